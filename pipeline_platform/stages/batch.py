"""Batching: handled messages of one batch key, in batches, through `handle_batch`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from pipeline_platform.failure import Failure
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.message import BULK, BatchInfo, Delivery, Message, Standing
from pipeline_platform.options import Batcher
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.source import Source
from pipeline_platform.stages.handle import checked, try_in_a_fork
from pipeline_platform.stages.record import STAGED, Recorder, decode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAMESPACE = uuid.UUID("6f1c3c0e-6a50-5a53-9f6e-0f3b6f0f6d5a")

BATCHED = pa.schema([*STAGED, ("window", pa.string()), ("batch", pa.int64()), ("full", pa.bool_())])
"""A staged message and its place: the how-manieth batch of its window and key, and whether that one is full."""

BATCH_BYTES = 128 * 2**20
"""A batch ends where its messages come to this, by payload and by what handling made of it: a worker holds it whole."""


def in_batches(staged: DataFrame, batch_size: int, concurrency: int) -> DataFrame:
    """Put staged messages in batches: in order of arrival within a window and batch key, cut at `batch_size`.

    A message in mode `flush` ends its batch, and so does one that makes it too large. The batches are spread over
    `concurrency` partitions, each sorted, so that as many are handled at once, those of one key among them.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    key = ["window", "batch_key"]
    in_order = Window.partitionBy(*key).orderBy("position")
    flushed = f.when(f.lag("batch_mode").over(in_order) == "flush", 1).otherwise(0)
    runs = staged.withColumn("run", f.sum(flushed).over(in_order.rowsBetween(Window.unboundedPreceding, 0)))
    in_run = Window.partitionBy(*key, "run").orderBy("position")
    place = f.row_number().over(in_run) - 1
    numbered = runs.withColumn("batch", f.col("run") * 1_000_000_000 + f.floor(place / batch_size))
    whole = Window.partitionBy(*key, "run", "batch")
    weight = f.octet_length("value") + f.coalesce(f.octet_length("data"), f.lit(0))
    before = f.sum(weight).over(whole.orderBy("position").rowsBetween(Window.unboundedPreceding, -1))
    part = f.floor(f.coalesce(before, f.lit(0)) / BATCH_BYTES)
    return (
        numbered.withColumns({"full": f.count("*").over(whole) == batch_size, "part": part})
        .withColumn("batch", f.col("batch") * 1_000 + f.col("part"))
        .repartition(concurrency, *key, "batch")
        .sortWithinPartitions(*key, "batch", "position")
        .select(*BATCHED.names)
    )


