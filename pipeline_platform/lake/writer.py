"""Writer of all Parquet files of the lake, which are listed in a manifest."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.portions import halves

FILTERED_TABLE = "_filtered"
"""Table of a receive with the positions of filtered messages, which is read after the decision, too."""

ROW_GROUP_ROWS = 65_536
ROW_GROUP_BYTES = 16 * 2**20
"""Greatest rows and bytes of a row group, unless a single row is larger. They bound the memory of readers."""

OPEN_FILES = 32
"""Greatest number of files of earlier windows that a task keeps open.

A retry may have hundreds of windows, and a process may open 1,024 files. Each open file buffers up to a row group, so
fewer files need less memory. Windows are nearly in order, so few files are needed.
"""

_UNIQUE = frozenset({"message_id", "ack_id", "data", "metadata", "traceback"})
"""Columns with few repeated values, for which a dictionary would be built and discarded."""

_NEVER_SOUGHT = (_UNIQUE - {"message_id"}).union(
    ["source", "ack_ref", "action", "outcome", "batch_id", "receive_id", "reason"]
)
"""Columns whose bounds do not help readers to skip row groups; computing them takes a tenth of the writing time."""

_WINDOW = re.compile(r"[0-9A-Za-z_-]+")


class Writer:
    """Writer of one task's files: a file per table and window, or several if the windows are mixed.

    Files are invisible to readers until a commit adds them. A failed task removes its files. A killed task leaves
    files without a manifest, and vacuum removes them.
    """

    def __init__(self, lake: Lake, pipeline: str, prefix: str, rows_per_file: dict[str, int] | None = None) -> None:
        """Prepare to write files named `<prefix>-<random>-<number>.parquet` under the folder of a pipeline.

        The prefix contains the receive, the step and the task, to help debugging. `rows_per_file` limits the rows of a
        file by table.
        """
        self._lake, self._pipeline = lake, pipeline
        self._prefix = f"{prefix}-{uuid.uuid4().hex[:8]}"
        self._rows_per_file = rows_per_file or {}
        self._open: dict[tuple[str, str], _OpenFile] = {}  # most recently written file last
        self._files: list[File | None] = []  # in the order of creation; None until a file is closed
        self._paths: list[str] = []  # of all files, until `close`

    def write(self, table: str, window: str, batch: pa.RecordBatch) -> None:
        """Add rows; an empty batch adds nothing.

        Raises:
            ValueError: `window` is not a valid window key; it becomes part of a path.
            OSError: The disk is full or fails; the message contains the table.
        """
        limit = self._rows_per_file.get(table)
        with self._lake.naming(self._pipeline, table):
            while batch.num_rows:
                file = self._open.pop((table, window), None) or self._create(table, window, batch.schema)
                self._open[table, window] = file
                room = batch.num_rows if limit is None else limit - file.rows
                file.add(batch.slice(0, room))
                batch = batch.slice(room)
                if limit is not None and file.rows >= limit:
                    self._close(table, window)

    def _create(self, table: str, window: str, schema: pa.Schema) -> _OpenFile:
        if not _WINDOW.fullmatch(window):
            raise ValueError(f"window must contain only letters, digits, - and _, got {window!r}.")
        # Close the least recently written files, except files of this window, whose tables alternate.
        earlier = [key for key in self._open if key[1] != window]
        for key in earlier[: max(0, len(self._open) - OPEN_FILES + 1)]:
            self._close(*key)
        file = File(table, window, f"window={window}/{self._prefix}-{len(self._files)}.parquet", 0, 0)
        self._paths.append(f"{self._pipeline}/{table}/{file.path}")
        self._files.append(None)
        return _OpenFile(len(self._files) - 1, file, self._lake.open_output(self._paths[-1]), schema)

    def _close(self, table: str, window: str) -> None:
        file = self._open[table, window]
        with self._lake.naming(self._pipeline, table):
            self._files[file.number] = file.close()
        del self._open[table, window]

    def close(self, report: TaskReport | None = None) -> Manifest:
        """Close all files; return them in the order of creation, with the task's report."""
        for table, window in list(self._open):
            self._close(table, window)
        # Other staged files need no sync: they are lost together with their undecided receive.
        kept = (path for path in self._paths if "/_receives/" not in path or f"/{FILTERED_TABLE}/" in path)
        self._lake.sync(*kept)
        self._paths.clear()
        return Manifest([file for file in self._files if file], [report] if report else [])

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Remove all files after an error: on a full disk, a retry needs the space."""
        for file in self._open.values():
            file.abandon()
        self._open.clear()
        for path in self._paths:
            with suppress(OSError):  # the error that ended the task is the one to report
                self._lake.remove_file(path)


def write_rows(lake: Lake, pipeline: str, prefix: str, parts: Iterable[tuple[str, str, pa.Table]]) -> list[File]:
    """Write rows of tables and windows as one task; return the files."""
    with Writer(lake, pipeline, prefix) as writer:
        for table, window, rows in parts:
            for batch in rows.to_batches():
                writer.write(table, window, batch)
        return writer.close().files


class _OpenFile:
    def __init__(self, number: int, file: File, sink: pa.NativeFile, schema: pa.Schema) -> None:
        self.number, self.rows = number, 0
        self._file, self._sink = file, sink
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0
        texts = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_binary(field.type)]
        self._writer = pq.ParquetWriter(
            sink,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=[name for name in texts if name not in _UNIQUE],
            write_statistics=[field.name for field in schema if _is_sought(field)],
        )

    def add(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        while batch.num_rows:
            room = ROW_GROUP_ROWS - self._waiting_rows
            for part in halves(batch.slice(0, room), ROW_GROUP_BYTES):
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
        return self._file._replace(rows=self.rows, bytes=size)

    def abandon(self) -> None:
        self._waiting.clear()
        self._writer.is_open = False  # otherwise it would write a footer, on a disk that may be full
        with suppress(OSError):
            self._sink.close()


def _is_sought(field: pa.Field) -> bool:
    """Whether bounds of a column help readers to skip row groups. Bounds of floats would hide NaN from some readers."""
    return field.name not in _NEVER_SOUGHT and not pa.types.is_floating(field.type)
