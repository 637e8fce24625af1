"""Threads that keep an order: messages of a partition in sequence, different partitions at once."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_platform import Message, Processors
from pipeline_platform.lake.storage import Lake
from pipeline_platform.tasks.handle.source_order import SOURCE_ORDER, dealt, in_source_order
from pipeline_platform.tasks.handle.threads import at_once, followers
from tests.fixtures.small_lake import numbered, outcomes
from tests.tasks.test_in_order import Keyed, Ordered, by_payload, handle, memory, reasons

LONG_S = 60
"""Maximum wait in seconds of a message for other messages."""


@pytest.fixture
def lake(tmp_path, monkeypatch):
    monkeypatch.setattr(Ordered, "diary", tmp_path / "diary", raising=False)
    return Lake(root=str(tmp_path / "lake"))


class Threaded(Ordered):
    """Handles four messages at once, with different durations."""

    name = "threaded"
    processors = Processors(concurrency=1, partition_by=by_payload, threads=4)

    def handle_message(self, message: Message, context: Any) -> Message:
        time.sleep(random.Random(message.data).uniform(0, 0.005))
        return super().handle_message(message, context)


def by_partition(lines: Iterable[str]) -> dict[str, list[str]]:
    told = defaultdict(list)
    for line in lines:
        partition, place = line.split()[:2]
        told[partition].append(place)
    return told


def test_messages_of_a_partition_are_handled_in_order_and_results_keep_the_order_of_arrival(lake):
    payloads = [f"{place % 5} {place:02}" for place in range(60)]
    handled = handle(lake, Threaded, memory(*payloads))
    assert by_partition(handled.all) == by_partition(payloads)
    assert handled.all != payloads, "partitions did not wait for each other"
    assert list(outcomes(lake, "threaded", handled.manifest)) == [f"m{place}" for place in range(60)]


def test_source_partitions_keep_their_sequence_and_other_messages_do_not_wait(lake):
    class BySource(Threaded):
        name = "by_source"
        processors = Processors(concurrency=1, threads=3)
        partition_by = "source"
        together = threading.Barrier(3)

        def handle_message(self, message: Message, context: Any) -> Message:
            if not message.data[:1].isalpha():
                self.together.wait(LONG_S)
            return super().handle_message(message, context)

    source = Keyed(deliveries_=numbered(b"a3", b"b2", b"a1", b"07", b"b1", b"a2", b"08", b"09"))

    lines = handle(lake, BySource, source).all

    assert [line for line in lines if line[0] == "a"] == ["a1", "a2", "a3"]
    assert [line for line in lines if line[0] == "b"] == ["b1", "b2"]
    assert {"07", "08", "09"} < set(lines)


def test_a_hot_partition_does_not_block_others(lake):
    class Hot(Threaded):
        """The first message of the hot partition ends after all messages of the cold partitions."""

        name = "hot"
        processors = Processors(concurrency=1, partition_by=by_payload, threads=2)
        cold = threading.Semaphore(0)

        def handle_message(self, message: Message, context: Any) -> Message:
            if message.data == b"1 00":
                for _ in range(10):
                    assert self.cold.acquire(timeout=LONG_S)
            elif not message.data.startswith(b"1 "):
                self.cold.release()
            return super().handle_message(message, context)

    hot, cold = [f"1 {place:02}" for place in range(20)], [f"{place} 0" for place in range(2, 12)]

    lines = handle(lake, Hot, memory(*hot, *cold)).all

    assert [line for line in lines if line in hot] == hot
    assert set(lines) == {*hot, *cold}


@pytest.mark.parametrize("limit", [None, timedelta(seconds=LONG_S)])
def test_forks_keep_the_order_of_partitions_around_messages_that_end_them(lake, limit):
    class Careful(Threaded):
        name = "careful"
        processors = Processors(concurrency=1, partition_by=by_payload, threads=4, message_timeout=limit)

    told = {3: " dies", 5: " fails", 22: " dies"}
    payloads = [f"{place % 3} {place:02}{told.get(place, '')}" for place in range(30)]

    handled = handle(lake, Careful, memory(*payloads), careful=True)

    kinds = {payload.split()[1]: kind for payload, (kind, _) in reasons(lake, handled, Careful).items()}
    assert kinds == {"03": "worker killed", "05": "failed", "22": "worker killed"}
    assert set(handled.all) == set(payloads)
    for partition in range(3):
        mine = [payload for payload in payloads if payload.startswith(f"{partition} ")]
        last = [max(place for place, line in enumerate(handled.all) if line == payload) for payload in mine]
        assert last == sorted(last), "the outcome of a message is that of its last call"


class Paced:
    """Gives a number of permits, and then no more."""

    waited = 0.0

    def __init__(self, permits: int) -> None:
        self._permits = permits

    def each(self, messages: Sequence[Message]) -> Iterator[Message]:
        yield from messages[: self._permits]


@pytest.mark.parametrize("careful", [False, True])
def test_messages_without_a_permit_are_returned_from_the_end_of_each_partition(lake, careful):
    payloads = [f"{place % 3} {place:02}" for place in range(30)]
    handled = handle(lake, Threaded, memory(*payloads), pace=Paced(7), careful=careful)
    begun = by_partition(handled.all)
    assert len(handled.all) == 7
    for partition, places in by_partition(payloads).items():
        assert begun[partition] == places[: len(begun[partition])]
    told = outcomes(lake, "threaded", handled.manifest)
    assert {name for name, outcome in told.items() if outcome == "handled"} == {
        f"m{int(line[2:])}" for line in handled.all
    }
    assert set(told.values()) == {"handled", "returned"}


@settings(max_examples=30)
@given(st.lists(st.none() | st.integers(0, 3), max_size=30), st.integers(1, 5), st.integers(0, 30), st.integers())
def test_every_lane_is_in_order_and_permits_are_not_exceeded(lanes, threads, permits, seed):
    begun: list[int] = []
    at_work: set[int] = set()
    chance = random.Random(seed)

    def worker(numbers: Iterable[int]) -> list[int]:
        done = []
        for number in numbers:
            assert lanes[number] is None or lanes[number] not in at_work
            at_work.add(lanes[number])
            begun.append(number)
            time.sleep(chance.choice([0, 0, 0.0005]))
            at_work.discard(lanes[number])
            done.append(number)
        return done

    results = at_once(range(len(lanes)), [worker] * threads, range(permits), followers(lanes))

    assert results == sorted(begun)
    assert len(results) == min(permits, len(lanes))
    for lane in {*lanes} - {None}:
        mine = [number for number in range(len(lanes)) if lanes[number] == lane]
        seen = [number for number in begun if lanes[number] == lane]
        assert seen == mine[: len(seen)]


def test_a_worker_that_raises_does_not_block_others():
    def worker(numbers: Iterable[int]) -> list[int]:
        for number in numbers:
            raise ValueError(number)
        return []

    with pytest.raises(ValueError, match=r"\d"):
        at_once(range(4), [worker] * 3, range(4), followers([0, 0, 0, 0]))


WINDOWS = ("2026-01-01T0000", "2026-01-01T0100")


def ordered(*rows: dict[str, Any]) -> list[int]:
    plain = {"window": WINDOWS[0], "source": "s", "partition": None, "sequence": None}
    told = [{**plain, "position": place, **row} for place, row in enumerate(rows)]
    return list(in_source_order(pa.Table.from_pylist(told, SOURCE_ORDER)).tolist())


def shared(partitions: list[str | None], sizes: list[int], tasks: int) -> list[int]:
    return list(dealt(pa.chunked_array([pa.array(partitions, pa.string())]), np.array(sizes, np.int64), tasks).tolist())


def test_the_order_of_no_rows_is_empty():
    assert ordered() == []
    assert shared([], [], 3) == []


def test_without_a_sequence_rows_are_in_order_of_arrival():
    assert ordered({"position": 2}, {"position": 0}, {"position": 1}) == [1, 2, 0]


def test_the_rows_of_a_partition_come_by_sequence_in_the_places_that_they_have():
    rows = [("a", 3), ("b", 9), ("a", 1), ("b", 7), ("a", 2)]
    assert ordered(*({"partition": name, "sequence": n} for name, n in rows)) == [2, 3, 4, 1, 0]


@pytest.mark.parametrize("apart", [{"source": "other"}, {"window": WINDOWS[1]}, {"partition": "other"}])
def test_sequences_of_different_partitions_sources_and_windows_do_not_compare(apart):
    assert ordered({"sequence": 2}, {"sequence": 1, **apart}) == [0, 1]


def test_a_sequence_without_a_partition_is_the_source_s():
    assert ordered({"sequence": 2**62}, {"sequence": -5}) == [1, 0]


def test_a_large_partition_leaves_the_small_ones_to_the_other_tasks():
    assert shared(["a"] * 6 + ["b", "c", "d"], [1] * 9, 3) == [0] * 6 + [1, 2, 1]


def test_rows_without_a_partition_go_to_the_least_loaded_task():
    assert shared(["a", "a", "a", None, None, None], [1] * 6, 2) == [0, 0, 0, 1, 1, 1]


def test_batches_weigh_as_many_messages_as_they_hold():
    assert shared(["a", "b", "c"], [10, 6, 5], 2) == [0, 1, 1]


@given(st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(1, 9)), max_size=60), st.integers(1, 5))
def test_a_partition_is_whole_and_no_task_has_more_than_the_least_and_a_partition(rows, tasks):
    taken = shared([partition for partition, _ in rows], [size for _, size in rows], tasks)
    owners, loads, sizes = defaultdict(set), [0] * tasks, defaultdict(int)
    for (partition, size), task in zip(rows, taken, strict=True):
        owners[partition].add(task)
        loads[task] += size
        sizes[partition] += size
    assert all(len(some) == 1 for some in owners.values())
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
