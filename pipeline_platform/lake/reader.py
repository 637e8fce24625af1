"""Readers of Parquet files: rows in order, in batches bounded by rows and bytes."""

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


class Bounds(NamedTuple):
    """Least and greatest value of a column in some rows."""

    column: str
    least: str
    most: str


class RowRange(NamedTuple):
    """Rows `start` to `stop` - 1 of a file. `position` is the position of the file's first row in the receive."""

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
    """Return all rows of files, in order."""
    return [rows for part in divide(files, pipeline, 1) for rows in part]


def between(ranges: Iterable[RowRange], first: int, end: int) -> list[RowRange]:
    """Return the part of the ranges with positions `first` to `end` - 1."""
    return _cut((rows, first - rows.position, end - rows.position) for rows in ranges)


def without(ranges: Iterable[RowRange], rows: int) -> list[RowRange]:
    """Return the ranges without their first `rows` rows."""
    left = []
    for each in ranges:
        skipped = min(rows, each.stop - each.start)
        left.append((each, each.start + skipped, each.stop))
        rows -= skipped
    return _cut(left)


def spread(ranges: Sequence[RowRange], shares: int) -> list[list[RowRange]]:
    """Divide rows into at most `shares` parts of equal length, in order; no part is empty."""
    ends = list(accumulate(rows.stop - rows.start for rows in ranges))
    total = ends[-1] if ends else 0
    shares = max(1, min(shares, total))
    bounds = pairwise(total * index // shares for index in range(shares + 1))
    placed = list(zip(ranges, ends, strict=True))
    parts = (
        _cut((rows, low - end + rows.stop, high - end + rows.stop) for rows, end in placed) for low, high in bounds
    )
    return [part for part in parts if part]


def _cut(ranges: Iterable[tuple[RowRange, int, int]]) -> list[RowRange]:
    """Limit ranges to bounds, and omit empty ranges."""
    cut = (rows._replace(start=max(rows.start, start), stop=min(rows.stop, stop)) for rows, start, stop in ranges)
    return [rows for rows in cut if rows.start < rows.stop]


def read_ranges(
    lake: Lake,
    ranges: Iterable[RowRange],
    columns: pa.Schema,
    max_rows: int,
    max_bytes: int = 16 * 2**20,
    near: Bounds | None = None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield `(position of the first row, batch)` with batches of limited size; a larger row is a separate batch.

    The columns `window` and `position` are computed, because files do not contain them. Row groups without a value
    in the bounds `near`, according to their statistics, are left out.
    """
    stored = pa.schema([field for field in columns if field.name not in ("window", "position")])
    for wanted in ranges:
        with stored_file(lake, wanted.path, stored) as file:
            first, groups = 0, None if near is None else file.groups_with(*near)
            for group, rows in enumerate(file.groups):
                start, stop = max(wanted.start - first, 0), min(wanted.stop - first, rows)
                if start < stop and (groups is None or group in groups):
                    table = file.group(group).slice(start, stop - start)
                    position = wanted.position + first + start
                    for batch in table.combine_chunks().to_batches(max_chunksize=max_rows):
                        for part in halves(batch, max_bytes):
                            yield position, _filled(part, columns.names, wanted.window, position)
                            position += part.num_rows
                first += rows


def row_groups(lake: Lake, path: str, columns: pa.Schema | None = None) -> Iterator[pa.Table]:
    """Yield the row groups of a file, with these columns or all stored columns."""
    with stored_file(lake, path, columns) as file:
        yield from map(file.group, range(len(file.groups)))


def rows_with(lake: Lake, path: str, name: str, value: str, columns: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of a file that have a value in a text column. Reads other columns only of matching row groups."""
    with stored_file(lake, path, columns) as file:
        for group in file.groups_with(name, value, value):
            some = file.group(group, name)[name]
            # The first scalar of `equal` in a process makes PyArrow import pandas, which takes 0.3 s of `status`.
            may_be = pc.any(pc.match_substring(some, value)).as_py()
            if may_be and pc.any(mine := pc.equal(some, value)).as_py():
                yield file.group(group).filter(mine)


def only(schema: pa.Schema, *names: str) -> pa.Schema:
    """Return some columns of a schema."""
    return pa.schema([schema.field(name) for name in names])


def filled(rows: Any, schema: pa.Schema, **values: Any) -> Any:
    """Return a table or a batch in the columns of a table's files: given values, else the stored column, else nulls.

    A given value is a column, a list, or a single value for all rows.
    """
    columns = {}
    for field in (field for field in schema if field.name != "window"):
        value = values.get(field.name, rows[field.name] if field.name in rows.schema.names else None)
        if isinstance(value, list):
            value = pa.array(value, field.type)
        is_column = isinstance(value, pa.Array | pa.ChunkedArray)
        columns[field.name] = value if is_column else pa.repeat(pa.scalar(value, field.type), rows.num_rows)
    return type(rows).from_pydict(columns)


def scan(lake: Lake, table: DeltaTable) -> pl.LazyFrame:
    """Return the rows of a Delta table under the root as a lazy frame, for any name of the root."""
    import polars as pl

    if quote(table.table_uri, safe=":/") == table.table_uri:
        return pl.scan_delta(table, storage_options=lake.polars_options)
    # Polars would search files at the quoted root, and parse a folder `a=b` above the table as a column.
    return pl.scan_pyarrow_dataset(table.to_pyarrow_dataset(filesystem=lake.below(unquote(table.table_uri))))


def receive_ids(lake: Lake, path: str) -> set[str]:
    """Return the receives that wrote the rows of a file. Memory is bounded by the few ids, not by the rows."""
    with stored_file(lake, path, pa.schema({"receive_id": pa.string()}), dictionary=["receive_id"]) as file:
        return {id_ for batch in file.batches(65_536) for id_ in pc.unique(batch.column(0)).to_pylist()}


def keys_of(rows: pa.Table | pa.RecordBatch, *columns: str) -> pa.Array:
    """Return the values of some columns of each row, joined to a string."""
    keys = pc.binary_join_element_wise(*(pc.cast(rows[name], pa.string()) for name in columns), "\0")
    return keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys


def rows_at(rows: pa.RecordBatch, indexes: Sequence[int]) -> pa.RecordBatch:
    """Return some rows, in order. All rows are returned without a copy."""
    return rows if len(indexes) == rows.num_rows else rows.take(pa.array(indexes, pa.int64()))


def groups(rows: pa.RecordBatch, column: str) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """Yield each value of a column with its rows. Usually there is one."""
    for value in pc.unique(rows.column(column)).to_pylist():
        yield value, rows.filter(pc.equal(rows.column(column), value))


def _filled(batch: pa.RecordBatch, columns: Sequence[str], window: str, position: int) -> pa.RecordBatch:
    made = {
        "window": lambda: pa.repeat(window, batch.num_rows),
        "position": lambda: pa.array(np.arange(position, position + batch.num_rows)),
    }
    arrays = [made[name]() if name in made else batch.column(name) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def is_whole(lake: Lake, path: str, file: File) -> bool:
    """Whether a file is complete: with a footer, and the size and rows of its manifest or of the table's log."""
    with suppress(pa.ArrowInvalid, FileNotFoundError), lake.open_input(path) as opened:
        return bool(opened.size() == file.bytes and pq.read_metadata(opened).num_rows == file.rows)
    return False


class StoredFile:
    """A Parquet file, read in the columns of a schema; missing columns are null.

    It uses the calling thread only, because other tasks use the other processors.
    """

    def __init__(self, parquet: pq.ParquetFile, schema: pa.Schema | None) -> None:
        self._parquet = parquet
        self._schema = parquet.schema_arrow if schema is None else schema

    @property
    def groups(self) -> list[int]:
        """Number of rows of each row group."""
        metadata = self._parquet.metadata
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    def group(self, number: int, *columns: str) -> pa.Table:
        """Read a row group: all columns of the schema, or some."""
        wanted = list(columns) or self._schema.names
        return self._completed(self._parquet.read_row_group(number, columns=wanted, use_threads=False), wanted)

    def batches(self, rows: int, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        """Read all row groups, or some, in batches of up to `rows` rows."""
        wanted = self._schema.names
        for batch in self._parquet.iter_batches(rows, groups, wanted, use_threads=False):
            yield self._completed(batch, wanted)

    def statistics(self, name: str) -> list[pq.Statistics | None]:
        """Return the statistics of a column by row group; none if the file does not have the column."""
        if name not in self._parquet.schema.names:
            return []
        place, metadata = self._parquet.schema.names.index(name), self._parquet.metadata
        return [metadata.row_group(number).column(place).statistics for number in range(metadata.num_row_groups)]

    def groups_with(self, name: str, least: Any, most: Any) -> list[int]:
        """Return the row groups that may have values from `least` to `most` in a column, by their statistics."""
        return [
            number
            for number, bounds in enumerate(self.statistics(name))
            if bounds is None or not bounds.has_min_max or (bounds.min <= most and least <= bounds.max)
        ]

    def _completed(self, rows: Any, names: list[str]) -> Any:
        """Return a table or a batch with these columns; missing columns and nested fields are null."""
        have, wanted = rows.schema, self._schema
        if have.names == names and not any(pa.types.is_nested(type_) for type_ in have.types):
            return rows

        def column(name: str) -> Any:
            type_ = wanted.field(name).type
            if name not in have.names:
                return pa.nulls(rows.num_rows, type_)
            stored = rows.column(name)
            return stored.cast(type_) if pa.types.is_nested(type_) and stored.type != type_ else stored

        return type(rows).from_arrays([*map(column, names)], names=names)


@contextmanager
def stored_file(
    lake: Lake, path: str, schema: pa.Schema | None, dictionary: Sequence[str] = ()
) -> Iterator[StoredFile]:
    """Open a file to read the columns of a schema, or all stored columns; `dictionary` names dictionary columns."""
    with lake.open_input(path) as file:
        yield StoredFile(pq.ParquetFile(file, read_dictionary=list(dictionary)), schema)
