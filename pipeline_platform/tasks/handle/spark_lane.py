"""The Spark lane in tasks: reading messages for a query, and writing the rows that the query returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.reader import RowRange, only, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.blocks import ROUTING
from pipeline_platform.model.message import DEFAULT, DELIVERY_KEY, MESSAGE_KEY, MESSAGES, PAYLOAD
from pipeline_platform.model.options import Processors
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.model.portions import portions
from pipeline_platform.tasks.by_position import ByPosition, count_positions
from pipeline_platform.tasks.callback_process.fork import Death
from pipeline_platform.tasks.calling_step import CallingStep
from pipeline_platform.tasks.handle.handle_messages import READ
from pipeline_platform.tasks.handle.repeats import Repeats
from pipeline_platform.tasks.isolation import Tries, each_alone, surely
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.routed import FIELD, ROUTES, RoutedRows, fields_of_all

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pipeline_platform.control.pace import Pace

_DELIVERY = [name for name in READ.names if name not in (*PAYLOAD, "window", "position")]
_KEPT_BYTES = 64 * 2**20
"""Bytes of rows that a task keeps for its callback process. Spark delivers rows once, and a crash needs them again."""


KEYS = only(MESSAGES, *MESSAGE_KEY)
"""Columns that identify a message."""


@dataclass(frozen=True)
class ReadKeys:
    """Task `n` reads the columns `KEYS` of the rows `parts[n]`."""

    lake: Lake
    parts: Sequence[Sequence[RowRange]]

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        return (rows for _, rows in read_ranges(self.lake, self.parts[index], KEYS, 65_536))


@dataclass(frozen=True)
class ReadColumns:
    """Task `n` reads the received rows `parts[n]` at the pace of the rate limit, without repeats."""

    lake: Lake
    parts: Sequence[Sequence[RowRange]]
    options: Processors
    pace: Pace
    repeats: Sequence[RowRange]

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        repeats, options = Repeats.read(self.lake, self.repeats), self.options
        for _, chunk in read_ranges(self.lake, self.parts[index], READ, options.chunk_size, options.chunk_bytes):
            rows, *_ = repeats.split(chunk)
            while rows.num_rows:
                count, _ = self.pace.permitted(rows.num_rows)
                yield pa.RecordBatch.from_arrays(rows.slice(0, count).columns, schema=READ)
                rows = rows.slice(count)


def read_locally(spark: SparkSession, lake: Lake, pipeline: str, files: Sequence[File]) -> DataFrame:
    """Read received files with Spark's reader, which is faster but needs a local lake and no rate limit."""
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.types import from_arrow_schema

    first, places = 0, []
    for file in files:
        places += [f.lit(file.path.rsplit("/", 1)[1]), f.struct(f.lit(file.window), f.lit(first).cast("long"))]
        first += file.rows
    stored = pa.schema([field for field in READ if field.name not in ("window", "position")])
    paths = [lake.uri(pipeline, file.table, file.path) for file in files]
    place = f.create_map(*places)[f.col("_metadata.file_name")]
    rows = spark.read.schema(from_arrow_schema(stored)).parquet(*paths)
    return rows.select(
        *stored.names,
        place["col1"].alias("window"),
        (place["col2"] + f.col("_metadata.row_index")).alias("position"),
    )


def offered(received: DataFrame) -> DataFrame:
    """Return the input of `handle_messages`: the received columns and the default routing."""
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
    """Select the columns to write from the result of `handle_messages`: a column per field, shared by all batchers.

    The delivery and its payload are not selected but looked up by position. That is faster than sending them to
    Python, and no expression can change them.

    Raises:
        PipelineError: A column is missing.
    """
    from pyspark.sql import functions as f

    fields = fields_of_all(pipeline)
    missing = sorted({"position", *ROUTING, *fields} - set(handled.columns))
    if missing:
        raise PipelineError(
            f"{pipeline.__qualname__}.handle_messages returned no column {missing}. Keep the columns of its argument, "
            "and add a column for each field of the batchers' models"
        )
    # Batch keys may be numbers.
    columns = [f.col(name).cast("string").alias(route) for name, route in zip(ROUTING, ROUTES[1:], strict=True)]
    return handled.select("position", *columns, *fields)


def not_returned(pipeline: type[Pipeline], received: DataFrame, seen: DataFrame) -> DataFrame:
    """Return the received rows that `handle_messages` dropped, as failed rows.

    Args:
        pipeline: Class of the pipeline.
        received: Rows passed to `handle_messages`.
        seen: `source` and `message_id` of the rows that it returned.
    """
    from pyspark.sql import functions as f

    missing = offered(received.join(seen, list(MESSAGE_KEY), "left_anti")).withColumns(
        {"status": f.lit("failed"), "reason": f.lit("handle_messages did not return it")}
    )
    fields = {name: f.lit(None) for name in fields_of_all(pipeline) if name not in missing.columns}
    return taken(pipeline, missing.withColumns(fields))


@dataclass(frozen=True)
class WriteColumns(CallingStep):
    """Writes the rows that `handle_messages` returned.

    Attributes:
        received: Received files, whole and in order, in which rows are looked up by position.
    """

    received: Sequence[RowRange]
    stem = "handle"

    def __call__(self, share: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition. Yield the manifest of each group of rows passed to a callback process."""
        for group in portions(share, lambda batch: batch.nbytes, _KEPT_BYTES):
            yield from super().__call__(group)

    def blocks(self, share: Sequence[pa.RecordBatch], skip: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the batches that Spark delivered."""
        yield from ((1, batch) for batch in share[skip:])

    def tries(self, block: pa.RecordBatch, known: Death | None) -> Tries:
        """Write rows, by their windows."""
        windows = _by_window(self._rows, block) if block.num_rows else []
        for window, rows in windows:
            write, fail = partial(self._write, window), partial(self._fail, window)
            yield from surely(partial(_count, rows))
            yield from each_alone(rows, write, fail, known if len(windows) == 1 else None)

    @cached_property
    def _rows(self) -> ByPosition:
        return ByPosition(self.lake, self.received)

    def _write(self, window: str, rows: pa.RecordBatch, recording: Recording) -> Sequence[int]:
        positions = rows.column("position")
        kept = self._rows.take(_DELIVERY, positions.to_numpy())
        columns = {name if name in ROUTES else FIELD + name: rows.column(name) for name in rows.schema.names}
        with recording.chunk(rows.num_rows):
            routed = RoutedRows(recording, window, positions, partial(self._as_received, window))
            routed.write(pa.RecordBatch.from_pydict(columns | {name: kept[name] for name in DELIVERY_KEY}))
        return ()

    def _fail(self, window: str, rows: pa.RecordBatch, recording: Recording, death: Death) -> None:
        routed = RoutedRows(recording, window, rows.column("position"), partial(self._as_received, window))
        routed.fail(rows, lambda _: death.failure("handle_messages"))

    def _as_received(self, window: str, positions: pa.Array) -> pa.RecordBatch:
        at = positions.to_numpy()
        parts = [self._rows.take(names, at) for names in (_DELIVERY, PAYLOAD)]
        columns = {name: part.column(name) for part in parts for name in part.schema.names}
        return pa.RecordBatch.from_pydict(columns | {"position": positions, "window": pa.repeat(window, len(at))})


def _count(rows: pa.RecordBatch, recording: Recording) -> None:
    count_positions(rows["position"].to_numpy(), recording.report)


def _by_window(received: ByPosition, batch: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
    try:
        return list(received.by_window(batch))
    except ValueError:
        raise PipelineError(
            "handle_messages changed the column position, which identifies the message. Use another name for the "
            "new column"
        ) from None
