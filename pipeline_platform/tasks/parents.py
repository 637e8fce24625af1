"""Parents: messages that end when all their children did, which share their fate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline_platform.lake.reader import Range, keys_of
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message
from pipeline_platform.model.settling import Settling
from pipeline_platform.tasks.fan_out import ENDS, PARENTS
from pipeline_platform.tasks.in_order import HandleInOrder
from pipeline_platform.tasks.outcomes import Outcomes


@dataclass(frozen=True)
class EndParents(HandleInOrder):
    """Task `n` of `tasks` records what became of its share of the parents.

    Attributes:
        plan: The files of `PARENTS`.
        ends: The files of `ENDS`.
        tasks: How many tasks there are.
    """

    ends: Sequence[Range] = ()
    tasks: int = 1
    in_order = False

    def _planned(self, index: int) -> Iterator[pa.Table]:
        parents = _read(self.lake, self.plan, PARENTS).sort_by("position")
        first, end = (parents.num_rows * number // self.tasks for number in (index, index + 1))
        yield parents.slice(first, end - first)

    def _blocks(self, index: int, rows: int) -> Iterator[pa.RecordBatch]:
        for block in super()._blocks(index, rows):
            # Of these messages alone: each child that failed has a traceback.
            bounds = pc.min_max(block.column("position")).as_py()
            within = [("position", ">=", bounds["min"]), ("position", "<=", bounds["max"])]
            yield with_ends(block, _read(self.lake, self.ends, ENDS, filters=within))

    def _handle(self, window: str, rows: pa.RecordBatch, outcomes: Outcomes, until: float | None) -> Sequence[int]:
        del until  # a message took its permit when it was handled
        with outcomes.told(len(rows)):
            outcomes.ended_parents(rows, window, *parents_of(rows, outcomes.settling))
        return ()

    def _blamed(self) -> str:
        return "handle_failed"


def failed_keys(lake: Lake, ends: Sequence[Range]) -> pa.Array:
    """Source and id of the parents that failed, by `keys_of`."""
    names = ["source", "message_id", "kind"]
    rows = _read(lake, ends, pa.schema([ENDS.field(name) for name in names]), columns=names)
    return pc.unique(keys_of(rows.filter(pc.is_valid(rows["kind"])), *names[:2]))


def _read(lake: Lake, files: Sequence[Range], schema: pa.Schema, **options: Any) -> pa.Table:
    """What files hold."""
    tables = [schema.empty_table()]
    for file in files:
        with lake.open_input(file.path) as opened:
            tables.append(pq.read_table(opened, **options))
    return pa.concat_tables(tables)


def with_ends(rows: pa.RecordBatch, ends: pa.Table) -> pa.RecordBatch:
    """The rows of parents, with a column of what its children say: rows of `ENDS`, by child."""
    by_position: dict[int, list[dict[str, Any]]] = {position: [] for position in rows.column("position").to_pylist()}
    for one in ends.sort_by("child").to_pylist():
        if one["position"] in by_position:
            by_position[one["position"]].append(one)
    return rows.append_column("ends", pa.array(by_position.values(), pa.list_(pa.struct(list(ENDS)))))


def parents_of(rows: pa.RecordBatch, settling: Settling) -> tuple[list[Message], Callable[[Message], bool]]:
    """The parents of some rows, ok or failed as their first child that failed, and whether one may be rescued.

    Args:
        rows: As they were received, `with_ends`.
        settling: How the source is told of them.
    """
    messages, rescuable = list[Message](), set[int]()
    for parent, said in zip(Message.each(rows, settling), rows.column("ends").to_pylist(), strict=True):
        message = parent
        for one in said:
            if one["on_success"] or one["on_failure"]:  # the last one counts
                message = message._but(actions=(one["on_success"], one["on_failure"]))
        first = next((one for one in said if one["kind"] is not None), None)
        if first is not None:
            message = _failed(message, first)
            if first["may_rescue"]:
                rescuable.add(message._row)
        messages.append(message)
    return messages, lambda message: message._row in rescuable


def _failed(parent: Message, end: dict[str, Any]) -> Message:
    """A parent, failed and settled as its child says."""
    kind, reason, traceback, stage, batcher, key = (
        str(end[name]) for name in ("kind", "reason", "traceback", "stage", "batcher", "batch_key")
    )
    failure = Failure(kind, reason, traceback, stage, bool(end["retry"]))
    actions = (end["on_success"], end["on_failure"]) if end["on_success"] or end["on_failure"] else None
    child = parent._but(failure=failure, actions=actions)
    child.batcher, child.batch_key = batcher, key
    return parent._failed_as(child)
