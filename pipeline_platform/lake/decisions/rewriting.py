"""Removal of rows from written files: decided by other receives, replaced by a replay, reopened manually, or erased.

Files are immutable: files that contain the rows are rewritten without them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from pipeline_platform.lake.decisions.ledger import Ledger, Receive
from pipeline_platform.lake.failures.failure_events import RANKED, events, failure_keys
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import keys_of, only, receive_ids, row_groups
from pipeline_platform.lake.tables import DECISIONS, Table, Tables
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.message import ATTEMPT_KEY, MESSAGE_KEY

DROPPED = "dropped"
"""Name of the manifest with the number of messages that other receives decided."""


class OthersDecisions:
    """Removal of messages that other receives decide from the files of a receive.

    The keys of the receive are read once, and 8 bytes of each are kept. They are read again only if some may be among
    the added messages. Reads are bounded by row groups.
    """

    def __init__(self, tables: Tables, ledger: Ledger, receive: Receive, on_success: str) -> None:
        self._tables, self._ledger, self._receive, self._on_success = tables, ledger, receive, on_success
        self._outcomes = tables["outcomes"]
        self._hashes: np.ndarray | None = None

    def drop(self, added: Sequence[str]) -> int:
        """Drop messages that added files of `outcomes` decide from the receive's files; return their number."""
        if not added:
            return 0
        ours = [file.path for file in self._ledger.manifest(self._receive).of_table("outcomes")]
        theirs = _last_attempts(pa.concat_tables(self._shared(added, ours)))
        if not theirs.num_rows:
            return 0
        sought = _Sought(theirs)
        lost = [_lost(rows, sought) for path in ours for rows in _rows(self._outcomes, path, *ATTEMPT_KEY)]
        keys = pc.unique(pa.concat_arrays(lost))
        if len(keys):
            # Written first: if it exists, the acknowledgement publishes the other receives.
            self._ledger.write(self._receive, DROPPED, Manifest(reports=[TaskReport(dropped=len(keys))]))
            drop_rows(self._tables, self._ledger, self._receive, keys, on_success=self._on_success)
        return len(keys)

    def _shared(self, added: Sequence[str], ours: Sequence[str]) -> Iterator[pa.Table]:
        """Yield decisions in added files for messages that the receive may contain, too."""
        if self._hashes is None:
            hashed = [
                _hashes(keys_of(rows, *MESSAGE_KEY))
                for path in ours
                for rows in _rows(self._outcomes, path, *MESSAGE_KEY)
            ]
            self._hashes = np.sort(np.concatenate([*hashed, np.empty(0, np.int64)]))
        for path in added:
            for rows in _rows(self._outcomes, path, *ATTEMPT_KEY, "outcome"):
                theirs = rows.filter(pc.is_in(rows["outcome"], pa.array(DECISIONS)))
                yield theirs.filter(pa.array(_found(self._hashes, _hashes(keys_of(theirs, *MESSAGE_KEY)))[1] > 0))


def drop_rows(
    tables: Tables, ledger: Ledger, receive: Receive, keys: pa.Array, *, on_success: str | None = None
) -> None:
    """Drop rows of some messages from the batchers' files of a receive, by `keys_of` source and id.

    Safe to repeat. With `on_success`, another receive decided the messages: their failures are dropped, too, and their
    outcomes become duplicates with this ack action.
    """
    manifest, sought = ledger.manifest(receive), _Sought(pa.table({"key": keys}))

    def are_theirs(rows: pa.Table) -> pa.Array:
        mine = keys_of(rows, *MESSAGE_KEY)
        return pc.is_in(mine, sought.near(mine)["key"].combine_chunks())

    def as_duplicates(rows: pa.Table) -> pa.Table:
        theirs = are_theirs(rows)
        for column, value in (("outcome", "duplicate"), ("action", on_success)):
            index = rows.schema.get_field_index(column)
            rows = rows.set_column(index, column, pc.if_else(theirs, value, rows[column]))
        return rows

    replaced: dict[File, File | None] = {}
    # The raw log may contain a message twice, and staged files are not published.
    for name in published(manifest) - ({"messages", "outcomes", "failed"} if on_success is None else {"messages"}):
        change = as_duplicates if name == "outcomes" else lambda rows: rows.filter(pc.invert(are_theirs(rows)))
        for file in manifest.of_table(name):
            if any(pc.any(are_theirs(rows)).as_py() for rows in _rows(tables[name], file.path, *MESSAGE_KEY)):
                replaced[file] = next(iter(rewrite(tables[name], _prefix(receive), file, change)), None)
    ledger.replace_files(receive, replaced)