@dataclass(frozen=True)
class HandleBatches:
    """Handles batches that come sorted by `window`, `batch_key`, `batch` and `position`.

    Attributes:
        careful: Try each batch in a forked process first: one that kills it fails, and costs no other.
    """

    pipeline: type[Pipeline]
    batcher: str
    context: Any
    source: Source
    origin: str
    lake: Lake
    receive_id: str
    careful: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Handle every batch in `batches`; rows of one batch may lie in several of them."""
        started = time.monotonic()
        pipeline = self.pipeline()

        def handle_failed(messages: list[Message]) -> list[Message]:
            return pipeline.handle_failed(messages, self.context)

        prefix = f"{self.receive_id}-{self.batcher}-{uuid.uuid4().hex[:4]}"
        with Writer(self.lake, pipeline.name, prefix) as writer:
            recorder = Recorder(self.pipeline, self.source, self.origin, self.receive_id, writer, handle_failed)
            count = 0
            for batch in whole_batches(batches):
                self._handle(pipeline, batch, recorder)
                count += 1
            manifest = writer.close(**recorder.notes(), batches=count, seconds=time.monotonic() - started)
        yield from manifest.to_arrow().to_batches()

    def _handle(self, pipeline: Pipeline, batch: pa.RecordBatch, recorder: Recorder) -> None:
        window, key, number = (batch.column(name)[0].as_py() for name in ("window", "batch_key", "batch"))
        batch_id = str(uuid.uuid5(_NAMESPACE, "\0".join((self.receive_id, self.batcher, window, key, str(number)))))
        trigger: Literal["size", "flush"] = "size" if batch.column("full")[0].as_py() else "flush"
        info = BatchInfo(self.batcher, key, None, batch.num_rows, trigger, batch_id)
        messages, undecodable = self._messages(batch)
        handled = self._called(pipeline, messages, info) if messages else []
        by_row = {message._row: message for message in [*handled, *undecodable]}
        recorder.batched(self.batcher, batch, window, [by_row[row] for row in range(batch.num_rows)], batch_id)

    def _called(self, pipeline: Pipeline, messages: list[Message], info: BatchInfo) -> list[Message]:
        def call() -> list[Message]:
            return handle_batch(pipeline, self.batcher, messages, info, self.context)

        if self.careful and (death := try_in_a_fork(call)):
            failure = Failure("worker killed", f"handling its batch ended the worker ({death})", "", "handle_batch")
            return [message.failed(failure) for message in messages]
        return call()

    def _messages(self, batch: pa.RecordBatch) -> tuple[list[Message], list[Message]]:
        options = self.pipeline.batchers[self.batcher]
        assert isinstance(options, Batcher)
        names = ("value", "encoding", "batch_key", "batch_mode", "on_success", "on_failure")
        standing, messages, undecodable = Standing(Delivery(batch)), [], []
        for row, cells in enumerate(zip(*(batch.column(name).to_pylist() for name in names), strict=True)):
            value, encoding, key, mode, on_success, on_failure = cells
            message = Message(value, row, standing if mode == BULK else standing._replace(batch_mode=mode))
            message.batcher, message.batch_key = self.batcher, key
            if on_success is not None or on_failure is not None:
                message = message.configure_ack(on_success=on_success, on_failure=on_failure)
            try:
                message.data = decode(value, encoding, options.table_schema)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # code of the model's own may raise anything: an enum's, a private field's
                undecodable.append(message.failed(Failure.of(error, "lake")))
            else:
                messages.append(message)
        return messages, undecodable


def handle_batch(
    pipeline: Pipeline, batcher: str, messages: Sequence[Message], info: BatchInfo, context: Any
) -> list[Message]:
    """Call `handle_batch`, and hold it to its contract: a message it does not return fails, none may be new."""
    try:
        returned = pipeline.handle_batch(batcher, list(messages), info, context)
        if not isinstance(returned, list) or any(one.__class__ is not Message for one in returned):
            raise TypeError(f"handle_batch must return a list of Messages, got {_kinds(returned)}")
        given = {message._row: message for message in messages}
        by_row = {message._row: message for message in returned}
        if len(by_row) < len(returned) or not all(row in given and given[row].is_same(by_row[row]) for row in by_row):
            raise TypeError(
                f"handle_batch got {len(messages)} messages and returned {len(returned)}: "
                "some twice, or others than it got"
            )
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failure = Failure.of(error, "handle_batch")
        return [message._rejected(failure) for message in messages]
    missing = Failure("not returned", "handle_batch did not return it", "", "handle_batch")
    return [_as_batched(by_row.get(message._row), message, missing) for message in messages]


def _kinds(returned: object) -> str:
    if not isinstance(returned, list):
        return type(returned).__name__
    return f"a list with {sorted({type(one).__name__ for one in returned if not isinstance(one, Message)})}"


def _as_batched(returned: Message | None, given: Message, missing: Failure) -> Message:
    if returned is None:
        return given._rejected(missing)
    returned = checked(given, returned, "handle_batch")
    if returned.failure is not None and not returned.failure.stage:
        return returned.failed(returned.failure._replace(stage="handle_batch"))
    return returned


def whole_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Cut a sorted stream where the batch changes; holds no more than one batch and one Arrow batch."""
    waiting: list[pa.RecordBatch] = []
    current: tuple[str, str, int] | None = None
    for batch in batches:
        places = list(zip(*(batch.column(name).to_pylist() for name in ("window", "batch_key", "batch")), strict=True))
        start = 0
        for row, place in enumerate(places):
            if place != current:
                if row > start:
                    waiting.append(batch.slice(start, row - start))
                if waiting:
                    yield _joined(waiting)
                    waiting = []
                start, current = row, place
        if len(places) > start:
            waiting.append(batch.slice(start))
    if waiting:
        yield _joined(waiting)


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    (joined,) = pa.Table.from_batches(parts).combine_chunks().to_batches()  # one, for it is bounded in bytes
    return joined
