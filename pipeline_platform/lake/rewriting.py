"""Rows that leave what is written: those that others decided, and those that a replay replaces.

Files are never changed: the few that hold such rows are written anew without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from pipeline_platform.lake import reader
from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Stored, Table, Tables
from pipeline_platform.lake.writer import Writer

KEY = ("source", "message_id")
DROPPED = "dropped"
"""A step of a receive that found messages decided by others: how many."""


class OthersDecisions:
    """Drops from what a receive wrote the messages that others decide.

    A look costs what is looked at: the receive's own keys are read and hashed once, and compared with no more than
    what was added. Only where some of them meet are they read again.
    """

    def __init__(self, tables: Tables, ledger: Ledger, receive: Receive, on_success: str) -> None:
        self._tables, self._ledger, self._receive, self._on_success = tables, ledger, receive, on_success
        self._hashes: np.ndarray | None = None

    def drop(self, added: Sequence[str]) -> int:
        """Drop from all that the receive wrote the messages which added files of `outcomes` decide; return how many."""
        if not added:
            return 0
        theirs = pa.concat_tables([_outcomes(self._tables.lake, self._path("outcomes", path)) for path in added])
        theirs = theirs.filter(pc.is_in(theirs["outcome"], pa.array(["handled", "failed"])))
        if not self._meet(theirs):
            return 0
        manifest = self._ledger.manifest(self._receive)
        ours = {
            file: _outcomes(self._tables.lake, self._path("outcomes", file.path))
            for file in manifest.of_table("outcomes")
        }
        lost = [_key(mine).filter(_decided_by(theirs, mine)) for mine in ours.values()]
        keys = pc.unique(pa.chunked_array(lost, pa.string()).combine_chunks())
        if len(keys):
            self._drop(manifest, {file: _key(mine) for file, mine in ours.items()}, keys)
        return len(keys)

    def _path(self, table: str, path: str) -> str:
        return f"{self._receive.pipeline}/{table}/{path}"

    def _meet(self, theirs: pa.Table) -> bool:
        """Whether any of these messages may be the receive's, too."""
        if self._hashes is None:
            files = self._ledger.manifest(self._receive).of_table("outcomes")
            hashed = [_hashes(_keys(self._tables.lake, self._path("outcomes", file.path))) for file in files]
            self._hashes = np.sort(np.concatenate([*hashed, np.empty(0, np.int64)]))
        sought = _hashes(_key(theirs))
        return bool((np.searchsorted(self._hashes, sought, "right") > np.searchsorted(self._hashes, sought)).any())

    def _drop(self, manifest: Manifest, outcomes: dict[File, pa.Array], keys: pa.Array) -> None:
        # Written first: the acknowledgement publishes what others decided where it finds this.
        self._ledger.write(self._receive, DROPPED, Manifest(notes=[{DROPPED: len(keys)}]))

        def stays(rows: pa.Table) -> pa.Array:
            return pc.invert(pc.is_in(_key(rows), keys))

        replaced: dict[File, File | None] = {}
        for file in manifest:
            # The raw log may hold a message twice; what is only staged is not published.
            if file.table == "messages" or file.table not in published(manifest):
                continue
            held = outcomes[file] if file in outcomes else _keys(self._tables.lake, self._path(file.table, file.path))
            if not pc.any(pc.is_in(held, keys)).as_py():
                continue
            table = self._tables.get(file.table)
            if file.table == "outcomes":
                replaced[file] = _as_duplicates(table, self._receive, file, keys, self._on_success)
            else:
                left = _rewrite(table, self._receive, file.path, file.window, stays)
                replaced[file] = left[0] if left else None
        self._ledger.replace_files(self._receive, replaced)


def published(manifest: Manifest) -> list[str]:
    """The tables that files are meant for; what is only staged lies in a folder of the receive."""
    return [name for name in dict.fromkeys(file.table for file in manifest) if "/" not in name]


