"""Erasing of messages: their rows, payloads and failures, and all files that still contain them.

1. Wait for the receives that are in progress. They may have read the rows, and may publish them again.
2. Find the messages in all files, including files that no commit names any more.
3. Rewrite the files of the tables. `outcomes` keeps the ids as `erased`, so that no redelivery is handled again.
4. Repeat until nothing changes. Then every receive that started before the last change has ended.
5. Give messages without an outcome the outcome `erased`, so that no redelivery is handled, and delete rows in sinks.
6. Remove the old files. A file by whose values messages are found is removed last, so that a second command finds the
   same messages after a crash.
7. Remove bounds from the log.

A file that a commit may still add is not removed: of an unfinished receive, of a repair, or of another writer. A
concurrent compaction of erased rows cannot commit, because files that it replaces were removed.
"""

import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.decisions.ledger import Ledger
from pipeline_platform.lake.decisions.rewriting import rewrite
from pipeline_platform.lake.erasing.erasure_choice import QUOTES, ErasureChoice, contain
from pipeline_platform.lake.erasing.log_bounds import forget_bounds
from pipeline_platform.lake.maintenance.compaction import UnreadableFileError
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import filled, keys_of, only, row_groups
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.tables import ERASED, OUTCOMES, CommitConflictError, Table, Tables
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.message import MESSAGE_KEY
from pipeline_platform.sinks.contract import SinkError

_WRITTEN = re.compile(r"([^/]+)-[0-9a-f]{8}-\d+\.parquet")
"""Names of files of the platform: the receive or the job that wrote it, and random digits."""
_OF_RECEIVE = re.compile(r"[0-9a-f]{32}-")
_WINDOW = re.compile(r"window=([^/]+)/")
_POLL_S = 1.0
_FOREVER = {"receive_id": ERASED, "outcome": ERASED, "ack_ref": None, "ack_id": None, "action": None}
"""Columns of the outcome of an erased message."""


@dataclass
class Erased:
    """Result of an erasure, or of its preview.

    Attributes:
        ids: Ids of the messages that were found.
        undecided: Number of messages without an outcome, which get the outcome `erased`.
        rows: Rows by table, including failures of other messages that quote the text. Those of `outcomes` keep the id.
        sinks: Rows in the sinks of batchers, by batcher; None if the sink does not support it.
        windows: Windows with these rows.
        old_files: Files that no commit names, with rows of the messages.
        unfinished: Receives that did not end in time. Their rows and all old files are left.
        left: Rows that a receive in progress has written, old files that a commit may still add, and errors of sinks.
    """

    ids: list[str] = field(default_factory=list)
    undecided: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    sinks: dict[str, int | None] = field(default_factory=dict)
    windows: set[str] = field(default_factory=set)
    old_files: int = 0
    unfinished: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left."""
        return not self.unfinished and not self.left


def searched_columns(tables: Tables) -> dict[str, pa.Schema]:
    """Return the searchable columns of batchers' tables, including removed batchers."""
    columns = {}
    for table in map(tables.__getitem__, [*tables.pipeline.batchers_with_tables(), *removed_batchers(tables)]):
        columns[table.name] = table.schema
        if table.exists():
            with table.look() as handle:
                columns[table.name] = table.stored_columns(handle)
    return columns


