"""Detection of runs that have ended, by their state in Dagster or by their process, which a tag identifies."""

import json
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

import dagster as dg

from pipeline_platform.control.store import ControlStore
from pipeline_platform.process import born, is_hidden

PROCESS_TAG = ".dagster/pipeline_platform/process"
"""Tag with the process of a run that `run_launcher` started. The UI hides tags with Dagster's own prefix."""
LAUNCHER_TAG = ".dagster/pipeline_platform/launcher"
"""Tag with the process that launches a run, set first: the process of the run may take a minute to start."""
MARKED_WITHIN = timedelta(seconds=10)
"""Time within which a STARTING run gets the launcher's tag: Dagster calls the launcher just after that state."""
_GRPC_TAG = ".dagster/grpc_info"
"""Tag of a run that Dagster's own launcher is about to start."""


@dataclass(frozen=True)
class RunProcess:
    """The process of a run.

    Attributes:
        run_id: Id of the run.
        host: Name of its host.
        pid: Id of the process on this host.
        born: Start time of the process: process ids are reused.
    """

    run_id: str
    host: str
    pid: int
    born: str

    @classmethod
    def of(cls, run: dg.DagsterRun, tag: str = PROCESS_TAG) -> Self | None:
        """Return the process of a run; None if Dagster's launcher started it, or another release wrote the tag."""
        try:
            process = cls(**json.loads(run.tags[tag]))
        except (KeyError, TypeError, ValueError):
            return None
        # A re-execution starts with a copy of its parent's tags, including hidden tags.
        return process if process.run_id == run.run_id else None

    @classmethod
    def tag(cls, run_id: str, pid: int) -> str:
        """Return the value of the tag for a process of this host."""
        return json.dumps(asdict(cls(run_id, socket.gethostname(), pid, born(pid) or "")))

    @property
    def is_here(self) -> bool:
        """Whether its host is this host."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether it has not ended. Valid on its own host only."""
        return born(self.pid) == self.born


def is_gone(run: dg.DagsterRun) -> bool | None:
    """Whether the process of a run, or of its launch, has ended; None if this host cannot check it."""
    process = RunProcess.of(run) or RunProcess.of(run, LAUNCHER_TAG)
    return not process.lives if process and process.is_here and not is_hidden(process.pid) else None


def is_lost(record: dg.RunRecord, now: datetime) -> bool:
    """Whether the launcher of a run crashed before it set a tag, so that the run never starts."""
    run = record.dagster_run
    if run.status is not dg.DagsterRunStatus.STARTING or _GRPC_TAG in run.tags:
        return False
    is_marked = RunProcess.of(run) or RunProcess.of(run, LAUNCHER_TAG)
    return not is_marked and now - record.update_timestamp.astimezone(UTC) > MARKED_WITHIN


STARTS_WITHIN = timedelta(minutes=15)
"""Time after which a launched run without a claim counts as ended, if its process cannot be checked."""
_MARKING = "StandbyRunLauncher"


def end_claims(instance: dg.DagsterInstance, control: ControlStore, pipeline: str) -> None:
    """Release the claims of a pipeline's runs that have ended, by their state in Dagster or by their processes.

    A run that is killed cannot release its claim. Sensors, `status` and starting runs call this before they read
    claims, so that they need not wait until claims expire. A run that Dagster does not know keeps its claim.
    """
    claims = {claim.run_id for claim in control.in_flight(pipeline, of_all=True)}
    for run in instance.get_runs(dg.RunsFilter(run_ids=sorted(claims))) if claims else ():
        if run.is_finished or is_gone(run):
            control.let_go(run.run_id)


def never_begins(record: dg.RunRecord, instance: dg.DagsterInstance, now: datetime) -> bool:
    """Whether a run without a claim that Dagster counts as running will never request a claim."""
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
