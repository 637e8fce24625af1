"""The fast lane: rows that column expressions handled, to the tables of their batchers. Runs in tasks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.control.pace import Pace
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import Range, bounded, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import DEFAULT, MESSAGES, Message
from pipeline_platform.model.options import Processors, TableBatcher
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.model.schema import ColumnError, arrow_schema, refuse_nulls, required
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.by_position import DELIVERY, PAYLOAD, ByPosition, Positions
from pipeline_platform.tasks.checksum import checksum
from pipeline_platform.tasks.handle import oversized
from pipeline_platform.tasks.isolate import (
    UNWATCHED,
    Attempt,
    Death,
    Progress,
    Sink,
    Watch,
    Written,
    in_a_fork,
    settle,
    tries_before,
)
from pipeline_platform.tasks.lookup import Already
from pipeline_platform.tasks.record import Recorder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECEIVED = pa.schema(
    [*(field for field in MESSAGES if field.name not in ("receive_id", "published_at")), ("position", pa.int64())]
)
"""What `handle_messages` is given, beside how each row would be routed."""
ROUTING = ("batcher", "batch_key", "status", "reason")
"""What it says of each row. It must return them, beside `position` and the fields of the batchers' models."""
TAKEN = ("position", "batcher", "batch_key", "_failure")
"""What of that goes to Python: a row is known again by its position alone, and has failed if it has a failure."""

_MISFITS = 10_000
"""Rows that fit no column are kept so many at a time, for their payloads are looked up together."""

_FEW = 16
"""Payloads looked up at first, before it is known how large they are."""


@dataclass(frozen=True)
class ReadColumns:
    """Task `n` reads the received rows `parts[n]` at the pace of the rate limit, but for those that are set aside."""

    lake: Lake
    parts: Sequence[Sequence[Range]]
    options: Processors
    pace: Pace
    already: Sequence[Range]

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        already = Already.read(self.lake, self.already)
        for _, chunk in read_ranges(
            self.lake, self.parts[index], RECEIVED.names, self.options.chunk_size, self.options.chunk_bytes
        ):
            kept = already.split(chunk).fresh
            if large := oversized(kept, self.options.max_message_bytes):
                kept = kept.filter(pc.invert(pc.is_in(pa.array(range(kept.num_rows)), pa.array(large))))
            while kept.num_rows:
                count, _ = self.pace.permitted(kept.num_rows)
                yield pa.RecordBatch.from_arrays(kept.slice(0, count).columns, schema=RECEIVED)
                kept = kept.slice(count)


def read_locally(spark: SparkSession, lake: Lake, pipeline: str, files: Sequence[File]) -> DataFrame:
    """Read received files with Spark's own reader, which is faster: for a local lake, and no rate limit."""
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import from_arrow_schema

    first, places = 0, []
    for file in files:
        places += [f.lit(file.path.rsplit("/", 1)[1]), f.struct(f.lit(file.window), f.lit(first).cast("long"))]
        first += file.rows
    stored = pa.schema([field for field in RECEIVED if field.name not in ("window", "position")])
    paths = [lake.uri(pipeline, file.table, file.path) for file in files]
    place = f.create_map(*places)[f.col("_metadata.file_name")]
    rows = spark.read.schema(from_arrow_schema(stored)).parquet(*paths)
    return rows.select(
        *stored.names,
        place["col1"].alias("window"),
        (place["col2"] + f.col("_metadata.row_index")).alias("position"),
    )


def offered(received: DataFrame) -> DataFrame:
    """What `handle_messages` gets: the received columns, and how each row would be routed if nothing is said."""
    from pyspark.sql import functions as f

    return received.withColumns(
        {
            "batcher": f.lit(DEFAULT),
            "batch_key": f.lit(DEFAULT),
            "status": f.lit("ok"),
            "reason": f.lit(None).cast("string"),
        }
    )


