"""Parents: messages whose outcome is that of all their children."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import RowRange, keys_of, only, row_groups, stored_file
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.failure import FAILURE_COLUMNS, Failure
from pipeline_platform.model.message import MESSAGE_KEY, Message
from pipeline_platform.tasks.handle.in_order import HandleInOrder
from pipeline_platform.tasks.record.batched import record_parents
from pipeline_platform.tasks.record.fan_out import ENDS, PARENTS
from pipeline_platform.tasks.record.recording import Recording

_READ_ROWS, _HELD_ROWS = 1_024, 65_536
"""Rows of `ENDS` that are read at once, and rows in memory before they are reduced."""


@dataclass(frozen=True)
class EndParents(HandleInOrder):
    """Task `n` of `tasks` records its share of the parents: `plan` has files of `PARENTS`, `ends` files of `ENDS`."""

    ends: Sequence[RowRange] = ()
    tasks: int = 1
    in_order = False

    def _planned(self, index: int) -> Iterator[pa.Table]:
        parents = _read(self.lake, self.plan, PARENTS).sort_by("position")
        first, end = (parents.num_rows * number // self.tasks for number in (index, index + 1))
        yield parents.slice(first, end - first)

    def _handle(self, window: str, rows: pa.RecordBatch, recording: Recording) -> Sequence[int]:
        first, last = pc.min_max(rows.column("position")).as_py().values()
        ends = _ends_between(self.lake, self.ends, first, last)
        with recording.chunk(len(rows)):
            record_parents(recording, rows, window, *parents_of(rows, ends, recording.ack_policy))
        return ()

    def _stage(self) -> str:
        return "handle_failed"


def failed_keys(lake: Lake, ends: Sequence[RowRange]) -> pa.Array:
    """Return `keys_of` the source and id of the parents that failed."""
    columns = only(ENDS, *MESSAGE_KEY, "kind")
    every = (rows for file in ends for rows in row_groups(lake, file.path, columns))
    failed = (keys_of(rows.filter(pc.is_valid(rows["kind"])), *MESSAGE_KEY) for rows in every)
    return pc.unique(pa.concat_arrays([pa.array([], pa.string()), *map(pc.unique, failed)]))


def _read(lake: Lake, files: Sequence[RowRange], schema: pa.Schema) -> pa.Table:
    tables = [rows for file in files for rows in row_groups(lake, file.path, schema)]
    return pa.concat_tables([schema.empty_table(), *tables])


def _ends_between(lake: Lake, files: Sequence[RowRange], first: int, last: int) -> pa.Table:
    """Return the ends, reduced by `that_count`, of the messages at positions `first` to `last`."""
    ends, held = [ENDS.empty_table()], 0
    for file in files:
        with stored_file(lake, file.path, ENDS) as stored:
            # A few rows at a time: thousands of failed children have a traceback each.
            for batch in stored.batches(_READ_ROWS, stored.groups_with("position", first, last)):
                rows = pa.table(batch)
                within = pc.and_(pc.greater_equal(rows["position"], first), pc.less_equal(rows["position"], last))
                ends.append(that_count(rows.filter(within)))
                held += ends[-1].num_rows
                if held > _HELD_ROWS:
                    ends, held = [that_count(pa.concat_tables(ends))], 0
    return that_count(pa.concat_tables(ends))


def that_count(ends: pa.Table) -> pa.Table:
    """Keep, of each message, the first failed child and the last child that sets an ack action."""
    ends = ends.sort_by([("position", "ascending"), ("child", "ascending")])
    failed = ends.filter(pc.is_valid(ends["kind"]))
    chosen = ends.filter(pc.or_(pc.is_valid(ends["on_success"]), pc.is_valid(ends["on_failure"])))
    first_of_each = np.diff(failed["position"].to_numpy(), prepend=-1) != 0
    last_of_each = np.diff(chosen["position"].to_numpy(), append=-1) != 0
    return pa.concat_tables([failed.filter(pa.array(first_of_each)), chosen.filter(pa.array(last_of_each))])


def parents_of(
    rows: pa.RecordBatch, ends: pa.Table, ack_policy: AckPolicy
) -> tuple[list[Message], Callable[[Message], bool]]:
    """Return the parents of rows, failed if a child failed, and a predicate for rescuable messages.

    A parent has the failure of its first failed child. `ends` are rows of `ENDS`.
    """
    messages, rescuable = list[Message](), set[int]()
    by_position = defaultdict[int, list[dict[str, Any]]](list)
    for end in ends.sort_by("child").to_pylist():
        by_position[end["position"]].append(end)
    for parent, position in zip(Message.each(rows, ack_policy), rows.column("position").to_pylist(), strict=True):
        message = parent
        for end in by_position[position]:
            if end["on_success"] or end["on_failure"]:  # the last child wins
                message = message._but(actions=(end["on_success"], end["on_failure"]))
        first = next((end for end in by_position[position] if end["kind"] is not None), None)
        if first is not None:
            message = _failed(message, first)
            if first["may_rescue"]:
                rescuable.add(message._row)
        messages.append(message)
    return messages, lambda message: message._row in rescuable


def _failed(parent: Message, end: dict[str, Any]) -> Message:
    failure = Failure._make([*(str(end[name]) for name in FAILURE_COLUMNS), bool(end["retry"]), None])
    actions = (end["on_success"], end["on_failure"]) if end["on_success"] or end["on_failure"] else None
    child = parent._but(failure=failure, actions=actions)
    child.batcher, child.batch_key = str(end["batcher"]), str(end["batch_key"])
    return parent._failed_as(child)
