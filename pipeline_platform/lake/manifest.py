"""Manifests: the files that tasks wrote, and their notes. A commit adds the files to their tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa


class File(NamedTuple):
    """A Parquet file that belongs to a table, or will belong to it after a commit.

    Attributes:
        table: Path of the table under the pipeline's folder.
        window: Window of the rows.
        path: Path under the table's folder.
        rows: Number of rows.
        bytes: Size on disk.
        stats: Column statistics of the Delta protocol, as JSON.
        committed_at: Time of the commit, or of the compaction that wrote it; the year 1 before a commit.
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
"""Columns of the result of a task: a row for each file, and a row without a path, with the task's notes as JSON."""


@dataclass(frozen=True)
class Manifest:
    """The files and notes of any number of tasks."""

    files: list[File] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, table: pa.Table) -> Manifest:
        """Read the results of tasks."""
        rows = table.to_pylist()
        return cls(
            [File(*(row[name] for name in _WRITTEN)) for row in rows if row["path"]],
            [json.loads(row["notes"]) for row in rows if row["notes"]],
        )

    def to_arrow(self) -> pa.Table:
        """Return the manifest as a table that `of` can read."""
        notes = [{"notes": json.dumps(note)} for note in self.notes]
        return pa.Table.from_pylist([*(file._asdict() for file in self.files), *notes], schema=MANIFEST)

    def __add__(self, other: Manifest) -> Manifest:
        """Return a manifest with the files and notes of both."""
        return Manifest([*self.files, *other.files], [*self.notes, *other.notes])

    def of_table(self, table: str) -> list[File]:
        """Return the files of one table, in the order in which they were written."""
        return [file for file in self.files if file.table == table]

    def rows(self, table: str) -> int:
        """Return the number of rows written for one table."""
        return sum(file.rows for file in self.of_table(table))

    def total(self, note: str) -> int:
        """Return the sum of a number in the tasks' notes."""
        return sum(int(notes.get(note, 0)) for notes in self.notes)

    def most(self, note: str) -> int:
        """Return the maximum of a number in the tasks' notes, 0 without notes."""
        return max((int(notes.get(note, 0)) for notes in self.notes), default=0)

    def __iter__(self) -> Iterator[File]:
        """Iterate over all files."""
        return iter(self.files)
