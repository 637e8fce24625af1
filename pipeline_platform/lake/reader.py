"""Reading back what was written: rows of Parquet files, in order, bounded in rows and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.portions import halves

if TYPE_CHECKING:
    import polars as pl
    from deltalake import DeltaTable


class RowRange(NamedTuple):
    """Rows `start` to `stop` of a file, whose first row has `position` among all rows of the receive."""

    path: str
    window: str
    start: int
    stop: int
    position: int


def divide(files: Sequence[File], pipeline: str, shares: int) -> list[list[RowRange]]:
    """Divide the rows of files into at most `shares` parts of equal length, in order; no part is empty."""
    ranges, first = [], 0
    for file in files:
        ranges.append(RowRange(f"{pipeline}/{file.table}/{file.path}", file.window, 0, file.rows, first))
        first += file.rows
    return spread(ranges, shares)


def whole(files: Sequence[File], pipeline: str) -> list[RowRange]:
    """All rows of files, in order."""
    return [one for part in divide(files, pipeline, 1) for one in part]


def between(ranges: Iterable[RowRange], first: int, end: int) -> list[RowRange]:
    """The rows among these whose positions are `first` to `end` - 1. Each range begins where its file does, or not."""
    return _cut((one, first - one.position, end - one.position) for one in ranges)


def without(ranges: Iterable[RowRange], rows: int) -> list[RowRange]:
    """All but the first rows of these."""
    left = []
    for one in ranges:
        skipped = min(rows, one.stop - one.start)
        left.append((one, one.start + skipped, one.stop))
        rows -= skipped
    return _cut(left)


def spread(ranges: Sequence[RowRange], shares: int) -> list[list[RowRange]]:
    """Divide rows into at most `shares` parts of equal length, in order; no part is empty."""
    ends = list(accumulate(one.stop - one.start for one in ranges))
    total = ends[-1] if ends else 0
    shares = max(1, min(shares, total))
    bounds = pairwise(total * index // shares for index in range(shares + 1))
    lie = list(zip(ranges, ends, strict=True))
    parts = (_cut((one, low - end + one.stop, high - end + one.stop) for one, end in lie) for low, high in bounds)
    return [part for part in parts if part]


def _cut(ranges: Iterable[tuple[RowRange, int, int]]) -> list[RowRange]:
    """Ranges within bounds, without those that are empty."""
    cut = (one._replace(start=max(one.start, start), stop=min(one.stop, stop)) for one, start, stop in ranges)
    return [one for one in cut if one.start < one.stop]


def read_ranges(
    lake: Lake, ranges: Iterable[RowRange], columns: pa.Schema, max_rows: int, max_bytes: int = 16 * 2**20
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield `(position of the first row, batch)`, each within the bounds; one larger row is a batch of its own.

    `window` and `position`, if asked for, are filled in: they are not stored in files.
    """
    stored = pa.schema([field for field in columns if field.name not in ("window", "position")])
    for wanted in ranges:
        with stored_file(lake, wanted.path, stored) as file:
            first = 0
            for group, rows in enumerate(file.groups):
                start, stop = max(wanted.start - first, 0), min(wanted.stop - first, rows)
                if start < stop:
                    table = file.group(group).slice(start, stop - start)
                    position = wanted.position + first + start
                    for batch in table.combine_chunks().to_batches(max_chunksize=max_rows):
                        for part in halves(batch, max_bytes):
                            yield position, _filled(part, columns.names, wanted.window, position)
                            position += part.num_rows
                first += rows


def row_groups(lake: Lake, path: str, columns: pa.Schema | None = None) -> Iterator[pa.Table]:
    """The row groups of a file: these columns, or those that it has."""
    with stored_file(lake, path, columns) as file:
        yield from map(file.group, range(len(file.groups)))


def rows_with(lake: Lake, path: str, name: str, value: str, columns: pa.Schema) -> Iterator[pa.Table]:
    """The rows of a file that have a value in a column of text. Other columns are read only of row groups with some."""
    with stored_file(lake, path, columns) as file:
        for group in file.groups_with(name, value, value):
            some = file.group(group, name)[name]
            # With the value that `equal` makes, the first in a process, PyArrow imports pandas: 0.3 s of `status`.
            may_be = pc.any(pc.match_substring(some, value)).as_py()
            if may_be and pc.any(mine := pc.equal(some, value)).as_py():
                yield file.group(group).filter(mine)


def only(schema: pa.Schema, *names: str) -> pa.Schema:
    """Some columns of a schema."""
    return pa.schema([schema.field(name) for name in names])


