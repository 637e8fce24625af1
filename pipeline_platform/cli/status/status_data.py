"""State of a deployment: the data of `status`, of its JSON and of the dashboard. `status_gathering` fills it in."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from pipeline_platform.cli.output import Output, Time
from pipeline_platform.source.backlog import ENDLESS, Backlog


class Health(StrEnum):
    """State of a pipeline, from good to bad."""

    HEALTHY = "healthy"
    BEHIND = "behind"
    FAILING = "failing"
    BROKEN = "broken"

    @property
    def exit_code(self) -> int:
        """Exit code of `status`."""
        return {"healthy": 0, "behind": 1, "failing": 1, "broken": 2}[self.value]


ProblemKind = Literal[
    "oldest_allowed",
    "open_failures",
    "redelivered",
    "lost_messages",
    "failed_runs",
    "crashed_runs",
    "breaker",
    "source",
    "not_requested",
    "dagster",
    "unreadable_receives",
    "changed_types",
]
_HEALTH: dict[str, Health] = {
    "oldest_allowed": Health.BEHIND,
    **dict.fromkeys(
        ("open_failures", "redelivered", "lost_messages", "failed_runs", "crashed_runs", "breaker"), Health.FAILING
    ),
}


class Problem(Output):
    """A reason why a pipeline is not healthy."""

    kind: ProblemKind = Field(description="Kind of the problem.")
    producer: str = Field("", description="Name of the producer; empty for the pipeline or its only producer.")
    text: str = Field(description="The problem, for people.")

    @property
    def health(self) -> Health:
        """State of a pipeline that has only this problem."""
        return _HEALTH.get(self.kind, Health.BROKEN)


def worst(states: list[Health]) -> Health:
    """Return the worst state; `healthy` without any."""
    order = list(Health)
    return max(states, key=order.index, default=Health.HEALTHY)


class BacklogStatus(Output):
    """Messages at a source that no run has leased."""

    messages: int | None = Field(description="Number of messages. Null if the source is endless, unknown or failed.")
    is_endless: bool = Field(False, description="Whether the source never ends.")
    is_minimum: bool = Field(False, description="Whether there may be more messages.")
    is_maximum: bool = Field(False, description="Whether there may be fewer messages, because offsets have gaps.")
    oldest_at: Time | None = Field(None, description="Time of the oldest message. Null if none waits, or if unknown.")
    oldest_allowed_s: float | None = Field(None, description="Option `oldest_allowed`.")
    lost: str = Field("", description="Messages that the source lost; empty if none.")
    error: str | None = Field(None, description="Error of the source. Null if it answered.")

    @property
    def text(self) -> str:
        """The number of messages as text."""
        messages = ENDLESS if self.is_endless else self.messages
        return str(Backlog(messages, at_least=self.is_minimum, counts_gaps=self.is_maximum))


class RequestsStatus(Output):
    """Whether runs of a producer are requested."""

    state: Literal["active", "paused", "draining", "not_requested", "source", "unknown"] = Field(
        description="`active`: runs are requested. `not_requested`: the sensor is off, or no daemon runs. `source`: "
        "the source does not answer. `unknown`: Dagster does not answer."
    )
    reason: str | None = Field(None, description="Reason why no runs are requested. Null if runs are requested.")

    def __str__(self) -> str:
        """Return the state of a producer that is not paused, as text that follows `is`."""
        if self.state == "active":
            return "active: runs are requested"
        if self.state == "unknown":
            return f"not paused; unknown whether runs are requested: {self.reason}"
        return f"not paused, but no runs are requested: {self.reason}"


class PauseStatus(Output):
    """A pause of a pipeline or a producer."""

    reason: str = Field(description="Reason of the pause.")
    draining_until: Time | None = Field(
        None, description="Time after which runs start no messages. Null if the pipeline is not draining."
    )
    by_breaker: bool = Field(False, description="Whether the producer's breaker pauses it, and no person.")

    def __str__(self) -> str:
        """Return the pause as text."""
        until = self.draining_until
        drains = f"; draining: runs start no messages after {until:%H:%M:%S} UTC" if until else ""
        return f"paused: {self.reason}{drains}"


class RateLimit(Output):
    """A rate limit."""

    allowed_messages: int = Field(description="Messages per interval.")
    interval_s: float = Field(description="Length of an interval.")


class RateLimitStatus(RateLimit):
    """A rate limit, and what is left of it."""

    is_set_at_run_time: bool = Field(description="Whether it differs from the limit of the class.")
    permits_left: int = Field(description="Messages that may still be handled in the current interval.")


class RunStatus(Output):
    """An active run of a producer."""

    run_id: str = Field(description="Id of the run in Dagster.")
    state: Literal["leased", "expired", "to_lease"] = Field(
        description="`leased`: it has leased messages. `expired`: its claim has expired, because it crashed or "
        "stalled. `to_lease`: it has leased no messages now, and may lease some."
    )
    messages: int = Field(description="Messages that it has leased, or may lease.")
    receive_id: str | None = Field(None, description="Id of its receive. Null before it has a claim.")
    started_at: Time | None = Field(None, description="Time of its claim.")
    claim_expires_at: Time | None = Field(None, description="End of its claim unless it is renewed.")
    slow_tasks: str = Field("", description="Slow Spark tasks; empty if there are none.")


class InFlightStatus(Output):
    """Messages in flight."""

    messages: int = Field(description="Messages that active runs have leased, by their claims.")
    runs: list[RunStatus] = Field(description="Active runs.")


class Shared(Output):
    """State of a producer, or of the retries and replays of a pipeline with several producers."""

    key: str = Field(description="Key in the control store.")
    pause: PauseStatus | None = Field(description="The pause. Null if it is not paused.")
    overrides: dict[str, int] = Field(description="Options that were changed at run time.")
    in_flight: InFlightStatus = Field(description="Messages in flight.")


class FailedRunsStatus(Output):
    """Newest runs that failed in a row."""

    runs: int = Field(description="Number of runs. Runs at the same time count once.")
    run_id: str = Field(description="Id of the latest of these runs in Dagster.")
    ended_at: Time = Field(description="End of the latest run.")
    step: str | None = Field(description="Step that failed. Null if the process of the run crashed.")
    reason: str = Field(description="Reason why the latest run failed; empty if it is not recorded.")


class ProducerStatus(Shared):
    """State of a producer."""

    source: str = Field(description="Key of the source.")
    backlog: BacklogStatus = Field(description="Messages that wait at the source.")
    requests: RequestsStatus = Field(description="Whether runs are requested.")
    rate_limit: RateLimitStatus | None = Field(description="The current rate limit. Null without a limit.")
    messages_per_s: float = Field(description="Messages acknowledged per second over the last five minutes.")
    failed_runs: FailedRunsStatus | None = Field(
        description="Newest runs that failed in a row. Null if the newest run that ended did not fail, or if it alone "
        "failed and a run has acknowledged messages since."
    )
    summary: str = Field("", exclude=True, description="The state in one sentence, as in the tick of the sensor.")


class DagsterRuns(Output):
    """Active runs of a pipeline in Dagster."""

    error: str | None = Field(None, description="Reason why Dagster's runs are unknown. Null if they are known.")
    by_state: dict[str, int] = Field({}, description="Number of runs by Dagster's status, in lower case.")
    crashed: list[str] = Field([], description="Runs that crashed before they leased messages.")


class ReceiveStatus(Output):
    """An unfinished receive."""

    receive_id: str = Field(description="Id of the receive.")
    run_id: str = Field(description="Run that started it.")
    phase: str = Field(description="Phase: `begun`, `leased`, `handled`, `batched`, `decided` or `published`.")


class ReceivesStatus(Output):
    """Unfinished receives of a pipeline."""

    undecided: list[ReceiveStatus] = Field(description="Receives before their decision.")
    unfinished: list[ReceiveStatus] = Field(description="Decided receives that are not acknowledged.")
    unreadable: list[str] = Field(description="Errors of receives that cannot be read.")


class WindowFailures(Output):
    """Open failures of a window."""

    window: str = Field(description="Key of the window.")
    open: int = Field(description="Open failures, dead failures included.")
    dead: int = Field(description="Dead failures.")


class FailuresStatus(Output):
    """Open failures of a pipeline."""

    open: int = Field(description="Open failures, dead failures included.")
    dead: int = Field(description="Dead failures.")
    scheduled: int = Field(description="Failures that an automatic retry will handle.")
    due_at: Time | None = Field(description="Earliest time of an automatic retry.")
    windows: int = Field(description="Number of windows with open failures.")
    first_window: str | None = Field(description="Oldest window with open failures.")
    last_window: str | None = Field(description="Newest window with open failures.")
    largest: list[WindowFailures] = Field(description="The windows with the most open failures, at most five.")


class RedeliveredStatus(Output):
    """Messages that were returned at least twice without a decision."""

    messages: int = Field(description="Number of messages.")
    deliveries: int = Field(description="Greatest number of returns of a message.")
    first_window: str = Field(description="Oldest window.")


class PipelineStatus(Output):
    """State of a pipeline."""

    state: Health = Field(description="The worst state of its problems.")
    problems: list[Problem] = Field(description="Reasons why it is not healthy.")
    producers: dict[str, ProducerStatus] = Field(description="Producers by name; a single producer has an empty name.")
    retries: Shared | None = Field(
        description="State of retries and replays. Null with a single producer, whose state includes them."
    )
    runs: DagsterRuns = Field(description="Active runs in Dagster.")
    receives: ReceivesStatus = Field(description="Unfinished receives.")
    failures: FailuresStatus = Field(description="Open failures.")
    changed_types: dict[str, str] = Field(description="Batchers whose model does not fit their table, with the error.")
    redelivered: RedeliveredStatus | None = Field(description="Messages that are returned again and again.")


class StatusOutput(Output):
    """Output of `status`."""

    at: Time = Field(description="Time at which the state was read.")
    state: Health = Field(description="The worst state of the pipelines, which determines the exit code.")
    control_store: str = Field(description="URL of the control store, without the password.")
    lake: str = Field(description="Root of the lake.")
    pipelines: dict[str, PipelineStatus] = Field(description="Pipelines by name.")
