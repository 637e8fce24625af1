"""A block: messages that a callback is done with, and what is known of each."""

from dataclasses import dataclass, field

import pyarrow as pa

from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message


@dataclass(frozen=True)
class Block:
    """Messages that a callback is done with, one for each row, and the indexes of those that are at their end.

    A message takes the place of what it was before: of one that fails, and of one that `handle_failed` made of it.
    Where messages are children that `handle_message` has made just now, `at` says which row each is of.
    """

    rows: pa.RecordBatch
    window: str
    messages: list[Message]
    done: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    at: list[int] | None = None

    @property
    def has_children(self) -> bool:
        """Whether some of the messages are children."""
        if self.at is not None:
            return True
        return "child" in self.rows.schema.names and self.rows.column("child").null_count < self.rows.num_rows

    def children(self, indexes: list[int]) -> pa.Array:
        """The numbers of messages as children; null for one that is none."""
        if not self.has_children:
            return pa.nulls(len(indexes), pa.int32())
        return pa.array([self.messages[index].child for index in indexes], pa.int32())

    def fail(self, index: int, failure: Failure) -> None:
        """Let a message fail."""
        self.messages[index] = self.messages[index].failed(failure)
        self.failed.append(index)

    def take(self, names: list[str], indexes: list[int]) -> pa.RecordBatch:
        """Some columns of some rows, in order; no copy if it is all of them."""
        columns = self.rows.select(names)
        if self.at is not None:
            indexes = [self.at[index] for index in indexes]
        elif len(indexes) == columns.num_rows:
            return columns
        return columns.take(pa.array(indexes, pa.int64()))