def taken(pipeline: type[Pipeline], handled: DataFrame) -> DataFrame:
    """Select, of what `handle_messages` returned, what is written; one column a field, whatever the batcher.

    Neither the delivery nor its payload is among it: both are looked up by position, for less time than it would take
    to send them to Python, and no expression can change them.

    Raises:
        PipelineError: A column is missing.
    """
    from pyspark.sql import functions as f

    fields = _fields(pipeline)
    missing = sorted({"position", *ROUTING, *fields} - set(handled.columns))
    if missing:
        raise PipelineError(f"{pipeline.__qualname__}.handle_messages returned no column {missing}")
    batcher, key, status, reason = (f.col(name).cast("string") for name in ROUTING)  # a key that is a number, say
    # A status that is none fails too: a misspelt `failed` must not pass.
    failure = f.when(status != "ok", f.coalesce(reason, f.lit("")))
    named = zip((batcher, key, failure), TAKEN[1:], strict=True)
    return handled.select("position", *(column.alias(name) for column, name in named), *fields)


def _fields(pipeline: type[Pipeline]) -> list[str]:
    """The fields of all batchers' models; for a batcher without one its data are the column `data`."""
    models = [options.table_schema for options in pipeline.batchers.values()]
    names = [name for model in models for name in (["data"] if model is None else arrow_schema(model).names)]
    return list(dict.fromkeys(names))


def not_returned(pipeline: type[Pipeline], received: DataFrame, seen: DataFrame) -> DataFrame:
    """The received rows that `handle_messages` dropped, as failed ones.

    Args:
        pipeline: Whose.
        received: What it was given.
        seen: `source` and `message_id` of what it returned.
    """
    from pyspark.sql import functions as f

    missing = offered(received.join(seen, ["source", "message_id"], "left_anti")).withColumns(
        {"status": f.lit("failed"), "reason": f.lit("handle_messages did not return it")}
    )
    fields = {name: f.lit(None) for name in _fields(pipeline) if name not in missing.columns}
    return taken(pipeline, missing.withColumns(fields))


@dataclass(frozen=True)
class WriteColumns:
    """Writes the rows that came out of `handle_messages`.

    Attributes:
        received: The files of what was received, whole and in order: rows are looked up there by position.
        careful: Call serialisers and `handle_failed` in forked processes. So does a task that is tried again.
    """

    pipeline: type[Pipeline]
    context: Any
    source: Source
    origin: str
    lake: Lake
    receive_id: str
    received: Sequence[Range]
    careful: bool = False

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition; return its manifest. A task that is tried again is careful: see `isolate`."""
        started = time.monotonic()
        rows_per_file = {
            name: options.batch_size
            for name, options in self.pipeline.batchers.items()
            if isinstance(options, TableBatcher)
        }
        prefix = f"{self.receive_id}-handle-{uuid.uuid4().hex[:4]}"
        with Writer(self.lake, self.pipeline.name, prefix, rows_per_file) as writer:
            received = ByPosition(self.lake, self.received)
            kind = _Careful if self.careful or tries_before() else _Here
            work: _Careful | _Here = kind(self, writer, received)
            count = total = 0
            for batch in filter(len, batches):
                for window, rows in self._by_window(received, batch):
                    positions = rows.column("position").to_numpy()
                    count, total = count + len(positions), (total + checksum(positions)) % 2**64
                    work.write(rows, window)
            work.close()
            notes = {"returned_rows": count, "checksum": total, "seconds": time.monotonic() - started}
            manifest = writer.close(**work.recorder.tally.notes(), **notes)
        yield from manifest.to_arrow().to_batches()

    def _by_window(self, received: ByPosition, batch: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
        try:
            return list(received.by_window(batch))
        except ValueError:
            raise PipelineError(
                "handle_messages changed the column position, by which a row is known again: put what it makes of a "
                "message into columns of other names"
            ) from None

    def recorder(self, sink: Sink, pipeline: Pipeline | None = None, watch: Watch = UNWATCHED) -> Recorder:
        """A recorder for this task; without a pipeline it calls nothing of the author's."""

        def look(messages: list[Message]) -> list[Message]:
            return pipeline.handle_failed(messages, self.context) if pipeline else messages

        return Recorder(self.pipeline, self.source, self.origin, self.receive_id, sink, look, watch)


class _Here:
    """Writes rows in the task's own process."""

    def __init__(self, task: WriteColumns, writer: Writer, received: ByPosition) -> None:
        self.recorder = task.recorder(writer, task.pipeline())
        self._rows = _Rows(task.pipeline, self.recorder, received)

    def write(self, rows: pa.RecordBatch, window: str) -> None:
        self._rows.write(rows, window)

    def close(self) -> None:
        self._rows.fail_misfits()


