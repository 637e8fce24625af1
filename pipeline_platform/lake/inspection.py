"""Failures as people look at them: counted by what is said of them, and one with its whole history."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake import events
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.reader import row_groups

IDS = 10
"""Messages of a group that are named."""


class Group(NamedTuple):
    """Failures of which the same is said.

    Attributes:
        window: Theirs.
        state: `waiting`, `due`, `dead` or `closed`.
        kind: As the latest event says; empty for closed ones.
        reason: The same.
        messages: How many.
        due_at: When the first of them is due; None where none ever is.
        ids: Some of them.
    """

    window: str
    state: str
    kind: str
    reason: str
    messages: int
    due_at: datetime | None
    ids: list[str]


def grouped(failed: FailedMessages, now: datetime, *, closed: bool = False) -> list[Group]:
    """Group the failures of a selection by window, state, kind and reason; the largest group of a window first.

    Args:
        failed: Gives them.
        now: What `due` goes by.
        closed: Those that are closed, in place of the open ones of the selection.
    """
    found: dict[tuple[str, str, str, str], Group] = {}
    for window, paths in sorted(failed.paths().items()):
        some = events.closed(failed.lake, paths) if closed else events.chosen(failed.lake, paths, failed.selection)
        for rows in events.rows_of(failed.lake, paths, some, failed.selection, "kind", "reason"):
            for row in rows.to_pylist():
                _count(found, window, row, now)
    return sorted(found.values(), key=lambda group: (group.window, -group.messages, group[1:4]))


def _count(found: dict[tuple[str, str, str, str], Group], window: str, row: dict[str, Any], now: datetime) -> None:
    key = window, state_of(row, now), row["kind"] or "", row["reason"] or ""
    group = found.get(key) or Group(*key, 0, None, [])
    if group.messages < IDS:
        group.ids.append(row["message_id"])
    due_at = min(filter(None, (group.due_at, row["due_at"])), default=None)
    found[key] = group._replace(messages=group.messages + 1, due_at=due_at)


def state_of(event: dict[str, Any], now: datetime) -> str:
    """What the latest event of a message says of it at a time."""
    if event["state"] != "open":
        return str(event["state"])
    return "due" if event["due_at"] is not None and event["due_at"] <= now else "waiting"


def history(failed: FailedMessages, message_id: str) -> list[dict[str, Any]]:
    """All events of a message id, each with its window, in the order in which they count; of each source apart."""
    found: list[tuple[str, int, dict[str, Any]]] = []
    for window, paths in failed.paths().items():
        for path in paths:
            known = (_of_id(rows, message_id).num_rows for rows in row_groups(failed.lake, path, "message_id"))
            if not any(known):  # payloads are read only where there are some of this message
                continue
            for rows in events.events(failed.lake, path, *_SHOWN):
                mine = _of_id(rows, message_id)
                ranks: Sequence[int] = events.rank(mine).to_pylist()
                found += [
                    (row["source"], rank, {"window": window, **row})
                    for row, rank in zip(mine.to_pylist(), ranks, strict=True)
                ]
    return [event for _, _, event in sorted(found, key=lambda each: each[:2])]


def _of_id(rows: pa.Table, message_id: str) -> pa.Table:
    return rows.filter(pc.equal(rows["message_id"], message_id))


_SHOWN = (
    *events.RANKED,
    *("stage", "kind", "reason", "traceback", "batcher", "batch_key", "data", "metadata", "at", "receive_id"),
)
