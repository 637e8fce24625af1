"""What `benchmarks.recovery` kills, when, and how."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import dagster as dg

from pipeline_platform.launcher.run_process import RunProcess
from pipeline_platform.spark import server as spark_server

if TYPE_CHECKING:
    from benchmarks.recovery import Trial

STALLED_S = 90.0
"""For how long a run is stopped, if nothing took its messages over before: half as long again as its claim."""


@dataclass(frozen=True)
class Death:
    """One row.

    Attributes:
        says: What dies, in words.
        blow: Kills; returns when it did.
        at: What the run does then: `handling`, or it is `starting`, or the daemon is just `launching` it.
        sends_after: Whether more is sent after the death: where the run may live, only that needs another run.
        in_worker: The same run goes on, in another worker.
        may_fail: How many messages it may cost.
    """

    says: str
    blow: Callable[[Trial], float]
    at: Literal["handling", "starting", "launching"] = "handling"
    sends_after: bool = False
    in_worker: bool = False
    may_fail: int = 0


def _run(trial: Trial) -> float:
    return _kill(process_of(trial.run).pid)


def _daemon(trial: Trial) -> float:
    died = _kill(trial.deployment.daemon.pid)
    trial.deployment.start_daemon()  # as a supervisor does
    return died


def _both(trial: Trial) -> float:
    _kill(process_of(trial.run).pid)
    return _daemon(trial)


def _worker(trial: Trial) -> float:
    return _kill(trial.marks()[-1][1])


def _spark(trial: Trial) -> float:
    server = spark_server.status(trial.deployment.spark_folder)
    assert server is not None, "Spark does not run"
    return _kill(server.pid)


def _source(trial: Trial) -> float:
    died = time.time()
    trial.deployment.ground.outage()
    return died


def _stall(trial: Trial) -> float:
    pid = process_of(trial.run).pid
    trial.at_end(STALLED_S, lambda: os.kill(pid, signal.SIGCONT))
    return _kill(pid, signal.SIGSTOP)


def _termination(trial: Trial) -> float:
    died = time.time()
    assert trial.deployment.instance.run_launcher.terminate(trial.run.run_id), "the run was not asked to end"
    return died


def _kill(pid: int, sent: signal.Signals = signal.SIGKILL) -> float:
    os.kill(pid, sent)
    return time.time()


def process_of(run: dg.DagsterRun) -> RunProcess:
    """The process of a run that has one."""
    process = RunProcess.of(run)
    assert process is not None, f"run {run.run_id} has no process"
    return process


DEATHS = {
    "run": Death("a run's process", _run),
    "starting": Death("a run's process, while it starts", _run, at="starting"),
    "daemon": Death("the daemon", _daemon, sends_after=True),
    "launching": Death("the daemon, while it launches a run", _daemon, at="launching"),
    "both": Death("a run's process and the daemon at once", _both),
    "worker": Death("a Python worker", _worker, in_worker=True, may_fail=1),
    "spark": Death("the warm Spark server", _spark),
    "source": Death("the server of the source", _source, sends_after=True),
    "stall": Death("nothing: a run's process is stopped", _stall),
    "termination": Death("a run, ended in the UI", _termination, sends_after=True),
}