def published(manifest: Manifest) -> set[str]:
    """Return the tables of a manifest's files, without staged files, which are in a folder of the receive."""
    return {file.table for file in manifest if "/" not in file.table}


class Replacement:
    """Removal of the rows that a replay replaces from a table.

    Each stored file is read once, even if the commit is retried.
    """

    def __init__(self, table: Table, receive: Receive) -> None:
        self._table, self._receive = table, receive
        self._instead: dict[str, list[File] | None] = {}  # by path of a stored file; None where it stays

    def at(self, handle: DeltaTable) -> tuple[list[File], list[File]]:
        """Return the files with replaced rows, and new files with their remaining rows."""
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

        return rewrite(self._table, _prefix(self._receive), file, change)


class Reopened:
    """Removal of failures of a retry that were closed and reopened manually during the retry.

    A message must have one open event. A reopened failure has the attempt of the retry. It stays open, and the result
    of the retry is in `outcomes`.
    """

    def __init__(self, table: Table, receive: Receive, files: Sequence[File]) -> None:
        self._table, self._receive, self._files = table, receive, files
        is_retry = table.name == "failed" and receive.origin == "failed"
        paths = [table.path(file.path) for file in files if is_retry]
        mine = [failure_keys(rows) for path in paths for rows in events(table.lake, path, *RANKED)]
        self._mine = pa.chunked_array(mine, pa.string()).drop_null()

    def at(self, handle: DeltaTable) -> Sequence[File]:
        """Return the files to commit."""
        if not len(self._mine):
            return self._files
        paths = [self._table.path(file.path) for file in self._table.files(handle, self._receive.windows)]
        stored = (failure_keys(rows) for path in paths for rows in events(self._table.lake, path, *RANKED))
        reopened = pa.chunked_array((keys.filter(pc.is_in(keys, self._mine)) for keys in stored), pa.string())
        if not len(reopened):
            return self._files

        def change(rows: pa.Table) -> pa.Table:
            return rows.filter(pc.invert(pc.is_in(failure_keys(rows), reopened)))

        return [left for file in self._files for left in rewrite(self._table, _prefix(self._receive), file, change)]


class _Sought:
    """Rows by `key`, for repeated searches among the keys of row groups.

    Arrow hashes all searched values on each call, so each call gets only rows whose hash matches a key.
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
    """Return the last decided attempt of each key; 2³¹ - 1 if the message was handled or skipped."""
    at = pc.if_else(pc.equal(theirs["outcome"], "failed"), theirs["attempt"], 2**31 - 1)
    return pa.table({"key": keys_of(theirs, *MESSAGE_KEY), "at": at}).group_by("key").aggregate([("at", "max")])


def _lost(ours: pa.Table, sought: _Sought) -> pa.Array:
    """Return the keys of our messages that other receives handled, or failed at our attempt or a later one.

    A failure at an earlier attempt is the failure that a retry handles.
    """
    keys = keys_of(ours, *MESSAGE_KEY)
    theirs = sought.near(keys)
    last = theirs["at_max"].take(pc.index_in(keys, theirs["key"].combine_chunks()))
    return keys.filter(pc.fill_null(pc.greater_equal(last, ours["attempt"]), False).combine_chunks())


def _hashes(keys: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Return Python's hashes, which are stable within this process."""
    some = (keys.slice(first, 65_536).to_pylist() for first in range(0, len(keys), 65_536))
    return np.fromiter(map(hash, chain.from_iterable(some)), np.int64, len(keys))


def _found(hashes: np.ndarray, sought: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the position and the count of each sought hash among sorted hashes."""
    first = np.searchsorted(hashes, sought)
    return first, np.searchsorted(hashes, sought, "right") - first


def _prefix(receive: Receive) -> str:
    return f"{receive.receive_id}-rewritten"


def _rows(table: Table, path: str, *columns: str) -> Iterator[pa.Table]:
    return row_groups(table.lake, table.path(path), only(table.schema, *columns))


def rewrite(table: Table, prefix: str, file: File, change: Callable[[pa.Table], pa.Table]) -> list[File]:
    """Rewrite a file by row groups; return no file if no row is left."""
    groups = row_groups(table.lake, table.path(file.path))
    parts = ((table.name, file.window, change(rows)) for rows in groups)
    return write_rows(table.lake, table.pipeline, prefix, parts)
