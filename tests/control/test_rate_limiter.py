"""The pace of tasks: as fast as the limit allows, never faster, and fair to other tasks."""

import itertools
import math
import os
import pickle
from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline_platform.control.pace import Pace
from pipeline_platform.control.store import ControlStore, ControlStoreError, Grant
from pipeline_platform.model.options import RateLimiting

START = 1_000_000.0
TEN_A_SECOND = RateLimiting(allowed_messages=10, interval=timedelta(seconds=1))
_names = (f"pipeline_{number}" for number in itertools.count())


class Clock:
    """A clock that sleeping advances; `slept` contains the duration of each sleep."""

    def __init__(self) -> None:
        self.now = START
        self.slept: list[float] = []
        self.latency = 0.0
        self.read = self.now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds

    def slow(self) -> float:
        """Clock of a store with the same delay for requests and answers."""
        self.read = self.now + self.latency / 2
        self.now += self.latency
        return self.read


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    store = ControlStore(f"sqlite:///{tmp_path}/control.db", now=clock.slow)
    yield store
    store.close()


def paced(store, clock, limit=TEN_A_SECOND, *, jitter=0.0, sleep=None):
    return Pace(store, "flights", limit, sleep=sleep or clock.sleep, monotonic=clock, jitter=lambda: jitter)


class Counted:
    """A store that counts its calls."""

    def __init__(self, store) -> None:
        self.store = store
        self.wanted: list[int] = []

    def take(self, limits, wanted, stops=()):
        self.wanted.append(wanted)
        return self.store.take(limits, wanted, stops)


def test_without_a_limit_one_slice_is_everything():
    assert Pace(None, "flights").permitted(1_000_000) == (1_000_000, math.inf)
    assert list(Pace(None, "flights").each([1, 2, 3])) == [1, 2, 3]


def test_a_pipeline_without_a_limit_looks_for_one_now_and_then(store, clock):
    counted = Counted(store)
    pace = paced(counted, clock, None)
    assert [pace.permitted(1_000) for _ in range(50)] == [(1_000, clock.now + 5)] * 50
    assert len(counted.wanted) == 1
    store.set_rate_limiting("flights", TEN_A_SECOND)
    clock.now += 5
    assert pace.permitted(1_000) == (1, clock.now + 1)


def test_forks_of_a_task_share_their_checks_for_a_limit(store, clock):
    pace = Pace(store, "flights", sleep=clock.sleep, monotonic=clock)
    child = os.fork()
    if child == 0:
        try:
            pace.permitted(1)
        finally:
            os._exit(0)
    os.waitpid(child, 0)

    assert pace.unlimited_until > clock.now


@pytest.mark.parametrize("until", [math.inf, START + 1_000])
def test_a_limit_set_while_messages_are_handled_is_noticed_within_seconds(store, clock, until):
    """Ten per second, in a block that takes minutes; then one per second."""
    counted = Counted(store)
    handled = []
    for message in paced(counted, clock, None).each(range(200), until=until):
        handled.append(clock.now - START)
        clock.now += 0.1
        if message == 99:
            store.set_rate_limiting("flights", RateLimiting(allowed_messages=1, interval=timedelta(seconds=1)))

    assert len(handled) == 200
    assert sum(at > 10 + 5.01 for at in handled) >= 45
    after = Counter(int(at) for at in handled if at > 10 + 5.01)
    assert max(after.values()) == 1
    assert len(counted.wanted) < 250, "while there is no limit, it asks once in five seconds"


def test_a_store_that_answers_slowly_does_not_keep_a_task_without_a_limit_from_working(store, clock):
    clock.latency = 7.0
    assert list(paced(store, clock, None).each(range(3))) == [0, 1, 2]


def test_messages_come_in_the_pace_of_the_limit_and_in_order(store, clock):
    handled = [(message, clock.now - START) for message in paced(store, clock).each(range(25))]
    assert [message for message, _ in handled] == list(range(25))
    assert [int(at) for _, at in handled] == [0] * 10 + [1] * 10 + [2] * 5


