"""Cutting: which messages make which batch. It moves no payloads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.tasks.order import dealt, in_source_order

BATCH_BYTES = 128 * 2**20
"""A batch holds no more than this, by payloads and by what handling made of them, but for one larger message."""

MESSAGES = pa.schema(
    [
        ("window", pa.string()),
        ("batch_key", pa.string()),
        ("position", pa.int64()),
        ("size", pa.int64()),
        ("flush", pa.bool_()),
        ("partition", pa.string()),
    ]
)
"""What is known of a message that waits for its batch. `position` is its place in order of arrival, `size` in bytes."""

BATCHES = pa.schema(
    [
        ("window", pa.string()),
        ("batch_key", pa.string()),
        ("number", pa.int64()),
        ("full", pa.bool_()),
        ("size", pa.int64()),
        ("rows", pa.list_(pa.int64())),
        ("partition", pa.string()),
        ("task", pa.int64()),
    ]
)
"""A batch: its number within its window, key and partition, whether it reached its size, its bytes, the rows it is made
of, and the task that handles all of its partition; null where any task may."""


def cut(messages: pa.Table, batch_size: int, batch_bytes: int = BATCH_BYTES) -> pa.Table:
    """Cut messages of the same window, key and partition into batches, in order of arrival.

    A batch ends when it has `batch_size` messages, before a message that would take it above `batch_bytes`, and after
    a message in mode `flush`.

    Args:
        messages: Rows of `MESSAGES`; a row is named by its index.
        batch_size: Messages in a batch, at the most.
        batch_bytes: Bytes in a batch, at the most.

    Returns:
        Rows of `BATCHES`, in order of the arrival of their first messages; nobody has dealt them to tasks.
    """
    if not messages.num_rows:
        return BATCHES.empty_table()
    keys = ["window", "batch_key"]
    if messages["partition"].null_count < messages.num_rows:
        # As a number: nulls are of one kind, too.
        codes = messages["partition"].combine_chunks().dictionary_encode(null_encoding="encode").indices
        messages, keys = messages.append_column("code", codes), [*keys, "code"]
    order = pc.sort_indices(messages, sort_keys=[(key, "ascending") for key in (*keys, "position")])
    ordered = messages.take(order)
    new_key = np.ones(len(order), bool)
    new_key[1:] = ~np.logical_and.reduce([_repeats(ordered[key]) for key in keys])
    starts, full = _bounds(new_key, ordered["size"].to_numpy(), ordered["flush"].to_numpy(), batch_size, batch_bytes)
    first, place = ordered.take(pa.array(starts[:-1])), np.arange(len(full))
    batches = pa.Table.from_pydict(
        {
            "window": first["window"],
            "batch_key": first["batch_key"],
            "number": place - np.maximum.accumulate(np.where(new_key[starts[:-1]], place, 0)),
            "full": full,
            "size": np.add.reduceat(ordered["size"].to_numpy(), starts[:-1]),
            "rows": pa.ListArray.from_arrays(pa.array(starts, pa.int32()), order.cast(pa.int64())),
            "partition": first["partition"],
            "task": pa.nulls(len(full), pa.int64()),
        },
        schema=BATCHES,
    )
    return batches.take(pc.sort_indices(first["position"]))


def cut_and_deal(messages: pa.Table, batch_size: int, tasks: int = 1) -> pa.Table:
    """Cut messages into batches; those of partitions in the order of their source, each dealt to its partition's task.

    Args:
        messages: Rows as `cut` takes them, and `SOURCE_ORDER`: there `partition` is the source's, and `own` is the one
            that batches are cut by.
        batch_size: Messages in a batch, at the most.
        tasks: How many tasks there are.
    """
    own, messages = messages["own"], messages.drop_columns("own")
    has_partitions = own.null_count < messages.num_rows
    if has_partitions:
        place = np.empty(messages.num_rows, np.int64)
        place[in_source_order(messages)] = np.arange(messages.num_rows)
        messages = _put(messages, position=place)
    batches = cut(_put(messages, partition=own), batch_size)
    if not has_partitions:
        return batches
    counts = pc.list_value_length(batches["rows"]).to_numpy()
    return _put(batches, task=dealt(batches["partition"], counts, tasks))


def _put(rows: pa.Table, **columns: Any) -> pa.Table:
    """Put columns in the place of those of the same name."""
    for name, values in columns.items():
        column = values if isinstance(values, pa.ChunkedArray) else pa.array(values)
        rows = rows.set_column(rows.schema.get_field_index(name), name, column)
    return rows


def _repeats(column: pa.ChunkedArray) -> Any:
    """Whether each value but the first is the same as the one before."""
    return pc.equal(column.slice(1), column.slice(0, len(column) - 1)).to_numpy()


def _bounds(new_key: Any, sizes: Any, flushes: Any, batch_size: int, batch_bytes: int) -> tuple[list[int], list[bool]]:
    """Where batches start, and where the last one ends; and whether each reached its size."""
    starts, full = [0], []
    count = size = 0
    for row, (new, weight, flush) in enumerate(zip(new_key.tolist(), sizes.tolist(), flushes.tolist(), strict=True)):
        if count and (new or size + weight > batch_bytes):
            starts.append(row)
            full.append(not new)
            count = size = 0
        count, size = count + 1, size + weight
        if flush or count == batch_size:
            starts.append(row + 1)
            full.append(count == batch_size)
            count = size = 0
    if count:
        starts.append(len(new_key))
        full.append(False)
    return starts, full