class _Careful:
    """Writes rows by way of forked processes, for serialisers and `handle_failed` are the author's."""

    def __init__(self, task: WriteColumns, writer: Writer, received: ByPosition) -> None:
        self._task, self._writer, self._received = task, writer, received
        self.recorder = task.recorder(writer)

    def write(self, rows: pa.RecordBatch, window: str) -> None:
        def attempt(some: Sequence[int]) -> Attempt:
            chosen = rows.take(pa.array(some, pa.int64()))
            answer = in_a_fork(partial(self._work, chosen, window), len(some), exact=False)
            if isinstance(answer, Death):
                return Attempt(answer._replace(rows=()), len(some))  # it knows rows of what it looked up, not these
            answer.pour(self._writer, self.recorder.tally)
            return Attempt(None, len(some))

        def fail(row: int, death: Death) -> None:
            lost = _Rows(self._task.pipeline, self.recorder, self._received)
            lost.fail(rows.slice(row, 1), window, death.failure("handle_messages"))

        settle(range(rows.num_rows), attempt, fail)

    def _work(self, rows: pa.RecordBatch, window: str, progress: Progress) -> Written:
        """Be the forked process."""
        written = Written()
        recorder = self._task.recorder(written, self._task.pipeline(), progress)
        work = _Rows(self._task.pipeline, recorder, self._received)
        work.write(rows, window)
        work.fail_misfits()
        written.notes = {"tally": recorder.tally.to_json()}
        return written

    def close(self) -> None:
        pass


