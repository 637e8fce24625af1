"""What tasks wrote: files and notes. A commit makes the files of a manifest part of their tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa


class File(NamedTuple):
    """A Parquet file of a table, or meant for one.

    Attributes:
        table: As a path under the pipeline's folder.
        window: The window its rows belong to.
        path: Under the table's folder.
        rows: How many.
        bytes: On disk.
        stats: Column statistics as the Delta protocol writes them, JSON.
        committed_at: When it became part of its table, or compaction wrote it; long ago for a file without a commit.
    """

    table: str
    window: str
    path: str
    rows: int
    bytes: int
    stats: str = ""
    committed_at: datetime = datetime.min.replace(tzinfo=UTC)


_WRITTEN = File._fields[:6]
MANIFEST = pa.schema({name: pa.int64() if name in ("rows", "bytes") else pa.string() for name in (*_WRITTEN, "notes")})
"""What tasks return: a row for each file, and one row without a path for each task, with its notes as JSON."""


@dataclass(frozen=True)
class Manifest:
    """The files and notes of any number of tasks."""

    files: list[File] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, table: pa.Table) -> Manifest:
        """Read what tasks returned."""
        rows = table.to_pylist()
        return cls(
            [File(*(row[name] for name in _WRITTEN)) for row in rows if row["path"]],
            [json.loads(row["notes"]) for row in rows if row["notes"]],
        )

    def to_arrow(self) -> pa.Table:
        """The inverse of `of`."""
        notes = [{"notes": json.dumps(note)} for note in self.notes]
        return pa.Table.from_pylist([*(file._asdict() for file in self.files), *notes], schema=MANIFEST)

    def __add__(self, other: Manifest) -> Manifest:
        """Both together."""
        return Manifest([*self.files, *other.files], [*self.notes, *other.notes])

    def of_table(self, table: str) -> list[File]:
        """The files meant for one table, in the order in which they were written."""
        return [file for file in self.files if file.table == table]

    def rows(self, table: str) -> int:
        """How many rows were written for one table."""
        return sum(file.rows for file in self.of_table(table))

    def total(self, note: str) -> int:
        """Sum of a number that tasks noted."""
        return sum(int(notes.get(note, 0)) for notes in self.notes)

    def most(self, note: str) -> int:
        """The largest of a number that tasks noted."""
        return max((int(notes.get(note, 0)) for notes in self.notes), default=0)

    def __iter__(self) -> Iterator[File]:
        """All files."""
        return iter(self.files)
