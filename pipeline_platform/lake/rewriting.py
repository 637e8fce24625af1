"""Rows that are dropped from what was written: decided by others, replaced by a replay, or reopened by a person.

Files are never changed: the few files that contain such rows are written again without them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pipeline_platform.lake.failure_events import RANKED, events, failure_keys
from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import keys_of, only, receive_ids, row_groups
from pipeline_platform.lake.tables import Table, Tables
from pipeline_platform.lake.writer import write_rows

DROPPED = "dropped"
"""A step of a receive that found messages decided by others: how many."""

_KEY = ("source", "message_id")


class OthersDecisions:
    """Drops from what a receive wrote the messages that others decide.

    A look costs what is looked at: the receive's own keys are read once, and of each 8 bytes are kept. Only where some
    may be among what was added are they read again. All are read by row groups, however many messages there are.
    """

    def __init__(self, tables: Tables, ledger: Ledger, receive: Receive, on_success: str) -> None:
        self._tables, self._ledger, self._receive, self._on_success = tables, ledger, receive, on_success
        self._outcomes = tables["outcomes"]
        self._hashes: np.ndarray | None = None

    def drop(self, added: Sequence[str]) -> int:
        """Drop from all that the receive wrote the messages which added files of `outcomes` decide; return how many."""
        if not added:
            return 0
        ours = [file.path for file in self._ledger.manifest(self._receive).of_table("outcomes")]
        theirs = _last_attempts(pa.concat_tables(self._shared(added, ours)))
        if not theirs.num_rows:
            return 0
        sought = _Sought(theirs)
        lost = [_lost(rows, sought) for path in ours for rows in _rows(self._outcomes, path, *_KEY, "attempt")]
        keys = pc.unique(pa.concat_arrays(lost))
        if len(keys):
            # Written first: the acknowledgement publishes what others decided where it finds this.
            self._ledger.write(self._receive, DROPPED, Manifest(notes=[{DROPPED: len(keys)}]))
            drop_rows(self._tables, self._ledger, self._receive, keys, on_success=self._on_success)
        return len(keys)

    def _shared(self, added: Sequence[str], ours: Sequence[str]) -> Iterator[pa.Table]:
        """What added files decide of messages that may be the receive's, too."""
        if self._hashes is None:
            hashed = [_hashes(keys_of(rows, *_KEY)) for path in ours for rows in _rows(self._outcomes, path, *_KEY)]
            self._hashes = np.sort(np.concatenate([*hashed, np.empty(0, np.int64)]))
        for path in added:
            for rows in _rows(self._outcomes, path, *_KEY, "attempt", "outcome"):
                theirs = rows.filter(pc.is_in(rows["outcome"], pa.array(["handled", "failed"])))
                yield theirs.filter(pa.array(_found(self._hashes, _hashes(keys_of(theirs, *_KEY)))[1] > 0))


def drop_rows(
    tables: Tables, ledger: Ledger, receive: Receive, keys: pa.Array, *, on_success: str | None = None
) -> None:
    """Drop from the batchers' rows that a receive wrote those of some messages, by `keys_of` source and id.

    To drop them again changes nothing. With `on_success` another receive decided them: their failures are dropped, too,
    and their outcomes become duplicates, acknowledged by this action.
    """
    manifest, sought = ledger.manifest(receive), _Sought(pa.table({"key": keys}))

    def are_theirs(rows: pa.Table) -> pa.Array:
        mine = keys_of(rows, *_KEY)
        return pc.is_in(mine, sought.near(mine)["key"].combine_chunks())

    def as_duplicates(rows: pa.Table) -> pa.Table:
        theirs = are_theirs(rows)
        for column, value in (("outcome", "duplicate"), ("action", on_success)):
            index = rows.schema.get_field_index(column)
            rows = rows.set_column(index, column, pc.if_else(theirs, value, rows[column]))
        return rows

    replaced: dict[File, File | None] = {}
    # The raw log may hold a message twice; what is only staged is not published.
    for name in published(manifest) - ({"messages", "outcomes", "failed"} if on_success is None else {"messages"}):
        change = as_duplicates if name == "outcomes" else lambda rows: rows.filter(pc.invert(are_theirs(rows)))
        for file in manifest.of_table(name):
            if any(pc.any(are_theirs(rows)).as_py() for rows in _rows(tables[name], file.path, *_KEY)):
                replaced[file] = next(iter(_rewrite(tables[name], receive, file, change)), None)
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


