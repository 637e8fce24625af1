"""What a demo runs on: warm Spark, Dagster's web server and daemon, all on loopback, all ended with it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

from pipeline_platform.spark import server as spark_server
from pipelines.demo.dagster_api import Dagster
from pipelines.demo.interrupts import undisturbed
from pipelines.demo.place import PROJECT, Place, Progress
from pipelines.demo.processes import Processes, free_port, spark, web_server
from pipelines.demo.queues import stop_server

_START_S = 120


class ServiceError(Exception):
    """Something did not start, or died; the message ends with what it said last."""


@contextlib.contextmanager
def ended(place: Place) -> Iterator[None]:
    """End everything that works on a demo when the block ends, however it ends: its SQS server, too."""
    try:
        yield
    finally:
        with undisturbed():
            progress = place.progress()
            Services(place, progress).stop()
            stop_server(progress)


class Services:
    """The processes of one demo.

    Args:
        place: Where it lies.
        progress: Of which demo.
        port: Of the web server; 0 for a free one.
    """

    def __init__(self, place: Place, progress: Progress | None, port: int = 0) -> None:
        self._place = place
        self._environment = place.environment(progress)
        self._processes = Processes(place)
        self._port = port or free_port()
        self._spark: subprocess.Popen[bytes] | None = None
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.dagster = Dagster(f"http://127.0.0.1:{self._port}")

    def start(self) -> None:
        """Start what takes long, and do not wait for it."""
        self._place.dagster.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PROJECT / "dagster.yaml", self._place.dagster / "dagster.yaml")
        self._spark = self._processes.start("spark", spark("start"), self._environment)
        self._begin("web-server", web_server(self._port))

    def start_daemon(self, command: list[str]) -> None:
        """Start the daemon, once a run would find Spark: one that does not starts its own, which takes longer."""
        up_within_s = spark_server.START_WITHIN_S  # its own start gives up earlier where it gets nowhere
        self._await("spark", lambda: spark_server.status(self._place.home) is not None, up_within_s)
        self._begin("daemon", command)

    def await_ui(self) -> None:
        """Wait until the web server has loaded the definitions."""
        self._await("web-server", self.dagster.is_up)

    def watch(self) -> None:
        """Raise if a process died.

        Raises:
            ServiceError: One did.
        """
        if self._spark is not None and self._spark.poll() not in (None, 0):
            raise ServiceError(f"Spark did not start:\n{self._processes.says('spark')}")
        for name, child in self._children.items():
            if child.poll() is not None:
                raise ServiceError(f"the {name} died with {child.returncode}:\n{self._processes.says(name)}")

    def stop_dagster(self) -> None:
        """End all but warm Spark, that of an earlier demo of this place included."""
        self._processes.stop()

    def stop(self) -> None:
        """End everything, that of an earlier demo of this place included."""
        self.stop_dagster()
        with contextlib.suppress(OSError):
            spark_server.stop(self._place.home)

    def _begin(self, name: str, command: list[str]) -> None:
        self._children[name] = self._processes.start(name, command, self._environment)

    def _await(self, name: str, ready: Callable[[], bool], within_s: float = _START_S) -> None:
        deadline = time.monotonic() + within_s
        while not ready():
            self.watch()
            if time.monotonic() > deadline:
                raise ServiceError(f"the {name} does not answer after {within_s:.0f} s:\n{self._processes.says(name)}")
            time.sleep(0.1)
