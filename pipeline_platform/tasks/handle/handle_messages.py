"""Handling received messages in the lane of their pipeline: rows or blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from pipeline_platform.lake.reader import RowRange, read_ranges, rows_at, without
from pipeline_platform.model.message import BULK, MESSAGES, BatchMode
from pipeline_platform.tasks.callback_process.fork import Death
from pipeline_platform.tasks.calling_step import CallingStep
from pipeline_platform.tasks.handle.block_lane import BlockLane
from pipeline_platform.tasks.handle.repeats import Repeats
from pipeline_platform.tasks.handle.row_lane import Handler
from pipeline_platform.tasks.isolation import Tries, each_alone, surely
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.verdicts import record_duplicates, record_failed, record_released

if TYPE_CHECKING:
    from pipeline_platform.control.pace import Pace

_UNREAD = ("receive_id", "first_receive_id", "published_at")
READ = pa.schema([*(field for field in MESSAGES if field.name not in _UNREAD), ("position", pa.int64())])
"""Columns of received messages that tasks read, and their positions."""

BLOCK_ROWS = 8_192
"""Minimum number of messages in a block. Recording has a fixed cost of a millisecond per block."""


def lane_of(recording: Recording, pace: Pace | None = None, batch_mode: BatchMode = BULK) -> BlockLane | Handler:
    """Return the lane of a pipeline.

    Args:
        recording: Recording of the task.
        pace: Rate limit; None for no limit.
        batch_mode: Initial batch mode of messages.
    """
    if recording.step.pipeline.block_type() is not None:
        return BlockLane(recording, pace.permitted if pace else None, batch_mode)
    return Handler(recording, pace.each if pace else None, batch_mode)


@dataclass(frozen=True)
class Handle(CallingStep):
    """Task `n` handles the received rows `parts[n]` and writes the results.

    Attributes:
        repeats: Files of `REPEATS`: deliveries that are not handled.
        pace: Rate limit and stop signal; None for no limit.
        in_order: Whether messages must stay in order even after one crashes the callback process.
    """

    parts: Sequence[Sequence[RowRange]]
    repeats: Sequence[RowRange] = ()
    pace: Pace | None = None
    in_order: ClassVar[bool] = False
    stem = "handle"

    def blocks(self, share: int, skip: int) -> Iterator[tuple[int, Sequence[pa.RecordBatch]]]:
        """Read the rows of a task. Each block has one window."""
        options = self.pipeline.processors
        most = max(options.chunk_size, BLOCK_ROWS)
        for _, rows in read_ranges(self.lake, without(self.parts[share], skip), READ, most, options.chunk_bytes):
            yield rows.num_rows, [rows]

    def tries(self, block: Sequence[pa.RecordBatch], known: Death | None) -> Tries:
        """Handle the rows of a block that are not repeats."""
        for rows in block:
            window, (fresh, decided, copies) = rows.column("window")[0].as_py(), self._repeats.split(rows)
            if decided.num_rows or copies.num_rows:
                yield from surely(partial(record_repeats, window, decided, copies))
            work, fail = partial(self._handle, window), partial(self._fail, window)
            mine = known if len(block) == 1 else None
            yield from each_alone(fresh, work, fail, mine, in_order=self.in_order)

    @cached_property
    def _repeats(self) -> Repeats:
        return Repeats.read(self.lake, self.repeats)

    def _handle(self, window: str, rows: pa.RecordBatch, recording: Recording) -> Sequence[int]:
        if recording.report.released:  # stopping: call no callback, not even `transform`
            record_released(recording, rows, window)
            return ()
        waited = self.pace.waited if self.pace else 0.0
        lane, begun = lane_of(recording, self.pace), set[int]()
        with recording.chunk(rows.num_rows):
            for some in lane.record(rows, window):
                begun.update(some)
                if recording.size.rows and not lane.is_over:  # this process keeps all results of a try in memory
                    break
        if self.pace:
            recording.report.waited += self.pace.waited - waited
        left = [row for row in range(rows.num_rows) if row not in begun] if len(begun) < rows.num_rows else []
        if left and lane.is_over:
            record_released(recording, rows_at(rows, left), window)
            return ()
        return left

    def _fail(self, window: str, rows: pa.RecordBatch, recording: Recording, death: Death) -> None:
        record_failed(recording, rows, window, [death.failure(self._stage())] * rows.num_rows)

    def _stage(self) -> str:
        """Return the callback to blame for a crash, if no other is known."""
        return "handle_message" if self.pipeline.block_type() is None else "handle_messages"


def record_repeats(window: str, decided: pa.RecordBatch, copies: pa.RecordBatch, recording: Recording) -> None:
    """Record repeats: messages that earlier receives decided, and copies of messages that are handled."""
    record_duplicates(recording, decided, window, decided=True)
    record_duplicates(recording, copies, window, decided=False)
