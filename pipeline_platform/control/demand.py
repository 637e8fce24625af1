"""When a run is asked for, and how many messages it may take on. Nothing here talks to anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Self

from pydantic import AwareDatetime, BaseModel, ValidationError

from pipeline_platform.model.options import Processors, Producer
from pipeline_platform.source.contract import Backlog

RUN_LASTS = timedelta(seconds=60)
"""What a run may plan its permits for: those of the intervals that begin within it."""


class Ask(NamedTuple):
    """What to ask for.

    Attributes:
        demand: Messages that a run may take on; 0 asks for no run.
        because: Why, in words for people.
    """

    demand: int
    because: str


class InFlight(NamedTuple):
    """What runs under way hold, or will.

    Attributes:
        messages: Of all of them.
        runs: How many.
        unleased: Of `messages`, what runs were asked for and have not leased yet: the source still counts it.
    """

    messages: int = 0
    runs: int = 0
    unleased: int = 0

    def with_ask(self, demand: int) -> InFlight:
        """Add a run that has just been asked for."""
        return InFlight(self.messages + demand, self.runs + 1, self.unleased + demand)


NOTHING = InFlight()


def with_left(backlog: Backlog, left: int) -> Backlog:
    """Count what dead runs left as waiting: the next run gives it back to the source, and takes it on.

    A part of it may be there already, for which nobody can tell; so as many are counted as one of the two says.

    Args:
        backlog: What the source says.
        left: Messages of receives that nobody works on.
    """
    return backlog if backlog.messages is None else backlog._replace(messages=max(backlog.messages, left))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a demand at this moment.

    Attributes:
        max_runs: Runs that may be under way at once.
        per_run: Messages that one run takes on at most.
        worthwhile: Messages that make a run worth its fixed cost.
        patience: After so long less than that is asked for, too.
        permits: Messages that the rate limit gives until a run asked for now would end; None without a limit.
        permits_soon: The same until the next look; never more than `permits`.
        permits_at: When the next interval of the limit begins.
        paused: Why nothing is to be asked for, None if it is.
    """

    max_runs: int
    per_run: int
    worthwhile: int
    patience: timedelta
    permits: int | None = None
    permits_soon: int | None = None
    permits_at: datetime | None = None
    paused: str | None = None

    @classmethod
    def of(
        cls,
        producer: Producer,
        processors: Processors,
        *,
        permits: int | None = None,
        permits_soon: int | None = None,
        permits_at: datetime | None = None,
        paused: str | None = None,
    ) -> Self:
        """Take them from a pipeline's options, and from what the control store says."""
        return cls(
            max_runs=producer.max_runs,
            per_run=processors.concurrency * processors.max_demand,
            worthwhile=processors.worthwhile,
            patience=producer.patience,
            permits=permits,
            permits_soon=permits_soon,
            permits_at=permits_at,
            paused=paused,
        )

    @property
    def capacity(self) -> int:
        """Messages that may be in flight at once, over all runs."""
        return self.max_runs * self.per_run


