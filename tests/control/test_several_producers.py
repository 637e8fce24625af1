"""Limits of a pipeline with several producers: each has its own, and backfills obey all."""

from collections import Counter
from datetime import timedelta
from functools import partial
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.control.pace import Pace
from pipeline_platform.model.options import RateLimiting
from tests.fixtures.control import TEN_A_MINUTE, names, on_both_databases, one_store_for_all_examples

EAST, WEST, ALL = 200, 100, 300
"""Capacity of each producer, and of both."""
THREE_A_MINUTE = RateLimiting(allowed_messages=3, interval=timedelta(minutes=1))


def claim(store, key, receive_id, wanted):
    capacity = {"east": EAST, "west": WEST}.get(key.partition("/")[2], ALL)
    return store.claim(key, receive_id, "run", wanted=wanted, capacity=capacity, lease_s=60)


@on_both_databases
def test_a_backfill_takes_the_room_that_all_of_them_leave_and_they_take_what_it_leaves(store):
    claim(store, "coasts/east", "a", 120)
    assert claim(store, "coasts", "backfill", 500) == ALL - 120
    assert claim(store, "coasts/west", "b", 1) == 0, "all is taken"
    store.adjust("backfill", 130)
    assert claim(store, "coasts/west", "b", 500) == 50, "all room but 250"
    store.end("backfill")
    assert claim(store, "coasts/west", "b", 500) == WEST


def test_a_retry_between_two_receives_limits_no_producer(store):
    store.stand_by("coasts", "retry", 60)
    assert claim(store, "coasts/west", "b", 500) == WEST


def test_a_pipeline_whose_name_begins_alike_is_another(store):
    claim(store, "coasts/east", "a", 120)
    claim(store, "coasts_2/east", "b", 150)
    claim(store, "coastsX", "c", 10)
    assert [c.receive_id for c in store.in_flight("coasts", of_all=True)] == ["a"]
    assert claim(store, "coasts", "backfill", 500) == ALL - 120


def test_a_producer_s_claim_that_is_over_comes_back_only_to_room_that_a_backfill_left(store, clock):
    claim(store, "coasts/west", "b", WEST)
    clock.now += 61
    claim(store, "coasts", "backfill", 250)
    assert not store.beat("b", 60)
    store.adjust("backfill", ALL - WEST)
    assert store.beat("b", 60)


_ids = map(str, count())


@one_store_for_all_examples
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["/east", "/west", ""]), st.integers(1, 400), st.sampled_from(["", "", "beat", "end"])
        ),
        max_size=25,
    ),
    passed=st.lists(st.sampled_from([0, 0, 0, 40]), min_size=25, max_size=25),
)
def test_capacities_of_producers_and_of_all_are_never_exceeded(store, clock, steps, passed):
    name, receives = next(names), []
    for (key, wanted, then), seconds in zip(steps, passed, strict=False):
        clock.now += seconds
        if then and receives:
            receive_id = receives[wanted % len(receives)]
            store.beat(receive_id, 60) if then == "beat" else store.end(receive_id)
        else:
            receives.append(f"{name} {next(_ids)}")
            claim(store, f"{name}{key}", receives[-1], wanted)
        held = {of: sum(c.messages for c in store.in_flight(f"{name}{of}")) for of in ("/east", "/west", "")}
        assert held["/east"] <= EAST
        assert held["/west"] <= WEST
        assert sum(held.values()) <= ALL


def test_rate_limits_of_producers_are_independent(store):
    store.set_rate_limiting("coasts/west", THREE_A_MINUTE)
    assert store.take({"coasts/east": TEN_A_MINUTE}, 20).messages == 10
    assert store.take({"coasts/west": TEN_A_MINUTE}, 20).messages == 3
    assert store.rate_limiting("coasts", None) is None


def test_a_message_of_all_of_them_takes_a_permit_of_each(store):
    limits = {"coasts/east": TEN_A_MINUTE, "coasts/west": THREE_A_MINUTE, "coasts/north": None}
    assert store.take(limits, 2).messages == 2
    assert store.take(limits, 20).messages == 1
    assert store.take({"coasts/east": TEN_A_MINUTE}, 20).messages == 7
    assert store.take({"coasts/north": None}, 20).messages == 20


def test_an_exhausted_limit_prevents_permits_of_all_limits_and_reports_its_next_interval(store, clock):
    day = RateLimiting(allowed_messages=5, interval=timedelta(hours=1))
    store.take({"coasts/west": THREE_A_MINUTE}, 3)
    assert store.take({"coasts/east": day, "coasts/west": THREE_A_MINUTE}, 5)[:2] == (0, 60)
    assert store.take({"coasts/east": day}, 5)[:2] == (5, 3_600)
    assert store.take({"coasts/east": day, "coasts/west": THREE_A_MINUTE}, 5)[:2] == (0, 3_600)


def test_messages_of_all_producers_obey_the_slowest_limit(store, clock):
    limits = {"coasts/west": THREE_A_MINUTE}

    def sleep(seconds):
        clock.now += seconds

    pace = partial(Pace, store, sleep=sleep, monotonic=clock, jitter=lambda: 0.5)
    backfill, pull, handled = pace("coasts/east", TEN_A_MINUTE, limits), pace("coasts/east", TEN_A_MINUTE), Counter()
    both = zip(backfill.each(range(9)), pull.each(range(9)), strict=False)
    for _ in both:
        handled[int(clock.now // 60)] += 2

    assert handled.total() == 18
    assert max(handled.values()) <= 10


@on_both_databases
def test_a_pause_of_the_pipeline_holds_for_each_and_one_of_a_producer_for_it_alone(store):
    store.pause("coasts/east", "moves")
    assert [store.paused(key) for key in ("coasts/east", "coasts/west", "coasts")] == ["moves", None, None]
    store.pause("coasts", "all move")
    assert [store.paused(key) for key in ("coasts/east", "coasts/west", "coasts")] == ["all move"] * 3
    store.resume("coasts")
    assert [store.paused(key) for key in ("coasts/east", "coasts/west", "coasts")] == ["moves", None, None]
