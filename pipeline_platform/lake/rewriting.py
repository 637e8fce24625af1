"""Rows that leave what is written: those that others decided, and those that a replay replaces.

Files are never changed: the few that hold such rows are written anew without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import keys_of, only, receive_ids, row_groups
from pipeline_platform.lake.tables import Table, Tables
from pipeline_platform.lake.writer import Writer

DROPPED = "dropped"
"""A step of a receive that found messages decided by others: how many."""

_KEY = ("source", "message_id")


class OthersDecisions:
    """Drops from what a receive wrote the messages that others decide.

    A look costs what is looked at: the receive's own keys are read and hashed once, and compared with no more than
    what was added. Only where some of them meet are they read again.
    """

    def __init__(self, tables: Tables, ledger: Ledger, receive: Receive, on_success: str) -> None:
        self._tables, self._ledger, self._receive, self._on_success = tables, ledger, receive, on_success
        self._outcomes = tables["outcomes"]
        self._hashes: np.ndarray | None = None

    def drop(self, added: Sequence[str]) -> int:
        """Drop from all that the receive wrote the messages which added files of `outcomes` decide; return how many."""
        if not added:
            return 0
        theirs = pa.concat_tables([_read(self._outcomes, path, *_KEY, "attempt", "outcome") for path in added])
        theirs = theirs.filter(pc.is_in(theirs["outcome"], pa.array(["handled", "failed"])))
        manifest = self._ledger.manifest(self._receive)
        ours = [file.path for file in manifest.of_table("outcomes")]
        if not self._meet(theirs, ours):
            return 0
        mine = [_read(self._outcomes, path, *_KEY, "attempt") for path in ours]
        lost = [keys_of(rows, *_KEY).filter(_decided_by(theirs, rows)) for rows in mine]
        keys = pc.unique(pa.concat_arrays(lost))
        if len(keys):
            self._drop(manifest, keys)
        return len(keys)

    def _meet(self, theirs: pa.Table, ours: Sequence[str]) -> bool:
        """Whether any of these messages may be the receive's, too."""
        if self._hashes is None:
            hashed = [_hashes(_read(self._outcomes, path, *_KEY)) for path in ours]
            self._hashes = np.sort(np.concatenate([*hashed, np.empty(0, np.int64)]))
        sought = _hashes(theirs)
        return bool((np.searchsorted(self._hashes, sought, "right") > np.searchsorted(self._hashes, sought)).any())

    def _drop(self, manifest: Manifest, keys: pa.Array) -> None:
        # Written first: the acknowledgement publishes what others decided where it finds this.
        self._ledger.write(self._receive, DROPPED, Manifest(notes=[{DROPPED: len(keys)}]))

        def stays(rows: pa.Table) -> pa.Array:
            return pc.invert(pc.is_in(keys_of(rows, *_KEY), keys))

        replaced: dict[File, File | None] = {}
        # The raw log may hold a message twice; what is only staged is not published.
        for name in published(manifest) - {"messages"}:
            table = self._tables[name]
            for file in manifest.of_table(name):
                if pc.all(stays(_read(table, file.path, *_KEY))).as_py():
                    continue
                change = self._as_duplicates(keys) if name == "outcomes" else lambda rows: rows.filter(stays(rows))
                replaced[file] = next(iter(_rewrite(table, self._receive, file, change)), None)
        self._ledger.replace_files(self._receive, replaced)

    def _as_duplicates(self, keys: pa.Array) -> Callable[[pa.Table], pa.Table]:
        """Mark the outcomes of these messages as another's: they are acknowledged all the same."""

        def change(rows: pa.Table) -> pa.Table:
            theirs = pc.is_in(keys_of(rows, *_KEY), keys)
            for column, value in (("outcome", "duplicate"), ("action", self._on_success)):
                index = rows.schema.get_field_index(column)
                rows = rows.set_column(index, column, pc.if_else(theirs, value, rows[column]))
            return rows

        return change


