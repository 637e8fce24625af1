"""Lookup of received rows by position, so that Spark and batch plans need not carry payloads."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import RowRange, only, stored_file
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.message import MESSAGES

_HELD_BYTES = 64 * 2**20
"""Size of the cache of row groups. Rows arrive in order unless the query moved them between partitions."""

RowPositions = np.ndarray[Any, np.dtype[np.int64]]


class _Group(NamedTuple):
    """A row group: its file, its number in the file, the position of its first row, and its window."""

    path: str
    number: int
    first: int
    window: str


class ByPosition:
    """Rows of received files, looked up by position.

    Args:
        lake: Lake that contains the files.
        files: Whole files, in the order of their positions.
        schema: Schema of the files.
    """

    def __init__(self, lake: Lake, files: Sequence[RowRange], schema: pa.Schema = MESSAGES) -> None:
        self._lake, self._files, self._schema = lake, files, schema
        self._groups: list[_Group] = []
        self._held: OrderedDict[tuple[str, int, str], pa.Table] = OrderedDict()
        self._bytes = 0

    def by_window(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Divide rows by the window of their positions.

        Raises:
            ValueError: A position is outside of the files.
        """
        positions, total = rows.column("position"), sum(file.stop - file.start for file in self._files)
        least, most = pc.min_max(positions).values()
        if positions.null_count or least.as_py() < 0 or most.as_py() >= total:
            values = f"{least} to {most} and {positions.null_count} nulls"
            raise ValueError(f"position must be from 0 to {total - 1}, got {values}")
        files = self._files_of(positions.to_numpy())
        windows = np.array([file.window for file in self._files], dtype=object)[files]
        found = [str(window) for window in dict.fromkeys(windows[np.unique(files, return_index=True)[1]])]
        for window in found:
            yield window, rows if len(found) == 1 else rows.filter(pa.array(windows == window))

    def windows(self, positions: RowPositions) -> pa.Array:
        """Look up the windows of the rows at some positions."""
        return pa.array([file.window for file in self._files], pa.string()).take(pa.array(self._files_of(positions)))

    def _files_of(self, positions: RowPositions) -> RowPositions:
        starts = np.array([file.position for file in self._files])
        return np.searchsorted(starts, positions, side="right") - 1

    def take(self, columns: Sequence[str], positions: RowPositions) -> pa.RecordBatch:
        """Look up columns of the rows at some positions, in the order given."""
        if not self._groups:
            self._groups = list(self._find_groups())
        numbers = np.searchsorted([group.first for group in self._groups], positions, side="right") - 1
        parts = [self._from_group(int(group), columns, positions[numbers == group]) for group in np.unique(numbers)]
        arrays = [pa.concat_arrays(pieces) for pieces in zip(*parts, strict=True)]
        rows = pa.RecordBatch.from_arrays(arrays, names=list(columns))
        if (np.diff(numbers) >= 0).all():
            return rows
        return rows.take(pa.array(np.argsort(np.argsort(numbers, kind="stable"))))

    def _find_groups(self) -> Iterator[_Group]:
        for file in self._files:
            with stored_file(self._lake, file.path, self._schema) as stored:
                groups = stored.groups
            first = file.position
            for number, rows in enumerate(groups):
                yield _Group(file.path, number, first, file.window)
                first += rows

    def _from_group(self, number: int, columns: Sequence[str], positions: RowPositions) -> list[pa.Array]:
        group = self._groups[number]
        rows = positions - group.first
        table = self._table(group, columns)
        if len(rows) and rows[-1] - rows[0] + 1 == len(rows) and (rows[1:] > rows[:-1]).all():
            part = table.slice(int(rows[0]), len(rows))
        else:
            part = table.take(pa.array(rows))
        return [column.combine_chunks() for column in part.columns]

    def _table(self, group: _Group, columns: Sequence[str]) -> pa.Table:
        key = (group.path, group.number, columns[0])
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        with stored_file(self._lake, group.path, only(self._schema, *columns)) as stored:
            table = stored.group(group.number).combine_chunks()
        self._held[key] = table
        self._bytes += table.nbytes
        while self._bytes > _HELD_BYTES and len(self._held) > 1:
            self._bytes -= self._held.popitem(last=False)[1].nbytes
        return table


def checksum(positions: RowPositions) -> int:
    """Return a checksum of positions in any order. It changes if a position is missing or repeated.

    Each position is mixed first (splitmix64, Steele et al. 2014): sums of plain positions collide easily.
    """
    mixed = positions.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64))


def count_positions(positions: RowPositions, report: TaskReport) -> None:
    """Count rows, with the checksum of their positions."""
    report.positions += len(positions)
    report.checksum += checksum(positions)


def checksum_of_all(rows: int) -> int:
    """Return the checksum of positions 0 to `rows` - 1."""
    parts = (np.arange(start, min(start + 2**20, rows)) for start in range(0, rows, 2**20))
    return sum(map(checksum, parts)) % 2**64
