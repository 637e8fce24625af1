"""Rate limits, permits and pauses, shared by several runs."""

import math
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.control.store import Grant, interval_end
from pipeline_platform.model.options import RateLimiting
from pipeline_platform.model.strict_options import PipelineError
from tests.fixtures.control import MINUTE, TEN_A_MINUTE, names, on_both_databases, one_store_for_all_examples


def test_without_a_limit_all_is_permitted_for_ever(store):
    assert store.take({"flights": None}, 10**6) == Grant(10**6, math.inf)
    assert store.spare("flights", None, MINUTE) is None


def test_asking_for_no_permit_is_refused(store):
    with pytest.raises(ValueError, match="wanted must be at least 1"):
        store.take({"flights": TEN_A_MINUTE}, 0)


def test_a_clock_set_back_finds_the_interval_as_it_was(store, clock):
    store.take({"flights": TEN_A_MINUTE}, 10)
    clock.now += 61
    store.take({"flights": TEN_A_MINUTE}, 1)
    clock.now -= 2
    assert store.take({"flights": TEN_A_MINUTE}, 1).messages == 0


@on_both_databases
def test_intervals_that_are_over_are_removed(store, clock):
    for _ in range(10):
        store.take({"flights": TEN_A_MINUTE}, 1)
        clock.now += 60
    with store.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM control_intervals").scalar() <= 3


@on_both_databases
def test_spare_counts_the_intervals_that_begin_before_the_horizon(store, clock):
    clock.now += 15
    store.take({"flights": TEN_A_MINUTE}, 4)
    spare = partial(store.spare, "flights", TEN_A_MINUTE)
    assert spare(timedelta(0)) == 6
    assert spare(timedelta(seconds=45)) == 6
    assert spare(timedelta(seconds=46)) == 16
    assert spare(timedelta(seconds=106)) == 26


@on_both_databases
def test_a_limit_set_at_run_time_holds_until_it_is_set_back(store):
    store.set_rate_limiting("flights", RateLimiting(allowed_messages=2, interval=MINUTE))
    assert store.take({"flights": TEN_A_MINUTE}, 5).messages == 2
    assert store.rate_limiting("flights", TEN_A_MINUTE).allowed_messages == 2
    store.set_rate_limiting("flights", None)
    assert store.rate_limiting("flights", TEN_A_MINUTE) == TEN_A_MINUTE
    assert store.take({"flights": TEN_A_MINUTE}, 50).messages == 8, "what was taken before counts"


def test_a_lower_limit_takes_nothing_back(store):
    store.take({"flights": TEN_A_MINUTE}, 9)
    store.set_rate_limiting("flights", RateLimiting(allowed_messages=2, interval=MINUTE))
    assert store.take({"flights": TEN_A_MINUTE}, 1).messages == 0
    assert store.spare("flights", TEN_A_MINUTE, timedelta(0)) == 0


def test_a_limit_can_be_set_for_a_pipeline_without_one(store):
    store.set_rate_limiting("flights", TEN_A_MINUTE)
    assert store.take({"flights": None}, 11).messages == 10


def test_changing_the_length_and_back_does_not_reset_an_interval(store):
    store.take({"flights": TEN_A_MINUTE}, 10)
    store.set_rate_limiting("flights", RateLimiting(allowed_messages=10, interval=timedelta(seconds=1)))
    store.take({"flights": TEN_A_MINUTE}, 10)
    store.set_rate_limiting("flights", None)
    assert store.take({"flights": TEN_A_MINUTE}, 1).messages == 0


@on_both_databases
def test_a_part_of_a_limit_can_be_changed(store):
    store.update_rate_limiting("flights", TEN_A_MINUTE, allowed_messages=3)
    after = store.update_rate_limiting("flights", TEN_A_MINUTE, interval=timedelta(seconds=1))
    assert after == RateLimiting(allowed_messages=3, interval=timedelta(seconds=1))
    assert store.rate_limiting("flights", TEN_A_MINUTE) == after


def test_a_change_of_nothing_or_to_nothing_is_refused(store):
    with pytest.raises(PipelineError, match="flights has no rate limit"):
        store.update_rate_limiting("flights", None, allowed_messages=3)
    with pytest.raises(ValueError, match="allowed_messages"):
        store.update_rate_limiting("flights", TEN_A_MINUTE, allowed_messages=0)
    with pytest.raises(TypeError, match="allowed_message'"):
        store.update_rate_limiting("flights", TEN_A_MINUTE, allowed_message=3)
    assert store.rate_limiting("flights", TEN_A_MINUTE) == TEN_A_MINUTE


@on_both_databases
def test_a_pause_lasts_until_it_is_resumed_and_says_why(store):
    assert store.paused("flights") is None
    store.resume("flights")
    store.pause("flights", "the lake is full")
    store.set_rate_limiting("flights", TEN_A_MINUTE)
    assert store.paused("flights") == "the lake is full"
    assert store.paused("trains") is None
    store.resume("flights")
    assert store.paused("flights") is None
    store.pause("flights", "")
    assert store.paused("flights"), "also without a reason"


@one_store_for_all_examples
@given(takes=st.lists(st.tuples(st.integers(1, 8), st.floats(0, 20)), max_size=30), allowed=st.integers(1, 12))
def test_an_interval_grants_all_that_is_wanted_or_all_that_is_left(store, clock, takes, allowed):
    pipeline, limit = next(names), RateLimiting(allowed_messages=allowed, interval=timedelta(seconds=7))
    wanted_of, granted_of = {}, {}
    for wanted, passed in takes:
        clock.now = round(clock.now + passed, 6)
        grant = store.take({pipeline: limit}, wanted)
        ends_at = round(clock.now + grant.seconds, 6)
        assert ends_at == interval_end(limit, datetime.fromtimestamp(clock.now, UTC)).timestamp()
        wanted_of[ends_at] = wanted_of.get(ends_at, 0) + wanted
        granted_of[ends_at] = granted_of.get(ends_at, 0) + grant.messages
        assert granted_of[ends_at] == min(allowed, wanted_of[ends_at])
        assert store.spare(pipeline, limit, timedelta(0)) == allowed - granted_of[ends_at]
