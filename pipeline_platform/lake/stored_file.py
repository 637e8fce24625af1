"""A Parquet file of the lake, open to be read. Here alone is known that a file of an earlier release lacks columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.storage import Lake


def is_whole(lake: Lake, path: str, file: File) -> bool:
    """Whether what lies at a path has the end and the length that its manifest, or its table's log, names."""
    with suppress(pa.ArrowInvalid, FileNotFoundError), lake.open_input(path) as opened:
        return bool(opened.size() == file.bytes and pq.read_metadata(opened).num_rows == file.rows)
    return False


@contextmanager
def stored_file(
    lake: Lake, path: str, schema: pa.Schema | None, dictionary: Sequence[str] = ()
) -> Iterator[StoredFile]:
    """Open a file.

    Args:
        lake: Where it is.
        path: Under the lake's root.
        schema: The columns to read; None for those that the file has.
        dictionary: Columns of text to read with each value once.
    """
    with lake.open_input(path) as file:
        yield StoredFile(pq.ParquetFile(file, read_dictionary=list(dictionary)), schema)


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
