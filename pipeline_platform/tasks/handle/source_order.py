"""Order of rows by their source, and assignment of partitions to tasks. It uses no payloads."""

import heapq
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import only
from pipeline_platform.model.message import MESSAGES

SOURCE_ORDER = pa.schema([*only(MESSAGES, "window", "source", "partition", "sequence"), ("position", pa.int64())])
"""Columns that define the order of rows. The source sets `partition` and `sequence`; `position` is by arrival."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]


def in_source_order(rows: pa.Table) -> _Ints:
    """Return the indexes of rows in the order of their source.

    Rows of one partition are sorted by `sequence` among the places that the partition has by arrival. Rows of different
    partitions, whose sequences are not comparable, and rows without a sequence stay in order of arrival.

    Args:
        rows: Rows with the columns of `SOURCE_ORDER`.
    """
    arrival = _sorted(rows, "position")
    if rows["sequence"].null_count == rows.num_rows:
        return arrival
    partition = [name for name in SOURCE_ORDER.names[:3] if len(pc.unique(rows[name])) > 1]
    place = np.empty_like(arrival)
    place[arrival] = np.arange(len(arrival))
    order = np.empty_like(arrival)
    order[place[_sorted(rows, *partition, "position")]] = _sorted(rows, *partition, "sequence", "position")
    return order


def _sorted(rows: pa.Table, *names: str) -> _Ints:
    keys = [(name, "ascending") for name in names]
    return pc.sort_indices(rows, sort_keys=keys).to_numpy().astype(np.int64)  # type: ignore[no-any-return]


def waves_of(lanes: pa.Array) -> _Ints:
    """Return the wave of each row: its number within its lane, from 0. Rows without a lane are in wave 0."""
    codes = lanes.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    by_lane = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[by_lane], prepend=-2))
    waves = np.empty(len(codes), np.int64)
    waves[by_lane] = np.arange(len(codes)) - np.repeat(starts, np.diff([*starts, len(codes)]))
    waves[codes < 0] = 0
    return waves


def dealt(partitions: pa.ChunkedArray, sizes: _Ints, tasks: int) -> _Ints:
    """Return the task of each row. The rows of a partition go to one task, a row without a partition to any task.

    Partitions are dealt by size, the largest first, to the task with the fewest messages so far. A hash would leave
    some tasks idle while others have several partitions.

    Args:
        partitions: Partition of each row, or null.
        sizes: Number of messages in each row.
        tasks: Number of tasks.
    """
    encoded = partitions.combine_chunks().dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy().astype(np.int64)
    loads = np.bincount(codes[codes >= 0], weights=sizes[codes >= 0], minlength=len(encoded.dictionary))
    least = [(0.0, task) for task in range(tasks)]

    def take(size: float) -> int:
        load, task = least[0]
        heapq.heapreplace(least, (load + size, task))
        return task

    owners = np.empty(len(loads), np.int64)
    for partition in np.argsort(-loads, kind="stable"):
        owners[partition] = take(loads[partition])
    taken = np.empty(len(codes), np.int64)
    taken[codes >= 0] = owners[codes[codes >= 0]]
    for row in np.flatnonzero(codes < 0):
        taken[row] = take(sizes[row])
    return taken
