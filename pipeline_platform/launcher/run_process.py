"""Which runs have ended: by what Dagster knows, or by their processes, which tags name and their own host knows."""

import json
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

import dagster as dg

from pipeline_platform.control.store import ControlStore
from pipeline_platform.process import born

PROCESS_TAG = ".dagster/pipeline_platform/process"
"""On a run that `run_launcher` started: its process. The UI hides tags with Dagster's own prefix."""
LAUNCHER_TAG = ".dagster/pipeline_platform/launcher"
"""On a run from the first moment of its launch: the process that starts its own, which may take a minute."""
MARKED_WITHIN = timedelta(seconds=10)
"""Dagster sets a run STARTING just before it asks the launcher, whose first act is to leave its tag."""
_GRPC_TAG = ".dagster/grpc_info"
"""On a run that Dagster's own launcher started, before it did."""


@dataclass(frozen=True)
class RunProcess:
    """The process of a run: of which run, on which host, its id there, and when it was born."""

    run_id: str
    host: str
    pid: int
    born: str

    @classmethod
    def of(cls, run: dg.DagsterRun, tag: str = PROCESS_TAG) -> Self | None:
        """The process that runs it; None if Dagster's own launcher started it, or the tag is another release's."""
        try:
            process = cls(**json.loads(run.tags[tag]))
        except (KeyError, TypeError, ValueError):
            return None
        # A re-execution begins with a copy of its parent's tags, hidden ones too.
        return process if process.run_id == run.run_id else None

    @classmethod
    def tag(cls, run_id: str, pid: int) -> str:
        """The value of the tag for a run that a process of this host runs."""
        return json.dumps(asdict(cls(run_id, socket.gethostname(), pid, born(pid) or "")))

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, on this host."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether it has not ended. Known on its own host only."""
        return born(self.pid) == self.born


def is_gone(run: dg.DagsterRun) -> bool | None:
    """Whether the process of a run has ended, or the one that was to start it; None where nobody here can tell."""
    process = RunProcess.of(run) or RunProcess.of(run, LAUNCHER_TAG)
    return not process.lives if process and process.is_here else None


def is_lost(record: dg.RunRecord, now: datetime) -> bool:
    """Whether a launcher that leaves tags died before it could leave one: the run never starts."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.STARTING or _GRPC_TAG in run.tags:
        return False
    is_marked = RunProcess.of(run) or RunProcess.of(run, LAUNCHER_TAG)
    return not is_marked and now - record.update_timestamp.astimezone(UTC) > MARKED_WITHIN


STARTS_WITHIN = timedelta(minutes=15)
"""A run that was launched and has claimed nothing after so long is taken for dead, if its process cannot be asked."""
_MARKING = "StandbyRunLauncher"


def end_claims(instance: dg.DagsterInstance, control: ControlStore, pipeline: str) -> None:
    """End the claims of a pipeline's runs that have ended: by what Dagster knows of them, or by their processes.

    A run that is killed cannot end its own. Nobody waits for them to run out: sensors, `status` and runs that begin
    call this before they look at claims. A run that Dagster does not know keeps its claim.
    """
    claims = {claim.run_id for claim in control.in_flight(pipeline, of_all=True)}
    for run in instance.get_runs(dg.RunsFilter(run_ids=sorted(claims))) if claims else ():
        if run.is_finished or is_gone(run):
            control.let_go(run.run_id)


def never_begins(record: dg.RunRecord, instance: dg.DagsterInstance, now: datetime) -> bool:
    """Whether a run that Dagster takes for one under way, and that holds no claim, will never ask for one."""
    run = record.dagster_run
    if run.status is dg.DagsterRunStatus.QUEUED:
        return False
    gone = is_gone(run)
    if gone is not None:
        return gone
    launcher = instance.get_ref().run_launcher_data if instance.is_persistent else None
    if launcher and launcher.class_name == _MARKING and is_lost(record, now):
        return True
    return now - record.update_timestamp.astimezone(UTC) > STARTS_WITHIN
