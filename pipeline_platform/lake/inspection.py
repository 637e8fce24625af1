"""Failures for display: groups with the same state and reason, the history of a message, and returned messages."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake import failure_events
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.reader import only, row_groups, rows_with
from pipeline_platform.lake.tables import DECISIONS, FAILED, OUTCOMES, Table

IDS = 10
"""Greatest number of ids of a group."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Group(NamedTuple):
    """Failures of a window with the same state, kind and reason.

    Attributes:
        window: Window of the failures.
        state: `waiting`, `due`, `dead` or `closed`.
        kind: Kind of the latest event; may be empty for closed failures.
        reason: Reason of the latest event; may be empty for closed failures.
        messages: Number of failures.
        due_at: Time when the first failure is due; None if no failure has a due time.
        ids: Ids of some messages.
    """

    window: str
    state: str
    kind: str
    reason: str
    messages: int
    due_at: datetime | None
    ids: list[str]


@dataclass
class _Count:
    messages: int = 0
    due: int | None = None
    ids: list[str] = field(default_factory=list)


def grouped(failed: FailedMessages, now: datetime, *, closed: bool = False) -> list[Group]:
    """Group the failures of a selection by window, state, kind and reason; the largest group of a window first.

    Failures are due as of `now`. With `closed`, return closed failures instead of open ones.
    """
    found: dict[tuple[str, str, str, str], _Count] = defaultdict(_Count)
    for window, paths in sorted(failed.paths().items()):
        some = (
            failure_events.closed(failed.lake, paths)
            if closed
            else failure_events.chosen(failed.lake, paths, failed.selection)
        )
        for rows in failure_events.rows_of(failed.lake, paths, some, failed.selection, "kind", "reason"):
            due = pc.cast(rows["due_at"], pa.int64())  # faster than a `datetime` per row
            states = _states(rows, now)
            shown = (states, rows["kind"], rows["reason"], rows["message_id"], due)
            columns = [column.to_pylist() for column in shown]
            for state, kind, reason, message_id, due_at in zip(*columns, strict=True):
                count = found[window, state, kind or "", reason or ""]
                count.messages += 1
                if len(count.ids) < IDS:
                    count.ids.append(message_id)
                if due_at is not None and (count.due is None or due_at < count.due):
                    count.due = due_at
    groups = [Group(*key, count.messages, _time(count.due), count.ids) for key, count in found.items()]
    return sorted(groups, key=lambda group: (group.window, -group.messages, group[1:4]))


def _time(us: int | None) -> datetime | None:
    return None if us is None else _EPOCH + timedelta(microseconds=us)


def _states(rows: pa.Table, now: datetime) -> pa.ChunkedArray:
    due = pc.fill_null(pc.less_equal(rows["due_at"], pa.scalar(now, rows["due_at"].type)), False)
    return pc.if_else(pc.equal(rows["state"], "open"), pc.if_else(due, "due", "waiting"), rows["state"])


def state_of_failure(event: Mapping[str, Any], now: datetime) -> str:
    """Return the state of a failure at a time, by its latest event."""
    row = pa.table({name: pa.array([event[name]], FAILED.field(name).type) for name in ("state", "due_at")})
    return str(_states(row, now)[0].as_py())


def history(failed: FailedMessages, message_id: str) -> list[dict[str, Any]]:
    """Return all events of a message id, each with its window, ordered by source and rank."""
    found: list[tuple[str, int, dict[str, Any]]] = []
    for window, paths in failed.paths().items():
        for path in paths:
            for mine in failure_events.events(failed.lake, path, *_SHOWN, message_id=message_id):
                ranks: Sequence[int] = failure_events.rank(mine).to_pylist()
                found += [
                    (row["source"], rank, {"window": window, **row})
                    for row, rank in zip(mine.to_pylist(), ranks, strict=True)
                ]
    return [event for _, _, event in sorted(found, key=lambda each: each[:2])]


_SHOWN = (
    *failure_events.RANKED,
    *("stage", "kind", "reason", "traceback", "batcher", "batch_key", "data", "metadata", "at", "receive_id"),
)


WINDOWS = 48
"""Number of newest windows with outcomes to search: a message that is always returned appears in them."""


class ComingBack(NamedTuple):
    """Messages returned at least twice, the greatest number of returns of a message, and the oldest window."""

    messages: int
    deliveries: int
    oldest: str


def coming_back(outcomes: Table) -> ComingBack | None:
    """Return undecided messages that were returned at least twice in the newest windows, or None."""
    if not outcomes.exists():
        return None
    with outcomes.look() as handle:
        files = outcomes.files(handle)
    newest = set(sorted({file.window for file in files})[-WINDOWS:])
    files = sorted((file for file in files if file.window in newest), key=lambda file: file.window)
    columns, times, first = only(OUTCOMES, "message_id", "outcome"), Counter[str](), dict[str, str]()
    for file in files:
        for rows in rows_with(outcomes.lake, outcomes.path(file.path), "outcome", "returned", columns):
            for message_id in rows["message_id"].to_pylist():
                times[message_id] += 1
                first.setdefault(message_id, file.window)
    again = {message_id for message_id, count in times.items() if count > 1}
    for file in files if again else ():
        for rows in row_groups(outcomes.lake, outcomes.path(file.path), columns):
            is_returned = pc.is_in(rows["message_id"], pa.array(list(again), pa.string()))
            is_decided = pc.is_in(rows["outcome"], pa.array(DECISIONS))
            again -= set(rows.filter(pc.and_(is_returned, is_decided))["message_id"].to_pylist())
    if not again:
        return None
    return ComingBack(len(again), max(times[id_] for id_ in again), min(first[id_] for id_ in again))
