"""Compaction: the small files of a window become few, which are written like all files of the lake."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.readable import unreadable_rows
from pipeline_platform.lake.reader import row_groups
from pipeline_platform.lake.tables import CommitConflictError, Table
from pipeline_platform.lake.writer import Writer

FULL = 100 * 2**20
"""Bytes at which a file is large enough, and is left as it is."""
_TRIES = 100
"""Commits that may come first before compaction leaves a window until next time; each try takes milliseconds."""


class UnreadableFileError(Exception):
    """A file of a table cannot be read. Names table, file, and the command that repairs it."""


def several(table: Table) -> dict[str, int]:
    """The windows of a table that have several files, and how many, from the oldest on."""
    if not table.exists():
        return {}
    with table.look() as handle:
        files = Counter(file.window for file in table.files(handle))
    return {window: count for window, count in sorted(files.items()) if count > 1}


def compact(table: Table, errors: list[Exception]) -> int:
    """Put the small files of each window together, in commits of their own; return how many became part of larger ones.

    Where live commits keep getting in, a window waits until next time. A window with a file that cannot be read is left
    as it is, and `errors` gets why.
    """
    compacted = 0
    for window in several(table):
        try:
            compacted += compact_window(table, window)
        except UnreadableFileError as error:
            errors.append(error)
    return compacted


def compact_window(table: Table, window: str) -> int:
    """Put the small files of a window together; return how many became part of larger ones."""
    with table.look() as handle:
        columns, files = table.stored_columns(handle), table.files(handle, [window])
    return sum(_merge(table, columns, group) for group in _groups(files))


def _groups(files: Sequence[File]) -> Iterator[list[File]]:
    """Divide files, from the oldest on, into groups of about the size of a full file; none of a single file."""
    group, size = list[File](), 0
    for file in sorted(files, key=lambda one: (one.committed_at, one.path)):
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
            if there.issuperset(after):  # a try that was cut off came through
                return len(group)
            if not there.issuperset(before):  # a replay, or another compaction, replaced some
                return 0
            table.swap(handle, "compaction", merged, removed=group, is_new=False)
            return len(group)
    return 0


def _readable(table: Table, file: File, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read a file, as the table's columns.

    Raises:
        UnreadableFileError: Some reader could not.
    """
    try:
        for rows in row_groups(table.lake, table.path(file.path), columns):
            for batch in rows.cast(columns).to_batches():
                if unreadable_rows(batch):
                    raise UnreadableFileError("it has values that not every reader can read")
                yield batch
    except (UnreadableFileError, pa.ArrowException, OSError) as error:
        raise UnreadableFileError(
            f"{table.pipeline}/{table.name}: {file.path} cannot be read: {error}. Run `pipeline-platform repair "
            f"{table.pipeline}`"
        ) from error


def drop_bounds(table: Table) -> None:
    """Take least and greatest values out of the log, where an earlier release or another writer put them."""
    for _ in range(_TRIES):
        with table.look() as handle, suppress(CommitConflictError):
            if files := _with_bounds(table, handle):
                same = [file._replace(stats=json.dumps({"numRecords": file.rows})) for file in files]
                table.swap(
                    handle, "statistics", same, not_before=max(file.committed_at for file in files), is_new=False
                )
            return


def _with_bounds(table: Table, handle: DeltaTable) -> list[File]:
    adds = pa.RecordBatchReader.from_stream(handle.get_add_actions(flatten=True)).read_all()
    bounds = [adds[name] for name in adds.schema.names if name.startswith(("min.", "max."))]
    paths = {path for one in bounds for path in adds["path"].filter(pc.is_valid(one)).to_pylist()}
    return [file for file in table.files(handle) if file.path in paths]