def drop_rows(tables: Tables, ledger: Ledger, receive: Receive, keys: pa.Array) -> None:
    """Drop from the batchers' rows that a receive wrote those of some messages, by `keys_of` source and id.

    To drop them again changes nothing.
    """
    manifest = ledger.manifest(receive)

    def stay(rows: pa.Table) -> pa.Array:
        return pc.invert(pc.is_in(keys_of(rows, *_KEY), keys))

    replaced: dict[File, File | None] = {}
    for name in published(manifest) - {"messages", "outcomes", "failed"}:
        for file in manifest.of_table(name):
            if not pc.all(stay(_read(tables[name], file.path, *_KEY))).as_py():
                rewritten = _rewrite(tables[name], receive, file, lambda rows: rows.filter(stay(rows)))
                replaced[file] = next(iter(rewritten), None)
    ledger.replace_files(receive, replaced)


def published(manifest: Manifest) -> set[str]:
    """The tables that files are meant for; what is only staged lies in a folder of the receive."""
    return {file.table for file in manifest if "/" not in file.table}


class Replacement:
    """What a replay takes out of a table: the rows of the receives that it replaces.

    It looks at each stored file once, however often the commit is tried.
    """

    def __init__(self, table: Table, receive: Receive) -> None:
        self._table, self._receive = table, receive
        self._instead: dict[str, list[File] | None] = {}  # by path of a stored file; None where it stays

    def at(self, handle: DeltaTable) -> tuple[list[File], list[File]]:
        """The files that hold rows of those receives, and new files with their other rows."""
        if not self._receive.replaces:
            return [], []
        stored = self._table.files(handle, self._receive.windows)
        for file in stored:
            if file.path not in self._instead:
                self._instead[file.path] = self._put_instead(file)
        removed = [file for file in stored if self._instead[file.path] is not None]
        return removed, [left for file in removed for left in self._instead[file.path] or ()]

    def _put_instead(self, file: File) -> list[File] | None:
        ids, replaced = receive_ids(self._table.lake, self._table.path(file.path)), set(self._receive.replaces)
        if not ids & replaced:
            return None
        if ids <= replaced:
            return []
        gone = pa.array(self._receive.replaces, pa.string())

        def change(rows: pa.Table) -> pa.Table:
            return rows.filter(pc.invert(pc.is_in(rows["receive_id"], gone)))

        return _rewrite(self._table, self._receive, file, change)


def _decided_by(theirs: pa.Table, ours: pa.Table) -> pa.Array:
    """Which of our messages theirs decide: what they handled, and what they failed at our attempt or a later one.

    A failure at an earlier attempt is the very one that a backfill drives once more.
    """
    # An attempt beyond all others stands for a message that was handled.
    at = pc.if_else(pc.equal(theirs["outcome"], "handled"), 2**31 - 1, theirs["attempt"])
    decided = pa.table({"key": keys_of(theirs, *_KEY), "at": at}).group_by("key").aggregate([("at", "max")])
    found = pc.index_in(keys_of(ours, *_KEY), decided["key"].combine_chunks())
    last = decided["at_max"].combine_chunks().take(found)
    return pc.fill_null(pc.greater_equal(last, ours["attempt"].combine_chunks()), False)


def _hashes(rows: pa.Table) -> np.ndarray:
    """Python's own hashes, which are the same within this process."""
    keys = keys_of(rows, *_KEY)
    return np.fromiter(map(hash, keys.to_pylist()), np.int64, len(keys))


def _read(table: Table, path: str, *columns: str) -> pa.Table:
    return pa.concat_tables(row_groups(table.lake, table.path(path), only(table.schema, *columns)))


def _rewrite(table: Table, receive: Receive, file: File, change: Callable[[pa.Table], pa.Table]) -> list[File]:
    """Write a file anew, a row group at a time; no file where no row is left."""
    with Writer(table.lake, table.pipeline, f"{receive.receive_id}-rewritten") as writer:
        for rows in row_groups(table.lake, table.path(file.path)):
            for batch in change(rows).to_batches():
                writer.write(table.name, file.window, batch)
        return writer.close().files
