"""Run sizes by `target_run_time`, on a simulated clock with a tick every 5 s and 1.5 s of overhead per run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.control.claims import Ended
from pipeline_platform.control.demand import InFlight, Limits, Waiting, next_asks
from pipeline_platform.control.run_size import Rate, learn, rate_of, run_size, worthwhile
from pipeline_platform.model.options import Processors, Producer
from pipeline_platform.source.backlog import Backlog

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LOOK_S, COST_S, TARGET_S, PATIENCE_S = 5.0, 1.5, 30.0, 30.0
PROCESSORS = Processors(concurrency=2, target_run_time=timedelta(seconds=TARGET_S), max_demand=10**8)
PRODUCER = Producer(source="queue", patience=timedelta(seconds=PATIENCE_S))


@dataclass
class Simulation:
    """A pipeline with one run at a time; `work` is the seconds per message over all tasks."""

    work: float
    rate: Rate | None = None
    arrivals: Callable[[float], int] = lambda _: 10**9
    sizes: list[int] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)
    now: float = 0.0
    taken: int = 0
    waiting: Waiting = field(default_factory=Waiting)

    def runs(self, count: int, until: float = 1e9) -> Simulation:
        """Advance the clock by a number of runs."""
        last = len(self.sizes) + count
        while len(self.sizes) < last and self.now < until:
            time = NOON + timedelta(seconds=self.now)
            backlog = Backlog(self.arrivals(self.now) - self.taken)
            limits = Limits(PRODUCER, PROCESSORS, size=run_size(PROCESSORS, self.rate))
            asks = next_asks(backlog, limits, InFlight(), self.waiting.waited(time))
            self.waiting = self.waiting.after(backlog, asks, time)
            self.now += LOOK_S
            if demand := asks[0].demand:
                seconds = COST_S + demand * self.work
                self.rate = learn(self.rate, Rate(demand, seconds))
                self.sizes.append(demand)
                self.asked_at.append(self.now)
                self.took.append(seconds)
                self.taken += demand
                self.now += seconds
        return self


@pytest.mark.parametrize("work", [1e-5, 1e-3, 0.1])
@pytest.mark.parametrize("off", [0.1, 10.0])
def test_from_ten_times_too_few_or_too_many_it_takes_at_most_five_runs(work, off):
    fits = (TARGET_S - COST_S) / work
    simulation = Simulation(work, rate=Rate(round(off * fits), TARGET_S)).runs(10)

    assert simulation.sizes[0] == pytest.approx(off * fits, abs=1)
    assert simulation.took[4:] == pytest.approx([TARGET_S] * 6, rel=0.05)
    assert all(seconds >= 10 * COST_S for seconds in simulation.took[4:]), "a tenth at most is not work"


@pytest.mark.parametrize("work", [1e-5, 1e-3, 0.1])
def test_a_new_pipeline_starts_with_small_runs_and_never_exceeds_the_target(work):
    simulation = Simulation(work).runs(8)

    assert simulation.sizes[0] == 200
    assert simulation.took[4:] == pytest.approx([TARGET_S] * 4, rel=0.1)
    assert max(simulation.took) <= TARGET_S * 1.1


@pytest.mark.parametrize(("slower", "runs"), [(10, 1), (0.1, 4)])
def test_a_callback_that_becomes_slower_or_faster_is_followed(slower, runs):
    simulation = Simulation(1e-3).runs(8)
    simulation.work *= slower
    simulation.runs(8)

    assert simulation.took[8 + runs :] == pytest.approx([TARGET_S] * (8 - runs), rel=0.1)


@pytest.mark.parametrize("work", [1e-5, 0.1, 0.6])
def test_a_trickle_never_starves(work):
    """One message per second: none waits for more than `patience`, two ticks and the previous run."""
    simulation = Simulation(work, arrivals=int).runs(40)
    longest = PATIENCE_S + 2 * LOOK_S + max(simulation.took)

    assert max(after - before for before, after in pairwise(simulation.asked_at)) <= longest
    assert simulation.arrivals(simulation.asked_at[-1]) - simulation.taken <= longest


def test_the_rate_of_busy_times_survives_small_runs():
    busy = Simulation(1e-4).runs(8)
    busy.arrivals = lambda now: busy.taken + 3
    busy.runs(20)
    assert set(busy.sizes[8:]) == {3}

    busy.arrivals = lambda _: 10**9
    assert busy.runs(1).took[-1] == pytest.approx(TARGET_S, rel=0.05)


def test_a_message_that_takes_longer_than_a_run_should_leaves_one_for_each_task():
    assert run_size(PROCESSORS, Rate(1, 300.0)) == 2


def test_less_than_keeps_a_run_busy_for_twenty_seconds_waits_for_patience():
    assert worthwhile(PROCESSORS, 30_000) == 20_000
    assert worthwhile(Processors(concurrency=2, max_demand=100), 200) == 100, "without a target, by min_demand"


@given(
    messages=st.integers(1, 10**9),
    seconds=st.floats(0, 10**6),
    max_demand=st.integers(1, 10**6),
    concurrency=st.integers(1, 100),
)
def test_the_greatest_size_is_never_exceeded(messages, seconds, max_demand, concurrency):
    target = timedelta(seconds=TARGET_S)
    processors = Processors(concurrency=concurrency, max_demand=max_demand, target_run_time=target)
    size = run_size(processors, Rate(messages, seconds))

    assert 1 <= worthwhile(processors, size) <= size <= processors.per_run


def test_without_a_target_the_size_follows_from_demand_and_tasks():
    assert run_size(Processors(), Rate(1, 1.0)) == Processors().per_run == 100_000


def test_the_rate_follows_from_ended_runs_in_the_control_store(store, clock):
    def run(messages: int, seconds: float) -> Rate | None:
        store.claim("flights", f"{clock.now}", "run", wanted=messages, capacity=10**6, lease_s=3_600)
        clock.now += seconds
        store.finish(f"{clock.now - seconds}")
        return rate_of(store.ended("flights"))

    assert rate_of(store.ended("flights")) is None
    assert run(1_000, 20.0) == Rate(1_000, 20.0)
    assert run(3, 2.0) == Rate(1_000, 20.0), "too short to tell that runs are slower"
    assert run(500, 2.0) == Rate(500, 2.0), "runs are at least so fast"
    assert run(1_000, 40.0) == Rate(1_000, 40.0), "and slower now"


def test_a_run_that_ended_before_it_began_by_a_clock_that_was_set_back_tells_nothing():
    known = Ended("r1", "run", 100, NOON, NOON + timedelta(seconds=20))
    set_back = Ended("r2", "run", 100, NOON, NOON - timedelta(seconds=40))

    assert rate_of([set_back, known]) == Rate(100, 20.0)
    assert rate_of([set_back]) is None


def test_a_run_that_received_nothing_tells_nothing():
    assert rate_of([Ended("r", "run", 0, NOON, NOON + timedelta(seconds=60))]) is None
