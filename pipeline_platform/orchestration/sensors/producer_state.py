"""Current state of a producer, in one sentence for the sensor's tick, the check `backlog` and `status`."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import dagster as dg

from pipeline_platform.control import demand
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.sensors.runs_under_way import in_flight, limits, steps_of
from pipeline_platform.orchestration.sensors.timely_calls import timely
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Source, SourceError

_RATE_OVER = timedelta(minutes=5)


class ProducerState(NamedTuple):
    """State of a producer.

    Attributes:
        source: Key of the source.
        backlog: Backlog of the source, or its error.
        in_flight: Messages that runs have leased or may lease.
        limits: Limits of a demand.
        steps: Current step or status of runs, by run id.
        oldest_allowed: Longest time that a message may wait; None for any time.
        rate: Acknowledged messages per second over the last five minutes.
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
        """Backlog, messages in flight with their runs, and the number of runs that can start."""
        room = demand.no_room(self.limits, self.in_flight)
        return self._sentence(f"no run can start: {self._without_runs(room)}" if room else self._allowed)

    def after(self, reason: str, news: str = "") -> str:
        """Return why a tick requests no run, with news, and the state without facts that the reason contains."""
        room = demand.no_room(self.limits, self.in_flight)
        starts = self._allowed if room is None else "" if room == reason else f"no run can start: {room}"
        return f"{self._without_runs(reason)}{news}. Now: {self._sentence(starts)}"

    def _sentence(self, starts: str) -> str:
        held = self.in_flight.held
        flying = f"{held:,} in flight in {self.in_flight.holding(self.steps)}" if held else "none in flight"
        return "; ".join(filter(None, [f"{self._waiting}{self._leasing}", flying, starts, self.others]))

    def _without_runs(self, reason: str) -> str:
        """Return a reason without the runs at its end: the sentence lists them with their steps."""
        return reason.removesuffix(f": {self.in_flight.named}")

    @property
    def _allowed(self) -> str:
        runs = demand.runs_allowed(self.limits, self.in_flight)
        return "1 more run can start" if runs == 1 else f"{runs:,} more runs can start"

    @property
    def others(self) -> str:
        """Other deployments that read the source; empty if there are none or the source does not report them."""
        return "" if isinstance(self.backlog, SourceError) else self.backlog.others or ""

    @property
    def _waiting(self) -> str:
        if isinstance(self.backlog, SourceError):
            return f"{self.source} {self.backlog.summary} ({self.backlog})"
        if (waiting := self.at_source) is None:
            return "the source does not report its backlog"
        if self.backlog.is_endless:
            return "the source never ends"
        bound = "at least " if self.backlog.at_least else "up to " if self.backlog.counts_gaps and waiting else ""
        return f"{bound}{waiting:,} waiting" if waiting else "no messages waiting"

    @property
    def at_source(self) -> int | None:
        """Messages at the source that no run has leased; None if the source does not report its backlog."""
        if isinstance(self.backlog, SourceError) or self.backlog.messages is None:
            return None
        return max(0, self.backlog.messages - (self.in_flight.held if self.backlog.counts_held else 0))

    @property
    def _leasing(self) -> str:
        """Return the number of waiting messages that runs may lease, and these runs."""
        if not (most := sum(self.in_flight.to_lease.values())):
            return ""
        runs, waiting = self.in_flight.leasing(self.steps), self.at_source
        if waiting == 0:
            return f"; nothing leased by {idle}" if (idle := self.in_flight.idle(self.steps)) else ""
        if waiting is None:
            return f"; up to {most:,} messages to be leased by {runs}"
        return f", up to {min(most, waiting):,} of them to be leased by {runs}"

    def evaluation(self, producer: BoundProducer) -> dg.AssetCheckEvaluation:
        """Return the result of the check `backlog`. Dagster plots its numbers, and shows every problem as a warning."""
        passed, judgement = self._judged()
        figures: dict[str, Any] = {"in flight": self.in_flight.held, "messages per second": round(self.rate, 2)}
        if isinstance(self.backlog, Backlog):
            if self.backlog.counted is not None:
                figures = {"backlog": self.backlog.counted, **figures}
            if self.backlog.oldest:
                figures["oldest, seconds"] = round((datetime.now(UTC) - self.backlog.oldest).total_seconds(), 1)
        for number, run_id in enumerate(self.steps, 1):
            figures["run" if number == 1 else f"run {number}"] = dg.MetadataValue.dagster_run(run_id)
        return dg.AssetCheckEvaluation(
            asset_key=dg.AssetKey([producer.pipeline.name, "messages"]),
            check_name=backlog_name(producer),
            passed=passed,
            severity=dg.AssetCheckSeverity.WARN,
            description=f"{judgement} Now: {self.sentence}.",
            metadata=figures,
        )

    def _judged(self) -> tuple[bool, str]:
        if isinstance(self.backlog, SourceError):
            return False, f"The source {self.backlog.summary}."
        if self.limits.paused is not None and not self.backlog.lost:
            return False, f"Paused: {self.limits.paused}."
        passed, text = judged(self.backlog, self.oldest_allowed)
        return (False, f"{text} Each deployment gets only a part of the messages.") if self.others else (passed, text)


def backlog_name(producer: BoundProducer) -> str:
    """Return the name of the check `backlog` of a producer. Each of several producers has a check of its own."""
    return f"backlog_{producer.name}" if producer.name else "backlog"


def judged(waiting: Backlog, allowed: timedelta | None) -> tuple[bool, str]:
    """Return whether no message waits too long and none was lost, and a description."""
    if waiting.lost:
        return False, f"The source lost messages: {waiting.lost}."
    if waiting.messages == 0:
        return True, "No messages are waiting."
    if allowed is None:
        return True, "Messages may wait for any time: `oldest_allowed` is not set."
    if waiting.oldest is None:
        unknown = "Messages are waiting, and the source does not report their age"
        return False, f"{unknown}. Monitor their age at the source itself, and remove `oldest_allowed`."
    if (age := (datetime.now(UTC) - waiting.oldest).total_seconds()) > (limit := allowed.total_seconds()):
        return False, f"The oldest message has waited {age:,.0f} s, longer than oldest_allowed ({limit:,g} s)."
    return True, "No message has waited too long."


def state_of(
    producer: BoundProducer,
    source: Source,
    control: ControlStore,
    instance: dg.DagsterInstance | None,
    *,
    is_tick: bool = False,
    counts_all: bool = True,
) -> ProducerState:
    """Return the current state of a producer.

    Args:
        producer: The producer.
        source: The producer's source, open.
        control: The control store.
        instance: The Dagster instance; None if it is unavailable: then only runs with a claim are known.
        is_tick: Whether a sensor asks, which waits for the source for a short time only.
        counts_all: Whether to count the whole backlog, not only up to a number that is of use for the next run.
    """
    options, now = producer.options, datetime.now(UTC)
    under_way, bounds = in_flight(producer, instance, control), limits(producer, control, now)
    most = None if counts_all else demand.of_use(bounds, under_way)
    name, look = ("backlog", source.backlog) if most is None else ("backlog_up_to", partial(source.backlog_up_to, most))
    try:
        backlog: Backlog | SourceError = timely(source, name, look) if is_tick else look()
    except SourceError as error:
        backlog = error
    ended = control.ended(producer.key, since=now - _RATE_OVER)
    rate = sum(end.messages for end in ended) / _RATE_OVER.total_seconds()
    steps = steps_of(instance, under_way.run_ids[: demand.NAMED], RunTags.of(producer.pipeline).rounds)
    return ProducerState(options.source, backlog, under_way, bounds, steps, options.oldest_allowed, rate)
