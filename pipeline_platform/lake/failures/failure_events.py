"""Events of failed messages: the rank of an event, the latest event of a message, and selections of failures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AwareDatetime, BaseModel, Field

from pipeline_platform.lake.reader import keys_of, only, row_groups, rows_with
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED
from pipeline_platform.model.failure import cause_of, causes
from pipeline_platform.model.message import ATTEMPT_KEY, MESSAGE_KEY

State = Literal["open", "waiting", "due", "dead"]
"""State of a failure that is not closed: `open` for all, `waiting` if not dead, `due` if its retry is due."""


class Selection(BaseModel, frozen=True, extra="forbid"):
    """Criteria for failures, by the latest event of each; all must match. Default: all open failures, dead or not."""

    state: State = Field("open", description="`open` (all), `waiting` (not dead), `due` or `dead`.")
    message_id: str | None = Field(None, description="Id of a single message.")
    source: str | None = Field(None, description="Name of a source, because ids are unique per source.")
    kind: str | None = Field(None, description="Kind of the failure, exactly.")
    reason: str | None = Field(None, description="Text that the reason contains.")
    cause: str | None = Field(
        None, description="Cause, or a reason with this cause: numbers, ids and quoted values may differ."
    )
    due_by: AwareDatetime | None = Field(
        None, description="Time for `due`, with its time zone. Default: the start of the run."
    )
    failed_before: AwareDatetime | None = Field(
        None, description="Time before which the messages failed. A retry in several runs selects each failure once."
    )

    def at(self, now: datetime) -> Self:
        """Return the selection with a fixed time, so that all steps of a run select the same due failures."""
        return self.model_copy(update={"due_by": self.due_by or now}) if self.state == "due" else self

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that `matching` needs beside the state, the source and the id."""
        needed = {"kind": self.kind, "reason": self.reason, "at": self.failed_before}
        wanted = dict.fromkeys(name for name, value in needed.items() if value is not None)
        return tuple(wanted | ({} if self.cause is None else {"reason": None}))

    def matching(self, rows: pa.Table) -> pa.Table:
        """Return the rows with a matching kind, reason, cause and time."""
        if self.kind is not None:
            rows = rows.filter(pc.equal(rows["kind"], self.kind))
        if self.reason is not None:
            rows = rows.filter(pc.match_substring(rows["reason"], self.reason))
        if self.cause is not None:
            rows = rows.filter(pc.equal(causes(rows["reason"]), cause_of(self.cause)))
        if self.failed_before is not None:
            rows = rows.filter(pc.less(rows["at"], pa.scalar(self.failed_before, rows["at"].type)))
        return rows


ALL = Selection()

RANKED = (*ATTEMPT_KEY, "state", "due_at")
"""Columns that determine the latest event of a message and its state."""

_SINCE = datetime(2020, 1, 1, tzinfo=UTC)
_DUE_BITS, _STATE_BITS = 32, 2
_NEVER = 2**_DUE_BITS - 1
_OPEN, _DEAD, _CLOSED = range(3)


def events(lake: Lake, path: str, *columns: str, message_id: str | None = None) -> Iterator[pa.Table]:
    """Yield columns of the events in a file by row groups, for all messages or for one id."""
    wanted = only(FAILED, *columns)
    if message_id is None:
        return row_groups(lake, path, wanted)
    return rows_with(lake, path, "message_id", message_id, wanted)


