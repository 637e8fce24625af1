"""Handling in order: one task handles all messages of a partition, in the order of their source.

Tasks first find the partition of each message. Then one task deals the partitions to tasks, using positions only.
Finally each task handles its messages, which it looks up by position.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.failures.held import open_in_partitions, waits_for
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange, row_groups, rows_at, stored_file
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.message import Message
from pipeline_platform.model.partition import PARTITION_BY, SOURCE
from pipeline_platform.model.portions import portions
from pipeline_platform.tasks.by_position import ByPosition
from pipeline_platform.tasks.callback_process.fork import Death
from pipeline_platform.tasks.callback_process.progress import Watch
from pipeline_platform.tasks.callback_process.try_size import TrySize
from pipeline_platform.tasks.handle.handle_messages import BLOCK_ROWS, READ, Handle
from pipeline_platform.tasks.handle.row_lane import LANE, Handler
from pipeline_platform.tasks.handle.source_order import SOURCE_ORDER, dealt, in_source_order, waves_of
from pipeline_platform.tasks.isolation import Tries, each_alone, surely
from pipeline_platform.tasks.record.columns import partitioned
from pipeline_platform.tasks.record.filtered import FILTERED, Filter
from pipeline_platform.tasks.record.held import HELD_BY, held_by, hold
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.routing import record_messages
from pipeline_platform.tasks.record.step import Destination, receive_table

FOUND = pa.schema(
    [
        *(field for field in SOURCE_ORDER if field.name != "window"),
        ("message_id", pa.string()),
        ("own", pa.string()),
        ("size", pa.int64()),
    ]
)
"""A message that waits for its task, in `FOUND_TABLE`. `own` is the partition for handling; `size` is in bytes."""
FOUND_TABLE, _DEALT_TABLE = "_found", "_dealt"

DEALT = pa.schema(
    [
        ("task", pa.int32()),
        ("turn", pa.int64()),
        ("position", pa.int64()),
        ("size", pa.int64()),
        (LANE, pa.int32()),
        ("wave", pa.int64()),
        ("own", pa.string()),
        (HELD_BY, pa.string()),
    ]
)
"""Messages of each task in `_DEALT_TABLE`, in the order of handling. `turn` counts all messages in this order; the lane
is the number of the partition. The last columns are for pipelines that hold partitions: a wave has one message of each
partition."""


@dataclass(frozen=True)
class FindPartitions(Handle):
    """Task `n` finds the partitions of the received rows `parts[n]`.

    It also records the messages that need no handling: repeats, and messages that fail before they have a partition.
    """

    def _handle(self, window: str, rows: pa.RecordBatch, recording: Recording) -> Sequence[int]:
        """Find the partitions. A message takes its permit when it is handled."""
        self.find(window, rows, recording)
        return ()

    def find(self, window: str, rows: pa.RecordBatch, recording: Recording) -> None:
        """Write `FOUND` for the rows that have a partition, and record the others as failed or skipped."""
        partition_by, good, own = self.pipeline.partitioning(), rows, rows.column("partition")
        if partition_by != SOURCE or Filter(self.pipeline):
            handler = Handler(recording)
            if partition_by != SOURCE:
                messages, found = partitioned(partition_by, handler.transformed(rows), recording.watch)
                ended = [row for row, partition in enumerate(found) if partition is None]
            else:  # a message that fails now would not stop its partition, so it fails when it is handled
                messages, found = handler.let_through(rows), own.to_pylist()
                ended = [row for row, message in enumerate(messages) if message.reason == FILTERED]
            record_messages(recording, rows_at(rows, ended), window, [messages[row] for row in ended])
            kept = sorted({*range(rows.num_rows)} - {*ended})
            good, own = rows_at(rows, kept), pa.array([found[row] for row in kept], pa.string())
        size = pc.binary_length(good.column("data")).cast(pa.int64())
        columns = [*(good.column(name) for name in FOUND.names[:-2]), own, size]
        recording.stage(FOUND_TABLE, window, pa.RecordBatch.from_arrays(columns, schema=FOUND))

    def _stage(self) -> str:
        return PARTITION_BY


@dataclass(frozen=True)
class DealPartitions:
    """Deals whole partitions to tasks, evenly by their numbers of messages.

    Attributes:
        found: Whole files of `FOUND`.
        tasks: Number of tasks that will handle.
        failures: Files of the table `failed` in windows with open failures, by window, which hold their partitions.
            None if the pipeline does not hold partitions.
    """

    lake: Lake
    pipeline: str
    receive_id: str
    found: Sequence[RowRange]
    tasks: int
    failures: Mapping[str, Sequence[str]] | None = None

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run the only task."""
        rows = pa.concat_tables(map(self._read, self.found))
        rows = self._in_waves(rows.take(in_source_order(rows)))
        tasks = dealt(rows["own"], np.ones(rows.num_rows, np.int64), self.tasks)
        by_task = pa.array(np.argsort(tasks, kind="stable"))
        turns = pa.array(np.arange(rows.num_rows))
        columns = [pa.array(tasks, pa.int32()), turns, *(rows[name] for name in DEALT.names[2:])]
        plan = pa.table(columns, schema=DEALT).take(by_task).combine_chunks()
        part = receive_table(self.receive_id, _DEALT_TABLE), self.found[0].window, plan
        files = write_rows(self.lake, self.pipeline, f"{self.receive_id}-deal-{index}", [part])
        yield from Manifest(files).to_arrow().to_batches()

    def _in_waves(self, rows: pa.Table) -> pa.Table:
        """Return rows, given in the order of their source, in the order of handling, with their lanes and waves."""
        lanes = rows["own"].combine_chunks().dictionary_encode().indices
        rows = rows.append_column(LANE, lanes)
        if self.failures is None:
            nothing = pa.nulls(rows.num_rows)
            return rows.append_column("wave", nothing).append_column(HELD_BY, nothing)
        held_by = waits_for(rows, open_in_partitions(self.lake, self.failures))
        waves = waves_of(pc.if_else(pc.is_valid(held_by), None, lanes))
        rows = rows.append_column("wave", pa.array(waves)).append_column(HELD_BY, held_by)
        return rows.take(pa.array(np.argsort(waves, kind="stable")))

    def _read(self, file: RowRange) -> pa.Table:
        rows = pa.concat_tables(row_groups(self.lake, file.path, FOUND))
        return rows.append_column("window", pa.repeat(file.window, rows.num_rows))


