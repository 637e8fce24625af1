"""The events of failed messages, which of a message's events is the latest, and a choice of failures by that."""

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

State = Literal["open", "waiting", "due", "dead"]
"""Of failures that are not closed: `open` are all, `waiting` those not dead, `due` those whose time has come."""


class Selection(BaseModel, frozen=True, extra="forbid"):
    """Failures by the latest event of each; all criteria together. By default all that are open, dead ones included."""

    state: State = Field("open", description="`open`, dead ones included; `waiting`, those not dead; `due`; or `dead`.")
    message_id: str | None = Field(None, description="Of this message alone.")
    source: str | None = Field(None, description="Of this source alone, by its name: ids are unique per source.")
    kind: str | None = Field(None, description="Of this kind, exactly.")
    reason: str | None = Field(None, description="Whose reason contains this text.")
    due_by: AwareDatetime | None = Field(
        None, description="What `due` goes by, with its zone; the time that the run begins if unset."
    )

    def at(self, now: datetime) -> Self:
        """The same at a fixed time: each look of a run finds the same failures due."""
        return self.model_copy(update={"due_by": self.due_by or now}) if self.state == "due" else self

    @property
    def by_words(self) -> bool:
        """Whether it goes by what a failure says."""
        return self.kind is not None or self.reason is not None

    def matching(self, rows: pa.Table) -> pa.Table:
        """The rows whose `kind` and `reason` it is about."""
        if self.kind is not None:
            rows = rows.filter(pc.equal(rows["kind"], self.kind))
        if self.reason is not None:
            rows = rows.filter(pc.match_substring(rows["reason"], self.reason))
        return rows


ALL = Selection()

KEY = ("source", "message_id")
ATTEMPT = (*KEY, "attempt")
RANKED = (*KEY, "attempt", "state", "due_at")
"""What says which event of a message is the latest, and what it says."""

_RANKS = pa.schema([*map(FAILED.field, KEY), ("rank", pa.int64())])
_SINCE = datetime(2020, 1, 1, tzinfo=UTC)
_DUE_BITS, _STATE_BITS = 32, 2
_NEVER = 2**_DUE_BITS - 1
_OPEN, _DEAD, _CLOSED = range(3)


def events(lake: Lake, path: str, *columns: str, message_id: str | None = None) -> Iterator[pa.Table]:
    """Columns of the events in a file, some at a time: of all messages, or of an id alone."""
    wanted = only(FAILED, *columns)
    if message_id is None:
        return row_groups(lake, path, wanted)
    return rows_with(lake, path, "message_id", message_id, wanted)


def latest(lake: Lake, paths: Sequence[str], message_id: str | None = None) -> pa.Table:
    """The latest event of each message in all files of one window: `source`, `message_id` and its `rank`."""
    every = (rows for path in paths for rows in events(lake, path, *RANKED, message_id=message_id))
    ranks = [rows.select(KEY).append_column("rank", rank(rows)) for rows in every]
    found = pa.concat_tables(ranks) if ranks else _RANKS.empty_table()
    return found.group_by(list(KEY)).aggregate([("rank", "max")]).rename_columns([*KEY, "rank"])


def open_failures(lake: Lake, paths: Sequence[str]) -> pa.Table:
    """The open failures in all files of one window, dead ones included."""
    found = latest(lake, paths)
    return found.filter(pc.not_equal(_state(found["rank"]), _CLOSED))


def closed(lake: Lake, paths: Sequence[str]) -> pa.Table:
    """The closed failures in all files of one window."""
    found = latest(lake, paths)
    return found.filter(pc.equal(_state(found["rank"]), _CLOSED))


def chosen(lake: Lake, paths: Sequence[str], selection: Selection = ALL) -> pa.Table:
    """The open failures in all files of one window that a selection is about, as far as ranks and ids tell."""
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
    return found.filter(wanted[selection.state])


def rows_of(
    lake: Lake, paths: Sequence[str], some: pa.Table, selection: Selection, *columns: str
) -> Iterator[pa.Table]:
    """Yield columns of the rows of these latest events that a selection matches, some at a time."""
    names = list(dict.fromkeys([*RANKED, *columns, *(["kind", "reason"] if selection.by_words else [])]))
    for rows in last_rows(lake, paths, _keys, keys_of(some, *KEY, "rank"), names):
        yield selection.matching(rows)


def last_rows(
    lake: Lake, paths: Sequence[str], key: Callable[[pa.Table], pa.Array], wanted: pa.Array, names: Sequence[str]
) -> Iterator[pa.Table]:
    """Yield the last row of each wanted key, some rows at a time. Only files that contain such a row are read in full.

    Two events of a message can have the same rank in tables of earlier releases: one of them counts.

    Args:
        lake: Where the files are.
        paths: Files, the oldest first.
        key: Returns the key of each event from its columns `RANKED`.
        wanted: Keys.
        names: Columns to read.
    """
    keys = [[key(rows) for rows in events(lake, path, *RANKED)] for path in paths]
    # All at once: each call hashes the wanted keys again.
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
    return keys_of(rows.append_column("rank", rank(rows)), *KEY, "rank")


def failure_keys(rows: pa.Table) -> pa.Array:
    """Return `keys_of` source, id and attempt of each event that is a failure; null for the end of a failure."""
    is_end = pc.equal(rows["state"], "closed").combine_chunks()
    return pc.if_else(is_end, pa.scalar(None, pa.string()), keys_of(rows, *ATTEMPT))


def counts(failures: pa.Table) -> tuple[int, int, int | None, int]:
    """Count failures: open, dead, the earliest due time of the others as `seconds`, and those with a due time."""
    ranks = failures["rank"]
    due = _due(ranks)
    first, scheduled = pc.min(due).as_py(), pc.sum(pc.not_equal(due, _NEVER)).as_py() or 0
    dead = pc.sum(pc.equal(_state(ranks), _DEAD)).as_py() or 0
    return failures.num_rows, dead, None if first == _NEVER else first, scheduled


def rank(rows: pa.Table) -> pa.ChunkedArray:
    """Number events so that a message's latest is the greatest: a later attempt wins; at the same attempt its end.

    The lowest bits say when an open one is due.
    """
    is_open = pc.equal(rows["state"], "open")
    state = pc.if_else(is_open, _OPEN, pc.if_else(pc.equal(rows["state"], "dead"), _DEAD, _CLOSED))
    micros = pc.subtract(pc.cast(rows["due_at"], pa.int64()), round(_SINCE.timestamp()) * 10**6)
    due = pc.divide(pc.add(pc.max_element_wise(micros, 0, skip_nulls=False), 999_999), 10**6)
    due = pc.if_else(is_open, pc.fill_null(pc.min_element_wise(due, _NEVER - 1, skip_nulls=False), _NEVER), _NEVER)
    standing = pc.add(pc.shift_left(pc.cast(rows["attempt"], pa.int64()), _STATE_BITS), pc.cast(state, pa.int64()))
    return pc.add(pc.shift_left(standing, _DUE_BITS), due)


def seconds(time: datetime | None) -> int:
    """A time as ranks have it; before all others where there is none."""
    return -1 if time is None else min(_NEVER - 1, int((time - _SINCE).total_seconds()))


def _state(ranks: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.bit_wise_and(pc.shift_right(ranks, _DUE_BITS), 2**_STATE_BITS - 1)


def _due(ranks: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.bit_wise_and(ranks, _NEVER)
