"""Held partitions: later messages of a partition wait for its open failures."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.failures import failure_events
from pipeline_platform.lake.failures.failure_events import ALL, Failures, is_due
from pipeline_platform.lake.reader import keys_of, only
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import FAILED
from pipeline_platform.model.failure import HELD
from pipeline_platform.model.message import MESSAGE_KEY

_COLUMNS = ("kind", "own_partition", "partition", "sequence", "at")
_OF_MESSAGE = ("source", "message_id", "own", "partition", "sequence", "window")
_PARTITION = ("source", "own_partition")


def open_in_partitions(lake: Lake, files: Mapping[str, Sequence[str]]) -> pa.Table:
    """Return the open failures that have a partition: their keys, order, kind and window.

    Args:
        lake: Lake with the files.
        files: Files of the table `failed`, by window.
    """
    columns = [*failure_events.RANKED, *_COLUMNS]
    tables = [only(FAILED, *columns, "window").empty_table()]
    for window, paths in files.items():
        for rows in failure_events.chosen(lake, paths).rows(*columns):
            kept = rows.filter(pc.is_valid(rows["own_partition"])).select(columns)
            tables.append(kept.append_column("window", pa.repeat(window, kept.num_rows)))
    return pa.concat_tables(tables)


def due_with(failures: pa.Table, due_by: datetime | None) -> pa.Array:
    """Return `keys_of` the held failures whose partition has no failure that is not due.

    Args:
        failures: Result of `open_in_partitions`.
        due_by: Time until which failures are due.
    """
    is_held = pc.equal(failures["kind"], HELD)
    waits = pc.and_not(pc.invert(is_held), is_due(failures, due_by))
    partitions = keys_of(failures, *_PARTITION)
    is_free = pc.invert(pc.is_in(partitions, pc.unique(partitions.filter(waits.combine_chunks()))))
    return keys_of(failures.filter(pc.and_(is_held, is_free)), *MESSAGE_KEY)


def first_of(failures: Failures, most: int) -> Failures:
    """Return at most `most` failures of a window, those that hold others first."""
    if len(failures.numbers) <= most:
        return failures
    rows = failures.numbered("kind", "partition", "sequence")
    # Only sequences of the same partition can be compared.
    waits = pc.and_(pc.equal(rows["kind"], HELD), pc.is_valid(rows["partition"]))
    keys = [(name, "ascending") for name in ("waits", "sequence", "number")]
    first = rows.append_column("waits", waits).sort_by(keys)["number"].slice(0, most)
    return Failures(failures.events, np.sort(first.to_numpy()), ALL)


class _Place(NamedTuple):
    """Place of a message or a failure in a window, where sequences cannot be compared."""

    is_held: bool
    at: float
    message_id: str


def waits_for(messages: pa.Table, failures: pa.Table) -> pa.Array:
    """Return, for each message, the id of an earlier open failure of its partition; null without one.

    Failures of the messages themselves do not count: they are handled in the order of their partition. Order is by
    window. Within a window it is by `sequence` if both have one and the same partition of the source, or none.
    Otherwise, all failures precede a new message, and held failures follow the others.

    Args:
        messages: `source`, `message_id`, `own`, `partition`, `sequence` and `window`.
        failures: Result of `open_in_partitions`.
    """
    waiting = pa.nulls(messages.num_rows, pa.string())
    mine, theirs = keys_of(messages, *MESSAGE_KEY), keys_of(failures, *MESSAGE_KEY)
    is_mine = pc.is_in(theirs, mine)
    others = failures.filter(pc.invert(is_mine))
    held_up = pc.is_in(keys_of(messages, "source", "own"), pc.unique(keys_of(others, *_PARTITION)))
    if not pc.any(held_up).as_py():
        return waiting
    places = {_key(row): _place(row) for row in failures.filter(is_mine).to_pylist()}
    by_partition: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in others.to_pylist():
        by_partition.setdefault((row["source"], row["own_partition"]), []).append(row)
    first = {partition: _First(rows) for partition, rows in by_partition.items()}
    ids = waiting.to_pylist()
    for index in pc.indices_nonzero(held_up).to_pylist():
        row = {name: messages[name][index].as_py() for name in _OF_MESSAGE}
        place = places.get(_key(row), _Place(True, float("inf"), row["message_id"]))
        ids[index] = first[row["source"], row["own"]].before(row, place)
    return pa.array(ids, pa.string())


class _First:
    """The first open failures of a partition, by partition of the source."""

    def __init__(self, failures: Sequence[dict[str, Any]]) -> None:
        self._window = min(row["window"] for row in failures)
        by_source: dict[tuple[str | None, bool], list[dict[str, Any]]] = {}
        for row in failures:
            if row["window"] == self._window:
                by_source.setdefault((row["partition"], row["sequence"] is not None), []).append(row)
        self._first = {
            (partition, is_numbered): (min(rows, key=_place), is_numbered and min(rows, key=itemgetter("sequence")))
            for (partition, is_numbered), rows in by_source.items()
        }

    def before(self, message: Mapping[str, Any], place: _Place) -> str | None:
        """Return the id of a failure that precedes a message; None without one."""
        if self._window > message["window"]:
            return None
        for (partition, _), (by_place, by_sequence) in self._first.items():
            if self._window < message["window"]:
                return str(by_place["message_id"])
            if by_sequence and partition == message["partition"] and message["sequence"] is not None:
                if by_sequence["sequence"] < message["sequence"]:
                    return str(by_sequence["message_id"])
            elif _place(by_place) < place:
                return str(by_place["message_id"])
        return None


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["source"], row["message_id"]


def _place(row: Mapping[str, Any]) -> _Place:
    return _Place(row["kind"] == HELD, row["at"].timestamp(), row["message_id"])
