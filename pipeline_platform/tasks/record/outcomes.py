"""Recording outcomes: an outcome for each message, and its rows in the tables of batchers."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import compress
from operator import attrgetter
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.early_acks import Entry
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.actions import EARLY
from pipeline_platform.model.events import EVENTS
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import ATTEMPT_KEY, DEFAULT, DELIVERY_KEY, PAYLOAD, Message
from pipeline_platform.model.options import Batcher, has_table
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.acknowledge.early import EarlyAcks, nobody
from pipeline_platform.tasks.callback_process.progress import UNWATCHED, Watch
from pipeline_platform.tasks.record.ack_actions import actions_of_failures
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.columns import Columns
from pipeline_platform.tasks.record.failures import Failures, unknown_batcher
from pipeline_platform.tasks.record.fan_out import ends_of, ends_table, parents_table, waiting_parents
from pipeline_platform.tasks.record.filtered import write_filtered
from pipeline_platform.tasks.record.held import own_column, own_of, stop
from pipeline_platform.tasks.record.staging import DELIVERED, staged_rows, staged_table
from pipeline_platform.tasks.record.step import Sink, Step
from pipeline_platform.telemetry.spans import span


class Outcomes:
    """Writes the outcomes of messages that a callback has processed.

    Attributes:
        step: Step of the messages.
        pipeline: Instance whose `handle_failed` gets failures before they are recorded; None to call no callbacks.
        watch: Watch that is notified of calls of user code.
        report: Report of the task; it gets the counts of the rows written.
        most_rows: Maximum number of rows of a try whose results return to the task; None for no limit.
        early_acks: Early acknowledger; None without `ack_immediately`.
        ack_policy: Ack actions of messages.
    """

    def __init__(
        self,
        step: Step,
        sink: Sink,
        pipeline: Pipeline | None = None,
        watch: Watch = UNWATCHED,
        early_acks: EarlyAcks | None = None,
        report: TaskReport | None = None,
    ) -> None:
        self.pipeline, self.watch = pipeline, watch
        self.report = report or TaskReport()
        self.most_rows: int | None = None
        self.early_acks = early_acks or step.early_acks()
        at_once = self.early_acks or (nobody if step.pipeline.acks_immediately else None)
        self.ack_policy = step.ack_policy._replace(at_once=at_once)
        self.step, self._sink, self._batchers = step, sink, step.pipeline.batchers
        self._failures = Failures(step, sink, self.report, watch)
        self._columns = Columns(step, watch)

    @contextmanager
    def chunk(self, messages: int) -> Iterator[None]:
        """Emit a span of a chunk with its number of messages and the outcomes recorded within it."""
        with span("chunk", self.step.pipeline, messages=messages) as chunk:
            before = self.report.counts()
            yield
            counts = self.report.counts()
            chunk.add(**{name: counts[name] - before[name] for name in EVENTS["chunk"].stop})

    def write(self, table: str, window: str, rows: pa.RecordBatch) -> None:
        """Write rows of a table other than `outcomes`."""
        self._sink.write(table, window, rows)

    def without_callbacks(self) -> Self:
        """Return a recorder for the same files and report that does not call `handle_failed`."""
        silent = copy(self)
        silent.pipeline = None
        return silent

    def handled(self, batch: pa.RecordBatch, window: str, messages: list[Message]) -> None:
        """Record messages that `handle_message` has processed, one for each row of `batch`, in its order."""
        block = Block(batch, window, messages)
        self._route(block, enumerate(messages))
        can_rescue = self.step.pipeline.processors.rescue
        self._finish(block, lambda _: can_rescue, lambda rescued: self._route(block, rescued))

    def _route(self, block: Block, messages: Iterable[tuple[int, Message]]) -> None:
        """Write messages of a block for their batchers."""
        groups, parents = {name: list[int]() for name in self._batchers}, list[int]()
        for index, message in messages:
            state = message._state
            if state.failure is not None:
                block.failed.append(index)
            elif state.skip_reason is not None:
                block.done.append(index)
            elif state.children is not None:
                parents.append(index)
            elif (group := groups.get(message.batcher)) is not None:
                group.append(index)
            elif not self._batchers:
                block.done.append(index)
            else:
                block.fail(index, unknown_batcher(message.batcher, self._batchers, "handle_message"))
        for name, indexes in groups.items():
            if indexes:
                self._write(name, block, indexes)
        if parents:
            self._route_children(block, parents)

    def _route_children(self, block: Block, parents: list[int]) -> None:
        """Write the children of messages for their batchers. If a child fails, none of its siblings is written."""
        # Without the payloads: a message may have thousands of children.
        payloads = pa.nulls(block.rows.num_rows, pa.binary())
        rows = block.rows.set_column(block.rows.schema.get_field_index("data"), "data", payloads)
        pairs = [(index, child) for index in parents for child in block.messages[index]._state.children or ()]
        at = [index for index, _ in pairs]
        family = Block(rows, block.window, [child for _, child in pairs], at=at)
        groups = {name: list[int]() for name in self._batchers}
        for number, child in enumerate(family.messages):
            if (group := groups.get(child.batcher)) is not None:
                group.append(number)
            elif self._batchers:
                family.fail(number, unknown_batcher(child.batcher, self._batchers, "handle_message"))
        built = {name: self._columns.build(name, family, numbers) for name, numbers in groups.items() if numbers}
        failed: dict[int, Message] = {}
        for number in sorted(family.failed):
            failed.setdefault(at[number], family.messages[number])
        waiting = set[int]()
        for name, (columns, fitting) in built.items():
            kept = [place for place, number in enumerate(fitting) if at[number] not in failed]
            if self._columns.wait(name):
                waiting.update(at[fitting[place]] for place in kept)
            if kept:
                taken = [column.take(pa.array(kept, pa.int64())) for column in columns]
                self._put(name, family, taken, [fitting[place] for place in kept])
        for index in parents:
            if index in failed:
                block.messages[index] = block.messages[index]._failed_as(failed[index])
                block.failed.append(index)
            elif index not in waiting:
                block.done.append(index)
        if waiting:
            self._await_children(block, sorted(waiting))

    def _await_children(self, block: Block, parents: list[int]) -> None:
        """Write the parents that wait for their children, and their ack actions."""
        own = own_of(block, parents, self.step)
        waiting = waiting_parents(block.take(["position", "data"], parents), own)
        self.write(parents_table(self.step.receive_id), block.window, waiting)
        ends = ends_of(block.rows, [(index, block.messages[index]) for index in parents])
        self.write(ends_table(self.step.receive_id), block.window, ends)

    def batched(
        self,
        name: str,
        batch: pa.RecordBatch,
        window: str,
        messages: list[Message],
        batch_id: str,
        called: Container[int] = (),
    ) -> None:
        """Record one batch that `handle_batch` has processed, one message for each row of `batch`, in its order.

        Args:
            name: Name of the batcher.
            batch: Rows of the batch.
            window: Window of the rows.
            messages: Messages of the rows, ok or failed.
            batch_id: Id of the batch.
            called: Rows of the messages that `handle_batch` got. The data of other messages is not decoded.
        """
        block, options = Block(batch, window, messages), self._batchers[name]
        block.failed.extend(index for index, message in enumerate(messages) if message.failure is not None)
        self._route_batched(
            name, block, [index for index, each in enumerate(messages) if each.failure is None], batch_id
        )

        def may_rescue(message: Message) -> bool:
            return isinstance(options, Batcher) and options.rescue and message._row in called

        if block.has_children:
            self._failures.judge(block)  # later steps know only the kinds of failures
            self._set_children_apart(block, may_rescue)
        self._finish(
            block,
            may_rescue,
            lambda rescued: self._route_batched(name, block, [index for index, _ in rescued], batch_id),
        )
        if not has_table(options):
            self.report.count_effects(name, window, failed=sum(message.failure is not None for message in messages))

    def _route_batched(self, name: str, block: Block, indexes: list[int], batch_id: str) -> None:
        """Write messages of a batch, without the skipped messages."""
        skipped = [index for index in indexes if block.messages[index].status == "skipped"]
        block.done.extend(skipped)
        if kept := sorted({*indexes} - {*skipped}):
            self._write(name, block, kept, batch_id)

    def _set_children_apart(self, block: Block, may_rescue: Callable[[Message], bool]) -> None:
        """Write the ends of children, whose parents end later, and remove the children from the block."""
        children = [(index, message) for index, message in enumerate(block.messages) if message.child is not None]
        ends = ends_of(block.rows, children, [child for _, child in children if may_rescue(child)])
        self.write(ends_table(self.step.receive_id), block.window, ends)
        failed = [index for index, child in children if child.failure is not None and not child._is_held]
        stop(block, failed, self.step, self.report)
        for indexes in block.done, block.failed:
            indexes[:] = [index for index in indexes if block.messages[index].child is None]

    def ended_parents(
        self, rows: pa.RecordBatch, window: str, messages: list[Message], may_rescue: Callable[[Message], bool]
    ) -> None:
        """Record messages whose children have ended, one for each row. A rescued message adds no row to a table."""
        block = Block(rows, window, messages, are_parents=True)
        for index, message in enumerate(messages):
            (block.done if message.failure is None else block.failed).append(index)
        self._finish(block, may_rescue, lambda rescued: block.done.extend(index for index, _ in rescued))

    def failed(self, batch: pa.RecordBatch, window: str, failures: Sequence[Failure]) -> None:
        """Record rows as failed, each with its failure. `handle_failed` cannot rescue them."""
        messages = [
            message.failed(why) for message, why in zip(Message.each(batch, self.ack_policy), failures, strict=True)
        ]
        self._finish(Block(batch, window, messages, failed=list(range(len(messages)))))

    def columns(self, name: str, rows: pa.RecordBatch, window: str, columns: Sequence[pa.Array]) -> None:
        """Record rows of a batcher, given as columns."""
        self._write_columns(name, rows, window, [*columns, rows.column("batch_key").fill_null(DEFAULT)])
        self.record_handled(rows, window)

    def record_handled(self, rows: pa.RecordBatch, window: str) -> None:
        """Write the outcomes of rows that are all handled."""
        action, early = self.step.ack_policy.on_success, self._early(rows)
        actions = [EARLY if index in early else action for index in range(rows.num_rows)] if early else action
        self._write_decided(rows, window, "handled", actions)

    def duplicates(self, rows: pa.RecordBatch, window: str, *, decided: bool) -> None:
        """Record deliveries that are not handled.

        Args:
            rows: Rows of the deliveries.
            window: Window of the rows.
            decided: Whether an earlier receive decided the message; then it is acknowledged as handled. Otherwise this
                receive handles another copy, which may still be released, and the lease of this copy expires.
        """
        self.report.duplicates[window] += rows.num_rows
        self._write_outcomes(rows, window, "duplicate", self.step.ack_policy.on_success if decided else "noop")

    def given_back(self, rows: pa.RecordBatch, window: str) -> None:
        """Record messages that were not started as returned: the source redelivers them, and open failures stay open.

        Messages that were acknowledged early would not be redelivered, so they fail.
        """
        if early := self._early(rows):
            begun = [index in early for index in range(rows.num_rows)]
            reason = "acknowledged early, but the run stopped before handle_message"
            self.failed(rows.filter(pa.array(begun)), window, [Failure("not handled", reason)] * len(early))
            rows = rows.filter(pc.invert(pa.array(begun)))
        self.report.released += rows.num_rows
        self.report.returned[window] += rows.num_rows
        self._write_outcomes(rows, window, "returned", self.step.ack_policy.giving_back or "noop")

    def _write(self, name: str, block: Block, indexes: list[int], batch_id: str | None = None) -> None:
        """Write messages for a batcher: staged, or to its table, if any, if they have a `batch_id` or need none."""
        if batch_id is not None and not has_table(self._batchers[name]):
            self.report.count_keys(name, pa.array([block.messages[index].batch_key for index in indexes], pa.string()))
            self.report.count_effects(name, block.window, handled=len(indexes))
            block.done.extend(indexes)
            return
        self._put(name, block, *self._columns.build(name, block, indexes, batch_id), batch_id)

    def _put(
        self, name: str, block: Block, columns: list[pa.Array], fitting: list[int], batch_id: str | None = None
    ) -> None:
        """Write columns that were built for a batcher."""
        if not fitting:
            return
        if self._columns.wait(name, batch_id):
            self.report.staged[name] += len(fitting)
            *handled, own = columns
            rows = staged_rows(block.take(DELIVERED, fitting), handled, own, block.children(fitting))
            self._sink.write(staged_table(self.step.receive_id, name), block.window, rows)
        else:
            children = block.children(fitting)
            self._write_columns(name, block.take(ATTEMPT_KEY, fitting), block.window, columns, batch_id, children)
            block.done.extend(fitting)

    def _write_columns(
        self,
        name: str,
        rows: pa.RecordBatch,
        window: str,
        columns: list[pa.Array],
        batch_id: str | None = None,
        children: pa.Array | None = None,
    ) -> None:
        """Write rows of a batcher's table. `columns` are those of its data, then the batch keys."""
        count, row_type = rows.num_rows, self._columns.row_types.get(name)
        self.report.count_keys(name, columns[-1])
        names = [*(row_type.schema.names if row_type else ["data"]), "batch_key"]
        table = dict(zip(names, columns, strict=True)) | {column: rows.column(column) for column in ATTEMPT_KEY}
        table["batch_id"] = pa.nulls(count, pa.string()) if batch_id is None else pa.repeat(batch_id, count)
        table["receive_id"] = pa.repeat(self.step.receive_id, count)
        table["child"] = pa.nulls(count, pa.int32()) if children is None else children
        self._sink.write(name, window, pa.RecordBatch.from_pydict(table))

    def _finish(
        self,
        block: Block,
        may_rescue: Callable[[Message], bool] = lambda _: False,
        take_back: Callable[[list[tuple[int, Message]]], None] = lambda _: None,
    ) -> None:
        """Pass failed messages to `handle_failed`, write the rescued messages, and record all outcomes.

        `take_back` writes rescued messages, given with their indexes. A message that fails in it stays failed.
        """
        self._failures.judge(block)
        if block.failed and self.pipeline is not None:
            held = {index for index in block.failed if block.messages[index]._is_held}
            losers = [(index, block.messages[index]) for index in sorted({*block.failed} - held)]
            shown = self._failures.shown([message for _, message in losers], self.pipeline, may_rescue)
            block.failed[:] = held
            rescued = []
            for (index, _), message in zip(losers, shown, strict=True):
                block.messages[index] = message
                if message.failure is None:
                    rescued.append((index, message))
                else:
                    block.failed.append(index)
            if rescued:
                take_back(rescued)
            self._failures.judge(block)
        self.record(block)

    def record(self, block: Block) -> None:
        """Write the outcomes of done and failed messages, and record the failures."""
        ack_policy, done, failed = self.ack_policy, sorted(block.done), sorted(block.failed)
        early = self._early(block.rows)
        skipped = [index for index in done if block.messages[index]._state.skip_reason is not None]
        if skipped:
            write_filtered(self.step, self._sink, block, skipped)
            done = sorted({*done} - {*skipped})
            for index in skipped:
                self.report.count_skipped(block.messages[index].reason)
        has_actions = bool(early) or any(map(attrgetter("_state.actions"), block.messages))
        for outcome, indexes in ("handled", done), ("skipped", skipped):
            if not indexes:
                continue
            actions: str | list[str] = ack_policy.on_success
            if has_actions:
                actions = [(block.messages[index].actions or (None,))[0] or ack_policy.on_success for index in indexes]
                actions = [EARLY if index in early else action for index, action in zip(indexes, actions, strict=True)]
            self._write_decided(block.take(DELIVERY_KEY, indexes), block.window, outcome, actions)
        if not failed:
            return
        losers = [block.messages[index] for index in failed]
        actions, ends = actions_of_failures(block, failed, early, ack_policy)
        outcomes = ["failed" if end else "returned" for end in ends]
        self._write_outcomes(block.take(DELIVERY_KEY, failed), block.window, outcomes, actions)
        self.report.failed[block.window] += sum(ends)
        self.report.returned[block.window] += len(ends) - sum(ends)
        for message in losers:
            self.report.count_failure(message)
        if held := sum(message._is_held for message in losers):
            self.report.count_held(held, in_retry=ack_policy.closes_failures)
        stop(block, failed, self.step, self.report)
        if recorded := list(compress(failed, ends)):
            rows = block.take([*ATTEMPT_KEY, *PAYLOAD, *own_column(block, self.step)], recorded)
            self._failures.record(rows, block.window, list(compress(losers, ends)))

    def _early(self, rows: pa.RecordBatch) -> dict[int, Entry]:
        """Return the early acknowledgements, by the index of the row."""
        return {} if self.early_acks is None else self.early_acks.among(rows, by_forks=self.pipeline is None)

    def _write_decided(self, rows: pa.RecordBatch, window: str, outcome: str, action: str | list[str]) -> None:
        """Write the outcomes of rows that are all handled or all skipped."""
        counted = self.report.handled if outcome == "handled" else self.report.skipped
        counted[window] += rows.num_rows
        self._write_outcomes(rows, window, outcome, action)
        if self.ack_policy.closes_failures:
            self._failures.close(rows, window)

    def _write_outcomes(
        self, rows: pa.RecordBatch, window: str, outcome: str | list[str], action: str | list[str]
    ) -> None:
        """Write the outcomes of rows. `outcome` and `action` are for all rows, or lists with a value per row."""
        table = {name: rows.column(name) for name in DELIVERY_KEY}
        for name, value in ("receive_id", self.step.receive_id), ("outcome", outcome), ("action", action):
            table[name] = pa.repeat(value, rows.num_rows) if isinstance(value, str) else pa.array(value, pa.string())
        schema = pa.schema([field for field in OUTCOMES if field.name != "window"])
        self._sink.write("outcomes", window, pa.RecordBatch.from_pydict(table, schema=schema))
