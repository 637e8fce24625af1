"""The one writer: rows in, Parquet files under their tables' folders out, told in a manifest. Runs in tasks."""

from __future__ import annotations

import json
import re
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import bounded
from pipeline_platform.lake.storage import Lake

ROW_GROUP_ROWS = 65_536
ROW_GROUP_BYTES = 16 * 2**20
"""Rows and bytes of a row group at the most, but for a single larger row: what a reader must hold at once."""

OPEN_FILES = 32
"""Files of earlier windows that a task keeps open: a backfill has hundreds of windows, a process 1,024 files.

Each may hold a row group back, so fewer is less memory; windows come nearly in order, so few are ever come back to.
"""

_UNIQUE = frozenset({"message_id", "ack_id", "data", "metadata", "traceback"})
"""Columns whose values rarely repeat: a dictionary would be built and thrown away."""

_NEVER_SOUGHT = _UNIQUE - {"message_id"} | {
    "source",
    "ack_ref",
    "action",
    "outcome",
    "batch_id",
    "receive_id",
    "reason",
}
"""Columns by whose least and greatest value no reader would skip a file; to find them costs a tenth of the writing."""

_WINDOW = re.compile(r"[0-9A-Za-z_-]+")


def check_window(window: str) -> str:
    """Return `window` if it can be part of a path: the partition keys that the platform makes are.

    Raises:
        ValueError: It cannot.
    """
    if not _WINDOW.fullmatch(window):
        raise ValueError(f"window {window!r} is no partition key of the platform: letters, digits, - and _ only")
    return window


class Writer:
    """Writes what one task makes: one file a table and window, or several where windows come mixed.

    Nothing written is visible to anyone before a commit names it. A task that fails removes its files; one that is
    killed leaves files that no manifest mentions, and `vacuum` removes them.
    """

    def __init__(self, lake: Lake, pipeline: str, prefix: str, rows_per_file: dict[str, int] | None = None) -> None:
        """Prepare to write files named `<prefix>-<random>-<number>.parquet`.

        Args:
            lake: Where.
            pipeline: The folder of its tables.
            prefix: Begins every file's name: the receive, the step and the task, for people who look.
            rows_per_file: By table; without a limit here a file ends with its window.
        """
        self._lake, self._pipeline = lake, pipeline
        self._prefix = f"{prefix}-{uuid.uuid4().hex[:8]}"
        self._rows_per_file = rows_per_file or {}
        self._open: dict[tuple[str, str], _OpenFile] = {}
        """By table and window, the one that was written to last at the end."""
        self._files: dict[int, File] = {}
        self._begun: list[str] = []
        """Paths of all files, until `close` hands them over."""
        self._number = 0

    def write(self, table: str, window: str, batch: pa.RecordBatch) -> None:
        """Add rows; an empty batch adds nothing."""
        limit = self._rows_per_file.get(table)
        while batch.num_rows:
            file = self._open.pop((table, window), None)
            if file is None:
                self._make_room(window)
                file = self._create(table, window, batch.schema)
            self._open[table, window] = file
            room = batch.num_rows if limit is None else limit - file.rows
            with self._lake.naming(self._pipeline, table):
                file.add(batch.slice(0, room))
            batch = batch.slice(room)
            if limit is not None and file.rows >= limit:
                self._close(table, window)

    def _make_room(self, window: str) -> None:
        """Close what was not written to for longest; never a file of `window`, whose tables are written in turn."""
        while len(self._open) >= OPEN_FILES:
            oldest = next((key for key in self._open if key[1] != window), None)
            if oldest is None:
                return
            self._close(*oldest)

    def _close(self, table: str, window: str) -> None:
        file = self._open[table, window]
        with self._lake.naming(self._pipeline, table):
            self._files[file.number] = file.close()
        del self._open[table, window]

    def _create(self, table: str, window: str, schema: pa.Schema) -> _OpenFile:
        number = self._number
        path = f"window={check_window(window)}/{self._prefix}-{number}.parquet"
        self._number += 1
        self._begun.append(f"{self._pipeline}/{table}/{path}")
        with self._lake.naming(self._pipeline, table):
            sink = self._lake.open_output(self._begun[-1])
            return _OpenFile(number, File(table, window, path, 0, 0, ""), sink, schema)

    def close(self, **notes: Any) -> Manifest:
        """Finish all files; return them in the order in which they were begun, with the task's notes."""
        for table, window in list(self._open):
            self._close(table, window)
        # What is only staged is given up with its receive.
        self._lake.sync(*(path for path in self._begun if "/_receives/" not in path))
        self._begun.clear()
        return Manifest([file for _, file in sorted(self._files.items())], [notes])

    def __enter__(self) -> Self:
        """Nothing to do."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Remove what an error left half done: on a full disk the next try would have less room than this one."""
        for file in self._open.values():
            file.abandon()
        self._open.clear()
        for path in self._begun:
            with suppress(OSError):  # the error that ended the task is the one to tell
                self._lake.remove_file(path)