def test_a_task_sleeps_to_the_next_interval_instead_of_asking(store, clock):
    counted = Counted(store)
    clock.now += 0.25
    list(paced(counted, clock, jitter=1.0).each(range(20)))
    assert clock.slept == [pytest.approx(0.75 + 0.02)]
    assert len(counted.wanted) < 15


def test_a_task_takes_no_more_than_it_needs(store, clock):
    pace = paced(store, clock)
    for _ in range(7):
        list(pace.each(["message"]))
    assert store.spare("flights", TEN_A_SECOND, timedelta(0)) == 3


def test_a_slow_task_leaves_permits_to_others(store, clock):
    """It needs 0.4 s per message, so it handles two or three of ten per second, and takes one permit at a time."""
    for _ in paced(store, clock).each(range(10)):
        left = store.spare("flights", TEN_A_SECOND, timedelta(0))
        assert left >= 10 - 3
        clock.now += 0.4


def test_a_task_that_becomes_slow_soon_takes_less(store, clock):
    counted = Counted(store)
    limit = RateLimiting(allowed_messages=100, interval=timedelta(seconds=1))
    for message in paced(counted, clock, limit).each(range(150)):
        clock.now += 0.001 if message < 100 else 0.6
        if message == 100:
            counted.wanted.clear()
    assert max(counted.wanted[7:]) <= 2


def test_a_fast_task_needs_few_calls(store, clock):
    """200,000 messages per second at a limit of 100,000."""
    counted = Counted(store)
    limit = RateLimiting(allowed_messages=100_000, interval=timedelta(seconds=1))
    clock.latency = 0.002
    pace, left, calls = paced(counted, clock, limit), 1_000_000, []
    while left:
        count, _ = pace.permitted(left)
        clock.now += count / 200_000
        left -= count
        calls.append(count)

    assert clock.now - START < 10.01, "the limit is used up"
    assert len(counted.wanted) < 10 * 12


@pytest.mark.parametrize("limit", [None, TEN_A_SECOND])
def test_waiting_ends_with_the_lease(store, clock, limit):
    handled = []
    for message in paced(store, clock, limit).each(range(100), until=START + 1.5):
        handled.append(message)
        clock.now += 0.03
    assert handled == list(range(20 if limit else 50))
    assert clock.now == pytest.approx(START + 1.5)
    assert paced(None, clock, None).permitted(5, until=clock.now) == (0, clock.now)


def test_a_long_interval_is_looked_at_now_and_then_so_that_a_change_is_noticed(store, clock):
    hourly = RateLimiting(allowed_messages=1, interval=timedelta(hours=1))

    def sleep(seconds):
        clock.sleep(seconds)
        if len(clock.slept) == 3:
            store.set_rate_limiting("flights", TEN_A_SECOND)

    assert list(paced(store, clock, hourly, sleep=sleep).each([1, 2])) == [1, 2]
    assert clock.slept == [5, 5, 5]


class Away:
    """A store that fails a number of times before it answers."""

    def __init__(self, failures: float) -> None:
        self.failures = failures

    def take(self, limits, wanted, stops=()):
        self.failures -= 1
        if self.failures >= 0:
            raise ControlStoreError("no answer")
        return Grant(wanted, 1.0)


def test_a_short_outage_of_the_store_costs_time_only(clock):
    # The previous request has expired, so there is another.
    assert paced(Away(4), clock).permitted(1) == (1, clock.now + 1)
    assert sum(clock.slept) < 5


def test_a_long_outage_of_the_store_stops_the_task(clock):
    with pytest.raises(ControlStoreError, match="no answer"):
        paced(Away(math.inf), clock).permitted(1)
    assert 60 <= sum(clock.slept) < 75


