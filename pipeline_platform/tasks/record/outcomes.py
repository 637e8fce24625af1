"""What became of messages: the rows of their batchers, and an outcome for each."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import attrgetter

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.early_acks import Entry
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.model.actions import EARLY
from pipeline_platform.model.failure import Failure, words
from pipeline_platform.model.message import DEFAULT, Message
from pipeline_platform.model.options import Batcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.host.progress import UNWATCHED, Watch
from pipeline_platform.tasks.host.step import Sink, Step
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.columns import Columns
from pipeline_platform.tasks.record.early import EarlyAcks, nobody
from pipeline_platform.tasks.record.failures import IDENTITY, PAYLOAD, Failures
from pipeline_platform.tasks.record.fan_out import PARENTS, ends_of, ends_table, parents_table
from pipeline_platform.tasks.record.staging import DELIVERY, staged_rows, staged_table
from pipeline_platform.tasks.record.tally import Tally
from pipeline_platform.telemetry.spans import span

_RECORDED = [*IDENTITY, "ack_ref", "ack_id"]


class Outcomes:
    """Writes, for messages that a callback is done with, what became of each.

    Attributes:
        step: Whose messages they are.
        pipeline: The instance whose `handle_failed` sees failures before they are recorded; None for no callbacks.
        watch: Learns where code of the author's is.
        tally: What was written.
        most_rows: Rows that a try takes up at once in a host that gives back what it writes; None where all.
        early_acks: Acknowledges early; None where nobody does.
        ack_policy: How messages are acknowledged.
    """

    def __init__(
        self,
        step: Step,
        sink: Sink,
        pipeline: Pipeline | None = None,
        watch: Watch = UNWATCHED,
        early_acks: EarlyAcks | None = None,
        tally: Tally | None = None,
    ) -> None:
        self.pipeline, self.watch = pipeline, watch
        self.tally = tally or Tally(step.pipeline.batchers)
        self.most_rows: int | None = None
        self.early_acks = early_acks or step.early_acks()
        at_once = self.early_acks or (nobody if step.pipeline.acks_immediately else None)
        self.ack_policy = step.ack_policy._replace(at_once=at_once)
        self.step, self._sink, self._batchers = step, sink, step.pipeline.batchers
        self._failures = Failures(step, sink, self.tally, watch)
        self._columns = Columns(step, watch)

    @contextmanager
    def chunk(self, messages: int) -> Iterator[None]:
        """Emit a chunk of so many messages, with what comes of them meanwhile."""
        names = {"handled", "failed", "returned", *(f"staged:{name}" for name in self._batchers)}
        counts = self.tally.counts
        with span("chunk", self.step.pipeline, messages=messages) as chunk:
            before = {name: counts[name] for name in names}
            yield
            came = {name: counts[name] - before[name] for name in names}
            staged = sum(count for name, count in came.items() if name.startswith("staged:"))
            chunk.add(handled=came["handled"], failed=came["failed"], returned=came["returned"], staged=staged)

    def write(self, table: str, window: str, rows: pa.RecordBatch) -> None:
        """Write rows that are no outcome."""
        self._sink.write(table, window, rows)

    @contextmanager
    def without_callbacks(self) -> Iterator[None]:
        """Show `handle_failed` nothing meanwhile."""
        pipeline, self.pipeline = self.pipeline, None
        try:
            yield
        finally:
            self.pipeline = pipeline

    def handled(self, batch: pa.RecordBatch, window: str, messages: list[Message]) -> None:
        """Record messages that `handle_message` is done with, one for each row of `batch`, in its order."""
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
            elif state.children is not None:
                parents.append(index)
            elif (group := groups.get(message.batcher)) is not None:
                group.append(index)
            elif not self._batchers:
                block.done.append(index)
            else:
                block.fail(index, self.no_batcher(repr(message.batcher), "handle_message"))
        for name, indexes in groups.items():
            if indexes:
                self._write(name, block, indexes)
        if parents:
            self._route_children(block, parents)

    def _route_children(self, block: Block, parents: list[int]) -> None:
        """Write the children of messages for their batchers; none of a message of which a child fails."""
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
                family.fail(number, self.no_batcher(repr(child.batcher), "handle_message"))
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
        """Write which messages end when their children do, and how they are acknowledged."""
        rows = block.take(["position", "data"], parents)
        size = pc.binary_length(rows.column("data")).cast(pa.int64())
        waiting = pa.RecordBatch.from_arrays([rows.column("position"), size], schema=PARENTS)
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
        """Record one batch that `handle_batch` is done with, one message for each row of `batch`, in its order.

        Args:
            name: The batcher.
            batch: The rows.
            window: Theirs.
            messages: Ok or failed.
            batch_id: Of the batch.
            called: Numbers of the messages that `handle_batch` got: the data of others is not decoded.
        """
        block, options = Block(batch, window, messages), self._batchers[name]
        block.failed.extend(index for index, message in enumerate(messages) if message.failure is not None)
        if done := [index for index, message in enumerate(messages) if message.failure is None]:
            self._write(name, block, done, batch_id)

        def may_rescue(message: Message) -> bool:
            return isinstance(options, Batcher) and options.rescue and message._row in called

        if block.has_children:
            self._set_children_apart(block, may_rescue)
        self._finish(
            block, may_rescue, lambda rescued: self._write(name, block, [index for index, _ in rescued], batch_id)
        )

    def _set_children_apart(self, block: Block, may_rescue: Callable[[Message], bool]) -> None:
        """Write what children say of their messages, which end later, and leave the other messages in a block."""
        children = [(index, one) for index, one in enumerate(block.messages) if one.child is not None]
        ends = ends_of(block.rows, children, [one for _, one in children if may_rescue(one)])
        self.write(ends_table(self.step.receive_id), block.window, ends)
        for indexes in block.done, block.failed:
            indexes[:] = [index for index in indexes if block.messages[index].child is None]

    def ended_parents(
        self, rows: pa.RecordBatch, window: str, messages: list[Message], may_rescue: Callable[[Message], bool]
    ) -> None:
        """Record messages whose children are at their end, one for each row. One that is rescued leaves no row."""
        block = Block(rows, window, messages)
        for index, message in enumerate(messages):
            (block.done if message.failure is None else block.failed).append(index)
        self._finish(block, may_rescue, lambda rescued: block.done.extend(index for index, _ in rescued))

    def failed(self, batch: pa.RecordBatch, window: str, failures: Sequence[Failure]) -> None:
        """Record rows that fail for good, each for its own reason."""
        messages = [
            message.failed(why) for message, why in zip(Message.each(batch, self.ack_policy), failures, strict=True)
        ]
        self._finish(Block(batch, window, messages, failed=list(range(len(messages)))))

    def columns(self, name: str, rows: pa.RecordBatch, window: str, columns: Sequence[pa.Array]) -> None:
        """Record rows of one batcher that came as columns."""
        self._write_columns(name, rows, window, [*columns, rows.column("batch_key").fill_null(DEFAULT)])
        self.record_handled(rows, window)

    def record_handled(self, rows: pa.RecordBatch, window: str) -> None:
        """Write the outcomes of rows that are all handled."""
        action, early = self.step.ack_policy.on_success, self._early(rows)
        actions = [EARLY if index in early else action for index in range(rows.num_rows)] if early else action
        self._write_handled(rows, window, actions)

    def duplicates(self, rows: pa.RecordBatch, window: str, *, decided: bool) -> None:
        """Record deliveries that are not handled.

        Args:
            rows: The deliveries.
            window: Theirs.
            decided: An earlier receive decided the message, so it is acknowledged as handled. Else this receive handles
                another copy, which may yet be given back, and this copy is left to its lease.
        """
        self.tally.outcome("duplicates", window, rows.num_rows)
        self._write_outcomes(rows, window, "duplicate", self.step.ack_policy.on_success if decided else "noop")

    def given_back(self, rows: pa.RecordBatch, window: str) -> None:
        """Record messages that nobody began to handle: the source delivers them again, and open failures stay open.

        One that was acknowledged early would not come again, so it fails.
        """
        if early := self._early(rows):
            begun = [index in early for index in range(rows.num_rows)]
            reason = "it was acknowledged early, and the run stopped before handle_message"
            self.failed(rows.filter(pa.array(begun)), window, [Failure("not handled", reason)] * len(early))
            rows = rows.filter(pa.array([not one for one in begun]))
        self.tally.counts["given_back"] += rows.num_rows
        self.tally.outcome("returned", window, rows.num_rows)
        self._write_outcomes(rows, window, "returned", self.step.ack_policy.giving_back or "noop")

    def no_batcher(self, batcher: str, stage: str) -> Failure:
        """Why a message fails that is to go where no batcher is."""
        reason = f"no batcher {words(batcher, 200)}; there are {sorted(self._batchers)}"
        return Failure("unknown batcher", reason, "", stage)

    def _write(self, name: str, block: Block, indexes: list[int], batch_id: str | None = None) -> None:
        """Write messages for a batcher: to where they wait for their batch, or, of a batch, to its table."""
        self._put(name, block, *self._columns.build(name, block, indexes, batch_id), batch_id)

    def _put(
        self, name: str, block: Block, columns: list[pa.Array], fitting: list[int], batch_id: str | None = None
    ) -> None:
        """Write columns that were built for a batcher."""
        if not fitting:
            return
        if self._columns.wait(name, batch_id):
            self.tally.counts[f"staged:{name}"] += len(fitting)
            *handled, own = columns
            rows = staged_rows(block.take(DELIVERY, fitting), handled, own, block.children(fitting))
            self._sink.write(staged_table(self.step.receive_id, name), block.window, rows)
        else:
            children = block.children(fitting)
            self._write_columns(name, block.take(IDENTITY, fitting), block.window, columns, batch_id, children)
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
        """Write rows of a batcher's table: the columns of its data, and then their batch keys."""
        count, row_type = rows.num_rows, self._columns.row_types.get(name)
        self.tally.counts[f"rows:{name}"] += count
        self.tally.keys(name, columns[-1])
        names = [*(row_type.schema.names if row_type else ["data"]), "batch_key"]
        table = dict(zip(names, columns, strict=True)) | {one: rows.column(one) for one in IDENTITY}
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
        """Show `handle_failed` what failed, let it rescue what it may, and record all.

        Args:
            block: The messages.
            may_rescue: Whether `handle_failed` may bring this one back.
            take_back: Writes those that it brought back, each with its index. What fails then fails for good.
        """
        if block.failed and self.pipeline is not None:
            losers = [(index, block.messages[index]) for index in sorted(block.failed)]
            shown = self._failures.shown([message for _, message in losers], self.pipeline, may_rescue)
            block.failed.clear()
            rescued = []
            for (index, _), message in zip(losers, shown, strict=True):
                block.messages[index] = message
                if message.failure is None:
                    rescued.append((index, message))
                else:
                    block.failed.append(index)
            if rescued:
                take_back(rescued)
        self.record(block)

    def record(self, block: Block) -> None:
        """Write the outcomes of messages that are handled or failed, and record the failures."""
        ack_policy, done, failed = self.ack_policy, sorted(block.done), sorted(block.failed)
        early = self._early(block.rows)
        if done:
            actions: str | list[str] = ack_policy.on_success
            if early or any(map(attrgetter("_state.actions"), block.messages)):
                actions = [(block.messages[index].actions or (None,))[0] or ack_policy.on_success for index in done]
                actions = [EARLY if index in early else action for index, action in zip(done, actions, strict=True)]
            self._write_handled(block.take(_RECORDED, done), block.window, actions)
        if not failed:
            return
        losers = [block.messages[index] for index in failed]
        again = block.rows.column("redelivered").take(pa.array(failed, pa.int64())).to_pylist()
        actions = [
            ack_policy.of_delivery(
                (message.actions or (None, None))[1] or ack_policy.on_failure, redelivered=redelivered
            )
            for message, redelivered in zip(losers, again, strict=True)
        ]
        # What goes back to the source comes again by intent: that decides nothing.
        ends = [ack_policy.ends(action) for action in actions]
        for place, index in enumerate(failed):
            if index in early:
                actions[place], ends[place] = EARLY, not early[index].comes_back(ack_policy)
        outcomes = ["failed" if end else "returned" for end in ends]
        self._write_outcomes(block.take(_RECORDED, failed), block.window, outcomes, actions)
        self.tally.outcome("failed", block.window, sum(ends))
        self.tally.outcome("returned", block.window, len(ends) - sum(ends))
        for message in losers:
            self.tally.failure(message)
        if recorded := list(compress(failed, ends)):
            rows = block.take([*IDENTITY, *PAYLOAD], recorded)
            self._failures.record(rows, block.window, list(compress(losers, ends)))

    def _early(self, rows: pa.RecordBatch) -> dict[int, Entry]:
        """What was acknowledged early, by the index of the row."""
        return {} if self.early_acks is None else self.early_acks.among(rows, by_forks=self.pipeline is None)

    def _write_handled(self, rows: pa.RecordBatch, window: str, action: str | list[str]) -> None:
        self.tally.outcome("handled", window, rows.num_rows)
        self._write_outcomes(rows, window, "handled", action)
        if self.ack_policy.closes_failures:
            self._failures.close(rows, window)

    def _write_outcomes(
        self, rows: pa.RecordBatch, window: str, outcome: str | list[str], action: str | list[str]
    ) -> None:
        """Write the outcomes of rows: one for all, or one each."""
        table = {name: rows.column(name) for name in _RECORDED}
        for name, value in ("receive_id", self.step.receive_id), ("outcome", outcome), ("action", action):
            table[name] = pa.repeat(value, rows.num_rows) if isinstance(value, str) else pa.array(value, pa.string())
        schema = pa.schema([field for field in OUTCOMES if field.name != "window"])
        self._sink.write("outcomes", window, pa.RecordBatch.from_pydict(table, schema=schema))