@dataclass(frozen=True)
class Events:
    """Events in all files of a window, of all messages or of some, numbered in the order of the files.

    The index has twelve bytes per event. Two events of a message can have the same rank in tables of earlier releases:
    the last counts.

    Attributes:
        lake: Lake with the files.
        paths: Files, oldest first.
        message_id: Only events of this id.
        source: Only events of this source.
    """

    lake: Lake
    paths: Sequence[str]
    message_id: str | None = None
    source: str | None = None

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The number of the message and the rank of each event, and the number of events of each file."""
        keys, ranks, counts = [pa.array([], pa.string())], [np.empty(0, np.int64)], []
        for path in self.paths:
            counts.append(0)
            for rows in self._read(path, *RANKED):
                keys.append(keys_of(rows, *MESSAGE_KEY))
                ranks.append(rank(rows).to_numpy())
                counts[-1] += rows.num_rows
        # A single call numbers the messages of all files.
        numbers = pa.chunked_array(keys).dictionary_encode().combine_chunks().indices
        return numbers.to_numpy(), np.concatenate(ranks), counts

    def latest(self) -> np.ndarray:
        """Return the latest event of each message."""
        messages, ranks, _ = self._index
        greatest = np.full(messages.max(initial=-1) + 1, -1, np.int64)
        np.maximum.at(greatest, messages, ranks)
        return self._last(ranks == greatest[messages])

    def failures_before(self, ends: np.ndarray) -> np.ndarray:
        """Return the failures that some `closed` events end: the last failure of their message at their attempt."""
        messages, ranks, _ = self._index
        attempts = ranks >> (_DUE_BITS + _STATE_BITS)
        wanted = np.full(messages.max(initial=-1) + 1, -1, np.int64)
        wanted[messages[ends]] = attempts[ends]
        return self._last((attempts == wanted[messages]) & (_state(ranks) != _CLOSED))

    def _last(self, wanted: np.ndarray) -> np.ndarray:
        """Return the last wanted event of each message."""
        messages, found = self._index[0], np.flatnonzero(wanted)
        last = np.full(messages.max(initial=-1) + 1, -1, np.int64)
        last[messages[found]] = found  # of equal indices, the last assignment counts
        return np.sort(last[last >= 0])

    def ranks(self, some: np.ndarray) -> np.ndarray:
        """Return the ranks of some events."""
        found: np.ndarray = self._index[1][some]
        return found

    def rows(self, some: np.ndarray, *columns: str) -> Iterator[pa.Table]:
        """Yield columns of some events in their order, by row groups. Files without such an event are not read."""
        messages, _, counts = self._index
        wanted, first = np.zeros(len(messages), bool), 0
        wanted[some] = True
        for path, count in zip(self.paths, counts, strict=True):
            if wanted[first : first + count].any():
                at = first
                for rows in self._read(path, *columns):
                    yield rows.filter(pa.array(wanted[at : at + rows.num_rows]))
                    at += rows.num_rows
            first += count

    def _read(self, path: str, *columns: str) -> Iterator[pa.Table]:
        names = columns if self.source is None else dict.fromkeys([*columns, "source"])
        for rows in events(self.lake, path, *names, message_id=self.message_id):
            yield rows if self.source is None else rows.filter(pc.equal(rows["source"], self.source))


@dataclass(frozen=True)
class Failures:
    """Failures of a window, each by the latest event of its message.

    Attributes:
        events: All events of the window.
        numbers: Events that are the failures, before `selection` is applied to their text and time.
        selection: Criteria.
    """

    events: Events
    numbers: np.ndarray
    selection: Selection

    def count(self) -> int:
        """Return the number of failures. Files are read only if text or time matter."""
        if not self.selection.columns:
            return len(self.numbers)
        return sum(rows.num_rows for rows in self.rows())

    def numbered(self, *columns: str) -> pa.Table:
        """Return columns of the failures, and their event in a column `number`."""
        first, tables = 0, [pa.table({"number": pa.array([], pa.int64())})]
        names = dict.fromkeys([*columns, *self.selection.columns])
        for rows in self.events.rows(self.numbers, *names):
            numbers = pa.array(self.numbers[first : first + rows.num_rows])
            tables.append(self.selection.matching(rows.append_column("number", numbers)))
            first += rows.num_rows
        return pa.concat_tables(tables, promote_options="default")

    def rows(self, *columns: str) -> Iterator[pa.Table]:
        """Yield columns of the failures, by row groups."""
        names = dict.fromkeys([*columns, *self.selection.columns, *([] if columns else ["attempt"])])
        return map(self.selection.matching, self.events.rows(self.numbers, *names))


def open_failures(lake: Lake, paths: Sequence[str]) -> np.ndarray:
    """Return the ranks of the open failures in all files of a window, dead ones included."""
    found = Events(lake, paths)
    ranks = found.ranks(found.latest())
    is_open: np.ndarray = ranks[_state(ranks) != _CLOSED]
    return is_open


def closed(lake: Lake, paths: Sequence[str], selection: Selection = ALL) -> Failures:
    """Return the `closed` events in all files of a window that match a selection's source and id."""
    found = Events(lake, paths, selection.message_id, selection.source)
    latest = found.latest()
    return Failures(found, latest[_state(found.ranks(latest)) == _CLOSED], ALL)