def filled(rows: pa.Table, schema: pa.Schema, **values: Any) -> pa.Table:
    """Rows in the columns of a table's files: values for all of them or for each, else their own, else nulls."""
    columns = {}
    for field in (field for field in schema if field.name != "window"):
        value = values.get(field.name, rows[field.name] if field.name in rows.schema.names else None)
        is_column = isinstance(value, pa.Array | pa.ChunkedArray)
        columns[field.name] = value if is_column else pa.repeat(pa.scalar(value, field.type), rows.num_rows)
    return pa.table(columns)


def scan(lake: Lake, table: DeltaTable) -> pl.LazyFrame:
    """Return the rows of a Delta table under the root as a lazy frame, whatever the root is named."""
    import polars as pl

    if quote(table.table_uri, safe=":/") == table.table_uri:
        return pl.scan_delta(table, storage_options=lake.polars_options)
    # Polars looks for files at the quoted root, and takes a folder `a=b` above the table for one of its columns.
    return pl.scan_pyarrow_dataset(table.to_pyarrow_dataset(filesystem=lake.below(unquote(table.table_uri))))


def receive_ids(lake: Lake, path: str) -> set[str]:
    """The receives that wrote the rows of a file. A driver asks: it holds the few ids, not one for each row."""
    with stored_file(lake, path, pa.schema({"receive_id": pa.string()}), dictionary=["receive_id"]) as file:
        return {id_ for batch in file.batches(65_536) for id_ in pc.unique(batch.column(0)).to_pylist()}


def keys_of(rows: pa.Table | pa.RecordBatch, *columns: str) -> pa.Array:
    """The values of some columns of each row, as one string."""
    keys = pc.binary_join_element_wise(*(pc.cast(rows[name], pa.string()) for name in columns), "\0")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def _filled(batch: pa.RecordBatch, columns: Sequence[str], window: str, position: int) -> pa.RecordBatch:
    made = {
        "window": lambda: pa.repeat(window, batch.num_rows),
        "position": lambda: pa.array(np.arange(position, position + batch.num_rows)),
    }
    arrays = [made[name]() if name in made else batch.column(name) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def is_whole(lake: Lake, path: str, file: File) -> bool:
    """Whether what lies at a path has the end and the length that its manifest, or its table's log, names."""
    with suppress(pa.ArrowInvalid, FileNotFoundError), lake.open_input(path) as opened:
        return bool(opened.size() == file.bytes and pq.read_metadata(opened).num_rows == file.rows)
    return False


class StoredFile:
    """Reads the columns of a schema, in its order. Those that the file lacks are null.

    The calling thread reads alone: the other processors have tasks of their own.
    """

    def __init__(self, parquet: pq.ParquetFile, schema: pa.Schema | None) -> None:
        self._parquet = parquet
        self._schema = parquet.schema_arrow if schema is None else schema

    @property
    def groups(self) -> list[int]:
        """How many rows each row group has."""
        metadata = self._parquet.metadata
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    def group(self, number: int, *columns: str) -> pa.Table:
        """Read a row group: all columns of the schema, or some."""
        wanted = list(columns) or self._schema.names
        return self._completed(self._parquet.read_row_group(number, columns=wanted, use_threads=False), wanted)

    def batches(self, rows: int, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        """Read all row groups, or some, by so many rows at a time."""
        wanted = self._schema.names
        for batch in self._parquet.iter_batches(rows, groups, wanted, use_threads=False):
            yield self._completed(batch, wanted)

    def groups_with(self, name: str, least: Any, most: Any) -> list[int]:
        """The row groups that may have values from `least` to `most` in a column, as statistics tell."""
        if name not in self._parquet.schema.names:
            return []
        place, metadata = self._parquet.schema.names.index(name), self._parquet.metadata
        known = [metadata.row_group(number).column(place).statistics for number in range(metadata.num_row_groups)]
        return [
            number
            for number, one in enumerate(known)
            if one is None or not one.has_min_max or (one.min <= most and least <= one.max)
        ]

    def _completed(self, rows: Any, names: list[str]) -> Any:
        """Rows of either kind with these columns; null where the file has none."""
        have = rows.schema.names
        if have == names:
            return rows
        count, schema = rows.num_rows, self._schema
        columns = [rows.column(name) if name in have else pa.nulls(count, schema.field(name).type) for name in names]
        return type(rows).from_arrays(columns, names=names)


@contextmanager
def stored_file(
    lake: Lake, path: str, schema: pa.Schema | None, dictionary: Sequence[str] = ()
) -> Iterator[StoredFile]:
    """Open a file to read the columns of a schema, or those that it has; some of text as dictionaries."""
    with lake.open_input(path) as file:
        yield StoredFile(pq.ParquetFile(file, read_dictionary=list(dictionary)), schema)
