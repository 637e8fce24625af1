"""When a run is asked for, and how many messages it may take on. Nothing here talks to anything."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pydantic import AwareDatetime, BaseModel, ValidationError

from pipeline_platform.control.run_size import worthwhile
from pipeline_platform.model.options import Processors, Producer, RateLimiting
from pipeline_platform.source.backlog import ENDLESS, Backlog

RUN_LASTS = timedelta(seconds=60)
"""A run plans on the permits of the intervals that begin within it, at the most."""
RUN_COSTS = timedelta(seconds=5)
"""What a run takes beside its handling, from the sensor's look to the acknowledgement, on a warm Spark."""
_WORTH = 9
"""How long a run handles, at the least, for what goes unused between two: a tenth at the most is lost so."""

_LATE = timedelta(seconds=1)
"""How much later than its interval says the sensor looks again, at times."""
LONGEST_PAUSE = timedelta(minutes=5)
LONGEST_UNANSWERED = timedelta(minutes=1)
REPORTS_EVERY = timedelta(minutes=1)
NAMED = 3
"""Runs that a reason names at most."""
LOOK_BACK = 12
"""Runs that are looked at: so many failures make the longest pause, from an interval of a second on."""


class Ask(NamedTuple):
    """Messages that a run may take on (0 asks for no run), and why, in words for people."""

    demand: int
    because: str


@dataclass(frozen=True)
class InFlight:
    """Messages that runs under way hold or may lease.

    Attributes:
        messages: How many.
        runs: How many runs.
        unleased: Those that are not leased yet: the source still counts them.
        permitted: Those that had their permits, of intervals that are over.
        of_others: Capacity that runs of other producers, backfills and replays take from this producer.
        run_ids: Of these runs, for people.
        to_lease: The most that each run may lease which has leased nothing yet, by run id.
    """

    messages: int = 0
    runs: int = 0
    unleased: int = 0
    permitted: int = 0
    of_others: int = 0
    run_ids: tuple[str, ...] = field(default=(), compare=False)
    to_lease: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def held(self) -> int:
        """Messages that runs have leased."""
        return self.messages - sum(self.to_lease.values())

    @property
    def of_capacity(self) -> int:
        """Messages that fill the producer's capacity."""
        return self.messages + self.of_others

    def holding(self, steps: Mapping[str, str]) -> str:
        """The runs that hold messages, each with its step."""
        return _named([run_id for run_id in self.run_ids if run_id not in self.to_lease], steps)

    def leasing(self, steps: Mapping[str, str]) -> str:
        """The runs that may lease messages, each with its step."""
        return _named([*self.to_lease], steps)

    @property
    def named(self) -> str:
        """The runs, by the beginnings of their ids, as Dagster shows them."""
        return _named(self.run_ids, {})


def _named(run_ids: Sequence[str], steps: Mapping[str, str]) -> str:
    names = ", ".join(f"{one[:8]} ({steps[one]})" if one in steps else one[:8] for one in run_ids[:NAMED])
    more = f" and {len(run_ids) - NAMED} more" if len(run_ids) > NAMED else ""
    return f"{'run' if len(run_ids) == 1 else 'runs'} {names}{more}" if names else "runs under way"


NOTHING = InFlight()


class FailedRuns(NamedTuple):
    """The newest runs of a pipeline that failed in a row: how many, and end and id of the last of them."""

    runs: int
    ended: datetime
    run_id: str


@dataclass(frozen=True)
class Limits:
    """What bounds a demand at this moment.

    Attributes:
        producer: Of the pipeline's options.
        processors: Of the pipeline's options.
        permits: Messages that the rate limit gives until a run asked for now would end; None without a limit.
        permits_soon: The same until the next look; never more than `permits`.
        permits_at: When the next interval of the limit begins.
        paused: Why nothing is to be asked for; None where the pipeline is not paused.
        empty_runs: The newest runs in a row that the source gave nothing; asked for where it cannot tell its backlog.
        filled: Whether the source gave the newest run all that it asked for; asked for likewise.
        left: Whether a run that died, failed or was ended may have left what waits: nobody waits for it again.
        batch_timeout: The shortest of the pipeline's batchers; None where none has one.
        size: What a run takes on at most by its `target_run_time`; None without one.
    """

    producer: Producer
    processors: Processors
    permits: int | None = None
    permits_soon: int | None = None
    permits_at: datetime | None = None
    paused: str | None = None
    empty_runs: int = 0
    filled: bool = False
    left: bool = False
    batch_timeout: timedelta | None = None
    size: int | None = None

    @property
    def patience(self) -> timedelta:
        """How long messages wait that are not worth a run, or do not fill a batch."""
        return min(self.producer.patience, self.batch_timeout or self.producer.patience)

    @property
    def per_run(self) -> int:
        """Messages that one run takes on at most; a replay may take on more."""
        return self.processors.per_run if self.size is None else min(self.size, self.processors.per_run)

    @property
    def capacity(self) -> int:
        """Messages that may be in flight at once, over all runs."""
        return self.producer.max_runs * self.per_run


