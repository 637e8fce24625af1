"""Ranges of logs: reserved by one receive, acknowledged in any order, committed without gaps."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.source.offsets import Choice, Offsets, Place
from tests.fixtures.control import on_both_databases


@pytest.fixture
def store(control_url):
    store = ControlStore(control_url)
    store.begin("log", [Place("p", 0, 0), Place("q", 0, 0)])
    return store


def hold(
    store: ControlStore, receive_id: str, *spans: tuple[str, int, int], **acknowledged_to: int
) -> Sequence[Offsets]:
    chosen = Choice([Offsets(*span) for span in spans], acknowledged_to)
    return store.reserve("log", receive_id, lambda _: chosen)


def spans(store: ControlStore, partition: str = "p") -> list[tuple[int, int, str | None]]:
    return [(span.first, span.past, span.holder) for span in store.places("log")[partition].spans]


@on_both_databases
def test_a_partition_begins_once(store):
    store.begin("log", [Place("p", 7, 9), Place("r", 3, 5)])
    store.begin("log", [])
    places = store.places("log")
    assert (places["p"].acknowledged_to, places["p"].reached) == (0, 0)
    assert places["r"] == Place("r", 3, 5)
    assert store.places("another log") == {}


@on_both_databases
def test_two_planners_at_once_are_given_different_spans(control_url, store):
    """Each planner reserves free ranges, and reads them during the other's transaction."""
    planners = 4
    start = Barrier(planners)

    def plan(nth: int) -> list[Offsets]:
        mine = ControlStore(control_url)
        given: list[Offsets] = []

        def choose(now: Mapping[str, Place]) -> Choice:
            past = max((span.past for span in now["p"].spans), default=0)
            return Choice([Offsets("p", past, past + 10)])

        start.wait()
        for time in range(5):
            given += mine.reserve("log", f"{nth}-{time}", choose)
        mine.close()
        return given

    with ThreadPoolExecutor(planners) as pool:
        given = sorted(span.first for some in pool.map(plan, range(planners)) for span in some)

    assert given == [10 * nth for nth in range(planners * 5)]
    assert store.places("log")["p"].reached == planners * 50


@on_both_databases
def test_a_position_moves_over_what_is_acknowledged_without_a_gap(store):
    hold(store, "a", ("p", 0, 10), ("q", 0, 5))
    hold(store, "b", ("p", 10, 20))
    hold(store, "c", ("p", 20, 30), ("q", 5, 6))
    assert store.acknowledge("log", "c") == {}
    assert store.acknowledge("log", "a") == {"p": 10, "q": 6}
    assert store.committed("log", {"p": 10, "q": 6}) == {}
    assert spans(store) == [(10, 20, "b"), (20, 30, None)]
    assert store.acknowledge("log", "b") == {"p": 30}
    assert store.committed("log", {"p": 30}) == {}
    assert spans(store) == spans(store, "q") == []
    assert {place.acknowledged_to for place in store.places("log").values()} == {30, 6}


def test_acknowledged_ranges_beyond_a_gap_are_merged_into_one_row(store):
    hold(store, "slow", ("p", 0, 10))
    order = [3, 1, 4, 2, 5]
    for nth in order:
        hold(store, str(nth), ("p", 10 * nth, 10 * nth + 10))
    for nth in order:
        assert store.acknowledge("log", str(nth)) == {}
    assert spans(store) == [(0, 10, "slow"), (10, 60, None)]
    assert store.acknowledge("log", "slow") == {"p": 60}


@on_both_databases
def test_released_ranges_are_free_and_acknowledged_ranges_stay(store):
    hold(store, "a", ("p", 0, 10))
    hold(store, "b", ("p", 10, 20))
    store.acknowledge("log", "b")
    store.give_back("log", "a")
    store.give_back("log", "a")
    store.give_back("log", "b")
    store.give_back("log", "nobody")
    assert spans(store) == [(10, 20, None)]
    assert store.places("log")["p"].reached == 20, "what was given out once may come a second time"


@on_both_databases
def test_a_partial_release_keeps_the_other_ranges(store):
    hold(store, "a", ("p", 0, 10), ("p", 10, 20), ("q", 0, 5))
    hold(store, "b", ("p", 20, 30))
    for _ in range(2):
        store.give_back("log", "a", [Offsets("p", 8, 12), Offsets("p", 15, 25), Offsets("p", 3, 4), Offsets("q", 0, 9)])
        store.give_back("log", "nobody", [Offsets("p", 0, 30)])
    assert spans(store) == [(0, 3, "a"), (4, 8, "a"), (12, 15, "a"), (20, 30, "b")]
    assert spans(store, "q") == []
    assert store.acknowledge("log", "a") == {"p": 3}, "no position passes what was given back"


def test_a_lower_commit_returns_the_position_to_commit_again(store):
    """The log may have received the smaller offset last."""
    hold(store, "a", ("p", 0, 10))
    hold(store, "b", ("p", 10, 20))
    first = store.acknowledge("log", "a")
    assert store.acknowledge("log", "b") == {"p": 20}
    assert store.committed("log", {"p": 20}) == {}
    assert store.committed("log", first) == {"p": 20}
    assert store.committed("log", {"p": 20}) == {}
    assert store.places("log")["p"].acknowledged_to == 20


def test_logs_are_independent(store):
    store.begin("other", [Place("p", 0, 0)])
    hold(store, "a", ("p", 0, 10))
    assert store.acknowledge("other", "a") == {}
    store.give_back("other", "a")
    assert spans(store) == [(0, 10, "a")]
    assert store.committed("other", {"gone": 5}) == {}


def test_of_a_thousand_partitions_a_plan_reserves_all_at_once(store):
    names = [f"partition-{number}" for number in range(1_000)]
    store.begin("log", [Place(name, 0, 0) for name in names])
    hold(store, "a", *((name, 0, 5) for name in names))
    assert store.acknowledge("log", "a") == dict.fromkeys(names, 5)
    assert store.committed("log", dict.fromkeys(names, 5)) == {}
    places = store.places("log")
    assert [places[name] for name in names] == [Place(name, 5, 5) for name in names]


def test_sqlite_reservations_are_on_disk_before_use(tmp_path, monkeypatch):
    """Otherwise a power cut could lead to a second reservation of handled offsets."""
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    store.begin("log", [Place("p", 0, 0)])
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def syncing(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", syncing)
    before = (tmp_path / "control.sqlite-wal").stat().st_size
    hold(store, "a", ("p", 0, 10))

    ((path, size),) = synced
    assert path == f"{tmp_path}/control.sqlite-wal"
    assert size > before