def test_a_pickled_pace_measures_its_speed_again(tmp_path):
    store = ControlStore(f"sqlite:///{tmp_path}/control.db")
    pace = Pace(store, "flights", RateLimiting(allowed_messages=10**6, interval=timedelta(days=1)))
    assert len(list(pace.each(range(1_000)))) == 1_000
    copy = pickle.loads(pickle.dumps(pace))
    assert copy.permitted(1_000)[0] == 1
    store.close()


# Many tasks at once


class SleepingError(Exception):
    """Raised instead of sleeping, so that other tasks can act; the task may continue early or late."""


class Task:
    """A task that acts step by step: it requests permits, or handles one permitted message."""

    def __init__(self, store, pipeline, limit, clock, offset) -> None:
        self.clock, self.offset = clock, offset
        self.store, self.interval = store, 0
        self.pace = Pace(self, pipeline, limit, sleep=self._sleep, monotonic=self._monotonic)
        self.permitted, self.valid_until = 0, 0.0
        self.restarted = lambda: Task(store, pipeline, limit, clock, offset)

    def _sleep(self, seconds):
        raise SleepingError

    def _monotonic(self):
        return self.clock.now + self.offset

    def take(self, limits, wanted, stops=()):
        """Record the interval of the permits that the store grants."""
        grant = self.store.take(limits, wanted, stops)
        self.interval = int(self.clock.read)
        return grant

    def step(self, wanted: int) -> bool:
        """Return whether a message was handled."""
        if self.permitted and self._monotonic() < self.valid_until:
            self.permitted -= 1
            assert int(self.clock.now) == self.interval, "with a permit of the interval it is handled in"
            return True
        try:
            self.permitted, self.valid_until = self.pace.permitted(wanted)
        except SleepingError:
            self.permitted = 0
        return False


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    allowed=st.integers(1, 12),
    steps=st.lists(
        st.tuples(
            st.integers(0, 3),  # which task acts
            st.integers(1, 20),  # on how many messages
            st.one_of(st.just(0.0), st.floats(0, 0.05), st.floats(0, 3)),  # after how long: tasks stall
            st.sampled_from([0.0, 0.0, 0.01, 0.6]),  # duration of the call of the store
            st.sampled_from([False] * 9 + [True]),  # whether it crashes and is replaced
        ),
        max_size=120,
    ),
)
def test_no_interval_exceeds_its_permits_if_tasks_stall_or_crash(store, clock, allowed, steps):
    limit = RateLimiting(allowed_messages=allowed, interval=timedelta(seconds=1))
    pipeline, handled = next(_names), Counter()
    tasks = [Task(store, pipeline, limit, clock, offset) for offset in (0, 17.5, -3, 10**6)]
    for who, wanted, passed, latency, dies in steps:
        clock.now += passed
        clock.latency = latency
        if dies:
            tasks[who] = tasks[who].restarted()
        if tasks[who].step(wanted):
            handled[int(clock.now)] += 1
    assert all(count <= allowed for count in handled.values())


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    allowed=st.integers(1, 300), interval=st.floats(0.05, 5), work=st.floats(0.0001, 0.5), messages=st.integers(1, 400)
)
def test_a_task_finishes_as_soon_as_limit_and_work_allow(store, clock, allowed, interval, work, messages):
    limit = RateLimiting(allowed_messages=allowed, interval=timedelta(seconds=interval))
    pace = Pace(store, next(_names), limit, sleep=clock.sleep, monotonic=clock, jitter=lambda: 0.5)
    started = clock.now
    for _ in pace.each(range(messages)):
        clock.now += work
    seconds = limit.interval.total_seconds()
    # Intervals that it needs, each with a small loss, and one at either end.
    a_interval = max(1, min(allowed, int(seconds / work)))
    by_limit = math.ceil(messages / a_interval) * max(seconds, work)
    assert clock.now - started <= 2 * by_limit + 2 * seconds + messages * work
