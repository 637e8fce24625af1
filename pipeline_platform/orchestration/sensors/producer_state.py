"""What holds of a producer at this moment: one sentence for the sensor's tick, the check `backlog` and `status`."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import dagster as dg

from pipeline_platform.control import demand
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.sensors.runs_under_way import in_flight, limits, steps_of
from pipeline_platform.source.backlog import ENDLESS, Backlog
from pipeline_platform.source.contract import Source, SourceError

_RATE_OVER = timedelta(minutes=5)


class ProducerState(NamedTuple):
    """What one look at a producer saw.

    Attributes:
        source: Key of its source.
        backlog: What waits there, or the error of the source.
        in_flight: What runs under way hold, or will.
        limits: What bounds a demand.
        steps: What runs under way do, by run id.
        oldest_allowed: How long a message may wait; None where nobody said.
        rate: Messages acknowledged per second, of late.
    """

    source: str
    backlog: Backlog | SourceError
    in_flight: demand.InFlight
    limits: demand.Limits
    steps: Mapping[str, str]
    oldest_allowed: timedelta | None
    rate: float

    @property
    def sentence(self) -> str:
        """What waits, what is held and by whom, and how many runs may be asked for, in words for people."""
        room = demand.no_room(self.limits, self.in_flight)
        runs = demand.runs_allowed(self.limits, self.in_flight)
        asks = f"no run may be asked for: {room}" if room else f"{_counted(runs)} may be asked for"
        held = self.in_flight.held
        holds = f"{held:,} held by {self.in_flight.holding(self.steps)}" if held else "none held"
        return f"{self._waiting}{self._leasing}, {holds}; {asks}{f'; {self.others}' if self.others else ''}"

    @property
    def others(self) -> str:
        """Which other deployments read the source; empty if none, or if nothing can be known."""
        return "" if isinstance(self.backlog, SourceError) else self.backlog.others or ""

    @property
    def _waiting(self) -> str:
        if isinstance(self.backlog, SourceError):
            return f"{self.source} {self.backlog.summary} ({self.backlog})"
        if (waiting := self.at_source) is None:
            return "the source cannot tell what waits"
        if waiting >= ENDLESS // 2:
            return "messages without end wait"
        most = "at least " if self.backlog.at_least else "up to " if self.backlog.counts_gaps and waiting else ""
        return f"{most}{waiting:,} {'waits' if waiting == 1 else 'wait'}" if waiting else "none waits"

    @property
    def at_source(self) -> int | None:
        """Messages at the source that no run has leased; None if that cannot be known."""
        if isinstance(self.backlog, SourceError) or self.backlog.messages is None:
            return None
        return max(0, self.backlog.messages - (self.in_flight.held if self.backlog.counts_held else 0))

    @property
    def _leasing(self) -> str:
        """Which runs may lease how many of the messages that wait."""
        if not (most := sum(self.in_flight.to_lease.values())):
            return ""
        runs, waiting = self.in_flight.leasing(self.steps), self.at_source
        if waiting == 0:
            return f", {runs} under way"
        return f", up to {most if waiting is None else min(most, waiting):,} of them for {runs}"

    def evaluation(self) -> tuple[bool, str, dict[str, Any]]:
        """Whether the check `backlog` passes, its description, and its metadata, whose numbers Dagster plots."""
        passed, judgement = self._judged()
        figures: dict[str, Any] = {"in flight": self.in_flight.held, "messages per second": round(self.rate, 2)}
        if isinstance(self.backlog, Backlog):
            if self.backlog.counted is not None:
                figures = {"backlog": self.backlog.counted, **figures}
            if self.backlog.oldest:
                figures["oldest, seconds"] = round((datetime.now(UTC) - self.backlog.oldest).total_seconds(), 1)
        for number, run_id in enumerate(self.steps, 1):
            figures["run" if number == 1 else f"run {number}"] = dg.MetadataValue.dagster_run(run_id)
        return passed, f"{judgement} Now: {self.sentence}.", figures

    def _judged(self) -> tuple[bool, str]:
        if isinstance(self.backlog, SourceError):
            return False, f"The source {self.backlog.summary}."
        if self.limits.paused is not None and not self.backlog.lost:
            return False, f"Paused: {self.limits.paused}."
        passed, words = judged(self.backlog, self.oldest_allowed)
        return (False, f"{words} Each message goes to one deployment only.") if self.others else (passed, words)


def judged(waiting: Backlog, allowed: timedelta | None) -> tuple[bool, str]:
    """Whether messages wait no longer than allowed, and none was lost; and a sentence that says so."""
    if waiting.lost:
        return False, f"The source lost messages: {waiting.lost}."
    if waiting.messages == 0:
        return True, "None waits."
    if allowed is None:
        return True, "The pipeline's `oldest_allowed` sets no limit."
    if waiting.oldest is None:
        unknown = "Messages wait, and the source cannot tell for how long: watch their age at the source itself"
        return False, f"{unknown}, or leave `oldest_allowed` out."
    if (age := datetime.now(UTC) - waiting.oldest) > allowed:
        return False, f"The oldest has waited {age}; {allowed} are allowed."
    return True, "None waits too long."


def state_of(
    pipeline: type[Pipeline],
    producer: str,
    source: Source,
    control: ControlStore,
    instance: dg.DagsterInstance | None,
    *,
    seen: tuple[demand.InFlight, demand.Limits] | None = None,
    most: int | None = None,
) -> ProducerState:
    """Look at a producer.

    Args:
        pipeline: The class.
        producer: Its name, empty where it is the only one.
        source: Its source, open.
        control: The control store.
        instance: Dagster's; None where it cannot be asked: then only runs that hold messages are known.
        seen: What is in flight and what bounds it, where the caller knows it already.
        most: How far to count the backlog; None for the whole.
    """
    options, now = pipeline.producers_of(producer)[producer], datetime.now(UTC)
    under_way, bounds = seen or (
        in_flight(pipeline, instance, control, producer),
        limits(pipeline, control, now, producer),
    )
    try:
        backlog: Backlog | SourceError = source.backlog() if most is None else source.backlog_up_to(most)
    except SourceError as error:
        backlog = error
    ended = control.ended(pipeline.limits_key(producer), since=now - _RATE_OVER)
    rate = sum(one.messages for one in ended) / _RATE_OVER.total_seconds()
    steps = steps_of(instance, under_way.run_ids[: demand.NAMED])
    return ProducerState(options.source, backlog, under_way, bounds, steps, options.oldest_allowed, rate)


def _counted(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs:,} runs"
