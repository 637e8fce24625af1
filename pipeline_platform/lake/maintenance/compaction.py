"""Compaction of the small files of a window into larger files."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import row_groups
from pipeline_platform.lake.tables import CommitConflictError, Table
from pipeline_platform.lake.writer import Writer

FULL = 100 * 2**20
"""Size in bytes from which a file is not compacted."""
_TRIES = 100
"""Number of attempts against concurrent commits before a window is left for the next time; each takes milliseconds."""


class UnreadableFileError(Exception):
    """A file of a table cannot be read. The message contains table, file, and the command that repairs it."""

    @classmethod
    def of(cls, table: Table, file: File, error: Exception) -> Self:
        """Return the error for a file."""
        return cls(
            f"{table.pipeline}/{table.name}: {file.path} cannot be read: {error}. Run `pipeline-platform repair "
            f"{table.pipeline}`"
        )


def mergeable(table: Table) -> dict[str, list[list[File]]]:
    """Return the groups of small files that compaction merges, by window, oldest first."""
    if not table.exists():
        return {}
    by_window: dict[str, list[File]] = {}
    with table.look() as handle:
        for file in table.files(handle):
            by_window.setdefault(file.window, []).append(file)
    groups = {window: [*_groups(files)] for window, files in sorted(by_window.items())}
    return {window: found for window, found in groups.items() if found}


def compact(table: Table, errors: list[Exception]) -> int:
    """Compact the small files of each window; return the number of files that were replaced by larger ones.

    A window that gets new commits all the time waits until the next call. A window with an unreadable file stays
    unchanged, and its error is added to `errors`.
    """
    compacted = 0
    for window in mergeable(table):
        try:
            compacted += compact_window(table, window)
        except UnreadableFileError as error:
            errors.append(error)
    return compacted


def compact_window(table: Table, window: str) -> int:
    """Compact the small files of a window; return the number of files that were replaced by larger ones."""
    with table.look() as handle:
        columns, files = table.stored_columns(handle), table.files(handle, [window])
    return sum(_merge(table, columns, group) for group in _groups(files))


def _groups(files: Sequence[File]) -> Iterator[list[File]]:
    """Divide files, oldest first, into groups of at least two files and about the size of a full file."""
    group, size = list[File](), 0
    for file in sorted(files, key=lambda file: (file.committed_at, file.path)):
        if file.bytes >= FULL:
            continue
        if size + file.bytes > FULL:
            yield from [group] if len(group) > 1 else []
            group, size = [], 0
        group.append(file)
        size += file.bytes
    if len(group) > 1:
        yield group


def _merge(table: Table, columns: pa.Schema, group: Sequence[File]) -> int:
    with Writer(table.lake, table.pipeline, "compacted") as writer:
        for file in group:
            for rows in _readable(table, file, columns):
                writer.write(table.name, file.window, rows)
        merged = writer.close().files
    before, after = {file.path for file in group}, {file.path for file in merged}
    for _ in range(_TRIES):
        with table.look() as handle, suppress(CommitConflictError):
            there = {file.path for file in table.files(handle, [group[0].window])}
            if there.issuperset(after):  # an attempt whose connection was lost has succeeded
                return len(group)
            if not there.issuperset(before):  # a replay or another compaction replaced files
                return 0
            table.swap(handle, "compaction", merged, removed=group, is_new=False)
            return len(group)
    return 0


def _readable(table: Table, file: File, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read a file in the table's columns.

    Raises:
        UnreadableFileError: The file is truncated or damaged.
    """
    try:
        for rows in row_groups(table.lake, table.path(file.path), columns):
            yield from rows.cast(columns).to_batches()
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFileError.of(table, file, error) from error


def drop_bounds(table: Table) -> None:
    """Remove column bounds from the log, which other writers add. They may be wrong, for example of decimals."""
    for _ in range(_TRIES):
        with table.look() as handle, suppress(CommitConflictError):
            if files := _with_bounds(table, handle):
                newest = max(file.committed_at for file in files)
                table.swap(handle, "statistics", files, not_before=newest, is_new=False)
            return


def _with_bounds(table: Table, handle: DeltaTable) -> list[File]:
    adds = pa.RecordBatchReader.from_stream(handle.get_add_actions(flatten=True)).read_all()
    bounds = [adds[name] for name in adds.schema.names if name.startswith(("min.", "max."))]
    paths = {path for bound in bounds for path in adds["path"].filter(pc.is_valid(bound)).to_pylist()}
    return [file for file in table.files(handle) if file.path in paths]
