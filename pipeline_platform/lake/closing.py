"""Failures that a person closes, and opens again: events in the table of failures, as those that runs write."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake import failure_events
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import filled, keys_of
from pipeline_platform.lake.tables import FAILED, CommitConflictError, Tables
from pipeline_platform.lake.writer import write_rows

BY_HAND = "closed by hand"
"""The kind of an event that a person closed a failure with; its reason says who did and why."""

_KEPT = [name for name in FAILED.names if name != "window"]
_ATTEMPT = (*failure_events.KEY, "attempt")


def close(tables: Tables, failed: FailedMessages, who: str, why: str) -> int:
    """Close the failures of a selection: no backfill drives them any more; return how many.

    A run that drives one of them at this moment has the last word.
    """
    return _commit(tables, failed, lambda: _closing(failed, f"{who}: {why}"))


def reopen(tables: Tables, failed: FailedMessages) -> int:
    """Open failures again that people closed, by id and source of the selection; return how many.

    Each is open at the next attempt, with its payload and its own reason; only a backfill by hand drives it.
    """
    return _commit(tables, failed, lambda: _opening(failed))


def _closing(failed: FailedMessages, reason: str) -> Iterator[tuple[str, pa.Table]]:
    end = {"state": "closed", "kind": BY_HAND, "reason": reason, "due_at": None, "at": datetime.now(UTC)}
    for window, paths in failed.paths().items():
        some = failure_events.chosen(failed.lake, paths, failed.selection)
        for rows in failure_events.rows_of(failed.lake, paths, some, failed.selection, "receive_id"):
            yield window, filled(rows, FAILED, **end)


def _opening(failed: FailedMessages) -> Iterator[tuple[str, pa.Table]]:
    only = failed.selection
    for window, paths in failed.paths().items():
        some = failure_events.closed(failed.lake, paths)
        for name, value in (("message_id", only.message_id), ("source", only.source)):
            some = some if value is None else some.filter(pc.equal(some[name], value))
        ends = failure_events.rows_of(failed.lake, paths, some, failed.selection, "kind")
        mine = [keys_of(rows.filter(pc.equal(rows["kind"], BY_HAND)), *_ATTEMPT) for rows in ends]
        closed = pa.chunked_array(mine, pa.string())
        for path in paths if len(closed) else ():
            # Payloads of those files alone that hold one of them.
            if not any(
                len(_failures(rows, closed)) for rows in failure_events.events(failed.lake, path, "state", *_ATTEMPT)
            ):
                continue
            for rows in failure_events.events(failed.lake, path, *_KEPT):
                failures = _failures(rows, closed)
                attempt = pc.add(failures["attempt"], pa.scalar(1, pa.int32()))
                yield window, filled(failures, FAILED, state="open", attempt=attempt, due_at=None, at=datetime.now(UTC))


def _failures(rows: pa.Table, closed: pa.ChunkedArray) -> pa.Table:
    """The failures among events whose attempts are these."""
    is_one = pc.and_(pc.not_equal(rows["state"], "closed"), pc.is_in(keys_of(rows, *_ATTEMPT), closed))
    return rows.filter(is_one)


def _commit(tables: Tables, failed: FailedMessages, events: Callable[[], Iterator[tuple[str, pa.Table]]]) -> int:
    table, transaction, looked, files = tables["failed"], f"by-hand-{uuid.uuid4().hex}", -1, list[File]()
    while table.exists():
        with table.look() as handle, suppress(CommitConflictError):
            # What is added meanwhile needs no other look; of what a replay took out, these are no events any more.
            if looked < 0 or table.lost_rows_since(handle, looked):
                looked, parts = handle.version(), ((table.name, window, rows) for window, rows in events())
                files = write_rows(failed.lake, failed.pipeline, transaction, parts)
            if files:
                table.swap(handle, transaction, files)
            break
    return sum(file.rows for file in files)
