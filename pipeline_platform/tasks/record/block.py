"""A block: messages that a callback has processed, and their state."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from pipeline_platform.lake.reader import rows_at
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message


@dataclass(frozen=True)
class Block:
    """Messages that a callback has processed, one per row, and the indexes of the messages that are done or failed.

    `messages` is updated in place when a message fails or `handle_failed` changes it. If the messages are new children,
    `at` contains the row of each. `are_parents` if the failures of the messages are those of their children.
    """

    rows: pa.RecordBatch
    window: str
    messages: list[Message]
    done: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    at: list[int] | None = None
    are_parents: bool = False

    @property
    def has_children(self) -> bool:
        """Whether some of the messages are children."""
        if self.at is not None:
            return True
        return "child" in self.rows.schema.names and self.rows.column("child").null_count < self.rows.num_rows

    def children(self, indexes: list[int]) -> pa.Array:
        """Return the child numbers of messages; null for messages that are not children."""
        if not self.has_children:
            return pa.nulls(len(indexes), pa.int32())
        return pa.array([self.messages[index].child for index in indexes], pa.int32())

    def fail(self, index: int, failure: Failure) -> None:
        """Mark a message as failed."""
        self.messages[index] = self.messages[index].failed(failure)
        self.failed.append(index)

    def take(self, names: Sequence[str], indexes: list[int]) -> pa.RecordBatch:
        """Return some columns of some rows, in order. All rows are returned without a copy."""
        columns = self.rows.select(list(names))
        if self.at is None:
            return rows_at(columns, indexes)
        return columns.take(pa.array([self.at[index] for index in indexes], pa.int64()))
