"""Reading back what was written: rows of Parquet files, in order, bounded in rows and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.storage import Lake


class Range(NamedTuple):
    """Rows `start` to `stop` of a file, whose first row has `position` among all rows of the receive."""

    path: str
    window: str
    start: int
    stop: int
    position: int


def divide(files: Sequence[File], pipeline: str, shares: int) -> list[list[Range]]:
    """Divide the rows of files into at most `shares` parts of equal length, in order; no part is empty."""
    ranges, first = [], 0
    for file in files:
        ranges.append(Range(f"{pipeline}/{file.table}/{file.path}", file.window, 0, file.rows, first))
        first += file.rows
    return spread(ranges, shares)


def between(ranges: Iterable[Range], first: int, end: int) -> list[Range]:
    """The rows among these whose positions are `first` to `end` - 1. Each range begins where its file does, or not."""
    return _cut((one, first - one.position, end - one.position) for one in ranges)


def spread(ranges: Sequence[Range], shares: int) -> list[list[Range]]:
    """Divide rows into at most `shares` parts of equal length, in order; no part is empty."""
    ends = list(accumulate(one.stop - one.start for one in ranges))
    total = ends[-1] if ends else 0
    shares = max(1, min(shares, total))
    bounds = pairwise(total * index // shares for index in range(shares + 1))
    lie = list(zip(ranges, ends, strict=True))
    parts = (_cut((one, low - end + one.stop, high - end + one.stop) for one, end in lie) for low, high in bounds)
    return [part for part in parts if part]


def _cut(ranges: Iterable[tuple[Range, int, int]]) -> list[Range]:
    """Ranges within bounds, without those that are empty."""
    cut = (one._replace(start=max(one.start, start), stop=min(one.stop, stop)) for one, start, stop in ranges)
    return [one for one in cut if one.start < one.stop]


def read_ranges(
    lake: Lake, ranges: Iterable[Range], columns: Sequence[str], max_rows: int, max_bytes: int = 16 * 2**20
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield `(position of the first row, batch)`, each within the bounds; one larger row is a batch of its own.

    `window` and `position`, if asked for, are filled in: they are not stored in files.
    """
    stored = [name for name in columns if name not in ("window", "position")]
    for wanted in ranges:
        with lake.open_input(wanted.path) as file:
            parquet = pq.ParquetFile(file)
            first = 0
            for group in range(parquet.metadata.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                start, stop = max(wanted.start - first, 0), min(wanted.stop - first, rows)
                if start < stop:
                    # By this thread alone: the other processors have tasks of their own.
                    table = parquet.read_row_group(group, columns=stored, use_threads=False)
                    table = table.slice(start, stop - start)
                    position = wanted.position + first + start
                    for batch in table.combine_chunks().to_batches(max_chunksize=max_rows):
                        for part in bounded(batch, max_bytes):
                            yield position, _filled(part, columns, wanted.window, position)
                            position += part.num_rows
                first += rows


def row_groups(lake: Lake, path: str, *columns: str) -> Iterator[pa.Table]:
    """The row groups of a file, each read by this thread alone: the other processors have tasks of their own."""
    with lake.open_input(path) as file:
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group, columns=list(columns) or None, use_threads=False)


def rows_with(lake: Lake, path: str, name: str, value: str, *columns: str) -> Iterator[pa.Table]:
    """The rows of a file that have a value in a column of text. Other columns are read only of row groups with some."""
    with lake.open_input(path) as file:
        parquet = pq.ParquetFile(file)
        for group in groups_with(parquet, name, value, value):
            mine = pc.equal(parquet.read_row_group(group, columns=[name], use_threads=False)[name], value)
            if pc.any(mine).as_py():
                yield parquet.read_row_group(group, columns=list(columns), use_threads=False).filter(mine)


def groups_with(parquet: pq.ParquetFile, name: str, least: Any, most: Any) -> list[int]:
    """The row groups of a file that may have values from `least` to `most` in a column, as statistics tell."""
    place = parquet.schema.names.index(name)
    known = [parquet.metadata.row_group(group).column(place).statistics for group in range(parquet.num_row_groups)]
    return [
        group
        for group, one in enumerate(known)
        if one is None or not one.has_min_max or (one.min <= most and least <= one.max)
    ]


def completed(rows: pa.Table, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
    """Some columns of rows, in order. Those that a file of an earlier release lacks are null."""
    missing = {name: pa.nulls(rows.num_rows, schema.field(name).type) for name in columns}
    return pa.table(missing | {name: rows[name] for name in rows.column_names})


def receive_ids(lake: Lake, path: str) -> set[str]:
    """The receives that wrote the rows of a file. A driver asks: it holds the few ids, not one for each row."""
    with lake.open_input(path) as file:
        batches = pq.ParquetFile(file, read_dictionary=["receive_id"]).iter_batches(columns=["receive_id"])
        return {id_ for batch in batches for id_ in pc.unique(batch.column(0)).dictionary.to_pylist()}


def keys_of(rows: pa.Table | pa.RecordBatch, *columns: str) -> pa.Array:
    """The values of some columns of each row, as one string."""
    keys = pc.binary_join_element_wise(*(pc.cast(rows[name], pa.string()) for name in columns), "\0")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def bounded(batch: pa.RecordBatch, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Cut a batch in halves until each part is within `max_bytes` or a single row."""
    if batch.num_rows <= 1 or batch.get_total_buffer_size() <= max_bytes or batch.nbytes <= max_bytes:
        yield batch
        return
    half = batch.num_rows // 2  # sizes vary, so halve instead of reckoning with a mean
    yield from bounded(batch.slice(0, half), max_bytes)
    yield from bounded(batch.slice(half), max_bytes)


def _filled(batch: pa.RecordBatch, columns: Sequence[str], window: str, position: int) -> pa.RecordBatch:
    made = {
        "window": lambda: pa.repeat(window, batch.num_rows),
        "position": lambda: pa.array(np.arange(position, position + batch.num_rows)),
    }
    arrays = [made[name]() if name in made else batch.column(name) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
