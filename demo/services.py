"""Processes of a demo, a warm Spark and Dagster on loopback, and the runs in Dagster."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import dagster as dg
import psutil
from filelock import FileLock, Timeout

from demo.place import MARK, PROJECT, DemoError, Place
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.spark import server as spark_server
from pipelines.flights import Flights
from servers.server import free_ports


class Run(NamedTuple):
    """A Dagster run of the demo.

    Attributes:
        run_id: Its id.
        status: Its status in Dagster.
        origin: Origin of its messages, or the name of its job.
        demand: Messages that it receives.
        times: Its start and end.
        steps: Start and end of each step.
        under_way: Whether it has not ended.
    """

    run_id: str
    status: str
    origin: str
    demand: int
    times: tuple[float | None, float | None]
    steps: Mapping[str, tuple[float | None, float | None]]
    under_way: bool


@contextmanager
def alone(place: Place) -> Iterator[None]:
    """Lock the folder of a demo, end the processes of a killed demo, and end all processes after the block.

    SIGTERM has the same effect as Ctrl-C.

    Raises:
        DemoError: Another demo runs in this folder.
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
                for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C does not interrupt the shutdown
                    signal.signal(number, signal.SIG_IGN)
                stop(place)
    except Timeout:
        raise DemoError(f"{place.home}: a demo or `make dev` is running there. Stop it first") from None


def working(place: Place) -> list[psutil.Process]:
    """Return the processes that a demo in this folder started, and their children."""
    every = psutil.process_iter(["environ"])  # None for processes of other users
    return [process for process in every if (process.info["environ"] or {}).get(MARK) == str(place.home)]


def stop(place: Place) -> None:
    """End all processes of this folder, and no others."""
    # The second pass finds processes that were being started during the first.
    for end in (psutil.Process.terminate, psutil.Process.kill):
        found = working(place)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(found, timeout=10)  # Dagster's daemon waits for its threads
    spark_server.stop(place.home)  # its state and scratch files


class Services:
    """Processes of one demo, with the environment of this process. Spark and the web server start at once.

    The web server listens on `port`; 0 selects a free port.
    """

    def __init__(self, place: Place, port: int) -> None:
        self._logs, self._port = place.logs, port or free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self._port}"
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        for folder in (place.dagster, place.logs):
            folder.mkdir(parents=True, exist_ok=True)
        settings = (PROJECT / "dagster.yaml").read_text()
        if os.environ.get("DAGSTER_POSTGRES_URL"):
            settings = re.sub(r"^# (storage:| +postgres.*)$", r"\1", settings, flags=re.MULTILINE)
        (place.dagster / "dagster.yaml").write_text(settings)
        self._start("spark", "pipeline_platform.cli.main", "spark", "start")
        # Created here, because two processes that create it at the same time damage it.
        self._dagster = dg.DagsterInstance.from_config(str(place.dagster))
        self._start("web-server", "dagster_webserver", "-h", "127.0.0.1", "-p", str(self._port), "-w", "workspace.yaml")

    def wait(self) -> None:
        """Start the daemon once Spark is up, and wait until the web server has loaded the definitions and answers."""
        while self._started["spark"].poll() is None:  # a run without a warm Spark starts its own, which takes longer
            time.sleep(0.1)
        self._start("daemon", "dagster._daemon", "run", "-w", "workspace.yaml")
        while True:
            self.watch()
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            time.sleep(0.1)

    def watch(self) -> None:
        """Raise `DemoError` with the end of the log if a service ended. The command that starts Spark may end."""
        for name, process in self._started.items():
            code = process.poll()
            if code is not None and (name, code) != ("spark", 0):
                lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
                raise DemoError("\n".join([f"The {name} ended with exit code {code}:", *lines]))

    def end_daemon(self) -> None:
        """End the daemon: no more runs start."""
        daemon = self._started.pop("daemon")
        daemon.terminate()
        daemon.wait()

    def runs(self) -> list[Run]:
        """Return all runs, newest first."""
        tags, runs = RunTags.of(Flights), []
        for record in self._dagster.get_run_records():
            run = record.dagster_run
            # A run that has not started does not have a log yet.
            stats = self._dagster.get_run_step_stats(run.run_id) if record.start_time else []
            stats = sorted(stats, key=lambda step: step.start_time or float("inf"))
            steps = {step.step_key.rpartition(".")[2]: (step.start_time, step.end_time) for step in stats}
            origin, demand = run.tags.get(tags.origin, run.job_name), int(run.tags.get(tags.demand, 0))
            times, under_way = (record.start_time, record.end_time), not run.is_finished
            runs.append(Run(run.run_id, run.status.value, origin, demand, times, steps, under_way))
        return runs

    def sensor_says(self) -> str:
        """Return the result of the last tick of the producer sensor."""
        for state in self._dagster.all_instigator_state():
            if state.name == f"{Flights.name}_producer":
                for tick in self._dagster.get_ticks(state.instigator_origin_id, state.selector_id, limit=1):
                    return tick.skip_reason or (
                        f"requested runs: {len(tick.run_ids)}" if tick.run_ids else "evaluating"
                    )
        return "no tick yet"

    def launch(self, job: str, **options: Any) -> str:
        """Launch a job with options of `DagsterGraphQLClient.submit_job_execution`; return the id of the run."""
        from dagster_graphql import (
            DagsterGraphQLClient,
        )  # imported here, because it is not needed while the queue drains

        client = DagsterGraphQLClient("127.0.0.1", port_number=self._port)
        return client.submit_job_execution(job, "pipeline_platform", "__repository__", **options)

    def _start(self, name: str, *module: str) -> None:
        with (self._logs / f"{name}.log").open("ab") as log:
            self._started[name] = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", *module],
                cwd=PROJECT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to this process only, which stops them in order
            )