def chosen(lake: Lake, paths: Sequence[str], selection: Selection = ALL, also_due: pa.Array | None = None) -> Failures:
    """Return the open failures in all files of a window that match a selection.

    Args:
        lake: Lake with the files.
        paths: Files of a window.
        selection: Failures to return.
        also_due: `keys_of` source and id of further failures that count as due.
    """
    found = Events(lake, paths, selection.message_id, selection.source)
    latest = found.latest()
    ranks = found.ranks(latest)
    states = _state(ranks)
    wanted = {
        "open": states != _CLOSED,
        "dead": states == _DEAD,
        "waiting": states == _OPEN,
        "due": _due(ranks) <= seconds(selection.due_by),
    }
    if also_due is not None:
        keys = (keys_of(rows, *MESSAGE_KEY) for rows in found.rows(latest, *MESSAGE_KEY))
        are_due = [pc.is_in(some, also_due).to_numpy(zero_copy_only=False) for some in keys]
        wanted["due"] |= wanted["open"] & np.concatenate([np.empty(0, bool), *are_due])
    return Failures(found, latest[wanted[selection.state]], selection)


def is_due(rows: pa.Table, by: datetime | None) -> pa.ChunkedArray:
    """Return whether each event is an open failure that is due at a time. `rows` have the columns `RANKED`."""
    return pa.chunked_array([_due(rank(rows).to_numpy()) <= seconds(by)], pa.bool_())


def failure_keys(rows: pa.Table) -> pa.Array:
    """Return `keys_of` source, id and attempt of each event that is a failure; null for the end of a failure."""
    is_end = pc.equal(rows["state"], "closed").combine_chunks()
    return pc.if_else(is_end, pa.scalar(None, pa.string()), keys_of(rows, *ATTEMPT_KEY))


def counts(ranks: np.ndarray) -> tuple[int, int, int | None, int]:
    """Count failures: open, dead, the earliest due time of the others as `seconds`, and those with a due time."""
    due = _due(ranks)
    first = int(due.min(initial=_NEVER))
    dead, scheduled = int((_state(ranks) == _DEAD).sum()), int((due != _NEVER).sum())
    return len(ranks), dead, None if first == _NEVER else first, scheduled


def rank(rows: pa.Table) -> pa.ChunkedArray:
    """Return a rank of each event, greatest for a message's latest: by attempt, then by state, `closed` last.

    The lowest bits contain the due time of an open event.
    """
    is_open = pc.equal(rows["state"], "open")
    state = pc.if_else(is_open, _OPEN, pc.if_else(pc.equal(rows["state"], "dead"), _DEAD, _CLOSED))
    micros = pc.subtract(pc.cast(rows["due_at"], pa.int64()), round(_SINCE.timestamp()) * 10**6)
    due = pc.divide(pc.add(pc.max_element_wise(micros, 0, skip_nulls=False), 999_999), 10**6)
    due = pc.if_else(is_open, pc.fill_null(pc.min_element_wise(due, _NEVER - 1, skip_nulls=False), _NEVER), _NEVER)
    standing = pc.add(pc.shift_left(pc.cast(rows["attempt"], pa.int64()), _STATE_BITS), pc.cast(state, pa.int64()))
    return pc.add(pc.shift_left(standing, _DUE_BITS), due)


def seconds(time: datetime | None) -> int:
    """Return a time in the units of ranks; -1, before all others, for None."""
    return -1 if time is None else min(_NEVER - 1, int((time - _SINCE).total_seconds()))


def time_of(seconds: int) -> datetime:
    """Return the time of a number in the units of ranks."""
    return _SINCE + timedelta(seconds=seconds)


def _state(ranks: np.ndarray) -> np.ndarray:
    states: np.ndarray = (ranks >> _DUE_BITS) & (2**_STATE_BITS - 1)
    return states


def _due(ranks: np.ndarray) -> np.ndarray:
    due: np.ndarray = ranks & _NEVER
    return due
