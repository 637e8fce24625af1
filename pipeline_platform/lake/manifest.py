"""Manifests: the files that tasks wrote, and their reports. A commit adds the files to their tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa

from pipeline_platform.lake.task_report import TaskReport, Totals, from_json


class File(NamedTuple):
    """A Parquet file that belongs to a table, or will belong to it after a commit.

    Attributes:
        table: Path of the table under the pipeline's folder.
        window: Window of the rows.
        path: Path under the table's folder.
        rows: Number of rows.
        bytes: Size on disk.
        committed_at: Time of the commit, or of the compaction that wrote it; the year 1 before a commit.
    """

    table: str
    window: str
    path: str
    rows: int
    bytes: int
    committed_at: datetime = datetime.min.replace(tzinfo=UTC)

    @property
    def stats(self) -> str:
        """Statistics of the Delta protocol, as JSON, without column bounds: readers use the bounds in the file.

        Delta's bounds are JSON: decimals lose digits, infinities and NaN are null, times are cut to milliseconds. The
        PyArrow reader of delta-rs loses rows if some columns have bounds and others do not.
        """
        return json.dumps({"numRecords": self.rows})


_WRITTEN = File._fields[:5]
MANIFEST = pa.schema({name: pa.int64() if name in ("rows", "bytes") else pa.string() for name in (*_WRITTEN, "report")})
"""Columns of the result of a task: a row for each file, and a row without a path, with the task's report as JSON."""


@dataclass(frozen=True)
class Manifest:
    """The files and reports of any number of tasks."""

    files: list[File] = field(default_factory=list)
    reports: list[TaskReport] = field(default_factory=list)

    @classmethod
    def of(cls, table: pa.Table) -> Manifest:
        """Read the results of tasks. Manifests of earlier releases have more columns."""
        rows = table.to_pylist()
        files = [File(*(row[name] for name in _WRITTEN)) for row in rows if row["path"]]
        return cls(files, [from_json(row["report"]) for row in rows if row["report"]])

    def to_arrow(self) -> pa.Table:
        """Return the manifest as a table that `of` can read."""
        reports = [{"report": report.to_json()} for report in self.reports]
        return pa.Table.from_pylist([*(file._asdict() for file in self.files), *reports], schema=MANIFEST)

    def __add__(self, other: Manifest) -> Manifest:
        """Return a manifest with the files and reports of both."""
        return Manifest([*self.files, *other.files], [*self.reports, *other.reports])

    @cached_property
    def totals(self) -> Totals:
        """Sum of the reports."""
        return Totals.of(self.reports)

    def of_table(self, table: str) -> list[File]:
        """Return the files of one table, in the order in which they were written."""
        return [file for file in self.files if file.table == table]

    def staged(self, name: str) -> list[File]:
        """Return the files of one table that only later steps of the receive read."""
        return [file for file in self.files if "/" in file.table and file.table.rpartition("/")[2] == name]

    def rows(self, table: str) -> int:
        """Return the number of rows written for one table."""
        return sum(file.rows for file in self.of_table(table))

    def __iter__(self) -> Iterator[File]:
        """Iterate over all files."""
        return iter(self.files)
