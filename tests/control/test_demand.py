"""Demand: when runs are requested, and for how many messages."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.control.demand import (
    NOTHING,
    Ask,
    InFlight,
    Limits,
    Waiting,
    next_ask,
    next_asks,
    of_use,
)
from pipeline_platform.model.options import Processors, Producer
from pipeline_platform.source.backlog import Backlog

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def of_runs(**options: Any) -> Producer:
    """Return a producer whose runs receive once."""
    return Producer(source="queue", idle_timeout=None, **options)


LIMITS = Limits(of_runs(max_runs=2), Processors())
UNKNOWN = Backlog(None)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def limited(permits: int, soon: int, max_runs: int = 2) -> Limits:
    return Limits(
        of_runs(max_runs=max_runs),
        Processors(),
        permits=permits,
        permits_soon=soon,
        permits_at=NOON + seconds(60),
    )


def test_limits_follow_from_the_options():
    assert (LIMITS.per_run, LIMITS.capacity, LIMITS.processors.worthwhile) == (100_000, 200_000, 50_000)


SLOW = limited(permits=600, soon=50)


@pytest.mark.parametrize(
    ("backlog", "limits", "in_flight", "waited", "demands"),
    [
        (60_000, LIMITS, 0, None, [60_000]),
        (1_000_000, LIMITS, 120_000, None, [80_000]),
        # A backlog leads to as many runs as are worthwhile.
        (10**6, LIMITS, 0, None, [100_000, 100_000]),
        (150_000, LIMITS, 0, None, [100_000, 50_000]),
        (100_001, LIMITS, 0, 99, [100_000]),
        # Little free capacity beside a replay is used after `patience`.
        (1_000_000, LIMITS, 199_997, None, [0]),
        (1_000_000, LIMITS, 199_997, 24, [0]),
        (1_000_000, LIMITS, 199_997, 25, [3]),
        (1_000_000, LIMITS, 150_001, 24, [0]),
        (1_000_000, LIMITS, 150_000, None, [50_000]),
        (1_000_000, LIMITS, 100_000, None, [100_000]),
        # An unknown backlog leads to a run at once, and then one per `patience`.
        (None, LIMITS, 0, None, [100_000]),
        (None, LIMITS, 0, 29, [0]),
        (None, LIMITS, 0, 30, [100_000]),
        # A slow limit makes small runs worthwhile, and messages in flight use its permits first.
        (10**6, SLOW, 0, None, [600]),
        (60, SLOW, 0, None, [60]),
        (40, SLOW, 0, None, [0]),
        (10**6, SLOW, 400, None, [200]),
        (10**6, SLOW, 600, None, [0]),
    ],
)
def test_the_demand_follows_from_backlog_limits_and_waiting_time(backlog, limits, in_flight, waited, demands):
    under_way = InFlight(in_flight, runs=1) if in_flight else NOTHING
    asks = next_asks(Backlog(backlog), limits, under_way, None if waited is None else seconds(waited))

    assert [ask.demand for ask in asks] == demands


def test_reasons_contain_the_free_capacity():
    assert next_ask(Backlog(1_000_000), LIMITS, InFlight(199_997, runs=1), None).because == (
        "1000000 messages wait, of which 3 may be leased; a run starts at 50000, or after 30 s (waited 0 s)"
    )
    assert next_ask(Backlog(10**6), SLOW, InFlight(600, runs=1), None).because == (
        "the rate limit allows 600 during a run, and 600 messages in flight need them"
    )
    assert next_ask(Backlog(60_000), LIMITS, NOTHING, None).because == "60000 messages at the source"


@pytest.mark.parametrize(("in_flight", "expected"), [(0, [100_000, 100_000]), (100_000, [100_000]), (200_000, [])])
def test_a_bounded_count_of_the_backlog_leads_to_the_same_demand(in_flight, expected):
    now = datetime.now(UTC)
    under_way = InFlight(in_flight, runs=in_flight // 100_000, unleased=in_flight)
    bounded, whole = Backlog(of_use(LIMITS, under_way), at_least=True), Backlog(1_000_000)

    for backlog in (bounded, whole):
        asks = next_asks(backlog, LIMITS, under_way, None)
        assert [ask.demand for ask in asks if ask.demand] == expected
        assert Waiting().after(backlog, asks, now, under_way).since == now, "more waits"
    words = next_ask(bounded, LIMITS, NOTHING, None).because
    assert words == f"at least {bounded.messages} messages at the source"


@pytest.mark.parametrize(
    ("backlog", "in_flight", "runs", "unleased", "waited", "because"),
    [
        (0, 0, 0, 0, None, "the queue is empty"),
        (0, 7, 1, 0, None, "the queue is empty; leased by run 0: 7 messages"),
        (9, 200_000, 1, 0, None, "200000 messages in flight use the capacity of 200000: run 0"),
        (9, 5, 2, 0, None, "2 runs active; max_runs allows 2: runs 0, 1"),
        (9, 9, 1, 9, None, "9 messages wait, and run 0 will lease them"),
        (9, 9, 5, 9, None, "9 messages wait, and runs 0, 1, 2 and 2 more will lease them"),
        (12, 0, 0, 0, 4, "12 messages wait; a run starts at 50000, or after 30 s (waited 4 s)"),
        (1, 0, 0, 0, None, "1 message waits; a run starts at 50000, or after 30 s (waited 0 s)"),
        (None, 0, 0, 0, 4, "the source does not report its backlog; next run after 30 s (waited 4 s)"),
    ],
)
def test_a_demand_of_zero_has_a_reason(backlog, in_flight, runs, unleased, waited, because):
    span = None if waited is None else seconds(waited)

    run_ids = tuple(str(run) for run in range(runs))
    under_way = InFlight(in_flight, runs, unleased, run_ids=run_ids, leased=dict.fromkeys(run_ids[:1], in_flight))

    assert next_ask(Backlog(backlog), LIMITS, under_way, span) == Ask(0, because)


@pytest.mark.parametrize(
    ("waiting", "waited", "demand"),
    [(1, None, 0), (1, 0.1, 0), (1, 0.3, 1), (99, None, 0), (100, None, 100), (400_000, None, 100_000)],
)
def test_a_round_starts_after_patience_or_with_a_full_batch(waiting, waited, demand):
    producer = Producer(source="queue", idle_timeout=seconds(30))
    limits = Limits(producer, LIMITS.processors, round_size=100)

    ask = next_ask(Backlog(waiting), limits, NOTHING, None if waited is None else seconds(waited))

    assert ask.demand == demand


def test_a_pause_comes_before_all_else():
    paused = Limits(Producer(source="queue"), Processors(), paused="the lake is full")

    assert next_ask(Backlog(10**6), paused, NOTHING, seconds(99)) == Ask(0, "paused: the lake is full")
    assert next_ask(UNKNOWN, paused, NOTHING, None) == Ask(0, "paused: the lake is full")


def test_a_small_backlog_is_asked_for_at_the_last_look_before_patience_is_over():
    assert next_ask(Backlog(12), LIMITS, NOTHING, seconds(24)).demand == 0
    assert next_ask(Backlog(12), LIMITS, NOTHING, seconds(24.9)) == Ask(
        12, "12 messages wait, and may wait 30 s at most"
    )


@pytest.mark.parametrize("patience", [0.1, 5])
def test_short_patience_starts_runs_at_once_except_for_leftovers(patience):
    limits = Limits(of_runs(patience=seconds(patience), max_runs=3), Processors())

    assert [ask.demand for ask in next_asks(Backlog(100_012), limits, NOTHING, None)] == [100_000]
    assert [ask.demand for ask in next_asks(Backlog(12), limits, NOTHING, None)] == [12]
    assert [ask.demand for ask in next_asks(Backlog(12), limits, NOTHING, seconds(4))] == [12]


@pytest.mark.parametrize(("batch_timeout", "patience"), [(None, 30), (20, 20), (90, 30)])
def test_a_batch_timeout_ends_the_wait_sooner_and_never_later(batch_timeout, patience):
    timeout = None if batch_timeout is None else seconds(batch_timeout)
    limits = Limits(of_runs(), Processors(), batch_timeout=timeout)

    assert next_ask(Backlog(12), limits, NOTHING, seconds(patience - 6)).demand == 0
    assert next_ask(Backlog(12), limits, NOTHING, seconds(patience - 5)).demand == 12


def test_an_exhausted_limit_reports_the_next_interval():
    for permits in (0, 600):
        ask = next_ask(Backlog(10**6), limited(permits=permits, soon=0), NOTHING, seconds(99))
        assert ask == Ask(0, "no permits are left until 12:01:00 UTC")


def test_runs_that_pay_may_start_one_at_a_time():
    limits, backlog = Limits(of_runs(max_runs=3), Processors()), Backlog(10**6)

    assert len(next_asks(backlog, limits, NOTHING, None)) == 3
    assert len(next_asks(backlog, replace(limits, alone=True), NOTHING, None)) == 1


messages = st.one_of(st.none(), st.integers(0, 500))
limits = st.builds(
    lambda runs, tasks, most, least, permits, soon: Limits(
        of_runs(max_runs=runs),
        Processors(concurrency=tasks, max_demand=most, min_demand=min(least, most - 1)),
        permits=permits,
        permits_soon=None if permits is None else min(permits, soon),
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 50),
    st.integers(0, 50),
    st.one_of(st.none(), st.integers(0, 200)),
    st.integers(0, 200),
)


@given(messages, limits, st.integers(0, 300), st.integers(0, 4), st.integers(0, 300), st.integers(0, 60))
def test_no_limit_is_ever_exceeded(backlog, limits, in_flight, runs, unleased, waited):
    under_way = InFlight(in_flight, runs, min(unleased, in_flight))
    asks = next_asks(Backlog(backlog), limits, under_way, seconds(waited))
    total = sum(ask.demand for ask in asks)

    assert all(0 <= ask.demand <= limits.per_run for ask in asks)
    assert all(ask.because for ask in asks)
    if total:
        assert in_flight + total <= limits.capacity
        assert runs + len(asks) <= limits.producer.max_runs
        assert limits.permits is None or in_flight + total <= limits.permits
        assert backlog is None or total + under_way.unleased <= backlog


@given(
    limits=limits.filter(lambda limits: limits.permits_soon != 0),
    looks=st.lists(st.tuples(st.integers(1, 10), st.integers(1, 20)), min_size=1, max_size=20),
    cursor=st.one_of(st.none(), st.text(max_size=5), st.just('{"since": "2999-01-01T00:00:00Z"}')),
)
def test_every_message_is_requested_within_patience(limits, looks, cursor):
    """Ticks at irregular times, with a changing backlog and a cursor that may be invalid."""
    now, first_seen, waiting = NOON, None, Waiting.from_json(cursor)
    for step, backlog in looks:
        now += seconds(step)
        asks = next_asks(Backlog(backlog), limits, NOTHING, waiting.waited(now))
        waiting = Waiting.from_json(waiting.after(Backlog(backlog), asks, now).to_json())
        if asks[0].demand:
            first_seen = None
            continue
        first_seen = first_seen or now
        assert now - first_seen < limits.producer.patience


@given(limits.filter(lambda limits: limits.permits_soon != 0), st.lists(st.integers(1, 10), max_size=30))
def test_an_unknown_backlog_is_asked_for_once_in_a_patience(limits, steps):
    now, last, waiting = NOON, None, Waiting()
    for step in steps:
        now += seconds(step)
        asks = next_asks(UNKNOWN, limits, NOTHING, waiting.waited(now))
        waiting = waiting.after(UNKNOWN, asks, now)
        due = last is None or now - last >= limits.producer.patience
        assert bool(asks[0].demand) == due
        last = now if due else last


def test_waiting_begins_when_something_is_first_left_over():
    nothing, backlog = Waiting(), Backlog(12)
    first = nothing.after(backlog, [Ask(0, "too few")], NOON)
    later = first.after(backlog, [Ask(0, "too few")], NOON + seconds(9))

    assert nothing.waited(NOON) is None
    assert later.waited(NOON + seconds(10)) == seconds(10)


def test_waiting_restarts_after_a_request():
    waiting = Waiting(since=NOON)

    assert waiting.after(Backlog(12), [Ask(12, "")], NOON + seconds(9)) == Waiting(asked=NOON + seconds(9))
    assert waiting.after(Backlog(12), [Ask(0, "")], NOON + seconds(9), InFlight(12, 1, 12)) == Waiting()
    assert waiting.after(Backlog(12), [Ask(8, "")], NOON + seconds(9)) == Waiting(
        since=NOON + seconds(9), asked=NOON + seconds(9)
    )


@pytest.mark.parametrize("cursor", [None, "", "{", "[]", '{"since": 1e999}', '{"since": "noon"}', '{"a": "12:00"}'])
def test_an_empty_cursor_counts_as_a_first_tick(cursor):
    assert Waiting.from_json(cursor) == Waiting()


def test_a_cursor_is_small_and_survives_a_round_trip():
    waiting = Waiting(since=NOON + timedelta(microseconds=1))

    assert len(waiting.to_json()) < 150
    assert Waiting.from_json(waiting.to_json()) == waiting


def test_a_source_that_does_not_answer_is_looked_at_less_and_less_often_up_to_a_minute():
    waiting, pauses = Waiting(since=NOON), []
    for _ in range(10):
        waiting = waiting.without_answer(NOON, seconds(5))
        assert waiting.again_at is not None
        pauses.append((waiting.again_at - NOON).total_seconds())

    for pause, longest in zip(pauses, [5, 10, 20, 40, *[60] * 6], strict=True):
        assert longest / 2 <= pause <= longest
    assert waiting.since == NOON
    assert "did not answer 10 times in a row" in str(waiting.held_back(NOON))
    assert waiting.held_back(NOON + seconds(60)) is None
    assert waiting.held_back(NOON - timedelta(days=1)) is None, "a clock that was set back holds nobody up"
