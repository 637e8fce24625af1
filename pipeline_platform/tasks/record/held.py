"""Held messages: their partition waits for an open failure, so they are not handled."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.failure import HELD, Failure
from pipeline_platform.model.message import ATTEMPT_KEY, MESSAGE_KEY, PAYLOAD, Message
from pipeline_platform.model.partition import PARTITION_BY
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.step import Step

HELD_BY = "held_by"
"""Column of received rows: the id of an earlier open failure of the partition, or null."""
_POSITION_BITS = 32


def held_by(rows: pa.RecordBatch, report: TaskReport) -> list[str | None]:
    """Return the id of the failure that holds each row, of an earlier receive or of this task; None without one.

    A message does not hold its own children.
    """
    earlier = rows.column(HELD_BY).to_pylist() if HELD_BY in rows.schema.names else [None] * rows.num_rows
    if not report.stopped:
        return earlier
    found = (None if partition is None else report.stopped.get(partition) for partition in _partitions(rows))
    ids = rows.column("message_id").to_pylist()
    return [
        before or (None if stopped == message_id else stopped)
        for before, stopped, message_id in zip(earlier, found, ids, strict=True)
    ]


def hold(messages: Sequence[Message], failures: Sequence[str | None]) -> list[Message]:
    """Return messages, of which those that a failure holds have failed as `HELD`."""
    return [
        message
        if failure is None
        else message.failed(Failure(HELD, f"waits for message {failure} of its partition", "", PARTITION_BY))
        for message, failure in zip(messages, failures, strict=True)
    ]


def own_column(block: Block, step: Step) -> list[str]:
    """Return the column of partitions, if the rows have it and the pipeline holds partitions."""
    return ["own"] if step.pipeline.holds_partitions() and "own" in block.rows.schema.names else []


def own_of(block: Block, indexes: list[int], step: Step) -> pa.Array:
    """Return the partitions of messages; null if the pipeline does not hold partitions."""
    return block.take(["own"], indexes).column(0) if own_column(block, step) else pa.nulls(len(indexes), pa.string())


def failure_columns(block: Block, failed: list[int], step: Step) -> pa.RecordBatch:
    """Return the columns of failed messages that are recorded; in a pipeline that holds partitions, with their order.

    Messages that their source does not number are numbered once, by their receive and their position in it: failures
    are recorded in the order in which callbacks end, and retried in the order of the messages.
    """
    own = own_column(block, step)
    rows = block.take([*ATTEMPT_KEY, *PAYLOAD, *own, *(["position"] if own else [])], failed)
    if not own:
        return rows
    number = pc.coalesce(rows.column("sequence"), pc.add(rows.column("position"), step.base << _POSITION_BITS))
    return rows.set_column(rows.schema.get_field_index("sequence"), "sequence", number).drop_columns("position")


def stop(block: Block, failed: list[int], step: Step, report: TaskReport) -> None:
    """Stop the partitions of messages that have failed, if the pipeline holds partitions."""
    if not failed or not own_column(block, step):
        return
    rows = block.take([*MESSAGE_KEY, "own"], failed)
    for partition, message_id in zip(_partitions(rows), rows.column("message_id").to_pylist(), strict=True):
        if partition is not None:
            report.stopped.setdefault(partition, message_id)


def _partitions(rows: pa.RecordBatch) -> list[str | None]:
    columns = (rows.column(name).to_pylist() for name in ("source", "own"))
    return [None if own is None else f"{source}\0{own}" for source, own in zip(*columns, strict=True)]
