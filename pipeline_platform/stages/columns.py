"""The fast lane: rows that column expressions handled, to the tables of their batchers. Runs in tasks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.columns import ColumnError, arrow_schema, refuse_nulls, required
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import Range, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.message import DEFAULT, MESSAGES, Failure, Message, words
from pipeline_platform.options import Processors, TableBatcher
from pipeline_platform.pipeline import Pipeline, PipelineError
from pipeline_platform.rate_limiter import Pace
from pipeline_platform.source import Source
from pipeline_platform.stages.checksum import checksum
from pipeline_platform.stages.lookup import Already
from pipeline_platform.stages.record import Recorder

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

RECEIVED = pa.schema([*(field for field in MESSAGES if field.name != "receive_id"), ("position", pa.int64())])
"""What `handle_messages` is given, beside how each row would be routed."""
IDENTITY = tuple(name for name in RECEIVED.names if name != "redelivered")
PAYLOAD = ("data", "metadata")
ROUTING = ("batcher", "batch_key", "status", "reason")
_MISFITS = 10_000
"""Rows that fit no column are kept so many at a time, for their payloads are read back in one pass."""
_OF_A_MISFIT = [*IDENTITY, *ROUTING]

SEAL = "seal"
"""A column of what is offered: a hash of the row's identity and payload. `handle_messages` may change neither."""
INTACT = "intact"
"""A column of what is taken: whether the row still is what its seal says."""


@dataclass(frozen=True)
class ReadColumns:
    """Task `n` reads the received rows `parts[n]`, at the pace of the rate limit, without what is decided already."""

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
            SEAL: _seal(),
        }
    )


def _seal() -> Column:
    from pyspark.sql import functions as f

    return f.xxhash64(*(f.col(name) for name in IDENTITY))


def taken(pipeline: type[Pipeline], handled: DataFrame) -> DataFrame:
    """Select, of what `handle_messages` returned, what is written; one column a field, whatever the batcher.

    Raises:
        PipelineError: A column is missing.
    """
    wanted = [*IDENTITY, SEAL, *ROUTING, *_fields(pipeline)]
    missing = sorted(set(wanted) - set(handled.columns))
    if missing:
        raise PipelineError(f"{pipeline.__qualname__}.handle_messages returned no column {missing}")
    from pyspark.sql import functions as f

    # What becomes a row of a table is done with its payload: not to send it to Python saves a third of the time.
    tables = [name for name, options in pipeline.batchers.items() if isinstance(options, TableBatcher)]
    is_row = (f.col("status") == "ok") & f.col("batcher").cast("string").isin(tables)
    sent = {name: f.when(~f.coalesce(is_row, f.lit(False)), f.col(name)).alias(name) for name in PAYLOAD}
    kept = (sent.get(name, f.col(name)) for name in wanted if name != SEAL)
    return handled.select(*kept, (_seal() == f.col(SEAL)).alias(INTACT))


def _fields(pipeline: type[Pipeline]) -> list[str]:
    models = [options.table_schema for options in pipeline.batchers.values() if options.table_schema is not None]
    return list(dict.fromkeys(name for model in models for name in arrow_schema(model).names))


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
        received: Where what was received lies: the payload of a row that fits no column is looked up there.
    """

    pipeline: type[Pipeline]
    context: Any
    source: Source
    origin: str
    lake: Lake
    receive_id: str
    received: Sequence[Range]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition; return its manifest."""
        started = time.monotonic()
        pipeline = self.pipeline()

        def handle_failed(messages: list[Message]) -> list[Message]:
            return pipeline.handle_failed(messages, self.context)

        rows_per_file = {
            name: options.batch_size for name, options in pipeline.batchers.items() if isinstance(options, TableBatcher)
        }
        prefix = f"{self.receive_id}-handle-{uuid.uuid4().hex[:4]}"
        with Writer(self.lake, pipeline.name, prefix, rows_per_file) as writer:
            recorder = Recorder(self.pipeline, self.source, self.origin, self.receive_id, writer, handle_failed)
            rows = _Rows(self.pipeline, recorder, Payloads(self.lake, self.received))
            for batch in batches:
                windows = pc.unique(batch.column("window")).to_pylist()
                for window in windows:
                    alone = len(windows) == 1  # as almost always: nothing to copy
                    rows.write(batch if alone else batch.filter(pc.equal(batch.column("window"), window)), window)
            rows.fail_misfits()
            notes = {"returned_rows": rows.count, "checksum": rows.checksum, "seconds": time.monotonic() - started}
            manifest = writer.close(**recorder.notes(), **notes)
        yield from manifest.to_arrow().to_batches()


class _Misfit(NamedTuple):
    """A row that fits no column, where it belongs, and why."""

    row: pa.RecordBatch
    window: str
    failure: Failure


class Payloads:
    """The payloads of received rows, by position."""

    def __init__(self, lake: Lake, received: Sequence[Range]) -> None:
        self._lake, self._received = lake, received

    def at(self, positions: Sequence[int]) -> list[tuple[bytes, str | None]]:
        """Read some; one pass over what lies between the first and the last of them."""
        wanted, found = set(positions), {}
        for file in self._received:
            first, last = file.position + file.start, file.position + file.stop
            here = [position - file.position for position in wanted if first <= position < last]
            if not here:
                continue
            between = [file._replace(start=min(here), stop=max(here) + 1)]
            for position, batch in read_ranges(self._lake, between, PAYLOAD, 65_536):
                for row in wanted.intersection(range(position, position + batch.num_rows)):
                    found[row] = tuple(column[row - position].as_py() for column in batch.columns)
        return [found[position] for position in positions]


