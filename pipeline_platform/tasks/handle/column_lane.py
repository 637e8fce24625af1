"""The fast lane: rows that column expressions handled, to the tables of their batchers. Runs in tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import RowRange, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.fields import ModelClass
from pipeline_platform.model.message import DEFAULT, MESSAGES, Message
from pipeline_platform.model.options import Processors, TableBatcher
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.model.portions import halves, portions
from pipeline_platform.model.schema import ColumnError, arrow_schema, refuse_nulls
from pipeline_platform.tasks.by_position import DELIVERY, PAYLOAD, ByPosition, Positions, checksum
from pipeline_platform.tasks.handle.handle_messages import oversized
from pipeline_platform.tasks.handle.repeats import Repeats
from pipeline_platform.tasks.host.fork import Death
from pipeline_platform.tasks.host.hosting import CallingStep
from pipeline_platform.tasks.host.isolation import Tries, each_alone, surely
from pipeline_platform.tasks.host.step import Step
from pipeline_platform.tasks.record.outcomes import Outcomes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pipeline_platform.control.pace import Pace

RECEIVED = pa.schema(
    [*(field for field in MESSAGES if field.name not in ("receive_id", "published_at")), ("position", pa.int64())]
)
"""What `handle_messages` is given, beside how each row would be routed."""
ROUTING = ("batcher", "batch_key", "status", "reason")
"""What it says of each row. It must return these, `position` and the fields of the batchers' models."""
TAKEN = ("position", "batcher", "batch_key", "_failure")
"""What of that goes to Python. A row is known again by its position alone, and has failed if it has a failure."""

GROUP_BYTES = 64 * 2**20
"""Bytes of rows that a task holds for a host: Spark gives them once, and a host that dies is followed by another."""

_FIRST = 16
"""Payloads that are looked up first, before it is known how large they are."""


@dataclass(frozen=True)
class ReadColumns:
    """Task `n` reads the received rows `parts[n]` at the pace of the rate limit, without those that are set aside."""

    lake: Lake
    parts: Sequence[Sequence[RowRange]]
    options: Processors
    pace: Pace
    repeats: Sequence[RowRange]

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        repeats = Repeats.read(self.lake, self.repeats)
        options = self.options
        for _, chunk in read_ranges(self.lake, self.parts[index], RECEIVED, options.chunk_size, options.chunk_bytes):
            rows, *_ = repeats.split(chunk)
            if large := oversized(rows, self.options.max_message_bytes):
                rows = rows.filter(pc.invert(pc.is_in(pa.array(range(rows.num_rows)), pa.array(large))))
            while rows.num_rows:
                count, _ = self.pace.permitted(rows.num_rows)
                yield pa.RecordBatch.from_arrays(rows.slice(0, count).columns, schema=RECEIVED)
                rows = rows.slice(count)