class Erasing:
    """Erases the chosen messages of a pipeline; `log` gets the progress."""

    def __init__(self, tables: Tables, choice: ErasureChoice, log: Callable[[str], None] = lambda _: None) -> None:
        self._choice, self._log, self._lake, self._sinks = choice, log, tables.lake, tables.sinks
        self._pipeline = tables.pipeline.name
        self._ledger = Ledger(tables.lake, self._pipeline)
        names = [*tables.names, *removed_batchers(tables)]
        self._tables = [table for table in map(tables.__getitem__, names) if table.exists()]
        self._keys, self._wanted = set[str](), pa.array([], pa.string())  # `keys_of` the messages, as set and array
        self._decided = set[str]()  # those with an outcome
        self._searched: dict[str, bool] = {}  # by path: whether messages are found by the values of this file
        self._clean: dict[str, int] = {}  # by path of a file without rows of the messages: number of keys at that time

    def preview(self) -> Erased:
        """Return what would be erased now. Unpublished rows of receives in progress are not counted."""
        self._find()
        erased = Erased(self._ids(), unfinished=self._ledger.unfinished())
        for table in self._tables:
            stored = self._stored(table)
            for file in stored:
                self._add(erased, table, file, self._touched_of(table, file)[0])
            erased.old_files += sum(self._has_rows(table, path) for path in self._others(table, stored))
        erased.undecided = len(self._undecided())
        return erased

    def erase(self, timeout_s: float) -> Erased:
        """Erase, after waiting for receives in progress for at most this time. Safe to repeat, also after a crash.

        Raises:
            UnreadableFileError: A file of a table is truncated or damaged.
        """
        erased, until, is_changed = Erased(), time.monotonic() + timeout_s, True
        while is_changed and not erased.unfinished:
            erased.unfinished = self._wait(self._ledger.unfinished(), until)
            self._find()
            erased.ids = self._ids()
            is_changed = sum(self._rewrite(table, erased) for table in self._tables) > 0
        if not erased.unfinished:
            erased.undecided = len(undecided := self._undecided())
            self._decide(undecided)
            self._erase_in_sinks(erased)
            self._remove_old(erased)
            for table in self._tables:
                if table.name != "outcomes":  # its columns are ids, and a replay may read an earlier version
                    self._log(f"Removing bounds from the log of {table.pipeline}/{table.name}")
                    forget_bounds(table)
        return erased

    def _wait(self, receives: list[str], until: float) -> list[str]:
        """Wait for the end of receives; return those that have not ended in time."""
        if receives:
            self._log(f"Waiting for the receives in progress: {', '.join(receives)}")
        while (receives := sorted({*receives} & {*self._ledger.unfinished()})) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return receives

    def _find(self) -> None:
        for table in self._tables:
            with table.look() as handle:
                stored = table.stored_columns(handle)
            if columns := self._choice.columns(table.name, stored):
                self._log(f"Searching {table.pipeline}/{table.name}")
                for path in (table.path(name) for name in self._paths(table)):
                    if path not in self._searched:
                        # A file may be incomplete, because a task is writing it, or removed meanwhile.
                        with suppress(pa.ArrowInvalid, FileNotFoundError):
                            groups = row_groups(self._lake, path, only(stored, *columns))
                            keys = [key for rows in groups for key in self._choice.found(table.name, rows).to_pylist()]
                            self._keys.update(keys)
                            self._searched[path] = bool(keys)
        self._wanted = pa.array(sorted({*self._keys, *self._choice.keys}), pa.string())

    def _ids(self) -> list[str]:
        return sorted(key.partition("\0")[2] for key in self._keys)

    def _paths(self, table: Table) -> list[str]:
        names = self._lake.files(f"{table.pipeline}/{table.name}")
        return [name for name in names if name.endswith(".parquet") and not name.startswith("_delta_log/")]

    def _stored(self, table: Table) -> list[File]:
        with table.look() as handle:
            return table.files(handle)

    def _others(self, table: Table, stored: Collection[File]) -> list[str]:
        if table.name == "outcomes":  # they contain ids only, and maintenance removes them
            return []
        return sorted({*self._paths(table)} - {file.path for file in stored})

    def _masks(self, table: Table, rows: pa.Table) -> tuple[pa.Array, pa.Array]:
        """Return whether each row is of an erased message, and whether it is to be changed or removed."""
        mine = pc.is_in(keys_of(rows, *MESSAGE_KEY), self._wanted)
        if table.name == "outcomes":
            return mine, pc.and_not(mine, pc.is_in(rows["outcome"], pa.array([ERASED])).combine_chunks())
        if table.name == "failed" and self._choice.containing:
            quotes = reduce(pc.or_, (contain(rows[name], self._choice.containing) for name in QUOTES))
            return mine, pc.or_(mine, quotes.combine_chunks())
        return mine, mine

    def _touched(self, table: Table, path: str, busy: Collection[str] = ()) -> tuple[int, int]:
        """Return the number of rows of a file to change or remove, and how many are of the receives `busy`."""
        place = table.path(path)
        if self._clean.get(place) == len(self._keys):
            return 0, 0
        more = {"outcomes": ("outcome",), "failed": QUOTES}.get(table.name, ())
        columns = pa.schema({name: pa.string() for name in (*MESSAGE_KEY, "receive_id", *more)})
        receives, touched, theirs = pa.array(sorted(busy), pa.string()), 0, 0
        for rows in row_groups(self._lake, place, columns):
            mine, mask = self._masks(table, rows)
            if table.name == "outcomes":
                self._decided.update(keys_of(rows, *MESSAGE_KEY).filter(mine).to_pylist())
            touched += mask.true_count
            theirs += pc.and_(mask, pc.is_in(rows["receive_id"], receives).combine_chunks()).true_count
        if not touched:
            self._clean[place] = len(self._keys)
        return touched, theirs

    def _touched_of(self, table: Table, file: File, busy: Collection[str] = ()) -> tuple[int, int]:
        try:
            return self._touched(table, file.path, busy)
        except (pa.ArrowException, OSError) as error:
            raise UnreadableFileError.of(table, file, error) from error

    def _has_rows(self, table: Table, name: str, busy: Collection[str] | None = None) -> bool:
        """Whether a file that no commit names has rows to erase, or is incomplete and its receive has ended."""
        with suppress(FileNotFoundError):
            try:
                return self._touched(table, name)[0] > 0
            except pa.ArrowInvalid:
                is_of_receive = _OF_RECEIVE.match(name.rpartition("/")[2])
                return busy is not None and bool(is_of_receive) and self._is_over(table, name, busy)
        return False

    def _add(self, erased: Erased, table: Table, file: File, rows: int) -> None:
        if rows:
            erased.rows[table.name] += rows
            erased.windows.add(file.window)

    def _rewrite(self, table: Table, erased: Erased) -> int:
        """Rewrite the files of a table, with a commit for each window; return the number of rewritten files."""
        busy = set(self._ledger.unfinished())
        windows = set()
        for file in self._stored(table):
            touched, theirs = self._touched_of(table, file, busy)
            windows |= {file.window} if touched > theirs else set()
        return sum(self._rewrite_window(table, window, busy, erased) for window in sorted(windows))

    def _rewrite_window(self, table: Table, window: str, busy: Collection[str], erased: Erased) -> int:
        self._log(f"Rewriting {table.pipeline}/{table.name}, window {window}")
        instead: dict[str, tuple[int, list[File]]] = {}  # by path: number of rows to erase, and files with the others
        receives, rewritten_files = pa.array(sorted(busy), pa.string()), 0

        def change(rows: pa.Table) -> pa.Table:
            is_theirs = pc.is_in(rows["receive_id"], receives).combine_chunks()
            mine, touched = (pc.and_not(mask, is_theirs) for mask in self._masks(table, rows))
            if table.name == "outcomes":
                return _replaced(rows, touched, _FOREVER)
            if table.name == "failed":
                rows = _replaced(rows, touched, dict.fromkeys(QUOTES, ""))
            return rows.filter(pc.invert(mine))

        while True:
            with table.look() as handle, suppress(CommitConflictError):
                stored = table.files(handle, [window])
                for file in stored:
                    if file.path not in instead:
                        touched, theirs = self._touched_of(table, file, busy)
                        rewritten = rewrite(table, "erased", file, change) if touched > theirs else []
                        instead[file.path] = touched - theirs, rewritten
                removed = [file for file in stored if instead[file.path][0]]
                if removed:
                    rewritten_files = len(removed)  # also if the connection is lost during a commit that succeeds
                    added = [new for file in removed for new in instead[file.path][1]]
                    # Compaction does the same to `outcomes`: its rows decide nothing new.
                    is_new = table.name != "outcomes"
                    table.swap(handle, f"erase-{uuid.uuid4().hex}", added, removed=removed, is_new=is_new)
                for file in removed:
                    self._add(erased, table, file, instead[file.path][0])
                return rewritten_files

    def _undecided(self) -> list[str]:
        """Return the messages without an outcome: their receive crashed before it decided, or their ids were given.

        They are redelivered, unless they are deleted at the source.
        """
        return sorted({*self._wanted.to_pylist()} - self._decided)

    def _decide(self, undecided: list[str]) -> None:
        """Record messages that have no outcome as erased, in the newest window."""
        windows = (_WINDOW.search(path) for table in self._tables for path in self._paths(table))
        window = max((found[1] for found in windows if found), default=None)
        outcomes = next((table for table in self._tables if table.name == "outcomes"), None)
        if not undecided or window is None or outcomes is None:
            return
        keys = zip(*(key.partition("\0")[::2] for key in undecided), strict=True)
        rows = pa.table(dict(zip(MESSAGE_KEY, keys, strict=True)))
        columns = pa.schema([field for field in OUTCOMES if field.name != "window"])
        added = filled(rows, columns, attempt=1, **_FOREVER).cast(columns)
        files = write_rows(self._lake, outcomes.pipeline, "erased", [(outcomes.name, window, added)])
        while True:
            with outcomes.look() as handle, suppress(CommitConflictError):
                outcomes.swap(handle, f"erase-{uuid.uuid4().hex}", files)
                return

    def _erase_in_sinks(self, erased: Erased) -> None:
        messages: dict[str, list[str]] = {}
        for source, message_id in (key.partition("\0")[::2] for key in self._wanted.to_pylist()):
            messages.setdefault(source, []).append(message_id)
        for name, sink in self._sinks.items() if messages else ():
            self._log(f"Deleting rows of {name} in sink {sink.name}")
            try:
                erased.sinks[name] = sink.erase(self._pipeline, name, messages)
            except SinkError as error:
                erased.left.append(f"rows of {name}: {error}")

    def _remove_old(self, erased: Erased) -> None:
        """Remove files that no commit names, if no commit can add them any more."""
        old, is_needed = list[str](), bool(erased.left)
        for table in self._tables:
            names = self._paths(table)  # listed first: a file of a receive that started later is not among them
            busy = self._ledger.unfinished()
            stored = self._stored(table)
            if rows := sum(self._touched_of(table, file)[0] for file in stored):
                erased.left.append(f"{table.pipeline}/{table.name}: rows that a receive wrote meanwhile ({rows})")
                is_needed = True
            for name in {*names} & {*self._others(table, stored)}:
                if not self._has_rows(table, name, busy):
                    continue
                path = table.path(name)
                if not rows and self._is_over(table, name, busy):
                    old.append(path)
                else:
                    erased.left.append(path)
                    is_needed |= not self._searched.get(path)
        # The next command finds the remaining messages by the values in the last files.
        for path in sorted(old, key=lambda path: self._searched.get(path, False)):
            if not (is_needed and self._searched.get(path)):
                self._log(f"Removing {path}")
                self._lake.remove_file(path)
                erased.old_files += 1

    def _is_over(self, table: Table, name: str, busy: Collection[str]) -> bool:
        """Whether no commit can add a file that no commit names now."""
        if found := _WRITTEN.fullmatch(name.rpartition("/")[2]):
            return found[1] != "repair" and not any(found[1].startswith(receive_id) for receive_id in busy)
        log = f"{table.pipeline}/{table.name}/_delta_log"
        commits = (self._lake.read(f"{log}/{each}") for each in self._lake.names(log) if each.endswith(".json"))
        actions = (json.loads(line) for commit in commits if commit for line in commit.splitlines())
        return any(unquote(action["remove"]["path"]) == name for action in actions if action.get("remove"))


def _replaced(rows: pa.Table, where: pa.Array, values: dict[str, str | None]) -> pa.Table:
    for column, value in values.items():
        index = rows.schema.get_field_index(column)
        kept = rows.column(index)
        rows = rows.set_column(index, rows.schema.field(index), pc.if_else(where, pa.scalar(value, kept.type), kept))
    return rows
