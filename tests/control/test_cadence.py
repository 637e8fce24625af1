"""The cadence of runs under a rate limit, on a simulated clock: ticks of the sensor, runs and their overhead."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest

from pipeline_platform.control import demand
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.options import Processors, Producer, RateLimiting
from pipeline_platform.source.backlog import Backlog
from tests.fixtures.control import NOON, Clock

LOOK, START, END = 5.0, 3.0, 1.0
"""Seconds between two ticks, and overhead of a run before and after its handling."""


class Done(NamedTuple):
    """Result of a simulation: messages handled by second, and acknowledged by time."""

    handled: Counter[float]
    acknowledged: list[tuple[float, int]]


class Simulated:
    """Simulation of one producer in steps of 0.1 s, with an endless or a limited backlog."""

    def __init__(self, store: ControlStore, clock: Clock, limit: RateLimiting, max_runs: int = 1) -> None:
        self.store, self.clock, self.limit = store, clock, limit
        self.options = Producer(source="queue", max_runs=max_runs, rate_limiting=limit)
        self.done = Done(Counter(), [])
        self.runs: list[tuple[Iterator[None], int, datetime]] = []

    def last(self, seconds: float, waiting: int) -> Done:
        """Advance the clock."""
        for tenth in range(int(seconds * 10)):
            self.clock.now = NOON.timestamp() + tenth / 10
            if tenth % (LOOK * 10) == 0:
                waiting -= self._look(waiting)
            self.runs = [run for run in self.runs if next(run[0], run) is None]
        return self.done

    def _look(self, waiting: int) -> int:
        now = datetime.fromtimestamp(self.clock.now, UTC)
        held = [(messages, since) for _, messages, since in self.runs]
        ahead = demand.permits_ahead(self.limit, self.options.interval)
        permits = self.store.spare("simulated", self.limit, ahead)
        limits = demand.Limits(self.options, Processors(), permits=permits, permits_soon=permits)
        in_flight = demand.InFlight(
            sum(messages for messages, _ in held), len(held), permitted=demand.had_permits(held, self.limit, now)
        )
        asks = demand.next_asks(Backlog(waiting), limits, in_flight, None)
        self.runs += [(self._run(ask.demand), ask.demand, now) for ask in asks if ask.demand]
        return sum(ask.demand for ask in asks)

    def _run(self, messages: int) -> Iterator[None]:
        left = messages
        yield from self._for(START)
        while left:
            grant = self.store.take({"simulated": self.limit}, left)
            left -= grant.messages
            self.done.handled[self.clock.now - NOON.timestamp()] += grant.messages
            yield
        yield from self._for(END)
        self.done.acknowledged.append((self.clock.now - NOON.timestamp(), messages))

    def _for(self, seconds: float) -> Iterator[None]:
        over = self.clock.now + seconds
        while self.clock.now < over:
            yield


def by_interval(handled: Counter[float], seconds: float) -> Counter[int]:
    counted: Counter[int] = Counter()
    for at, messages in handled.items():
        counted[int(at // seconds)] += messages
    return counted


def every(seconds: float, allowed: int = 10) -> RateLimiting:
    return RateLimiting(allowed_messages=allowed, interval=timedelta(seconds=seconds))


def test_ten_in_ten_seconds_are_acknowledged_ten_at_a_time_in_their_own_interval(store, clock):
    done = Simulated(store, clock, every(10)).last(60, waiting=60)
    assert [messages for _, messages in done.acknowledged] == [10] * 6
    assert [int(at // 10) for at, _ in done.acknowledged] == [*range(6)]
    assert by_interval(done.handled, 10) == dict.fromkeys(range(6), 10)


@pytest.mark.parametrize(("seconds", "least", "lasts"), [(1, 0.85, 40), (60, 1.0, 120)])
def test_nearly_all_that_is_allowed_is_handled_and_never_more(store, clock, seconds, least, lasts):
    done = Simulated(store, clock, every(seconds)).last(lasts, waiting=1_000_000)
    counted = by_interval(done.handled, seconds)
    assert max(counted.values()) <= 10
    assert sum(counted.values()) >= least * 10 * lasts / seconds - 10


def test_a_second_run_takes_the_permits_that_go_unused_between_two(store, clock):
    done = Simulated(store, clock, every(1), max_runs=2).last(60, waiting=1_000_000)
    assert sum(by_interval(done.handled, 1).values()) >= 0.97 * 10 * 60 - 50


@pytest.mark.parametrize(
    ("interval_s", "look_s", "ahead_s"), [(10, 5, 0), (3_600, 5, 0), (9, 5, 9), (1, 5, 60), (1, 60, 60)]
)
def test_a_run_uses_more_intervals_only_if_some_would_pass_unused(interval_s, look_s, ahead_s):
    ahead = demand.permits_ahead(every(interval_s), timedelta(seconds=look_s))
    assert ahead == timedelta(seconds=ahead_s)


def test_messages_in_flight_got_permits_of_earlier_intervals():
    held = [(10, NOON), (25, NOON + timedelta(seconds=10)), (5, NOON + timedelta(seconds=29))]
    assert demand.had_permits(held, every(10), NOON + timedelta(seconds=29)) == 10 + 10
    assert demand.had_permits(held, every(10), NOON - timedelta(hours=1)) == 0, "a clock that was set back"
