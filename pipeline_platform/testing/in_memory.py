"""Execution of the code of Spark tasks in this process, with records in memory instead of files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.decisions.early_acks import AckKey, Entry
from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.columns.schema import arrow_schema
from pipeline_platform.model.message import DEFAULT, BatchMode, Message
from pipeline_platform.model.options import Batcher
from pipeline_platform.model.pipeline import BatchInfo, Pipeline
from pipeline_platform.tasks.acknowledge.early import EarlyAcks
from pipeline_platform.tasks.batch import cutting
from pipeline_platform.tasks.batch.handle_batches import Batch, HandleBatches
from pipeline_platform.tasks.batch.parents import parents_of
from pipeline_platform.tasks.callback_process.fork import Written
from pipeline_platform.tasks.handle.handle_messages import lane_of
from pipeline_platform.tasks.handle.in_order import FOUND, FOUND_TABLE, FindPartitions
from pipeline_platform.tasks.handle.row_lane import LANE
from pipeline_platform.tasks.handle.source_order import in_source_order, waves_of
from pipeline_platform.tasks.record.batched import record_parents
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.fan_out import ENDS, ENDS_TABLE, PARENTS_TABLE
from pipeline_platform.tasks.record.held import held_by, hold
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.routing import record_messages
from pipeline_platform.tasks.record.staging import CUT_BY, staged_messages, to_be_cut
from pipeline_platform.tasks.record.step import Step, receive_table


class EarlyCalls(EarlyAcks):
    """Records early acknowledgements instead of calling a source: the messages, and their ack actions by id."""

    def __init__(
        self, ack_policy: AckPolicy, acknowledge: Callable[[str, list[Message], list[Message]], object]
    ) -> None:
        """Call `acknowledge` with `(ack_ref, successful, failed)` for each early acknowledgement."""
        super().__init__(ack_policy)
        self._acknowledge = acknowledge
        self.messages, self.actions = list[Message](), dict[str, str]()

    def _acknowledge_now(self, messages: Mapping[AckKey, Message]) -> dict[AckKey, Entry]:
        some, entries = list(messages.values()), {key: self._entry(key, message) for key, message in messages.items()}
        (ack_ref, _), *_ = messages
        failed = [message for message in some if message.status == "failed"]
        self._acknowledge(ack_ref, [message for message in some if message.status != "failed"], failed)
        self.messages += some
        self.actions |= {message.message_id: entries[key].action for key, message in messages.items()}
        return entries


class Kept(Recording):
    """Records in memory, with the handled and failed messages in `ended`, by position."""

    def __init__(self, step: Step, instance: Pipeline, early_acks: EarlyAcks | None = None) -> None:
        self._files = Written()
        super().__init__(step, self._files, instance, early_acks=early_acks)
        self.ended = dict[int, Message]()
        self._children: dict[int, dict[int, Message]] = {}

    def keep(self, block: Block) -> None:
        """Keep the messages of a block."""
        positions = block.rows.column("position").to_pylist()
        self.ended |= {positions[index]: block.messages[index] for index in (*block.done, *block.failed)}

    def keep_rows(self, rows: pa.RecordBatch, batcher: str | None, columns: Sequence[pa.Array]) -> None:
        """Keep handled rows as messages; those of a batcher have a dict of their fields as data."""
        positions = rows.column("position")
        received = self._received.take(pc.index_in(positions, value_set=self._received["position"]))
        messages: Iterable[Message] = Message.each(received, self.ack_policy)
        if batcher is not None:
            model = self.step.pipeline.batchers[batcher].table_schema
            assert model is not None
            names, keys = arrow_schema(model).names, rows.column("batch_key").fill_null(DEFAULT).to_pylist()
            data = pa.RecordBatch.from_arrays(list(columns), names).to_pylist(maps_as_pydicts="strict")
            messages = [
                message.put(value, batcher=batcher, batch_key=key)
                for message, value, key in zip(messages, data, keys, strict=True)
            ]
        self.ended |= dict(zip(positions.to_pylist(), messages, strict=True))

    def keep_children(self, rows: pa.RecordBatch, children: Sequence[tuple[int, Message]]) -> None:
        """Keep children by the position of their parent."""
        positions = rows.column("position").to_pylist()
        for index, child in children:
            self._children.setdefault(positions[index], {})[child.child or 0] = child

    @property
    def successful(self) -> list[Message]:
        """Handled messages in order; a message with children is replaced by them."""
        ended = [self.ended[position] for position in sorted(self.ended)]
        return [
            result
            for message in ended
            if message.status == "ok"
            for result in ([message] if message._state.children is None else message._state.children)
            if result.status == "ok"
        ]

    def written(self, table: str) -> pa.Table:
        """Return the recorded rows of a table, which must not be empty."""
        return pa.Table.from_batches([rows for name, _, rows in self._files.batches if name == table]).combine_chunks()

    def handle(self, rows: pa.RecordBatch, window: str, batch_mode: BatchMode) -> list[BatchInfo]:
        """Handle the messages of a receive, then their batches; return the properties of the batches."""
        rows = self._in_order(rows, window)
        self._received = rows
        for wave in self._waves(rows):
            lane = lane_of(self, batch_mode=batch_mode)
            for _ in lane.record(self._without_held(wave, window), window):
                pass
        infos = []
        for name, options in self.step.pipeline.batchers.items():
            if isinstance(options, Batcher) and self.report.staged[name]:
                task = HandleBatches(**vars(self.step), batcher=name, staged=(), plan=())
                for batch in self._cut(task, window, options):
                    task.handle(batch, self)
                    infos += [] if batch.failure else [batch.info]
        self._end_parents(rows, window)
        return infos

    def _end_parents(self, rows: pa.RecordBatch, window: str) -> None:
        written = {table for table, *_ in self._files.batches}
        names = [receive_table(self.step.receive_id, name) for name in (PARENTS_TABLE, ENDS_TABLE)]
        if names[0] not in written:
            return
        parents, ends = (self.written(name) if name in written else ENDS.empty_table() for name in names)
        rows = rows.filter(pc.is_in(rows["position"], parents["position"].combine_chunks()))
        messages, may_rescue = parents_of(rows, ends, self.ack_policy)
        for index, position in enumerate(rows["position"].to_pylist()):
            if messages[index].failure is None:
                children = self._children[position]
                messages[index] = messages[index]._but(children=tuple(children[number] for number in sorted(children)))
        record_parents(self, rows, window, messages, may_rescue)

    def _in_order(self, rows: pa.RecordBatch, window: str) -> pa.RecordBatch:
        """Return the rows with a partition in the order of their source; all rows if the pipeline keeps no order."""
        if self.step.pipeline.partitioning() is None:
            return rows
        FindPartitions(**vars(self.step), parts=()).find(window, rows, self)
        table = receive_table(self.step.receive_id, FOUND_TABLE)
        found = [some for name, _, some in self._files.batches if name == table]
        plan = pa.Table.from_batches(found, FOUND).combine_chunks()
        rows = rows.take(pc.index_in(plan["position"].combine_chunks(), rows["position"]))
        own = plan["own"].combine_chunks()
        rows = rows.append_column(LANE, own.dictionary_encode().indices).append_column("own", own)
        return rows.take(pa.array(in_source_order(pa.table(rows))))

    def _waves(self, rows: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Return the rows of each wave; all rows if the pipeline does not hold partitions."""
        if not self.step.pipeline.holds_partitions():
            return [rows]
        waves = waves_of(rows.column(LANE))
        return [rows.filter(pa.array(waves == wave)) for wave in range(waves.max(initial=-1) + 1)]

    def _without_held(self, rows: pa.RecordBatch, window: str) -> pa.RecordBatch:
        """Record the rows whose partition waits for a failure. Return the other rows."""
        if not self.report.stopped:
            return rows
        failures = held_by(rows, self.report)
        is_held = pa.array([failure is not None for failure in failures])
        some, held_up = rows.filter(is_held), list(filter(None, failures))
        record_messages(self, some, window, hold(list(Message.each(some, self.ack_policy)), held_up))
        return rows.filter(pc.invert(is_held))

    def _cut(self, task: HandleBatches, window: str, options: Batcher) -> Iterator[Batch]:
        waiting = self.written(receive_table(task.receive_id, task.batcher))

        def read(rows: list[int]) -> Iterator[Message]:
            (batch,) = waiting.take(rows).combine_chunks().to_batches()
            batch = batch.append_column("window", pa.repeat(window, batch.num_rows))
            return staged_messages(batch, task.batcher, task.ack_policy, options.table_schema, {}, self.watch)

        known = to_be_cut(waiting.select(CUT_BY.names), window)
        bounds, retry = (options.batch_size, options.batch_bytes), task.pipeline.retry
        plan = cutting.cut_and_deal(known, *bounds, rest="timeout", read=read, retry=retry)
        for planned in cutting.each(plan):
            (messages,) = waiting.take(planned["rows"]).combine_chunks().to_batches()
            yield task.batch(planned, messages)
