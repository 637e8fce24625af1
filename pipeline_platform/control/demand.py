"""Rules for when a run is requested and for how many messages: pure functions without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pydantic import AwareDatetime, BaseModel, ValidationError

from pipeline_platform.control.run_size import worthwhile
from pipeline_platform.model.options import Processors, Producer, RateLimiting
from pipeline_platform.model.retry import Backoff
from pipeline_platform.source.backlog import ENDLESS, Backlog

RUN_LASTS = timedelta(seconds=60)
"""Longest time whose permits a run may count on: those of the intervals that start within it."""
RUN_COSTS = timedelta(seconds=5)
"""Overhead of a run beside handling, from the sensor's tick to the acknowledgement, on a warm Spark."""
_WORTH = 9
"""Least ratio of handling time to the unused time between two runs: at most a tenth is lost."""

_LATE = timedelta(seconds=1)
"""Usual delay of a tick beyond the sensor's interval."""
LONGEST_PAUSE = timedelta(minutes=5)
LONGEST_UNANSWERED = timedelta(minutes=1)
REPORTS_EVERY = timedelta(minutes=1)
NAMED = 3
"""Greatest number of runs that a reason names."""
LOOK_BACK = 12
"""Number of runs to examine. With an interval of a second, this many failures reach the longest pause."""


class Ask(NamedTuple):
    """Messages that a run may lease (0 requests no run), and a readable reason."""

    demand: int
    because: str


@dataclass(frozen=True)
class InFlight:
    """Messages that current runs have leased or may lease.

    Attributes:
        messages: Number of messages.
        runs: Number of runs.
        unleased: Messages that are not leased yet: the source still counts them.
        permitted: Messages that got their permits in earlier intervals.
        of_others: Capacity that runs of other producers, retries and replays take from this producer.
        run_ids: Ids of these runs, to name them in reasons.
        leased: Messages that each run has leased, by run id.
        to_lease: Greatest number of messages that each run may still lease, by run id.
    """

    messages: int = 0
    runs: int = 0
    unleased: int = 0
    permitted: int = 0
    of_others: int = 0
    run_ids: tuple[str, ...] = field(default=(), compare=False)
    leased: Mapping[str, int] = field(default_factory=dict, compare=False)
    to_lease: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def held(self) -> int:
        """Messages that runs have leased."""
        return sum(self.leased.values())

    @property
    def of_capacity(self) -> int:
        """Messages that fill the producer's capacity."""
        return self.messages + self.of_others

    def holding(self, steps: Mapping[str, str]) -> str:
        """Return the runs that have leased messages, each with its step."""
        return _named([*self.leased], steps)

    def leasing(self, steps: Mapping[str, str]) -> str:
        """Return the runs that may lease messages, each with its step."""
        return _named([*self.to_lease], steps)

    def idle(self, steps: Mapping[str, str]) -> str:
        """Return the runs that may lease messages and have leased none, each with its step; empty without any."""
        runs = [run_id for run_id in self.to_lease if run_id not in self.leased]
        return _named(runs, steps) if runs else ""

    @property
    def named(self) -> str:
        """All runs, by the first characters of their ids, as Dagster shows them."""
        return _named(self.run_ids, {})


def _named(run_ids: Sequence[str], steps: Mapping[str, str]) -> str:
    names = ", ".join(run[:8] + (f" ({steps[run]})" if run in steps else "") for run in run_ids[:NAMED])
    more = f" and {len(run_ids) - NAMED} more" if len(run_ids) > NAMED else ""
    return f"{'run' if len(run_ids) == 1 else 'runs'} {names}{more}" if names else "runs under way"


NOTHING = InFlight()


