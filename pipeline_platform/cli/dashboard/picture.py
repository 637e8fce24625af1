"""The picture of a deployment at one time: plain data, gathered by `gathering` and drawn by `drawing`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from pipeline_platform.cli.status.status_data import PipelineStatus

HOUR_MINUTES = 60
RATES_OVER = timedelta(minutes=5)
"""Time over which rates and the busy share of stages are measured."""
TIME_LINE = timedelta(minutes=10)
"""Time that the time line of runs shows."""


class Cause(NamedTuple):
    """Open failures with the same kind and cause, and the time of the last one."""

    messages: int
    kind: str
    cause: str
    last: datetime


class Causes(NamedTuple):
    """The most frequent causes of the open failures of the newest windows.

    Attributes:
        causes: The causes.
        messages: Number of failures in these windows.
        unknown: Reason why the causes are unknown; empty if they are known.
    """

    causes: tuple[Cause, ...] = ()
    messages: int = 0
    unknown: str = ""


class Look(NamedTuple):
    """The last known state of a pipeline, as `status` shows it, and the causes of its open failures.

    Attributes:
        status: The state; None if it was never known.
        causes: Causes of the open failures.
        at: Time of the state.
        waits_for: Part that the current look waits for, such as `the source orders_queue`; empty if it does not wait.
        waits_s: Duration of this wait.
        error: Reason why the last look failed; empty if it did not.
    """

    status: PipelineStatus | None = None
    causes: Causes = Causes()
    at: datetime | None = None
    waits_for: str = ""
    waits_s: float = 0.0
    error: str = ""


class Stage(NamedTuple):
    """A stage of a pipeline over the last `RATES_OVER`, by the reports of runs to Dagster.

    Attributes:
        rate: Messages per second.
        busy: Share of the time of all its tasks in which they worked; None if the stage has no tasks.
        seconds: Mean duration per receive in seconds, by the last reports of the hour; None without a report.
        batch: Mean messages per batch; None without batches.
        batch_size: Most messages in a batch; 0 without batches.
        stored_in: `table`, `table and sink`, or `no table`; empty for `receive` and `handle`.
    """

    rate: float = 0.0
    busy: float | None = None
    seconds: float | None = None
    batch: float | None = None
    batch_size: int = 0
    stored_in: str = ""


class Work(NamedTuple):
    """A receive on the time line, from its claim to its acknowledgement, or until now."""

    began: datetime
    ended: datetime


RunState = Literal["queued", "working", "waiting", "crashed", "succeeded", "failed", "canceled", "ended"]


class RunLine(NamedTuple):
    """A run on the time line.

    Attributes:
        run_id: Its id.
        state: `waiting` between two rounds; `crashed` if its claim has expired; `ended` if Dagster is unknown.
        origin: `source`, `failed` or `messages`; empty if unknown.
        rounds: Number of rounds at its last report; 0 for a run that receives once.
        began: Its start, or the start of the first receive that is shown.
        ended: Its end; None while it is active.
        messages: Messages in flight.
        work: Its receives, oldest first.
    """

    run_id: str
    state: RunState
    origin: str = ""
    rounds: int = 0
    began: datetime | None = None
    ended: datetime | None = None
    messages: int = 0
    work: tuple[Work, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("queued", "working", "waiting", "crashed")


class Minute(NamedTuple):
    """Figures of a minute.

    Attributes:
        messages: Acknowledged messages.
        failed: Failed messages; None if they are unknown.
        latency_s: Highest 95th percentile of its reports; None without a report.
    """

    messages: int = 0
    failed: int | None = 0
    latency_s: float | None = None


@dataclass(frozen=True)
class PipelinePicture:
    """A pipeline.

    Attributes:
        name: Its name.
        look: Its state.
        capacity: Messages that each producer may have in flight, by its name.
        stages: Figures of the stages `receive`, `handle` and, by their names, batchers.
        latency: Percentiles 50, 95 and 99 of the last report with a latency; empty without one.
        minutes: The last hour, oldest first.
        runs: Active runs, then the last ended ones.
        unknown: Reason why a part is unknown, by the name of the part.
    """

    name: str
    look: Look
    capacity: Mapping[str, int]
    stages: Mapping[str, Stage]
    latency: tuple[float, ...]
    minutes: tuple[Minute, ...]
    runs: tuple[RunLine, ...]
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """A deployment.

    Attributes:
        at: Time of the picture.
        daemon_seen: Last heartbeat of the daemon that evaluates sensors; None if unknown or if it never ran.
        daemon_unknown: Reason why the state of the daemon is unknown; empty if it is known.
        queued: Runs in Dagster's queue.
        pipelines: Its pipelines.
    """

    at: datetime
    daemon_seen: datetime | None
    daemon_unknown: str
    queued: int
    pipelines: tuple[PipelinePicture, ...]
