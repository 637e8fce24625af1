"""Failures for display: groups with the same state and reason, the history of a message, and returned messages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.failures import failure_events
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.reader import keys_of, only, row_groups, rows_with
from pipeline_platform.lake.tables import DECISIONS, FAILED, OUTCOMES, Table
from pipeline_platform.model.failure import causes
from pipeline_platform.model.message import MESSAGE_KEY

GROUPS = 10_000
"""Greatest number of groups that are counted. Beyond it, the smallest are dropped."""


class Group(NamedTuple):
    """Failures with the same state, kind and cause, of all windows.

    Attributes:
        messages: Number of failures.
        state: `waiting`, `due`, `dead` or `closed`.
        kind: Kind of the latest event; may be empty for closed failures.
        cause: Reason without the values that differ, or the reason if all have the same; may be empty.
        first: Time of the first failure, by the latest event of each message.
        last: Time of the last failure.
        first_window: Oldest window.
        last_window: Newest window.
        due_at: Time when the first failure is due; None if no failure has a due time.
        example: Id of a message.
    """

    messages: int
    state: str
    kind: str
    cause: str
    first: datetime
    last: datetime
    first_window: str
    last_window: str
    due_at: datetime | None
    example: str


class Grouped(NamedTuple):
    """Groups of failures, the largest first, and of equal ones the newest; and the number of all failures."""

    groups: list[Group]
    messages: int


@dataclass
class _Counted:
    """Failures of a group that are counted so far. The reason is None if they have several."""

    messages: int
    reason: str | None
    first: datetime
    last: datetime
    due_at: datetime | None
    example: str
    first_window: str
    last_window: str

    def add(self, other: "_Counted") -> None:
        self.messages += other.messages
        self.reason = self.reason if self.reason == other.reason else None
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.first_window = min(self.first_window, other.first_window)
        self.last_window = max(self.last_window, other.last_window)
        self.due_at = min((due for due in (self.due_at, other.due_at) if due), default=None)

    def group(self, key: "_Key") -> Group:
        state, kind, cause = key
        text = cause if self.reason is None else self.reason
        windows = self.first_window, self.last_window
        return Group(self.messages, state, kind, text, self.first, self.last, *windows, self.due_at, self.example)


_Key = tuple[str, str, str]
_Groups = dict[_Key, _Counted]


def grouped(failed: FailedMessages, now: datetime, *, closed: bool = False) -> Grouped:
    """Group the failures of a selection by state, kind and cause. Memory is bounded by `GROUPS`.

    Failures are due as of `now`. With `closed`, return closed failures instead of open ones.
    """
    look, files = (failure_events.closed, failed.paths()) if closed else (failure_events.chosen, failed.open_files())
    found, messages = _Groups(), 0
    for window, paths in sorted(files.items()):
        failures = look(failed.lake, paths, failed.selection)
        for rows in failures.rows("message_id", "state", "due_at", "kind", "reason", "at"):
            messages += rows.num_rows
            for key, counted in _groups(rows, window, now).items():
                if key in found:
                    found[key].add(counted)
                else:
                    found[key] = counted
            if len(found) > 2 * GROUPS:
                found = dict(_largest(found)[:GROUPS])
    return Grouped([counted.group(key) for key, counted in _largest(found)], messages)


def _largest(found: _Groups) -> list[tuple[_Key, _Counted]]:
    by_key = sorted(found.items(), key=itemgetter(0))
    return sorted(by_key, key=lambda each: (each[1].messages, each[1].last), reverse=True)


_NAMED = ("state", "kind", "cause")
_COUNTS = [
    ("message_id", "count"),
    *((name, kind) for name in ("reason", "at") for kind in ("min", "max")),
    ("due_at", "min"),
    ("message_id", "min"),
]


def _groups(rows: pa.Table, window: str, now: datetime) -> _Groups:
    """Count the groups of some rows of a window."""
    kind, reason = (pc.fill_null(rows[name], "") for name in ("kind", "reason"))
    texts = {"state": _states(rows, now), "kind": kind, "cause": causes(reason), "reason": reason}
    table = pa.table(texts | {name: rows[name] for name in ("message_id", "at", "due_at")})
    counted = table.group_by(list(_NAMED)).aggregate(_COUNTS)
    least, most = counted["reason_min"], counted["reason_max"]
    counts = [
        counted["message_id_count"],
        pc.if_else(pc.equal(least, most), least, pa.scalar(None, pa.string())),
        *(counted[name] for name in ("at_min", "at_max", "due_at_min", "message_id_min")),
    ]
    columns = [*(counted[name] for name in _NAMED), *counts]
    return {
        (state, kind, cause): _Counted(count, same, first, last, due, example, window, window)
        for state, kind, cause, count, same, first, last, due, example in zip(
            *(column.to_pylist() for column in columns), strict=True
        )
    }


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
    columns, times, first = only(OUTCOMES, *MESSAGE_KEY, "outcome"), Counter[str](), dict[str, str]()
    for file in files:
        for rows in rows_with(outcomes.lake, outcomes.path(file.path), "outcome", "returned", columns):
            for key in keys_of(rows, *MESSAGE_KEY).to_pylist():
                times[key] += 1
                first.setdefault(key, file.window)
    again = {key for key, count in times.items() if count > 1}
    for file in files if again else ():
        for rows in row_groups(outcomes.lake, outcomes.path(file.path), columns):
            decided = keys_of(rows.filter(pc.is_in(rows["outcome"], pa.array(DECISIONS))), *MESSAGE_KEY)
            again -= set(decided.filter(pc.is_in(decided, pa.array(list(again), pa.string()))).to_pylist())
    if not again:
        return None
    return ComingBack(len(again), max(times[key] for key in again), min(first[key] for key in again))