class Reopened:
    """Drops failures of a retry that a person closed and reopened meanwhile, so that a message has one open event.

    The attempt of a reopened failure is that of the retry. It stays open, and the result of the retry is in `outcomes`.
    """

    def __init__(self, table: Table, receive: Receive, files: Sequence[File]) -> None:
        self._table, self._receive, self._files = table, receive, files
        is_retry = table.name == "failed" and receive.origin == "failed"
        paths = [table.path(file.path) for file in files if is_retry]
        mine = [failure_keys(rows) for path in paths for rows in events(table.lake, path, *RANKED)]
        self._mine = pa.chunked_array(mine, pa.string()).drop_null()

    def at(self, handle: DeltaTable) -> Sequence[File]:
        """The files to commit."""
        if not len(self._mine):
            return self._files
        paths = [self._table.path(file.path) for file in self._table.files(handle, self._receive.windows)]
        stored = (failure_keys(rows) for path in paths for rows in events(self._table.lake, path, *RANKED))
        reopened = pa.chunked_array((keys.filter(pc.is_in(keys, self._mine)) for keys in stored), pa.string())
        if not len(reopened):
            return self._files

        def change(rows: pa.Table) -> pa.Table:
            return rows.filter(pc.invert(pc.is_in(failure_keys(rows), reopened)))

        return [left for file in self._files for left in _rewrite(self._table, self._receive, file, change)]


class _Sought:
    """Rows by `key`, sought among the keys of one row group after another.

    Arrow's look-ups hash all that is sought at each call. So each is given what has the hash of some key there.
    """

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows.combine_chunks()
        hashes = _hashes(rows["key"])
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]

    def near(self, keys: pa.Array) -> pa.Table:
        first, count = _found(self._hashes, np.unique(_hashes(keys)))
        places = [first[count > nth] + nth for nth in range(count.max(initial=0))]
        return self._rows.take(self._order[np.concatenate([*places, np.empty(0, np.int64)])])


def _last_attempts(theirs: pa.Table) -> pa.Table:
    """By key, the attempt up to which others decided a message: one beyond all others where they handled it."""
    at = pc.if_else(pc.equal(theirs["outcome"], "handled"), 2**31 - 1, theirs["attempt"])
    return pa.table({"key": keys_of(theirs, *_KEY), "at": at}).group_by("key").aggregate([("at", "max")])


def _lost(ours: pa.Table, sought: _Sought) -> pa.Array:
    """The keys of our messages that others handled, or failed at our attempt or a later one.

    A failure at an earlier attempt is the very one that a backfill retries.
    """
    keys = keys_of(ours, *_KEY)
    theirs = sought.near(keys)
    last = theirs["at_max"].take(pc.index_in(keys, theirs["key"].combine_chunks()))
    return keys.filter(pc.fill_null(pc.greater_equal(last, ours["attempt"]), False).combine_chunks())


def _hashes(keys: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Python's own hashes, which are the same within this process."""
    some = (keys.slice(first, 65_536).to_pylist() for first in range(0, len(keys), 65_536))
    return np.fromiter(map(hash, chain.from_iterable(some)), np.int64, len(keys))


def _found(hashes: np.ndarray, sought: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where sorted hashes have each of those sought, and how often."""
    first = np.searchsorted(hashes, sought)
    return first, np.searchsorted(hashes, sought, "right") - first


def _rows(table: Table, path: str, *columns: str) -> Iterator[pa.Table]:
    return row_groups(table.lake, table.path(path), only(table.schema, *columns))


def _rewrite(table: Table, receive: Receive, file: File, change: Callable[[pa.Table], pa.Table]) -> list[File]:
    """Write a file anew, a row group at a time; no file where no row is left."""
    groups = row_groups(table.lake, table.path(file.path))
    parts = ((table.name, file.window, change(rows)) for rows in groups)
    return write_rows(table.lake, table.pipeline, f"{receive.receive_id}-rewritten", parts)