class _OpenFile:
    def __init__(self, number: int, file: File, sink: pa.NativeFile, schema: pa.Schema) -> None:
        self.number, self.rows = number, 0
        self._file, self._sink = file, sink
        self._metadata: list[Any] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._writer = pq.ParquetWriter(
            sink,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=[field.name for field in schema if field.name not in _UNIQUE and _repeats(field.type)],
            write_statistics=[field.name for field in schema if field.name not in _NEVER_SOUGHT],
            metadata_collector=self._metadata,
        )

    def add(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        while batch.num_rows:
            room = ROW_GROUP_ROWS - self._waiting_rows
            for part in bounded(batch.slice(0, room), ROW_GROUP_BYTES):
                if self._waiting_bytes + part.nbytes > ROW_GROUP_BYTES:
                    self._flush()
                self._waiting.append(part)
                self._waiting_rows += part.num_rows
                self._waiting_bytes += part.nbytes
            if self._waiting_rows >= ROW_GROUP_ROWS:
                self._flush()
            batch = batch.slice(room)

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting), row_group_size=self._waiting_rows)
            self._waiting.clear()
            self._waiting_rows = self._waiting_bytes = 0

    def close(self) -> File:
        self._flush()
        self._writer.close()
        size = self._sink.tell()
        self._sink.close()
        return self._file._replace(rows=self.rows, bytes=size, stats=_stats(self._metadata[0]))

    def abandon(self) -> None:
        self._waiting.clear()
        self._writer.is_open = False  # or it would write a file's end, on a disk that may be full
        with suppress(OSError):
            self._sink.close()


def _repeats(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_binary(type_))


def _stats(metadata: pq.FileMetaData) -> str:
    """Statistics as the Delta protocol wants them, for columns whose bounds are exact: readers skip files by them.

    Left out: times (the protocol cuts them to milliseconds, and a cut maximum hides rows), long text (Parquet may cut
    it), nested columns, and floating point (a NaN compares with nothing).
    """
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    uncounted: set[str] = set()
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name, stats = column.path_in_schema, column.statistics
            if "." in name or stats is None or not stats.has_null_count:
                unknown.add(name)
                uncounted.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + stats.null_count
            if not stats.has_min_max:
                if stats.num_values:  # not all are null
                    unknown.add(name)
                continue
            low, high = stats.min, stats.max
            if not _bounds(low, high):
                unknown.add(name)
                continue
            least[name] = min(least.get(name, low), low)
            most[name] = max(most.get(name, high), high)
    return json.dumps(
        {
            "numRecords": metadata.num_rows,
            "minValues": {name: value for name, value in least.items() if name not in unknown},
            "maxValues": {name: value for name, value in most.items() if name not in unknown},
            "nullCount": {name: count for name, count in nulls.items() if name not in uncounted},
        }
    )


def _bounds(low: object, high: object) -> bool:
    if type(low) is int and type(high) is int:
        return True
    return all(isinstance(one, str) and len(one) <= 32 and one.isascii() for one in (low, high))