class _Rows:
    """Puts rows in the columns of their batchers' tables; what fits none fails alone."""

    def __init__(self, pipeline: type[Pipeline], recorder: Recorder, received: ByPosition) -> None:
        self._batchers, self._recorder, self._received = pipeline.batchers, recorder, received
        self._options = pipeline.processors
        self._misfits: dict[str, dict[int, Failure]] = {}
        """By window and position."""
        models = {name: options.table_schema for name, options in pipeline.batchers.items() if options.table_schema}
        self._schemas = {name: arrow_schema(model) for name, model in models.items()}
        self._required = {name: required(model) for name, model in models.items()}

    def write(self, rows: pa.RecordBatch, window: str) -> None:
        """Write rows of one window."""
        deliveries = self._received.take(DELIVERY, rows.column("position").to_numpy())
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        columns |= dict(zip(DELIVERY, deliveries, strict=True))
        self._route(pa.RecordBatch.from_pydict(columns), window)

    def fail(self, rows: pa.RecordBatch, window: str, failure: Failure) -> None:
        """Fail rows of one window."""
        self._fail(rows, window, lambda _: failure)

    def _route(self, batch: pa.RecordBatch, window: str) -> None:
        failed = pc.is_valid(batch.column("_failure"))
        batcher = pc.fill_null(batch.column("batcher"), "")
        known = pc.is_in(batcher, pa.array([*self._batchers], pa.string()))
        unknown = pc.invert(known) if self._batchers else pc.and_(known, failed)
        self._fail(batch.filter(failed), window, _said_failed)
        self._fail(batch.filter(pc.and_not(unknown, failed)), window, self._unknown)
        good = pc.and_not(pc.invert(unknown), failed)
        if not self._batchers:
            self._recorder.settle_handled(batch.filter(good), window)
        for name, options in self._batchers.items():
            rows = batch.filter(pc.and_(good, pc.equal(batcher, name)))
            if rows.num_rows and isinstance(options, TableBatcher):
                self._write(name, rows, window)
            elif rows.num_rows:
                self._stage(name, rows, window)

    def _write(self, name: str, rows: pa.RecordBatch, window: str) -> None:
        try:
            columns = self._cast(name, rows)
        except (pa.ArrowException, ValueError, ColumnError):
            if rows.num_rows > 1:
                half = rows.num_rows // 2
                self._write(name, rows.slice(0, half), window)
                self._write(name, rows.slice(half), window)
                return
            misfits = self._misfits.setdefault(window, {})
            misfits[rows.column("position")[0].as_py()] = Failure("ColumnError", self._misfit(name, rows), "", "lake")
            if len(misfits) >= _MISFITS:
                self.fail_misfits()
            return
        self._recorder.columns(name, rows, window, columns, self._schemas[name].names)

    def fail_misfits(self) -> None:
        """Fail the rows that fitted no column."""
        for window, failures in self._misfits.items():
            rows = pa.record_batch({"position": pa.array(failures)})
            for some, delivered in self._delivered(rows, window):
                reasons = (failures[position] for position in some.column("position").to_pylist())
                self._settle_failed(delivered, window, reasons)
        self._misfits.clear()

    def _settle_failed(self, delivered: pa.RecordBatch, window: str, reasons: Iterable[Failure]) -> None:
        messages = [message.failed(why) for message, why in zip(Message.each(delivered), reasons, strict=True)]
        self._recorder.settle(delivered, window, messages, [], list(range(len(messages))))

    def _delivered(self, rows: pa.RecordBatch, window: str) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Some rows at a time, and the same as they were received: few at first, and more as long as they are small."""
        options, start, step = self._options, 0, _FEW
        while start < rows.num_rows:
            some = rows.slice(start, step)
            delivered = self._as_received(some.column("position").to_numpy(), window)
            done = 0
            for part in bounded(delivered, options.chunk_bytes):
                yield some.slice(done, part.num_rows), part
                done += part.num_rows
            start += some.num_rows
            fitting = options.chunk_bytes * some.num_rows // (delivered.nbytes + 1)
            step = max(1, min(4 * step, options.chunk_size, fitting))

    def _as_received(self, positions: Positions, window: str) -> pa.RecordBatch:
        columns = dict(zip(DELIVERY, self._received.take(DELIVERY, positions), strict=True))
        columns |= dict(zip(PAYLOAD, self._received.take(PAYLOAD, positions), strict=True))
        columns |= {"position": pa.array(positions), "window": pa.repeat(window, len(positions))}
        return pa.RecordBatch.from_pydict(columns)

    def _cast(self, name: str, rows: pa.RecordBatch) -> list[pa.Array]:
        columns = [rows.column(field.name).cast(field.type) for field in self._schemas[name]]
        refuse_nulls(columns, self._schemas[name], self._required[name])
        return columns

    def _misfit(self, name: str, row: pa.RecordBatch) -> str:
        for field in self._schemas[name]:
            try:
                row.column(field.name).cast(field.type)
            except (pa.ArrowException, ValueError):
                return f"{field.name} is {row.column(field.name).type} and holds what fits no {field.type}"
            if row.column(field.name).null_count and field.name in self._required[name]:
                return f"{field.name} is None, which its model does not allow"
        return "it fits no column"

    def _stage(self, name: str, rows: pa.RecordBatch, window: str) -> None:
        """Hand rows to a batcher with a callback, as messages whose data is a dict of its model's fields."""
        for some, delivered in self._delivered(rows, window):
            try:
                if name in self._schemas:
                    data = some.select(self._schemas[name].names).to_pylist(maps_as_pydicts="lossy")
                else:
                    data = some.column("data").to_pylist()
            except (ValueError, OverflowError) as error:  # a date that Python has no value for
                self._stage_apart(name, some, window, delivered, error)
                continue
            keys = some.column("batch_key").fill_null(DEFAULT).to_pylist()
            messages = [
                message.put(value, batcher=name, batch_key=key)
                for message, value, key in zip(Message.each(delivered), data, keys, strict=True)
            ]
            self._recorder.handled(delivered, window, messages)

    def _stage_apart(
        self, name: str, rows: pa.RecordBatch, window: str, delivered: pa.RecordBatch, error: Exception
    ) -> None:
        if rows.num_rows == 1:
            self._settle_failed(delivered, window, [Failure.of(error, "lake")])
            return
        half = rows.num_rows // 2
        self._stage(name, rows.slice(0, half), window)
        self._stage(name, rows.slice(half), window)

    def _unknown(self, row: dict[str, Any]) -> Failure:
        reason = f"no batcher {row['batcher']!r}; there are {sorted(self._batchers)}"
        return Failure("unknown batcher", reason, "", "handle_messages")

    def _fail(self, rows: pa.RecordBatch, window: str, why: Callable[[dict[str, Any]], Failure]) -> None:
        for some, delivered in self._delivered(rows, window):
            self._settle_failed(delivered, window, map(why, some.select(["batcher", "_failure"]).to_pylist()))


def _said_failed(row: dict[str, Any]) -> Failure:
    return Failure("failed", row["_failure"] or "handle_messages gave no reason", "", "handle_messages")