class Waiting(BaseModel, frozen=True):
    """What a sensor keeps in its cursor: since when something waits that it has not asked for.

    Attributes:
        since: When it was first seen; for a source that cannot tell what waits, when it was last asked. None where
            nothing waits, or nothing was asked yet.
    """

    since: AwareDatetime | None = None

    def waited(self, now: datetime) -> timedelta | None:
        """Say for how long; never negative, whatever clocks do."""
        return None if self.since is None else max(timedelta(0), now - self.since)

    def after(self, backlog: Backlog, asks: Sequence[Ask], now: datetime, in_flight: InFlight = NOTHING) -> Waiting:
        """Say what waits after a look at the source.

        Args:
            backlog: What the look found.
            asks: What was decided on it.
            now: The time of the look.
            in_flight: What runs held before it.
        """
        demand = sum(ask.demand for ask in asks)
        if backlog.messages is not None and backlog.messages <= in_flight.unleased + demand:
            return Waiting()
        if demand or (self.since is None and backlog.messages is not None):
            return Waiting(since=now)
        # A clock that was ahead when it was written must not make anybody wait for it to come true.
        return Waiting(since=now) if self.since is not None and self.since > now else self

    def to_json(self) -> str:
        """Write it as a cursor, below 100 bytes."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | None) -> Waiting:
        """Read a cursor; what is none counts as a sensor that looks for the first time."""
        try:
            return cls.model_validate_json(text or "{}")
        except ValidationError:
            return cls()


def decide(backlog: Backlog, limits: Limits, in_flight: InFlight, waited: timedelta | None) -> Ask:
    """Say how many messages one more run should take on, or why there should be none.

    A backlog is asked for as soon as what can be taken on of it makes a run worthwhile, or is as much as can be handled
    before the next look; less than that after `patience`. A source that cannot tell its backlog (None) is asked for at
    once, and then again each `patience`.

    Args:
        backlog: What waits at the source.
        limits: What bounds the demand now.
        in_flight: What live and queued runs hold, or will.
        waited: For how long something waits that was not asked for, from `Waiting`; None if nothing was seen.
    """
    waiting = None if backlog.messages is None else max(0, backlog.messages - in_flight.unleased)
    room = min(limits.per_run, limits.capacity - in_flight.messages)
    # Messages in flight will take their permits out of the same intervals.
    permits = room if limits.permits is None else limits.permits - in_flight.messages
    hindrance = _hindrance(backlog, limits, in_flight, waiting) or _no_permits(limits, in_flight, permits)
    if hindrance:
        return Ask(0, hindrance)

    most = min(room, permits)
    patient = waited is not None and waited < limits.patience
    if waiting is None:
        if patient:
            return Ask(0, f"the source cannot tell what waits; {_pays_after(limits, waited)}")
        return Ask(most, "the source cannot tell what waits")
    demand = min(waiting, most)
    # Not what room there is: where others hold nearly all of it, each look would ask for a run of a few messages.
    worthwhile = limits.worthwhile if limits.permits_soon is None else min(limits.worthwhile, limits.permits_soon)
    if demand >= worthwhile:
        return Ask(demand, f"{count(waiting)} at the source")
    if waited is None or patient:
        bound = f", of which {demand} could be taken on" if demand < waiting else ""
        return Ask(0, f"{_wait(waiting)}{bound}; a run pays from {worthwhile}, or {_pays_after(limits, waited)}")
    return Ask(demand, f"{_wait(waiting)}, and {_seconds(waited)} are long enough")


def decide_all(backlog: Backlog, limits: Limits, in_flight: InFlight, waited: timedelta | None) -> list[Ask]:
    """Decide on every run that one look at the source is worth; the arguments are those of `decide`.

    Returns:
        One ask for each run, or a single one of 0 that says why there is none.
    """
    asks: list[Ask] = []
    while True:
        ask = decide(backlog, limits, in_flight, waited)
        if not ask.demand:
            return asks or [ask]
        asks.append(ask)
        in_flight = in_flight.with_ask(ask.demand)
        waited = timedelta(0)  # the patience of what waited is satisfied; the rest has to be worth a run of its own


class FailedRuns(NamedTuple):
    """The newest runs of a pipeline that have ended, as far as they failed in a row.

    Attributes:
        runs: How many.
        ended: When the last of them did.
        run_id: Of the last of them.
    """

    runs: int
    ended: datetime
    run_id: str


LONGEST_PAUSE = timedelta(minutes=5)
LOOK_BACK = 12
"""Runs that are looked at: so many failures make the longest pause, from an interval of a second on."""


def hold_back(failed: FailedRuns, interval: timedelta, now: datetime) -> str | None:
    """Say why no run should be asked for although one is due, or None: what failed twice would fail again.

    The pause is the sensor's interval after two failures, and doubles with each one more.
    """
    if failed.runs < 2:
        return None
    until = failed.ended + min(LONGEST_PAUSE, interval * 2 ** min(failed.runs - 2, LOOK_BACK))
    if now >= until:
        return None
    again = until.astimezone(UTC)
    return f"the last {failed.runs} runs failed; asking again at {again:%H:%M:%S} UTC; see run {failed.run_id}"


def _hindrance(backlog: Backlog, limits: Limits, in_flight: InFlight, waiting: int | None) -> str | None:
    if limits.paused is not None:
        return f"paused: {limits.paused}"
    if backlog.messages == 0:
        return "the queue is empty"
    if waiting == 0:
        return f"{_wait(backlog.messages or 0)}, and runs under way will take them"
    if in_flight.messages >= limits.capacity:
        return f"{count(in_flight.messages)} in flight fill the capacity of {limits.capacity}"
    if in_flight.runs >= limits.max_runs:
        return (
            f"{in_flight.runs} {'run' if in_flight.runs == 1 else 'runs'} under way; max_runs allows {limits.max_runs}"
        )
    return None


def _no_permits(limits: Limits, in_flight: InFlight, permits: int) -> str | None:
    if limits.permits is None or (permits > 0 and limits.permits_soon != 0):
        return None
    until = f"until {limits.permits_at.astimezone(UTC):%H:%M:%S} UTC" if limits.permits_at else "for now"
    if limits.permits > 0 and permits <= 0:
        held = count(in_flight.messages)
        return f"the rate limit gives {limits.permits} while a run lasts, and {held} in flight need them"
    return f"the rate limit leaves nothing {until}"


def _pays_after(limits: Limits, waited: timedelta | None) -> str:
    return f"after {_seconds(limits.patience)} (waited {_seconds(waited or timedelta(0))})"


def count(messages: int) -> str:
    """A number of messages in words."""
    return f"{messages} message" if messages == 1 else f"{messages} messages"


def _wait(messages: int) -> str:
    return f"{count(messages)} {'waits' if messages == 1 else 'wait'}"


def _seconds(span: timedelta) -> str:
    return f"{span.total_seconds():.3g} s"
