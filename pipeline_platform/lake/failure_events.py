"""Events of failed messages: the rank of an event, the latest event of a message, and selections of failures."""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AwareDatetime, BaseModel, Field

from pipeline_platform.lake.reader import keys_of, only, row_groups, rows_with
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED
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
    due_by: AwareDatetime | None = Field(
        None, description="Time for `due`, with its time zone. Default: the start of the run."
    )

    def at(self, now: datetime) -> Self:
        """Return the selection with a fixed time, so that all steps of a run select the same due failures."""
        return self.model_copy(update={"due_by": self.due_by or now}) if self.state == "due" else self

    @property
    def by_text(self) -> bool:
        """Whether it selects by kind or reason."""
        return self.kind is not None or self.reason is not None

    def matching(self, rows: pa.Table) -> pa.Table:
        """Return the rows with a matching `kind` and `reason`."""
        if self.kind is not None:
            rows = rows.filter(pc.equal(rows["kind"], self.kind))
        if self.reason is not None:
            rows = rows.filter(pc.match_substring(rows["reason"], self.reason))
        return rows


ALL = Selection()

RANKED = (*ATTEMPT_KEY, "state", "due_at")
"""Columns that determine the latest event of a message and its state."""

_RANKS = pa.schema([*map(FAILED.field, MESSAGE_KEY), ("rank", pa.int64())])
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


def latest(lake: Lake, paths: Sequence[str], message_id: str | None = None) -> pa.Table:
    """Return the latest event of each message in all files of a window: `source`, `message_id` and `rank`."""
    every = (rows for path in paths for rows in events(lake, path, *RANKED, message_id=message_id))
    ranks = [rows.select(MESSAGE_KEY).append_column("rank", rank(rows)) for rows in every]
    found = pa.concat_tables(ranks) if ranks else _RANKS.empty_table()
    return found.group_by(list(MESSAGE_KEY)).aggregate([("rank", "max")]).rename_columns([*MESSAGE_KEY, "rank"])


def open_failures(lake: Lake, paths: Sequence[str]) -> pa.Table:
    """Return the open failures in all files of a window, dead ones included."""
    found = latest(lake, paths)
    return found.filter(pc.not_equal(_state(found["rank"]), _CLOSED))


def closed(lake: Lake, paths: Sequence[str]) -> pa.Table:
    """Return the closed failures in all files of a window."""
    found = latest(lake, paths)
    return found.filter(pc.equal(_state(found["rank"]), _CLOSED))


def chosen(lake: Lake, paths: Sequence[str], selection: Selection = ALL, also_due: pa.Array | None = None) -> pa.Table:
    """Return the open failures in all files of a window that match a selection's state, source and id.

    Args:
        lake: Lake with the files.
        paths: Files of a window.
        selection: Failures to return.
        also_due: `keys_of` source and id of further failures that count as due.
    """
    found = latest(lake, paths, selection.message_id)
    if selection.source is not None:
        found = found.filter(pc.equal(found["source"], selection.source))
    ranks = found["rank"]
    is_open, is_dead = pc.not_equal(_state(ranks), _CLOSED), pc.equal(_state(ranks), _DEAD)
    wanted = {
        "open": is_open,
        "dead": is_dead,
        "waiting": pc.and_not(is_open, is_dead),
        "due": pc.less_equal(_due(ranks), seconds(selection.due_by)),
    }
    if also_due is not None:
        wanted["due"] = pc.or_(wanted["due"], pc.and_(is_open, pc.is_in(keys_of(found, *MESSAGE_KEY), also_due)))
    return found.filter(wanted[selection.state])


def is_due(rows: pa.Table, by: datetime | None) -> pa.ChunkedArray:
    """Return whether each event is an open failure that is due at a time. `rows` have the columns `RANKED`."""
    return pc.less_equal(_due(rank(rows)), seconds(by))


def rows_of(
    lake: Lake, paths: Sequence[str], some: pa.Table, selection: Selection, *columns: str
) -> Iterator[pa.Table]:
    """Yield columns of these latest events that match a selection, by row groups."""
    names = list(dict.fromkeys([*RANKED, *columns, *(["kind", "reason"] if selection.by_text else [])]))
    for rows in last_rows(lake, paths, _keys, keys_of(some, *MESSAGE_KEY, "rank"), names):
        yield selection.matching(rows)


def last_rows(
    lake: Lake, paths: Sequence[str], key: Callable[[pa.Table], pa.Array], wanted: pa.Array, names: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield the last row of each wanted key, by row groups. Only files that contain a wanted row are read in full.

    In tables of earlier releases, two events of a message can have the same rank: only the last is used.

    Args:
        lake: Lake with the files.
        paths: Files, oldest first.
        key: Returns the key of each event from its columns `RANKED`.
        wanted: Wanted keys.
        names: Columns to read.
    """
    keys = [[key(rows) for rows in events(lake, path, *RANKED)] for path in paths]
    # A single call, because each call hashes the wanted keys again.
    every = pa.chunked_array([of_group for of_file in keys for of_group in of_file], pa.string())
    found = pc.indices_nonzero(pc.is_in(every, wanted))
    last = pa.table({"key": every.take(found), "at": found}).group_by("key").aggregate([("at", "max")])["at_max"]
    mine, first = np.zeros(len(every), bool), 0
    mine[last.to_numpy()] = True
    for path, of_file in zip(paths, keys, strict=True):
        end = first + sum(map(len, of_file))
        if mine[first:end].any():
            at = first
            for rows in events(lake, path, *names):
                yield rows.filter(pa.array(mine[at : at + rows.num_rows]))
                at += rows.num_rows
        first = end


def _keys(rows: pa.Table) -> pa.Array:
    return keys_of(rows.append_column("rank", rank(rows)), *MESSAGE_KEY, "rank")


def failure_keys(rows: pa.Table) -> pa.Array:
    """Return `keys_of` source, id and attempt of each event that is a failure; null for the end of a failure."""
    is_end = pc.equal(rows["state"], "closed").combine_chunks()
    return pc.if_else(is_end, pa.scalar(None, pa.string()), keys_of(rows, *ATTEMPT_KEY))


def counts(failures: pa.Table) -> tuple[int, int, int | None, int]:
    """Count failures: open, dead, the earliest due time of the others as `seconds`, and those with a due time."""
    ranks = failures["rank"]
    due = _due(ranks)
    first, scheduled = pc.min(due).as_py(), pc.sum(pc.not_equal(due, _NEVER)).as_py() or 0
    dead = pc.sum(pc.equal(_state(ranks), _DEAD)).as_py() or 0
    return failures.num_rows, dead, None if first == _NEVER else first, scheduled


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


def _state(ranks: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.bit_wise_and(pc.shift_right(ranks, _DUE_BITS), 2**_STATE_BITS - 1)


def _due(ranks: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.bit_wise_and(ranks, _NEVER)
