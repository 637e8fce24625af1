"""Manual closing and reopening of failures, by events in the table of failures."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.failures import failure_events
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import Failures
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import filled, keys_of
from pipeline_platform.lake.tables import FAILED, CommitConflictError, Table, Tables
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.message import ATTEMPT_KEY, MESSAGE_KEY

if TYPE_CHECKING:
    from deltalake import DeltaTable

BY_HAND = "closed by hand"
"""Kind of the event of a manual close; its reason contains the user and their reason."""

Progress = Callable[[int], object]


def no_progress(done: int) -> None:
    """Report nothing."""


_KEPT = [name for name in FAILED.names if name != "window"]


def close(tables: Tables, failed: FailedMessages, who: str, why: str, progress: Progress = no_progress) -> int:
    """Close the failures of a selection, so that no retry handles them; return their number.

    If a run is retrying one of them now, the result of the run takes precedence. `progress` is called with the number
    of closed failures after each part.
    """
    return _commit(tables, failed, lambda: _closing(failed, f"{who}: {why}"), progress)


def reopen(tables: Tables, failed: FailedMessages, progress: Progress = no_progress) -> int:
    """Reopen manually closed failures of the selection, whose `state` is ignored; return their number.

    Each failure is open at the next attempt, with its payload and its original reason; only a manual retry retries
    it. If a run retries it meanwhile and fails at the same attempt, the reopened failure stays.
    """
    return _commit(tables, failed, lambda: _opening(failed), progress)


def closed_manually(failed: FailedMessages) -> Iterator[tuple[str, Failures]]:
    """Yield the failures that a person closed, by window, as they were before."""
    for window, paths in failed.paths().items():
        ends = failure_events.closed(failed.lake, paths, failed.selection)
        kinds = [pc.fill_null(pc.equal(rows["kind"], BY_HAND), False).to_numpy() for rows in ends.rows("kind")]
        if kinds and (mine := ends.numbers[np.concatenate(kinds)]).size:
            yield window, Failures(ends.events, ends.events.failures_before(mine), failed.selection)


def _closing(failed: FailedMessages, reason: str) -> Iterator[tuple[str, pa.Table]]:
    end = {"state": "closed", "kind": BY_HAND, "reason": reason, "due_at": None, "at": datetime.now(UTC)}
    for window, paths in failed.open_files().items():
        for rows in failure_events.chosen(failed.lake, paths, failed.selection).rows(*ATTEMPT_KEY, "receive_id"):
            yield window, filled(rows, FAILED, **end)


def _opening(failed: FailedMessages) -> Iterator[tuple[str, pa.Table]]:
    for window, closed in closed_manually(failed):
        for failures in closed.rows(*_KEPT):
            attempt = pc.add(failures["attempt"], pa.scalar(1, pa.int32()))
            yield window, filled(failures, FAILED, state="open", attempt=attempt, due_at=None, at=datetime.now(UTC))


def _commit(
    tables: Tables, failed: FailedMessages, events: Callable[[], Iterator[tuple[str, pa.Table]]], progress: Progress
) -> int:
    """Commit events; if other commits changed these failures since they were read, read them again.

    If several commands close or reopen a failure at the same time, only one of them has an effect.
    """
    table, transaction, looked, files = tables["failed"], f"by-hand-{uuid.uuid4().hex}", -1, list[File]()
    while table.exists():
        with table.look() as handle, suppress(CommitConflictError):
            if looked < 0 or _changed(table, handle, looked, files):
                looked, parts = handle.version(), ((table.name, window, rows) for window, rows in events())
                files = write_rows(failed.lake, failed.pipeline, transaction, _counting(parts, progress))
            if files:
                table.swap(handle, transaction, files)
            break
    return sum(file.rows for file in files)


def _counting(parts: Iterable[tuple[str, str, pa.Table]], progress: Progress) -> Iterator[tuple[str, str, pa.Table]]:
    """Yield parts, and report the number of rows after each."""
    done = 0
    for part in parts:
        yield part
        done += part[2].num_rows
        progress(done)


def _changed(table: Table, handle: DeltaTable, looked: int, files: Sequence[File]) -> bool:
    """Whether a commit after version `looked` removed events, or added events of messages in these files."""
    if table.lost_rows_since(handle, looked):
        return True
    added = [table.path(path) for path in table.added_since(handle, looked)]
    mine = pa.chunked_array(_message_keys(table, [table.path(file.path) for file in files]), pa.string())
    return any(pc.any(pc.is_in(theirs, mine)).as_py() for theirs in _message_keys(table, added))


def _message_keys(table: Table, paths: Iterable[str]) -> Iterator[pa.Array]:
    for path in paths:
        for rows in failure_events.events(table.lake, path, *MESSAGE_KEY):
            yield keys_of(rows, *MESSAGE_KEY)
