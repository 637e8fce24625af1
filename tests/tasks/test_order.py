"""Order: where a row stands among those of its source, and which task takes which partition."""

from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.tasks.handle.source_order import SOURCE_ORDER, dealt, in_source_order

WINDOWS = ("2026-01-01T0000", "2026-01-01T0100")


def ordered(*rows: dict[str, Any]) -> list[int]:
    plain = {"window": WINDOWS[0], "source": "s", "partition": None, "sequence": None}
    told = [{**plain, "position": place, **row} for place, row in enumerate(rows)]
    return list(in_source_order(pa.Table.from_pylist(told, SOURCE_ORDER)).tolist())


def shared(partitions: list[str | None], sizes: list[int], tasks: int) -> list[int]:
    return list(dealt(pa.chunked_array([pa.array(partitions, pa.string())]), np.array(sizes, np.int64), tasks).tolist())


def test_no_rows_are_in_order():
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


def test_rows_without_a_partition_fill_up_what_partitions_leave():
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
