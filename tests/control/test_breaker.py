"""Breaker: a producer pauses while most messages fail, and an attempt with a few messages decides."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pipeline_platform import Backoff, Breaker
from pipeline_platform.control.breaker import BreakerState
from pipeline_platform.control.store import ControlStore
from tests.fixtures.control import on_both_databases

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
PAUSES = Backoff(first=timedelta(seconds=30), most=timedelta(seconds=100))
BREAKER = Breaker(share=0.5, of_last=100, pause=PAUSES)


def seconds(number: float) -> datetime:
    return NOON + timedelta(seconds=number)


def after(*receives: tuple[int, int], state: BreakerState | None = None) -> BreakerState:
    """Return the state after receives of messages and failures, at noon."""
    state = state or BreakerState()
    for messages, failed in receives:
        state = state.after(BREAKER, messages, failed, NOON)
    return state


@pytest.mark.parametrize(
    ("receives", "is_paused"),
    [
        ([(100, 50)], True),
        ([(100, 49)], False),
        ([(99, 99)], False),
        ([(99, 99), (1, 0)], True),
        ([(1, 1)] * 99, False),
        ([(1, 1)] * 100, True),
        ([(1, 1), (1, 0)] * 50, True),
        ([(100_000, 0), (100, 99)], False),
        ([(100_000, 0), (100, 100)], True),
    ],
)
def test_it_pauses_once_that_share_of_the_last_messages_failed(receives, is_paused):
    assert (after(*receives).paused(NOON) is not None) == is_paused


def test_failures_of_long_ago_lose_their_weight():
    state = after((100, 49), *[(10, 0)] * 50)

    assert state.messages == 100
    assert state.failed <= 1


def test_attempts_that_fail_pause_it_for_longer_and_an_attempt_that_succeeds_ends_the_pauses():
    state, now, pauses = after((100, 100)), NOON, []
    for _ in range(4):
        assert state.until is not None
        pauses.append((state.until - now).total_seconds())
        now = state.until
        assert state.paused(now) is None
        state = state.after(BREAKER, 10, 9, now)

    assert pauses == [30, 60, 100, 100]
    assert state.until is not None
    assert state.after(BREAKER, 10, 4, state.until) == BreakerState(10, 4)


def test_a_receive_that_ends_during_the_pause_changes_nothing():
    state = after((100, 100))
    assert state.after(BREAKER, 100, 0, seconds(29)) == state


def test_the_reason_contains_the_counts_and_the_time_of_the_next_attempt():
    assert after((1_000, 812)).paused(NOON) == "812 of the last 1,000 messages failed; next attempt at 12:00:30 UTC"


@on_both_databases
def test_receives_that_are_acknowledged_at_the_same_time_all_count(control_url, monkeypatch):
    stores = [ControlStore(control_url, now=NOON.timestamp) for _ in range(2)]
    both_read, after = threading.Barrier(2), BreakerState.after

    def slowly(state: BreakerState, *given: Any) -> BreakerState:
        with suppress(threading.BrokenBarrierError):
            both_read.wait(0.5)
        return after(state, *given)

    stores[0].judge("sales", BREAKER, 1, 0)
    monkeypatch.setattr(BreakerState, "after", slowly)
    with ThreadPoolExecutor() as runs:
        list(runs.map(lambda store, failed: store.judge("sales", BREAKER, 20, failed), stores, (20, 0)))
    state = stores[0].breaker("sales")
    assert (state.messages, state.failed) == (41, 20)


@on_both_databases
def test_producers_have_their_own_and_resume_ends_the_pauses_of_a_pipeline(control_url):
    now = [NOON.timestamp()]
    store = ControlStore(control_url, now=lambda: now[0])
    for key in ("sales/east", "sales/west", "sales_too/east"):
        store.judge(key, BREAKER, 100, 100)
    store.judge("sales/west", BREAKER, 100, 0)
    now[0] += 30
    store.judge("sales/east", BREAKER, 10, 10)

    assert store.breaker("sales/east").until == seconds(90)
    assert store.breaker("sales/west").until == seconds(30)
    assert store.breaker("sales/north") == BreakerState()
    store.resume("sales")
    assert (store.breaker("sales/east"), store.breaker("sales/west")) == (BreakerState(), BreakerState())
    assert store.breaker("sales_too/east").until == seconds(30)