@dataclass(frozen=True)
class Limits:
    """Bounds of a demand at this moment.

    Attributes:
        producer: Options of the producer.
        processors: Options of the pipeline's processors.
        permits: Messages that the rate limit allows until a run requested now would end; None without a limit.
        permits_soon: Messages that the rate limit allows until the next tick; never more than `permits`.
        permits_at: Start of the next interval of the limit.
        paused: Reason of the pause; None if the pipeline is not paused.
        empty_runs: Newest runs in a row that received nothing. Used if the source does not report its backlog.
        filled: Whether the newest run received all that it asked for. Used if the source does not report its backlog.
        left: Whether a run that crashed, failed or was terminated may have left messages: they are due at once.
        batch_timeout: Shortest batch timeout of the pipeline's batchers; None if no batcher has a timeout.
        size: Greatest size of a run by `target_run_time`; None if it is not set.
        round_size: Messages that are worth a round before `patience` has passed; None for a sensor.
        alone: Whether runs take turns, so that a tick requests at most one run.
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
    round_size: int | None = None
    alone: bool = False

    @property
    def patience(self) -> timedelta:
        """Longest wait of messages that are too few for a run, or that do not fill a batch."""
        return min(self.producer.patience, self.batch_timeout or self.producer.patience)

    @property
    def pays_from(self) -> int:
        """Messages that are worth a run or a round."""
        # Not the free capacity: if other runs use nearly all of it, each tick would request a run of a few messages.
        least = min(worthwhile(self.processors, self.per_run), self.per_run)  # an attempt of a breaker is smaller
        if self.round_size is not None:
            least = min(least, self.round_size)
        return least if self.permits_soon is None else min(least, self.permits_soon)

    @property
    def next_look(self) -> timedelta:
        """Time until the backlog is read again."""
        return self.producer.interval + _LATE if self.round_size is None else timedelta(0)

    @property
    def per_run(self) -> int:
        """Greatest number of messages in a run; a replay may handle more."""
        return self.processors.per_run if self.size is None else min(self.size, self.processors.per_run)

    @property
    def capacity(self) -> int:
        """Messages that may be in flight at once, over all runs of the producer."""
        return self.producer.max_runs * self.per_run


def permits_ahead(limit: RateLimiting, look: timedelta) -> timedelta:
    """Return the time ahead whose permits a run may use, beyond the current interval.

    A run handles the messages that the current interval permits as soon as it starts. If the next run can start before
    the next interval ends, the run loses no permit by ending here, and its messages are acknowledged early. Intervals
    shorter than the sensor's interval plus the overhead of a run pass unused between two runs. A run then uses as many
    more intervals as make up for this loss, up to `RUN_LASTS`. `look` is the sensor's interval.
    """
    unused = max(timedelta(0), look + RUN_COSTS - limit.interval)
    return min(RUN_LASTS, _WORTH * unused)


def had_permits(held: Iterable[tuple[int, datetime]], limit: RateLimiting, now: datetime) -> int:
    """Estimate the messages in flight that got their permits in earlier intervals, by the start of their runs.

    If a run has not handled them yet, it and the run that is requested now both wait for permits. `held` contains the
    messages and the start of each run.
    """
    begun, permitted = now.timestamp() // limit.interval.total_seconds(), 0
    for messages, since in held:
        intervals = max(0, begun - since.timestamp() // limit.interval.total_seconds())
        permitted += min(messages, int(intervals) * limit.allowed_messages)
    return permitted


class Waiting(BaseModel, frozen=True):
    """Cursor of a sensor.

    Attributes:
        since: Time since which messages wait that no run was requested for. For a source that does not report its
            backlog, time of the last request. None if nothing waits, or nothing was requested yet.
        unanswered: Ticks in a row that the source did not answer.
        again_at: Time of the next attempt, if the source did not answer.
        lost: Checksum of the reported losses at the source.
        asked: Time of the last request for a run.
        reported: Time of the last evaluation of the check.
        shown: Checksum of the result of that evaluation.
    """

    since: AwareDatetime | None = None
    unanswered: int = 0
    again_at: AwareDatetime | None = None
    lost: int = 0
    asked: AwareDatetime | None = None
    reported: AwareDatetime | None = None
    shown: int = 0

    def is_to_report(self, now: datetime) -> bool:
        """Whether the check is due again. Dagster keeps each evaluation for ever, so there should be few."""
        return self.reported is None or not self.reported <= now < self.reported + REPORTS_EVERY

    def is_due(self, expired_at: datetime, now: datetime) -> bool:
        """Whether a claim that expired is worth a run: no run was requested since then, or none for `LONGEST_PAUSE`.

        A receive stays unfinished while its dead letters or the pipeline's own `acknowledge` fail.
        """
        return self.asked is None or expired_at > self.asked or not self.asked <= now < self.asked + LONGEST_PAUSE

    def waited(self, now: datetime) -> timedelta | None:
        """Return the time since `since`; never negative, even if the clock was set back."""
        return None if self.since is None else max(timedelta(0), now - self.since)

    def after(self, backlog: Backlog, asks: Sequence[Ask], now: datetime, in_flight: InFlight = NOTHING) -> Waiting:
        """Return the cursor after a tick at `now` that led to `asks`, with `in_flight` before them."""
        demand = sum(ask.demand for ask in asks)
        asked = now if demand else self.asked
        held = in_flight.messages if backlog.counts_held else in_flight.unleased
        if backlog.messages is not None and backlog.messages <= held + demand:
            return Waiting(asked=asked)
        if demand or (self.since is None and backlog.messages is not None):
            return Waiting(since=now, asked=asked)
        # A clock that was ahead when the cursor was written must not prolong the wait.
        return self if self.since is None else Waiting(since=min(self.since, now), asked=asked)

    def without_answer(self, now: datetime, interval: timedelta) -> Waiting:
        """Return the cursor after a tick that the source did not answer: the pause doubles, up to a minute.

        Up to half of the pause is random, so that many sensors do not call a restarted server at the same time.
        """
        unanswered = self.unanswered + 1
        backoff = Backoff(first=min(interval, LONGEST_UNANSWERED), most=LONGEST_UNANSWERED)
        again_at = now + backoff.before(unanswered + 1, jitter=-0.5)
        return self.model_copy(update={"unanswered": unanswered, "again_at": again_at})

    def held_back(self, now: datetime) -> str | None:
        """Return the reason not to call the source now, or None."""
        if self.again_at is None or now >= self.again_at or self.again_at > now + LONGEST_UNANSWERED:
            return None
        times = "once" if self.unanswered == 1 else f"{self.unanswered} times in a row"
        return f"did not answer {times}; next attempt at {_clock(self.again_at)}"

    def to_json(self) -> str:
        """Return the cursor as JSON, below 200 bytes."""
        return self.model_dump_json(exclude_defaults=True)

    @classmethod
    def from_json(cls, text: str | None) -> Waiting:
        """Read a cursor. An unreadable cursor counts as empty, as at the first tick of a sensor."""
        try:
            return cls.model_validate_json(text or "{}")
        except ValidationError:
            return cls()


def with_left(backlog: Backlog, left: int) -> Backlog:
    """Include messages of crashed runs in the backlog: the next run releases them, and can lease them again.

    The source may already count some of them, so the larger of the two numbers is used.
    """
    return backlog if backlog.messages is None else backlog._replace(messages=max(backlog.messages, left))


def of_use(limits: Limits, in_flight: InFlight) -> int:
    """Return the number up to which a source needs to count its backlog: more than current and new runs can lease."""
    return max(limits.capacity, in_flight.of_capacity) + 1


def next_ask(backlog: Backlog, limits: Limits, in_flight: InFlight, waited: timedelta | None) -> Ask:
    """Return the messages that one more run should lease, or 0 and the reason.

    A run is requested as soon as the messages that it may lease make it worthwhile, or are all that can be handled
    before the next tick. For fewer messages, it is requested at the last tick before `limits.patience` has passed. If
    the source does not report its backlog (None), the last run decides: if it received all that it asked for, the next
    run follows at once, otherwise after `patience`. `waited` is the time for which messages have waited without a
    request: None if there were none at the last tick, zero if they remain from the request just made.
    """
    waiting = not_taken(backlog, in_flight)
    if hindrance := _hindrance(backlog, limits, in_flight, waiting):
        return Ask(0, hindrance)
    most = min(limits.per_run, limits.capacity - in_flight.of_capacity)
    if limits.permits is not None:  # messages in flight take their permits out of the same intervals
        most = min(most, limits.permits - in_flight.of_capacity + in_flight.permitted)
    pays_from, patience = limits.pays_from, limits.patience
    if waiting is None:
        patience = Backoff(first=patience, most=max(patience, LONGEST_PAUSE)).before(limits.empty_runs + 2)
    pays_after = f"after {_seconds(patience)} (waited {_seconds(waited or timedelta(0))})"
    if waiting is None:
        unknown = "the source does not report its backlog"
        if limits.filled and most >= pays_from:
            return Ask(most, f"{unknown}, and the last run received all that it asked for")
        if limits.left:
            return Ask(most, f"{unknown}, and a run that ended early may have left messages")
        is_due = waited is None or waited >= patience
        return Ask(most, unknown) if is_due else Ask(0, f"{unknown}; next run {pays_after}")
    demand, at_least = min(waiting, most), "at least " if backlog.at_least else ""
    if demand >= pays_from:
        return Ask(demand, f"{at_least}{count(waiting)} at the source")
    if limits.left:
        return Ask(demand, f"{at_least}{_wait(waiting)} after a run that ended early")
    is_left_over = waited is not None and not waited
    if is_left_over or (waited or timedelta(0)) + limits.next_look <= patience:
        bound = f", of which {demand} may be leased" if demand < waiting else ""
        return Ask(0, f"{at_least}{_wait(waiting)}{bound}; a run starts at {pays_from}, or {pays_after}")
    return Ask(demand, f"{at_least}{_wait(waiting)}, and may wait {_seconds(patience)} at most")


def next_asks(backlog: Backlog, limits: Limits, in_flight: InFlight, waited: timedelta | None) -> list[Ask]:
    """Return an ask for each run to request at this tick, or a single ask of 0 with the reason."""
    asks: list[Ask] = []
    while True:
        ask = next_ask(backlog, limits, in_flight, waited)
        if not ask.demand:
            return asks or [ask]
        asks.append(ask)
        if limits.alone:
            return asks
        messages, unleased = in_flight.messages + ask.demand, in_flight.unleased + ask.demand
        in_flight = replace(in_flight, messages=messages, runs=in_flight.runs + 1, unleased=unleased)
        waited = timedelta(0)  # the remaining messages must be worth another run
        limits = replace(limits, filled=False, left=False)  # the new run's result decides next


def count(messages: int) -> str:
    """Return a number of messages in words."""
    if messages >= ENDLESS:
        return "messages without end"
    return f"{messages} message" if messages == 1 else f"{messages} messages"


def _hindrance(backlog: Backlog, limits: Limits, in_flight: InFlight, waiting: int | None) -> str | None:
    if limits.paused is None and backlog.messages == 0:
        if in_flight.held:
            return f"the queue is empty; leased by {in_flight.holding({})}: {count(in_flight.held)}"
        return f"the queue is empty; running: {in_flight.named}" if in_flight.run_ids else "the queue is empty"
    if limits.paused is None and waiting == 0:
        return f"{_wait(backlog.messages or 0)}, and {in_flight.named} will lease them"
    return no_room(limits, in_flight)


def no_room(limits: Limits, in_flight: InFlight) -> str | None:
    """Return the reason why no run may be requested, whatever the backlog, or None."""
    held, runs = in_flight.of_capacity, in_flight.runs
    if limits.paused is not None:
        return f"paused: {limits.paused}"
    if runs >= limits.producer.max_runs:
        active = f"{runs} {'run' if runs == 1 else 'runs'} active"
        return f"{active}; max_runs allows {limits.producer.max_runs}: {in_flight.named}"
    if held >= limits.capacity:
        return f"{count(held)} in flight use the capacity of {limits.capacity}: {in_flight.named}"
    if limits.permits and limits.permits <= (need := held - in_flight.permitted):
        return f"the rate limit allows {limits.permits} during a run, and {count(need)} in flight need them"
    if limits.permits == 0 or limits.permits_soon == 0:
        return f"no permits are left {f'until {_clock(limits.permits_at)}' if limits.permits_at else 'for now'}"
    return None


def runs_allowed(limits: Limits, in_flight: InFlight) -> int:
    """Return the number of runs that may still be requested, if `no_room` returns None."""
    return min(
        limits.producer.max_runs - in_flight.runs, -(-(limits.capacity - in_flight.of_capacity) // limits.per_run)
    )


def not_taken(backlog: Backlog, in_flight: InFlight) -> int | None:
    """Return the messages that no run has leased or will lease; None if the source does not report its backlog."""
    held = in_flight.messages if backlog.counts_held else in_flight.unleased
    return None if backlog.messages is None else max(0, backlog.messages - held)


def _wait(messages: int) -> str:
    return f"{count(messages)} {'waits' if messages == 1 else 'wait'}"


def _clock(time: datetime) -> str:
    return f"{time.astimezone(UTC):%H:%M:%S} UTC"


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():.3g} s"