def read_locally(spark: SparkSession, lake: Lake, pipeline: str, files: Sequence[File]) -> DataFrame:
    """Read received files with Spark's own reader, which is faster: for a local lake without a rate limit."""
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
    """What `handle_messages` gets: the received columns, and the routing of a row of which nothing is said."""
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
    """Select, of what `handle_messages` returned, what is written: one column a field, whatever the batcher.

    Neither the delivery nor its payload is selected. Both are looked up by position: that takes less time than to send
    them to Python, and no expression can change them.

    Raises:
        PipelineError: A column is missing.
    """
    from pyspark.sql import functions as f

    fields = _fields(pipeline)
    missing = sorted({"position", *ROUTING, *fields} - set(handled.columns))
    if missing:
        raise PipelineError(f"{pipeline.__qualname__}.handle_messages returned no column {missing}")
    batcher, key, status, reason = (f.col(name).cast("string") for name in ROUTING)  # a key that is a number, say
    # An unknown status fails too: a misspelt `failed` must not pass.
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
class WriteColumns(CallingStep):
    """Writes the rows that came out of `handle_messages`.

    Attributes:
        received: The files of what was received, whole and in order: rows are looked up there by position.
    """

    received: Sequence[RowRange]
    stem = "handle"

    def __call__(self, share: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition; yield its manifest, some of it for each group of rows that a host gets."""
        for group in portions(share, lambda batch: batch.nbytes, GROUP_BYTES):
            yield from super().__call__(group)

    def blocks(self, share: Sequence[pa.RecordBatch], skip: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The batches that Spark gave."""
        yield from ((1, batch) for batch in share[skip:])

    def tries(self, block: pa.RecordBatch, known: Death | None) -> Tries:
        """Write rows, by their windows."""
        windows = _by_window(self._rows, block) if block.num_rows else []
        for window, rows in windows:
            lane, mine = _Rows(self, self._rows, window), known if len(windows) == 1 else None
            yield from surely(partial(_count, rows["position"].to_numpy()))
            yield from each_alone(rows, lane.write, lane.record_death, mine)

    @cached_property
    def _rows(self) -> ByPosition:
        return ByPosition(self.lake, self.received)


def _count(positions: Positions, outcomes: Outcomes) -> None:
    outcomes.tally.counts["returned_rows"] += len(positions)
    outcomes.tally.counts["checksum"] += checksum(positions)


def _by_window(received: ByPosition, batch: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
    try:
        return list(received.by_window(batch))
    except ValueError:
        raise PipelineError(
            "handle_messages changed the column position, by which a row is known again: put what it makes of a "
            "message into columns of other names"
        ) from None


class _Rows:
    """Puts rows of one window into the columns of their batchers' tables; a row that fits none fails alone."""

    def __init__(self, step: Step, received: ByPosition, window: str) -> None:
        self._batchers, self._options = step.pipeline.batchers, step.pipeline.processors
        self._received, self._window = received, window
        self._misfits: dict[int, Failure] = {}
        """By position."""
        self._row_at: dict[int, int] = {}
        """The rows that are being written, by position."""

    def write(self, rows: pa.RecordBatch, outcomes: Outcomes) -> Sequence[int]:
        """Route rows and write them, all of them."""
        self._number(rows)
        with outcomes.chunk(rows.num_rows):
            self._write_all(rows, outcomes)
        return ()

    def _write_all(self, rows: pa.RecordBatch, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        deliveries = self._received.take(DELIVERY, rows.column("position").to_numpy())
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        batch = pa.RecordBatch.from_pydict(columns | dict(zip(DELIVERY, deliveries, strict=True)))
        failed = pc.is_valid(batch.column("_failure"))
        batcher = pc.fill_null(batch.column("batcher"), "")
        known = pc.is_in(batcher, pa.array([*self._batchers], pa.string()))
        unknown = pc.invert(known) if self._batchers else pc.and_(known, failed)
        self._fail(batch.filter(failed), _failure_of)
        self._fail(batch.filter(pc.and_not(unknown, failed)), self._unknown)
        good = pc.and_not(pc.invert(unknown), failed)
        if not self._batchers:
            self._outcomes.record_handled(batch.filter(good), self._window)
        for name, options in self._batchers.items():
            mine = batch.filter(pc.and_(good, pc.equal(batcher, name)))
            if mine.num_rows and isinstance(options, TableBatcher):
                self._write(name, mine, options.table_schema)
            elif mine.num_rows:
                self._stage(name, mine, options.table_schema)
        misfits = pa.record_batch({"position": pa.array(list(self._misfits), pa.int64())})
        self._fail(misfits, lambda row: self._misfits[row["position"]])

    def record_death(self, rows: pa.RecordBatch, outcomes: Outcomes, death: Death) -> None:
        """Fail rows that ended their process."""
        self._number(rows)
        self._outcomes = outcomes
        self._fail(rows, lambda _: death.failure("handle_messages"))

    def _number(self, rows: pa.RecordBatch) -> None:
        self._row_at = {position: row for row, position in enumerate(rows.column("position").to_pylist())}

    def _fail(self, rows: pa.RecordBatch, why: Callable[[dict[str, Any]], Failure]) -> None:
        known = [name for name in ("position", "batcher", "_failure") if name in rows.schema.names]
        for some, delivered in self._delivered(rows):
            failures = list(map(why, some.select(known).to_pylist()))
            self._outcomes.failed(delivered, self._window, failures)

    def _write(self, name: str, rows: pa.RecordBatch, model: ModelClass) -> None:
        schema = arrow_schema(model)
        try:
            columns = [rows.column(field.name).cast(field.type) for field in schema]
            refuse_nulls(columns, model)
        except (pa.ArrowException, ValueError, ColumnError) as error:
            if rows.num_rows > 1:
                for half in _halves(rows):
                    self._write(name, half, model)
                return
            reason = str(error) if isinstance(error, ColumnError) else _misfit(rows, schema)
            self._misfits[rows.column("position")[0].as_py()] = Failure("ColumnError", reason, "", "lake")
            return
        self._outcomes.columns(name, rows, self._window, columns)

    def _stage(self, name: str, rows: pa.RecordBatch, model: ModelClass | None) -> None:
        """Hand rows to a batcher with a callback, as messages whose data is a dict of its model's fields."""
        for some, delivered in self._delivered(rows):
            try:
                if model is None:
                    data = some.column("data").to_pylist()
                else:
                    data = some.select(arrow_schema(model).names).to_pylist(maps_as_pydicts="lossy")
            except (ValueError, OverflowError) as error:  # a date that Python has no value for
                if some.num_rows == 1:
                    self._outcomes.failed(delivered, self._window, [Failure.of(error, "lake")])
                else:
                    for half in _halves(some):
                        self._stage(name, half, model)
                continue
            keys = some.column("batch_key").fill_null(DEFAULT).to_pylist()
            messages = [
                message.put(value, batcher=name, batch_key=key)
                for message, value, key in zip(
                    Message.each(delivered, self._outcomes.ack_policy), data, keys, strict=True
                )
            ]
            self._outcomes.handled(delivered, self._window, messages)

    def _delivered(self, rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Some rows at a time, and the same as they were received: few at first, and more as long as they are small."""
        options, start, step = self._options, 0, _FIRST
        while start < rows.num_rows:
            some = rows.slice(start, step)
            delivered = self._as_received(some.column("position").to_numpy())
            done = 0
            for part in halves(delivered, options.chunk_bytes):
                positions = some["position"].slice(done, part.num_rows).to_pylist()
                self._outcomes.watch.name([self._row_at[position] for position in positions])
                yield some.slice(done, part.num_rows), part
                done += part.num_rows
            start += some.num_rows
            fitting = options.chunk_bytes * some.num_rows // (delivered.nbytes + 1)
            step = max(1, min(4 * step, options.chunk_size, fitting))

    def _as_received(self, positions: Positions) -> pa.RecordBatch:
        columns = dict(zip(DELIVERY, self._received.take(DELIVERY, positions), strict=True))
        columns |= dict(zip(PAYLOAD, self._received.take(PAYLOAD, positions), strict=True))
        columns |= {"position": pa.array(positions), "window": pa.repeat(self._window, len(positions))}
        return pa.RecordBatch.from_pydict(columns)

    def _unknown(self, row: dict[str, Any]) -> Failure:
        return self._outcomes.no_batcher(repr(row["batcher"]), "handle_messages")


def _halves(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    half = rows.num_rows // 2
    return rows.slice(0, half), rows.slice(half)


def _misfit(row: pa.RecordBatch, schema: pa.Schema) -> str:
    """Which column a row does not fit; Arrow's own words quote the value, which is payload."""
    for field in schema:
        try:
            row.column(field.name).cast(field.type)
        except (pa.ArrowException, ValueError):
            return f"{field.name} is {row.column(field.name).type} and holds what fits no {field.type}"
    return "it fits no column"


def _failure_of(row: dict[str, Any]) -> Failure:
    return Failure("failed", row["_failure"] or "handle_messages gave no reason", "", "handle_messages")