@dataclass(frozen=True)
class HandleInOrder(Handle):
    """Task `n` handles the messages that were dealt to it, in order.

    Attributes:
        parts: One part: the received files, whole and in the order of their positions.
        plan: Files of `DEALT`.
        turns: First turn (inclusive) and end (exclusive) of the messages to handle; None for all.
        stopped: Partitions in which a message failed in an earlier portion; see `TaskReport`.
    """

    plan: Sequence[RowRange] = ()
    turns: tuple[int, int] | None = None
    stopped: Mapping[str, str] = field(default_factory=dict)
    in_order = True

    def recording(
        self, destination: Destination, watch: Watch, report: TaskReport, size: TrySize | None = None
    ) -> Recording:
        """Return the recording of tries. Its report has the partitions that are stopped already."""
        report.stopped = {**self.stopped, **report.stopped}
        return super().recording(destination, watch, report, size)

    def blocks(self, share: int, skip: int) -> Iterator[tuple[int, Sequence[pa.RecordBatch]]]:
        """Look up the rows of a task. A block contains a batch of rows per window, and only rows of one wave."""
        (whole,) = self.parts
        received = ByPosition(self.lake, whole)
        stored = [name for name in READ.names if name not in ("window", "position")]
        of_plan = [LANE] if self.pipeline.processors.threads > 1 else []
        if self.pipeline.holds_partitions():
            of_plan = ["own", HELD_BY]
        for some in self._dealt(share, skip):
            positions = some["position"].to_numpy()
            rows = received.take(stored, positions).append_column("position", pa.array(positions))
            for name in of_plan:
                if name in some.schema.names:
                    rows = rows.append_column(name, some[name].combine_chunks())
            for first, end in pairwise([0, *self._ends_of_waves(some), len(rows)]):
                windows = received.by_window(rows.slice(first, end - first))
                block = [some.append_column("window", pa.repeat(window, len(some))) for window, some in windows]
                yield end - first, block

    def _ends_of_waves(self, planned: pa.Table) -> Sequence[int]:
        """Return the indexes between two waves; empty for rows without waves."""
        if not (self.in_order and self.pipeline.holds_partitions()):
            return ()
        return (np.flatnonzero(np.diff(planned["wave"].to_numpy())) + 1).tolist()

    def _dealt(self, index: int, skip: int) -> Iterator[pa.Table]:
        """Yield the planned rows of a task, at most a block at a time."""
        most_rows = max(self.pipeline.processors.chunk_size, BLOCK_ROWS)
        most_bytes = self.pipeline.processors.chunk_bytes
        for planned in self._planned(index):
            mine, skip = planned.slice(skip), max(0, skip - planned.num_rows)
            first, sizes = 0, mine["size"].fill_null(0).to_pylist()  # a message may have no data
            for some in portions(sizes, int, most_bytes, most_rows):
                yield mine.slice(first, len(some))
                first += len(some)

    def tries(self, block: Sequence[pa.RecordBatch], known: Death | None) -> Tries:
        """Handle the rows of a block. In a wave, first record the rows whose partition waits for a failure."""
        if not (self.in_order and self.pipeline.holds_partitions()):
            yield from super().tries(block, known)
            return
        for rows in block:
            window = rows.column("window")[0].as_py()
            held = {*(yield from surely(partial(self._hold, window, rows)))}
            fresh = rows_at(rows, [row for row in range(rows.num_rows) if row not in held])
            # `known` counts rows of another try, in which other partitions may have been held.
            yield from each_alone(fresh, partial(self._handle, window), partial(self._fail, window))

    def _hold(self, window: str, rows: pa.RecordBatch, recording: Recording) -> list[int]:
        """Record the rows whose partition waits for a failure. Return their indexes."""
        # Once a message was released, later messages of its partition are released, too.
        is_over = recording.report.released or (self.pace is not None and self.pace.is_over)
        failures = [] if is_over else held_by(rows, recording.report)
        held = [row for row, failure in enumerate(failures) if failure is not None]
        if held:
            some = rows_at(rows, held)
            messages = hold(list(Message.each(some, recording.ack_policy)), [failures[row] for row in held])
            record_messages(recording, some, window, messages)
        return held

    def _planned(self, index: int) -> Iterator[pa.Table]:
        mine = pc.field("task") == index
        if self.turns is not None:
            mine &= (pc.field("turn") >= self.turns[0]) & (pc.field("turn") < self.turns[1])
        for file in self.plan:
            with stored_file(self.lake, file.path, DEALT) as stored:
                tables = [stored.group(group).filter(mine) for group in stored.groups_with("task", index, index)]
            yield pa.concat_tables([DEALT.empty_table(), *tables])
