"""Held messages: their partition waits for an open failure, so they are not handled."""

from collections.abc import Sequence

import pyarrow as pa

from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.failure import HELD, Failure
from pipeline_platform.model.message import Message

HELD_BY = "held_by"
"""Column of received rows: the id of an earlier open failure of the partition, or null."""


def held_by(rows: pa.RecordBatch, report: TaskReport) -> list[str | None]:
    """Return the id of the failure that holds each row, of an earlier receive or of this task; None without one."""
    earlier = rows.column(HELD_BY).to_pylist() if HELD_BY in rows.schema.names else [None] * rows.num_rows
    if not report.stopped:
        return earlier
    found = (None if partition is None else report.stopped.get(partition) for partition in _partitions(rows))
    return [before or stopped for before, stopped in zip(earlier, found, strict=True)]


def hold(messages: Sequence[Message], failures: Sequence[str | None]) -> list[Message]:
    """Return messages, of which those that a failure holds have failed as `HELD`."""
    return [
        message if failure is None else message.failed(Failure(HELD, f"waits for message {failure} of its partition"))
        for message, failure in zip(messages, failures, strict=True)
    ]


def stop(rows: pa.RecordBatch, report: TaskReport) -> None:
    """Stop the partitions of rows that have failed."""
    for partition, message_id in zip(_partitions(rows), rows.column("message_id").to_pylist(), strict=True):
        if partition is not None:
            report.stopped.setdefault(partition, message_id)


def _partitions(rows: pa.RecordBatch) -> list[str | None]:
    columns = (rows.column(name).to_pylist() for name in ("source", "own"))
    return [None if own is None else f"{source}\0{own}" for source, own in zip(*columns, strict=True)]
