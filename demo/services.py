"""What a demo runs on: warm Spark, Dagster's web server and daemon, all on loopback, all ended with it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import dagster as dg
import psutil
from filelock import FileLock, Timeout

from demo.place import MARK, PROJECT, DemoError, Place
from pipeline_platform.spark import server as spark_server

_PATIENCE_S = 10
"""Dagster's daemon waits for its threads; the demo then kills it."""


@contextmanager
def alone(place: Place) -> Iterator[None]:
    """Work on a demo alone. End its processes before the block, if an earlier one was killed, and after it.

    A request to end is a Ctrl-C here.

    Raises:
        DemoError: Another demo works in this place.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ[MARK] = str(place.home)
    place.home.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(place.home / "demo.lock", blocking=False):
            stop(place)
            try:
                yield
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C does not stop the stopping
                    signal.signal(number, signal.SIG_IGN)
                stop(place)
    except Timeout:
        raise DemoError(f"a demo or `make dev` is running in {place.home}; stop it first") from None


def working(place: Place) -> list[psutil.Process]:
    """Return the processes of this place: those that a demo started, and those that these started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended, or is somebody else's
            if process.environ().get(MARK) == str(place.home):
                found.append(process)
    return found


def stop(place: Place) -> None:
    """End all processes of this place, and of no other."""
    # The second look finds what was just being started at the first.
    for end in (psutil.Process.terminate, psutil.Process.kill):
        found = working(place)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(found, timeout=_PATIENCE_S)
    spark_server.stop(place.home)  # what it left: its state and its scratch files


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Services:
    """The processes of one demo; Spark and the web server start at once, with the variables of this process.

    Args:
        place: Where it lies.
        port: Of the web server; 0 for a free one.

    Attributes:
        dagster: The instance.
        url: Of the web server.
    """

    def __init__(self, place: Place, port: int) -> None:
        self._logs, self.port = place.logs, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        for folder in (place.dagster, place.logs):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / "dagster.yaml", place.dagster)
        self._start("spark", "pipeline_platform.cli.main", "spark", "start")
        # Created here: two processes that create it at once damage it.
        self.dagster = dg.DagsterInstance.from_config(str(place.dagster))
        self._start("web-server", "dagster_webserver", "-h", "127.0.0.1", "-p", str(self.port), "-w", "workspace.yaml")

    def wait(self) -> None:
        """Start the daemon once Spark is up, then wait until the web server has loaded the definitions and answers."""
        # A run that does not find Spark starts its own, and takes longer.
        self._until(lambda: self._started["spark"].poll() == 0)
        self._start("daemon", "dagster._daemon", "run", "-w", "workspace.yaml")
        self._until(self._answers)

    def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.watch()
            time.sleep(0.1)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def watch(self) -> None:
        """Raise `DemoError` with its last words if a service died; the command that starts Spark ends by itself."""
        for name, process in self._started.items():
            code = process.poll()
            if code is not None and (name, code) != ("spark", 0):
                words = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
                raise DemoError("\n".join([f"the {name} died with {code}:", *words]))

    def _start(self, name: str, *module: str) -> None:
        with (self._logs / f"{name}.log").open("ab") as log:
            self._started[name] = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", *module],
                cwd=PROJECT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for this process, which ends them in order
            )