class Replacement:
    """What a replay takes out of a table: the rows of the receives that it replaces.

    Each stored file is looked at once, however often the commit is tried.
    """

    def __init__(self, table: Table, receive: Receive) -> None:
        self._table, self._receive = table, receive
        self._instead: dict[str, list[File] | None] = {}
        """By path of a stored file what comes in its place; None where it stays."""

    def at(self, handle: DeltaTable) -> tuple[list[Stored], list[File]]:
        """The files that hold rows of those receives, and new files with their other rows."""
        if not self._receive.replaces:
            return [], []
        stored = self._table.files(handle, self._receive.windows)
        windows = {file.path: file.window for file in stored if file.path not in self._instead}
        for path, ids in receive_ids(self._table, windows):
            self._instead[path] = self._put_instead(path, windows[path], ids)
        removed = [file for file in stored if self._instead[file.path] is not None]
        return removed, [kept for file in removed for kept in self._instead[file.path] or ()]

    def _put_instead(self, path: str, window: str, ids: set[str]) -> list[File] | None:
        replaced = set(self._receive.replaces)
        if not ids & replaced:
            return None
        if ids <= replaced:
            return []
        gone = pa.array(self._receive.replaces, pa.string())
        return _rewrite(
            self._table, self._receive, path, window, lambda rows: pc.invert(pc.is_in(rows["receive_id"], gone))
        )


def receive_ids(table: Table, paths: Iterable[str]) -> Iterator[tuple[str, set[str]]]:
    """By path of a stored file, the receives that have rows in it."""
    for path in paths:
        yield path, reader.receive_ids(table.lake, f"{table.pipeline}/{table.name}/{path}")


def _outcomes(lake: Lake, path: str) -> pa.Table:
    with lake.open_input(path) as file:
        return pq.read_table(file, columns=[*KEY, "attempt", "outcome"])


def _decided_by(theirs: pa.Table, ours: pa.Table) -> pa.Array:
    """Which of our messages theirs decide: what they handled, and what they failed at our attempt or a later one.

    A failure at an earlier attempt is the very one that a backfill drives once more.
    """
    keys = _key(ours)
    handled = _key(theirs.filter(pc.equal(theirs["outcome"], "handled")))
    failures = theirs.filter(pc.equal(theirs["outcome"], "failed"))
    failed = (
        pa.table({"key": _key(failures), "attempt": failures["attempt"]})
        .group_by("key")
        .aggregate([("attempt", "max")])
    )
    at = failed["attempt_max"].combine_chunks().take(pc.index_in(keys, failed["key"].combine_chunks()))
    not_before = pc.fill_null(pc.greater_equal(at, ours["attempt"].combine_chunks()), False)
    return pc.or_(pc.is_in(keys, handled), not_before)


def _keys(lake: Lake, path: str) -> pa.Array:
    with lake.open_input(path) as file:
        return _key(pq.read_table(file, columns=[*KEY]))


def _key(rows: pa.Table) -> pa.Array:
    return pc.binary_join_element_wise(rows["source"], rows["message_id"], "\0").combine_chunks()


def _hashes(keys: pa.Array) -> np.ndarray:
    """Python's own hashes, which are the same within this process."""
    return np.fromiter(map(hash, keys.to_pylist()), np.int64, len(keys))


def _as_duplicates(table: Table, receive: Receive, file: File, keys: pa.Array, on_success: str) -> File:
    """The same outcomes, with those of `keys` marked as another's: the source is told of them all the same."""
    with _source_file(table, file.path) as stored:
        rows = pq.read_table(stored)
    theirs = pc.is_in(_key(rows), keys)
    for column, value in (("outcome", "duplicate"), ("action", on_success)):
        index = rows.schema.get_field_index(column)
        rows = rows.set_column(index, column, pc.if_else(theirs, value, rows[column]))
    return _write(table, receive, file.window, rows.to_batches())[0]


def _rewrite(
    table: Table, receive: Receive, path: str, window: str, keep: Callable[[pa.Table], pa.Array]
) -> list[File]:
    """Write the rows of a file that are to be kept to a new one, a row group at a time."""

    def kept() -> Iterator[pa.RecordBatch]:
        with _source_file(table, path) as stored:
            parquet = pq.ParquetFile(stored)
            for group in range(parquet.metadata.num_row_groups):
                rows = parquet.read_row_group(group)
                yield from rows.filter(keep(rows)).to_batches()

    return _write(table, receive, window, kept())


def _source_file(table: Table, path: str) -> pa.NativeFile:
    return table.lake.open_input(f"{table.pipeline}/{table.name}/{path}")


def _write(table: Table, receive: Receive, window: str, batches: Iterable[pa.RecordBatch]) -> list[File]:
    with Writer(table.lake, table.pipeline, f"{receive.receive_id}-rewritten") as writer:
        for batch in batches:
            writer.write(table.name, window, batch)
        return writer.close().files
