"""What became of messages: the rows of their batchers, and an outcome for each."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import Any

import pyarrow as pa
from pydantic import BaseModel
from pydantic_core import to_json

from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.lake.told import Entry
from pipeline_platform.model.crossing import encode
from pipeline_platform.model.failure import Failure, words
from pipeline_platform.model.message import DEFAULT, Message
from pipeline_platform.model.options import Batcher, TableBatcher
from pipeline_platform.model.partition import SOURCE, partition_of
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.schema import RowType
from pipeline_platform.model.settling import TOLD
from pipeline_platform.tasks.early import Teller, nobody
from pipeline_platform.tasks.failures import IDENTITY, PAYLOAD, Failures
from pipeline_platform.tasks.progress import UNWATCHED, Watch
from pipeline_platform.tasks.staging import DELIVERY, handled_columns, staged_rows, staged_table
from pipeline_platform.tasks.step import Sink, Step
from pipeline_platform.tasks.tally import Tally
from pipeline_platform.telemetry.spans import span

_SETTLED = [*IDENTITY, "ack_ref", "ack_id"]


@dataclass(frozen=True)
class Block:
    """Messages that a callback is done with, one for each row, and the indexes of those that are at their end.

    A message takes the place of what it was before: of one that fails, and of one that `handle_failed` made of it.
    """

    rows: pa.RecordBatch
    window: str
    messages: list[Message]
    done: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    def fail(self, index: int, failure: Failure) -> None:
        """Let a message fail."""
        self.messages[index] = self.messages[index].failed(failure)
        self.failed.append(index)

    def take(self, names: list[str], indexes: list[int]) -> pa.RecordBatch:
        """Some columns of some rows, in order; no copy if it is all of them."""
        columns = self.rows.select(names)
        return columns if len(indexes) == columns.num_rows else columns.take(pa.array(indexes, pa.int64()))


class Outcomes:
    """Writes, for messages that a callback is done with, what became of each.

    Attributes:
        pipeline: The instance whose `handle_failed` sees failures before they are recorded; None for no callbacks.
        watch: Learns where code of the author's is.
        tally: What was written.
        teller: Tells the source early; None where nobody does.
        settling: How the source is told of the messages that callbacks get.
    """

    def __init__(
        self,
        step: Step,
        sink: Sink,
        pipeline: Pipeline | None = None,
        watch: Watch = UNWATCHED,
        teller: Teller | None = None,
    ) -> None:
        self.pipeline, self.watch = pipeline, watch
        self.teller = teller or step.teller()
        tell = self.teller or (nobody if step.pipeline.acks_immediately else None)
        self.settling = step.settling._replace(tell=tell)
        self._step, self._sink, self._batchers = step, sink, step.pipeline.batchers
        self.tally = Tally(self._batchers)
        self._failures = Failures(step, sink, self.tally, watch)
        models = {name: options.table_schema for name, options in self._batchers.items()}
        self._partition_by = {name: step.pipeline.partitioning(name) for name in self._batchers}
        self._row_types = {name: RowType(model) for name, model in models.items() if model is not None}

    @contextmanager
    def told(self, messages: int) -> Iterator[None]:
        """Tell of a chunk of so many messages, with what comes of them meanwhile."""
        names = {"handled", "failed", "returned", *(f"staged:{name}" for name in self._batchers)}
        counts = self.tally.counts
        with span("chunk", self._step.pipeline, messages=messages) as chunk:
            before = {name: counts[name] for name in names}
            yield
            came = {name: counts[name] - before[name] for name in names}
            staged = sum(count for name, count in came.items() if name.startswith("staged:"))
            chunk.add(handled=came["handled"], failed=came["failed"], returned=came["returned"], staged=staged)

    def write(self, table: str, window: str, rows: pa.RecordBatch) -> None:
        """Write rows that are no outcome."""
        self._sink.write(table, window, rows)

    def handled(self, batch: pa.RecordBatch, window: str, messages: list[Message]) -> None:
        """Record messages that `handle_message` is done with, one for each row of `batch`, in its order."""
        block = Block(batch, window, messages)
        self._route(block, enumerate(messages))
        can_rescue = self._step.pipeline.processors.rescue
        self._finish(block, lambda _: can_rescue, lambda rescued: self._route(block, rescued))

    def _route(self, block: Block, messages: Iterable[tuple[int, Message]]) -> None:
        """Write messages of a block for their batchers."""
        groups = {name: list[int]() for name in self._batchers}
        for index, message in messages:
            if message._standing.failure is not None:
                block.failed.append(index)
            elif (group := groups.get(message.batcher)) is not None:
                group.append(index)
            elif not self._batchers:
                block.done.append(index)
            else:
                block.fail(index, self.no_batcher(repr(message.batcher), "handle_message"))
        for name, indexes in groups.items():
            if indexes and isinstance(self._batchers[name], TableBatcher):
                self._write_rows(name, block, indexes)
            elif indexes:
                self._stage(name, block, indexes)

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
            self._write_rows(name, block, done, batch_id)
        can_rescue = isinstance(options, Batcher) and options.rescue
        self._finish(
            block,
            lambda message: can_rescue and message._row in called,
            lambda rescued: self._write_rows(name, block, [index for index, _ in rescued], batch_id),
        )

    def failed(self, batch: pa.RecordBatch, window: str, failures: Sequence[Failure]) -> None:
        """Record rows that fail for good, each for its own reason."""
        messages = [
            message.failed(why) for message, why in zip(Message.each(batch, self.settling), failures, strict=True)
        ]
        self._finish(Block(batch, window, messages, failed=list(range(len(messages)))))

    def columns(self, name: str, rows: pa.RecordBatch, window: str, columns: Sequence[pa.Array]) -> None:
        """Record rows of one batcher that the fast lane made columns of."""
        self._write_columns(name, rows, window, [*columns, rows.column("batch_key").fill_null(DEFAULT)])
        self.settle_handled(rows, window)

    def settle_handled(self, rows: pa.RecordBatch, window: str) -> None:
        """Write the outcomes of rows that are all handled."""
        self._write_handled(rows, window, self._step.settling.on_success)

    def duplicates(self, rows: pa.RecordBatch, window: str, *, decided: bool) -> None:
        """Record deliveries that are not handled.

        Args:
            rows: The deliveries.
            window: Theirs.
            decided: An earlier receive decided the message, so it is settled as handled. Else this receive handles
                another copy, which may yet be given back, and this copy is left to its lease.
        """
        self.tally.outcome("duplicates", window, rows.num_rows)
        self._write_outcomes(rows, window, "duplicate", self._step.settling.on_success if decided else "noop")

    def given_back(self, rows: pa.RecordBatch, window: str) -> None:
        """Record messages that nobody began to handle: the source delivers them again, and open failures stay open.

        One that the source was told of early would not come again, so it fails.
        """
        if told := self._told(rows):
            begun = [index in told for index in range(rows.num_rows)]
            reason = "the source was told of it, and the run stopped before handle_message"
            self.failed(rows.filter(pa.array(begun)), window, [Failure("not handled", reason)] * len(told))
            rows = rows.filter(pa.array([not one for one in begun]))
        self.tally.counts["given_back"] += rows.num_rows
        self.tally.outcome("returned", window, rows.num_rows)
        self._write_outcomes(rows, window, "returned", self._step.settling.giving_back or "noop")

    def no_batcher(self, batcher: str, stage: str) -> Failure:
        """Why a message fails that is to go where no batcher is."""
        reason = f"no batcher {words(batcher, 200)}; there are {sorted(self._batchers)}"
        return Failure("unknown batcher", reason, "", stage)

    def _write_rows(self, name: str, block: Block, indexes: list[int], batch_id: str | None = None) -> None:
        row_type = self._row_types.get(name)

        def build(some: list[Message]) -> list[pa.Array]:
            data = [one.data for one in some]
            columns = row_type.columns(data) if row_type else [pa.array(map(_json, data), pa.string())]
            return [*columns, pa.array([one.batch_key for one in some], pa.string())]

        columns, fitting = self._fitting(build, block, indexes)
        if fitting:
            self._write_columns(name, block.take(IDENTITY, fitting), block.window, columns, batch_id)
            block.done.extend(fitting)

    def _write_columns(
        self, name: str, rows: pa.RecordBatch, window: str, columns: list[pa.Array], batch_id: str | None = None
    ) -> None:
        """Write rows of a batcher's table: the columns of its data, and then their batch keys."""
        count, row_type = rows.num_rows, self._row_types.get(name)
        self.tally.counts[f"rows:{name}"] += count
        self.tally.keys(name, columns[-1])
        names = [*(row_type.schema.names if row_type else ["data"]), "batch_key"]
        table = dict(zip(names, columns, strict=True)) | {one: rows.column(one) for one in IDENTITY}
        table["batch_id"] = pa.nulls(count, pa.string()) if batch_id is None else pa.repeat(batch_id, count)
        table["receive_id"] = pa.repeat(self._step.receive_id, count)
        self._sink.write(name, window, pa.RecordBatch.from_pydict(table))

    def _stage(self, name: str, block: Block, indexes: list[int]) -> None:
        """Write the messages of a batcher with a callback to where they wait for their batch."""
        model, partition_by = self._batchers[name].table_schema, self._partition_by[name]
        partitions = block.rows.column("partition") if partition_by == SOURCE else None
        if partition_by is not None and partitions is None:
            indexes, partitions = self._partitioned(partition_by, block, indexes)
        columns, fitting = self._fitting(lambda some: handled_columns(some, model), block, indexes)
        if fitting:
            self.tally.counts[f"staged:{name}"] += len(fitting)
            own = None if partitions is None else partitions.take(pa.array(fitting, pa.int64()))
            rows = staged_rows(block.take(DELIVERY, fitting), columns, own)
            self._sink.write(staged_table(self._step.receive_id, name), block.window, rows)

    def _partitioned(self, function: Any, block: Block, indexes: list[int]) -> tuple[list[int], pa.Array]:
        """The indexes of the messages that have a partition, and the partitions by index."""
        messages, found = partitioned(function, [block.messages[index] for index in indexes], self.watch)
        by_index: list[str | None] = [None] * len(block.messages)
        kept = []
        for index, message, partition in zip(indexes, messages, found, strict=True):
            by_index[index] = partition
            if message.failure is None:
                kept.append(index)
            else:
                block.fail(index, message.failure)
        return kept, pa.array(by_index, pa.string())

    def _fitting(
        self, build: Callable[[list[Message]], list[pa.Array]], block: Block, indexes: list[int]
    ) -> tuple[list[pa.Array], list[int]]:
        """Build the columns of the messages that fit; one by one only if one does not.

        Building runs code of the models' own, which may raise anything.
        """
        messages = [block.messages[index] for index in indexes]
        if not self.watch.exact:
            with self.watch.busy("lake", messages), suppress(BaseException):
                return build(messages), indexes
        fitting, built = [], []
        for index, message in zip(indexes, messages, strict=True):
            with self.watch.busy("lake", [message]):
                try:
                    built.append(build([message]))
                except BaseException as error:
                    block.fail(index, Failure.of(error, "lake"))
                else:
                    fitting.append(index)
        return [pa.concat_arrays(column) for column in zip(*built, strict=True)], fitting

    def _finish(
        self,
        block: Block,
        may_rescue: Callable[[Message], bool] = lambda _: False,
        take_back: Callable[[list[tuple[int, Message]]], None] = lambda _: None,
    ) -> None:
        """Show `handle_failed` what failed, let it rescue what it may, and settle all.

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
        self.settle(block)

    def settle(self, block: Block) -> None:
        """Write the outcomes of messages that are handled or failed, and record the failures."""
        settling, done, failed = self.settling, sorted(block.done), sorted(block.failed)
        told = self._told(block.rows)
        if done:
            actions: str | list[str] = settling.on_success
            if told or any(map(attrgetter("_standing.actions"), block.messages)):
                actions = [(block.messages[index].actions or (None,))[0] or settling.on_success for index in done]
                actions = [TOLD if index in told else action for index, action in zip(done, actions, strict=True)]
            self._write_handled(block.take(_SETTLED, done), block.window, actions)
        if not failed:
            return
        losers = [block.messages[index] for index in failed]
        again = block.rows.column("redelivered").take(pa.array(failed, pa.int64())).to_pylist()
        actions = [
            settling.of_delivery((message.actions or (None, None))[1] or settling.on_failure, redelivered=redelivered)
            for message, redelivered in zip(losers, again, strict=True)
        ]
        # What goes back to the source comes again by intent: that decides nothing.
        ends = [settling.ends(action) or self._step.origin != "source" for action in actions]
        for place, index in enumerate(failed):
            if index in told:
                actions[place], ends[place] = TOLD, not told[index].comes_back(settling)
        outcomes = ["failed" if end else "returned" for end in ends]
        self._write_outcomes(block.take(_SETTLED, failed), block.window, outcomes, actions)
        self.tally.outcome("failed", block.window, sum(ends))
        self.tally.outcome("returned", block.window, len(ends) - sum(ends))
        for message in losers:
            self.tally.failure(message)
        if recorded := list(compress(failed, ends)):
            rows = block.take([*IDENTITY, *PAYLOAD], recorded)
            self._failures.record(rows, block.window, list(compress(losers, ends)))

    def _told(self, rows: pa.RecordBatch) -> dict[int, Entry]:
        """What the source was told early, by the index of the row."""
        return {} if self.teller is None else self.teller.among(rows, by_forks=self.pipeline is None)

    def _write_handled(self, rows: pa.RecordBatch, window: str, action: str | list[str]) -> None:
        self.tally.outcome("handled", window, rows.num_rows)
        self._write_outcomes(rows, window, "handled", action)
        if self._step.origin == "failed":
            self._failures.close(rows, window)

    def _write_outcomes(
        self, rows: pa.RecordBatch, window: str, outcome: str | list[str], action: str | list[str]
    ) -> None:
        """Write the outcomes of rows: one for all, or one each."""
        table = {name: rows.column(name) for name in _SETTLED}
        for name, value in ("receive_id", self._step.receive_id), ("outcome", outcome), ("action", action):
            table[name] = pa.repeat(value, rows.num_rows) if isinstance(value, str) else pa.array(value, pa.string())
        schema = pa.schema([field for field in OUTCOMES if field.name != "window"])
        self._sink.write("outcomes", window, pa.RecordBatch.from_pydict(table, schema=schema))


def partitioned(
    function: Callable[[Message], object], messages: Sequence[Message], watch: Watch
) -> tuple[list[Message], list[str | None]]:
    """Ask for the partition of each message; one without has failed, if it had not before."""
    given, found = list[Message](), list[str | None]()
    for message in messages:
        partition = None
        if message.failure is None:
            with watch.busy("partition_by", [message]):
                try:
                    partition = partition_of(function, message)
                except BaseException as error:
                    message = message._rejected(Failure.of(error, "partition_by"))  # noqa: PLW2901
        given.append(message)
        found.append(partition)
    return given, found


def _json(data: Any) -> str:
    """Data for a column of JSON, which has no NaN and no infinity: they become null, as pydantic has it."""
    if isinstance(data, bytes):
        try:
            return json.dumps(data.decode())
        except UnicodeDecodeError:  # the batch is handled: data that is no text must not fail it now
            return json.dumps({"base64": b64encode(data).decode()})
    if isinstance(data, BaseModel):
        return encode(data)[0].decode()
    return to_json(data, inf_nan_mode="null").decode()
