"""Crashes that `benchmarks.recovery` causes: the process, the moment and the method."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import dagster as dg

from benchmarks.recovery_deployment import Deployment
from benchmarks.recovery_sources import Ground
from pipeline_platform.launcher.run_process import RunProcess
from pipeline_platform.spark import server as spark_server

STALLED_S = 90.0
"""Seconds for which a run is stopped, unless its messages are taken over earlier: 1.5 times its claim."""


class Scene(NamedTuple):
    """Processes of a trial.

    Attributes:
        deployment: All processes that can be killed, except the run and the source.
        ground: The source.
        run: The run of the trial.
        host: Process that handled a message last; 0 if there is none.
        at_end: Calls a function after a number of seconds, or at the end of the trial if that is earlier.
    """

    deployment: Deployment
    ground: Ground
    run: dg.DagsterRun
    host: int
    at_end: Callable[[float, Callable[[], None]], None]


@dataclass(frozen=True)
class Death:
    """One kind of crash.

    Attributes:
        says: Description of the process.
        blow: Kills the process; returns the time.
        at: State of the run: `handling`, `starting`, or just `launching` by the daemon.
        sends_after: Whether more messages are sent after the crash, because a surviving run needs no other run.
        in_worker: Whether the same run continues in another worker.
    """

    says: str
    blow: Callable[[Scene], float]
    at: Literal["handling", "starting", "launching"] = "handling"
    sends_after: bool = False
    in_worker: bool = False


def _run(scene: Scene) -> float:
    return _kill(process_of(scene.run).pid)


def _daemon(scene: Scene) -> float:
    died = _kill(scene.deployment.daemon.pid)
    scene.deployment.start_daemon()  # as a supervisor does
    return died


def _both(scene: Scene) -> float:
    _kill(process_of(scene.run).pid)
    return _daemon(scene)


def _host(scene: Scene) -> float:
    return _kill(scene.host)


def _worker(scene: Scene) -> float:
    after_name = Path(f"/proc/{scene.host}/stat").read_text().rpartition(")")[2]
    return _kill(int(after_name.split()[1]))  # its parent


def _spark(scene: Scene) -> float:
    server = spark_server.status(scene.deployment.spark_folder)
    assert server is not None, "Spark is not running"
    return _kill(server.pid)


def _source(scene: Scene) -> float:
    died = time.time()
    scene.ground.outage()
    return died


def _stall(scene: Scene) -> float:
    pid = process_of(scene.run).pid

    def go_on() -> None:
        with suppress(ProcessLookupError):  # it has ended in the meantime
            os.kill(pid, signal.SIGCONT)

    scene.at_end(STALLED_S, go_on)
    return _kill(pid, signal.SIGSTOP)


def _termination(scene: Scene) -> float:
    died = time.time()
    assert scene.deployment.instance.run_launcher.terminate(scene.run.run_id), "the run was not terminated"
    return died


def _kill(pid: int, sent: signal.Signals = signal.SIGKILL) -> float:
    os.kill(pid, sent)
    return time.time()


def process_of(run: dg.DagsterRun) -> RunProcess:
    """Return the process of a run that has one."""
    process = RunProcess.of(run)
    assert process is not None, f"run {run.run_id} has no process"
    return process


DEATHS = {
    "run": Death("a run's process", _run),
    "starting": Death("a run's process, while it starts", _run, at="starting"),
    "daemon": Death("the daemon", _daemon, sends_after=True),
    "launching": Death("the daemon, while it launches a run", _daemon, at="launching"),
    "both": Death("a run's process and the daemon at once", _both),
    "host": Death("the host of a task", _host, in_worker=True),
    "worker": Death("a Python worker of Spark", _worker, in_worker=True),
    "spark": Death("the warm Spark server", _spark),
    "source": Death("the server of the source", _source, sends_after=True),
    "stall": Death("nothing: a run's process is stopped", _stall),
    "termination": Death("a run, ended in the UI", _termination, sends_after=True),
}
