"""Repair of tables: unreadable files are removed, and outcomes of their messages are recorded again."""

import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.decisions.decided import are_decided
from pipeline_platform.lake.decisions.ledger import Ledger
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import filled, is_whole, keys_of, only, row_groups, whole
from pipeline_platform.lake.tables import FAILED, OUTCOMES, CommitConflictError, Table, Tables
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.message import ATTEMPT_KEY, DELIVERY_KEY, MESSAGES, PAYLOAD

_RECEIVED = only(MESSAGES, *DELIVERY_KEY, "receive_id", *PAYLOAD)
_TRIES = 10
_REASON = "the outcome of the message was in an unreadable file"


def unreadable(tables: Tables) -> list[File]:
    """Return the incomplete files of a pipeline's tables: without a footer, or with another size than in the log."""
    return [file for name in tables.names for file in _broken(tables[name])]


def repair(tables: Tables) -> int:
    """Remove unreadable files from their tables; return the number of recorded open failures.

    The files stay on disk until maintenance removes them. A lost outcome is restored from the message's failure or row.
    A message with neither is a duplicate if another window has decided it. Otherwise, it becomes an open failure, with
    its payload, which a retry handles. Lost rows of a message with a known outcome are restored by a replay of the
    window.

    Raises:
        CommitConflictError: Other commits came first in all attempts; try again.
    """
    broken = unreadable(tables)
    lost = [file for file in broken if file.table == "outcomes"]
    again = 0
    for window in sorted({file.window for file in lost}):
        again += _record(tables, window, lost)
    for name in dict.fromkeys(file.table for file in broken if file.table != "outcomes"):
        _swap(tables[name], [], [file for file in broken if file.table == name])
    return again


def _broken(table: Table) -> list[File]:
    if not table.exists():
        return []
    with table.look() as handle:
        return [file for file in table.files(handle) if not is_whole(table.lake, table.path(file.path), file)]


def _record(tables: Tables, window: str, broken: Sequence[File]) -> int:
    """Record outcomes of a window's messages whose outcome is lost, in place of the window's broken files."""
    receives, _ = Ledger(tables.lake, tables.pipeline.name).under_way()
    under_way = pa.array([receive.receive_id for receive in receives], pa.string())
    received = _rows(tables["messages"], window, _RECEIVED)
    known = keys_of(_rows(tables["outcomes"], window, only(OUTCOMES, *ATTEMPT_KEY)), *ATTEMPT_KEY)
    is_known = pc.is_in(keys_of(received, *ATTEMPT_KEY), known)
    received = received.filter(pc.invert(pc.or_(is_known, pc.is_in(received["receive_id"], under_way))))
    failed = keys_of(_rows(tables["failed"], window, only(FAILED, *ATTEMPT_KEY)), *ATTEMPT_KEY)
    columns = only(OUTCOMES, *ATTEMPT_KEY)  # which are in every table
    rows = [
        keys_of(_rows(tables[name], window, columns), *ATTEMPT_KEY) for name in tables.pipeline.batchers_with_tables()
    ]
    keys, handled = keys_of(received, *ATTEMPT_KEY), pa.concat_arrays([pa.array([], pa.string()), *rows])
    has_failed, is_handled = pc.is_in(keys, failed), pc.is_in(keys, handled)
    is_duplicate = pc.and_not(_are_decided_elsewhere(tables, received, window, broken), pc.or_(has_failed, is_handled))
    outcome = pc.if_else(is_handled, "handled", pc.if_else(is_duplicate, "duplicate", "failed"))
    outcomes = filled(received, OUTCOMES, outcome=outcome, action="noop")
    lost = received.filter(pc.invert(pc.or_(has_failed, pc.or_(is_handled, is_duplicate))))
    failures = filled(lost, FAILED, state="open", stage="repair", kind="unknown", reason=_REASON, at=datetime.now(UTC))
    parts = ("outcomes", window, outcomes), ("failed", window, failures)
    written = write_rows(tables.lake, tables.pipeline.name, "repair", parts)
    _swap(tables["failed"], [file for file in written if file.table == "failed"], [])
    replaced = [file for file in broken if file.window == window]
    _swap(tables["outcomes"], [file for file in written if file.table == "outcomes"], replaced)
    return int(lost.num_rows)


def _are_decided_elsewhere(tables: Tables, messages: pa.Table, window: str, broken: Sequence[File]) -> pa.Array:
    with tables["outcomes"].look() as handle:
        files = tables["outcomes"].files(handle)
    others = [file for file in files if file.window != window and file not in broken]
    return are_decided(tables.lake, messages, whole(others, tables.pipeline.name))


def _rows(table: Table, window: str, columns: pa.Schema) -> pa.Table:
    def groups() -> Iterator[pa.Table]:
        with table.look() as handle:
            files = table.files(handle, [window])
        for file in files:
            if is_whole(table.lake, table.path(file.path), file):
                yield from row_groups(table.lake, table.path(file.path), columns)

    return pa.concat_tables([columns.empty_table(), *groups()]) if table.exists() else columns.empty_table()


def _swap(table: Table, added: Sequence[File], removed: Sequence[File]) -> None:
    for attempt in range(_TRIES if added or removed else 0):
        with table.look() as handle:
            try:
                table.swap(handle, f"repair-{uuid.uuid4().hex}", added, removed=removed)
                break
            except CommitConflictError:
                if attempt == _TRIES - 1:
                    raise