def permits_ahead(limit: RateLimiting, look: timedelta) -> timedelta:
    """For how long ahead a run takes on permits: those of the current interval, and of the intervals that begin then.

    A run handles what the current interval permits as soon as it starts. If the next run can start before the next
    interval is over, no permit is lost by ending here, and what was handled is acknowledged. Intervals that are
    shorter than a look of the sensor and the cost of a run go unused between two runs; then a run takes on as many
    more of them as make that worth it, up to `RUN_LASTS`.

    Args:
        limit: The rate limit that holds.
        look: How often the sensor looks.
    """
    unused = max(timedelta(0), look + RUN_COSTS - limit.interval)
    return min(RUN_LASTS, _WORTH * unused)


def had_permits(held: Iterable[tuple[int, datetime]], limit: RateLimiting, now: datetime) -> int:
    """Count the messages in flight that took their permits in intervals that are over, by when their runs began.

    A run may not have come to it: then it and a run that is asked for now wait for permits, as all do that handle.

    `held` are the messages of each run, and since when.
    """
    begun, permitted = now.timestamp() // limit.interval.total_seconds(), 0
    for messages, since in held:
        intervals = max(0, begun - since.timestamp() // limit.interval.total_seconds())
        permitted += min(messages, int(intervals) * limit.allowed_messages)
    return permitted


class Waiting(BaseModel, frozen=True):
    """What a sensor keeps in its cursor.

    Attributes:
        since: Since when something waits that was not asked for. For a source that cannot tell what waits, when it was
            last asked. None where nothing waits, or was asked yet.
        unanswered: Looks in a row that the source did not answer.
        again_at: When it is looked at again, if it did not answer.
        lost: Checksum of the losses at the source that were said.
        asked: When a run was last asked for.
        reported: When the check was last looked at.
        shown: Checksum of what it showed.
    """

    since: AwareDatetime | None = None
    unanswered: int = 0
    again_at: AwareDatetime | None = None
    lost: int = 0
    asked: AwareDatetime | None = None
    reported: AwareDatetime | None = None
    shown: int = 0

    def is_to_report(self, now: datetime) -> bool:
        """Whether the check is to be looked at again: Dagster keeps each evaluation for ever."""
        return self.reported is None or not self.reported <= now < self.reported + REPORTS_EVERY

    def waited(self, now: datetime) -> timedelta | None:
        """Return for how long; never negative, whatever clocks do."""
        return None if self.since is None else max(timedelta(0), now - self.since)

    def after(self, backlog: Backlog, asks: Sequence[Ask], now: datetime, in_flight: InFlight = NOTHING) -> Waiting:
        """Return what waits after a look at the source at `now`, which led to `asks` beside what was in flight."""
        demand = sum(ask.demand for ask in asks)
        asked = now if demand else self.asked
        held = in_flight.messages if backlog.counts_held else in_flight.unleased
        if backlog.messages is not None and backlog.messages <= held + demand:
            return Waiting(asked=asked)
        if demand or (self.since is None and backlog.messages is not None):
            return Waiting(since=now, asked=asked)
        # A clock that was ahead when it was written must not make anybody wait for it to come true.
        return self if self.since is None else Waiting(since=min(self.since, now), asked=asked)

    def without_answer(self, now: datetime, interval: timedelta) -> Waiting:
        """Return what waits after a look that the source did not answer: the pause doubles, up to a minute.

        Up to half of it is left to chance, so that many sensors do not meet a server that comes back all at once.
        """
        pause = min(LONGEST_UNANSWERED, interval * (1 << min(self.unanswered, LOOK_BACK)))
        again_at = now + pause * random.uniform(0.5, 1)  # noqa: S311 - no secret
        return self.model_copy(update={"unanswered": self.unanswered + 1, "again_at": again_at})

    def held_back(self, now: datetime) -> str | None:
        """Why the source is not to be looked at now, or None."""
        if self.again_at is None or now >= self.again_at or self.again_at > now + LONGEST_UNANSWERED:
            return None
        looks = "once" if self.unanswered == 1 else f"{self.unanswered} times in a row"
        return f"did not answer, {looks}; asking it again at {_clock(self.again_at)}"

    def to_json(self) -> str:
        """Write it as a cursor, below 200 bytes."""
        return self.model_dump_json(exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str | None) -> Waiting:
        """Read a cursor; one that cannot be read counts as that of a sensor that looks for the first time."""
        try:
            return cls.model_validate_json(text or "{}")
        except ValidationError:
            return cls()


def with_left(backlog: Backlog, left: int) -> Backlog:
    """Count the messages that dead runs left as waiting: the next run gives them back to the source and takes them on.

    A part of them may be there already, and nobody can say which: the larger of the two counts.
    """
    return backlog if backlog.messages is None else backlog._replace(messages=max(backlog.messages, left))


def of_use(limits: Limits, in_flight: InFlight) -> int:
    """How far a source needs to count what waits: beyond all that runs under way and new ones take on."""
    return max(limits.capacity, in_flight.of_capacity) + 1


def decide(backlog: Backlog, limits: Limits, in_flight: InFlight, waited: timedelta | None) -> Ask:
    """Decide how many messages one more run should take on, or why there should be none.

    A backlog is asked for as soon as what can be taken on of it makes a run worthwhile, or is as much as can be handled
    before the next look; less than that at the last look before `limits.patience` is over. Of a source that cannot tell
    its backlog (None) runs tell: a run that got all that it asked for is followed at once, another after `patience`.
    `waited` is for how long something waits that was not asked for; None if nothing was seen, and nothing if it was
    left over just now.
    """
    waiting = not_taken(backlog, in_flight)
    if hindrance := _hindrance(backlog, limits, in_flight, waiting):
        return Ask(0, hindrance)
    most = min(limits.per_run, limits.capacity - in_flight.of_capacity)
    if limits.permits is not None:  # messages in flight take their permits out of the same intervals
        most = min(most, limits.permits - in_flight.of_capacity + in_flight.permitted)
    # Not what room there is: where others hold nearly all of it, each look would ask for a run of a few messages.
    pays_from = worthwhile(limits.processors, limits.per_run)
    if limits.permits_soon is not None:
        pays_from = min(pays_from, limits.permits_soon)
    patience = limits.patience
    if waiting is None:
        patience = empty_pause(patience, limits.empty_runs)
    pays_after = f"after {_seconds(patience)} (waited {_seconds(waited or timedelta(0))})"
    if waiting is None:
        cannot_tell = "the source cannot tell what waits"
        if limits.filled and most >= pays_from:
            return Ask(most, f"{cannot_tell}, and the last run got all that it asked for")
        if limits.left:
            return Ask(most, f"{cannot_tell}, and a run that ended early may have left some")
        is_due = waited is None or waited >= patience
        return Ask(most, cannot_tell) if is_due else Ask(0, f"{cannot_tell}; {pays_after}")
    demand, at_least = min(waiting, most), "at least " if backlog.at_least else ""
    if demand >= pays_from:
        return Ask(demand, f"{at_least}{count(waiting)} at the source")
    if limits.left:
        return Ask(demand, f"{at_least}{_wait(waiting)} since before a run ended early")
    is_left_over = waited is not None and not waited
    if is_left_over or (waited or timedelta(0)) + limits.producer.interval + _LATE <= patience:
        bound = f", of which {demand} could be taken on" if demand < waiting else ""
        return Ask(0, f"{at_least}{_wait(waiting)}{bound}; a run pays from {pays_from}, or {pays_after}")
    return Ask(demand, f"{at_least}{_wait(waiting)}, for {_seconds(patience)} at the most")


def decide_all(backlog: Backlog, limits: Limits, in_flight: InFlight, waited: timedelta | None) -> list[Ask]:
    """Decide on every run that one look at the source is worth: an ask for each, or one of 0 that says why."""
    asks: list[Ask] = []
    while True:
        ask = decide(backlog, limits, in_flight, waited)
        if not ask.demand:
            return asks or [ask]
        asks.append(ask)
        messages, unleased = in_flight.messages + ask.demand, in_flight.unleased + ask.demand
        in_flight = replace(in_flight, messages=messages, runs=in_flight.runs + 1, unleased=unleased)
        waited = timedelta(0)  # the patience of what waited is satisfied; the rest has to be worth a run of its own
        limits = replace(limits, filled=False, left=False)  # the run that is asked for tells next


def empty_pause(patience: timedelta, empty_runs: int) -> timedelta:
    """How long a source that cannot tell its backlog is left alone: longer with each run that got nothing."""
    return max(patience, min(LONGEST_PAUSE, patience * (1 << min(empty_runs, LOOK_BACK))))


def hold_back(failed: FailedRuns, interval: timedelta, now: datetime) -> str | None:
    """Return why no run should be asked for although one is due, or None: what failed twice would fail again.

    The pause is the sensor's interval after two failures, and doubles with each one more.
    """
    if failed.runs < 2:
        return None
    until = failed.ended + min(LONGEST_PAUSE, interval * 2 ** min(failed.runs - 2, LOOK_BACK))
    # A clock that was ahead when they failed must not make anybody wait for it to come true.
    if now >= until or until > now + 2 * LONGEST_PAUSE:
        return None
    return f"the last {failed.runs} runs failed; asking again at {_clock(until)}; see run {failed.run_id}"


def count(messages: int) -> str:
    """A number of messages in words."""
    if messages >= ENDLESS:
        return "messages without end"
    return f"{messages} message" if messages == 1 else f"{messages} messages"


def _hindrance(backlog: Backlog, limits: Limits, in_flight: InFlight, waiting: int | None) -> str | None:
    if limits.paused is None and backlog.messages == 0:
        if in_flight.held:
            return f"the queue is empty; {in_flight.holding({})} took on {count(in_flight.held)}"
        return f"the queue is empty; under way: {in_flight.named}" if in_flight.run_ids else "the queue is empty"
    if limits.paused is None and waiting == 0:
        return f"{_wait(backlog.messages or 0)}, and {in_flight.named} will take them"
    return no_room(limits, in_flight)


def no_room(limits: Limits, in_flight: InFlight) -> str | None:
    """Why no run may be asked for, whatever waits; or None."""
    held, runs = in_flight.of_capacity, in_flight.runs
    if limits.paused is not None:
        return f"paused: {limits.paused}"
    if held >= limits.capacity:
        return f"{count(held)} in flight fill the capacity of {limits.capacity}: {in_flight.named}"
    if runs >= limits.producer.max_runs:
        under_way = f"{runs} {'run' if runs == 1 else 'runs'} under way"
        return f"{under_way}; max_runs allows {limits.producer.max_runs}: {in_flight.named}"
    if limits.permits and limits.permits <= (need := held - in_flight.permitted):
        return f"the rate limit gives {limits.permits} while a run lasts, and {count(need)} in flight need them"
    if limits.permits == 0 or limits.permits_soon == 0:
        return (
            f"the rate limit leaves nothing {f'until {_clock(limits.permits_at)}' if limits.permits_at else 'for now'}"
        )
    return None


def runs_allowed(limits: Limits, in_flight: InFlight) -> int:
    """How many more runs may be asked for, where there is room for one: `no_room` says why not."""
    return min(
        limits.producer.max_runs - in_flight.runs, -(-(limits.capacity - in_flight.of_capacity) // limits.per_run)
    )


def not_taken(backlog: Backlog, in_flight: InFlight) -> int | None:
    """How many messages wait that no run holds or will take; None where the source cannot tell."""
    held = in_flight.messages if backlog.counts_held else in_flight.unleased
    return None if backlog.messages is None else max(0, backlog.messages - held)


def _wait(messages: int) -> str:
    return f"{count(messages)} {'waits' if messages == 1 else 'wait'}"


def _clock(time: datetime) -> str:
    return f"{time.astimezone(UTC):%H:%M:%S} UTC"


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():.3g} s"
