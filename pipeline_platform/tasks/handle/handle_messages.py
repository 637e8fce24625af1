"""Handling: received messages through the callbacks, by the lane that their author chose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar, Protocol

import pyarrow as pa

from pipeline_platform.lake.reader import RowRange, read_ranges, without
from pipeline_platform.model.message import BULK, MESSAGES, BatchMode
from pipeline_platform.tasks.handle.block_lane import BlockLane
from pipeline_platform.tasks.handle.repeats import Repeats
from pipeline_platform.tasks.handle.row_lane import Handler
from pipeline_platform.tasks.host.fork import Death
from pipeline_platform.tasks.host.hosting import CallingStep
from pipeline_platform.tasks.host.isolation import Tries, each_alone, surely
from pipeline_platform.tasks.record.outcomes import Outcomes

if TYPE_CHECKING:
    from pipeline_platform.control.pace import Pace

UNREAD = ("receive_id", "first_receive_id", "published_at")
"""Columns of received messages that handling does not read."""

READ = pa.schema([*(field for field in MESSAGES if field.name not in UNREAD), ("position", pa.int64())])
"""What handling reads of a received message."""

BLOCK_ROWS = 8_192
"""Messages recorded at once, in one or several chunks: recording has a fixed cost of a millisecond."""


class Lane(Protocol):
    """Puts messages through the callbacks, once. Needs no Spark.

    Attributes:
        is_over: Whether the rate limit, or a stop, let fewer begin than there are.
    """

    is_over: bool

    def record(self, rows: pa.RecordBatch, window: str, outcomes: Outcomes) -> Iterator[Sequence[int]]:
        """Handle rows and record what came of them; yield which are, some at a time."""


def lane_of(outcomes: Outcomes, pace: Pace | None = None, batch_mode: BatchMode = BULK) -> Lane:
    """The lane of a pipeline's messages.

    Args:
        outcomes: Of its task.
        pace: The rate limit; None where nothing holds.
        batch_mode: That of each message, at first.
    """
    pipeline, context, ack_policy = outcomes.pipeline, outcomes.step.context, outcomes.ack_policy
    assert pipeline is not None
    if type(pipeline).block_type() is not None:
        return BlockLane(pipeline, context, ack_policy, pace.permitted if pace else None, batch_mode)
    return Handler(pipeline, context, ack_policy, pace.each if pace else None, outcomes.watch, batch_mode)


@dataclass(frozen=True)
class Handle(CallingStep):
    """Task `n` handles the received rows `parts[n]` and writes all that came of them.

    Attributes:
        repeats: Files that say which deliveries are not to be handled.
        pace: The rate limit, and whether messages may begin at all; None where nothing holds.
        in_order: Whether the order of messages must be kept around one that ends its host, too.
    """

    parts: Sequence[Sequence[RowRange]]
    repeats: Sequence[RowRange] = ()
    pace: Pace | None = None
    in_order: ClassVar[bool] = False
    stem = "handle"

    def blocks(self, share: int, skip: int) -> Iterator[tuple[int, Sequence[pa.RecordBatch]]]:
        """Read the rows of a task; those of a block by their windows."""
        options = self.pipeline.processors
        most = max(options.chunk_size, BLOCK_ROWS)
        for _, rows in read_ranges(self.lake, without(self.parts[share], skip), READ, most, options.chunk_bytes):
            yield rows.num_rows, [rows]

    def tries(self, block: Sequence[pa.RecordBatch], known: Death | None) -> Tries:
        """Handle a block, but for repeats."""
        for rows in block:
            window, (fresh, decided, copies) = rows.column("window")[0].as_py(), self._repeats.split(rows)
            if decided.num_rows or copies.num_rows:
                yield from surely(partial(_record_repeats, window, decided, copies))
            work, fail = partial(self._handle, window), partial(self._fail, window)
            mine = known if len(block) == 1 else None
            yield from each_alone(fresh, work, fail, mine, in_order=self.in_order)

    @cached_property
    def _repeats(self) -> Repeats:
        return Repeats.read(self.lake, self.repeats)

    def _handle(self, window: str, rows: pa.RecordBatch, outcomes: Outcomes) -> Sequence[int]:
        if outcomes.tally.counts["given_back"]:  # not even `transform` sees what is not to begin
            outcomes.given_back(rows, window)
            return ()
        waited = self.pace.waited if self.pace else 0.0
        lane, begun = lane_of(outcomes, self.pace), set[int]()
        with outcomes.chunk(rows.num_rows):
            for some in lane.record(rows, window, outcomes):
                begun.update(some)
                if outcomes.most_rows and not lane.is_over:  # this host holds all that a try writes
                    break
        if self.pace:
            outcomes.tally.counts["waited"] += self.pace.waited - waited  # type: ignore[assignment]
        left = [row for row in range(rows.num_rows) if row not in begun] if len(begun) < rows.num_rows else []
        if left and lane.is_over:
            outcomes.given_back(rows.take(pa.array(left, pa.int64())), window)
            return ()
        return left

    def _fail(self, window: str, rows: pa.RecordBatch, outcomes: Outcomes, death: Death) -> None:
        outcomes.failed(rows, window, [death.failure(self._stage())] * rows.num_rows)

    def _stage(self) -> str:
        """The callback of which a message died, if no other is known."""
        return "handle_message" if self.pipeline.block_type() is None else "handle_messages"


def _record_repeats(window: str, decided: pa.RecordBatch, copies: pa.RecordBatch, outcomes: Outcomes) -> None:
    outcomes.duplicates(decided, window, decided=True)
    outcomes.duplicates(copies, window, decided=False)