class _Rows:
    """Puts rows in the columns of their batchers' tables; what fits none fails alone."""

    def __init__(self, pipeline: type[Pipeline], recorder: Recorder, payloads: Payloads) -> None:
        self._batchers, self._recorder, self._payloads = pipeline.batchers, recorder, payloads
        self.count = self.checksum = 0
        self._misfits: list[_Misfit] = []
        models = {name: options.table_schema for name, options in pipeline.batchers.items() if options.table_schema}
        self._schemas = {name: arrow_schema(model) for name, model in models.items()}
        self._required = {name: required(model) for name, model in models.items()}

    def write(self, batch: pa.RecordBatch, window: str) -> None:
        for name in ROUTING:  # a key that is a number, say
            if batch.column(name).type != pa.string():
                index = batch.schema.get_field_index(name)
                batch = batch.set_column(index, name, batch.column(name).cast(pa.string()))
        self._expect_intact(batch)
        self.count += batch.num_rows
        self.checksum = (self.checksum + checksum(batch.column("position").to_numpy())) % 2**64
        # A status that is none fails too: a misspelt `failed` must not pass.
        failed = pc.fill_null(pc.not_equal(batch.column("status"), "ok"), False)
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

    def _expect_intact(self, batch: pa.RecordBatch) -> None:
        if not pc.all(pc.fill_null(batch.column(INTACT), False)).as_py():
            raise PipelineError(
                f"handle_messages changed a column that says which delivery a row is ({', '.join(IDENTITY)}): put "
                "what it makes of a message into columns of other names"
            )

    def _write(self, name: str, rows: pa.RecordBatch, window: str) -> None:
        try:
            columns = self._cast(name, rows)
        except (pa.ArrowException, ValueError, ColumnError):
            if rows.num_rows > 1:
                half = rows.num_rows // 2
                self._write(name, rows.slice(0, half), window)
                self._write(name, rows.slice(half), window)
                return
            misfit = Failure("ColumnError", self._misfit(name, rows), "", "lake")
            self._misfits.append(_Misfit(rows.select(_OF_A_MISFIT), window, misfit))
            if len(self._misfits) >= _MISFITS:
                self.fail_misfits()
            return
        self._recorder.columns(name, rows, window, columns, self._schemas[name].names)

    def fail_misfits(self) -> None:
        """Fail the rows that fitted no column, with the payloads they came with, which were not sent along."""
        misfits, self._misfits = self._misfits, []
        payloads = self._payloads.at([misfit.row.column("position")[0].as_py() for misfit in misfits])
        for misfit, payload in zip(misfits, payloads, strict=True):
            columns = dict(zip(misfit.row.schema.names, misfit.row.columns, strict=True))
            for name, value in zip(PAYLOAD, payload, strict=True):
                columns[name] = pa.array([value], MESSAGES.field(name).type)
            row = pa.RecordBatch.from_pydict(columns)
            message = next(Message.each(row)).failed(misfit.failure)
            self._recorder.settle(row, misfit.window, [message], [], [0])

    def _cast(self, name: str, rows: pa.RecordBatch) -> list[pa.Array]:
        columns = [rows.column(field.name).cast(field.type) for field in self._schemas[name]]
        refuse_nulls(columns, self._schemas[name], self._required[name])
        return columns

    def _misfit(self, name: str, row: pa.RecordBatch) -> str:
        for field in self._schemas[name]:
            try:
                row.column(field.name).cast(field.type)
            except (pa.ArrowException, ValueError) as error:
                return words(f"{field.name} is {row.column(field.name)[0]} and fits no {field.type}: {error}", 2_000)
            if row.column(field.name).null_count and field.name in self._required[name]:
                return f"{field.name} is None, which its model does not allow"
        return "it fits no column"

    def _stage(self, name: str, rows: pa.RecordBatch, window: str) -> None:
        """Hand rows to a batcher with a callback, as messages whose data is a dict of its model's fields."""
        if name in self._schemas:
            data = rows.select(self._schemas[name].names).to_pylist(maps_as_pydicts="lossy")
        else:
            data = rows["data"].to_pylist()
        messages = []
        for message, value, key in zip(Message.each(rows), data, rows.column("batch_key").to_pylist(), strict=True):
            messages.append(message.put_data(value).put_batcher(name).put_batch_key(DEFAULT if key is None else key))
        self._recorder.handled(rows, window, messages)

    def _unknown(self, row: dict[str, Any]) -> Failure:
        reason = f"no batcher {row['batcher']!r}; there are {sorted(self._batchers)}"
        return Failure("unknown batcher", reason, "", "handle_messages")

    def _fail(self, rows: pa.RecordBatch, window: str, why: Callable[[dict[str, Any]], Failure]) -> None:
        if rows.num_rows:
            told = rows.select(["batcher", "reason"]).to_pylist()
            messages = [message.failed(why(row)) for message, row in zip(Message.each(rows), told, strict=True)]
            self._recorder.settle(rows, window, messages, [], list(range(rows.num_rows)))


def _said_failed(row: dict[str, Any]) -> Failure:
    return Failure("failed", row["reason"] or "handle_messages gave no reason", "", "handle_messages")
