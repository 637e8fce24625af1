"""Repeats: deliveries that are not to be handled again, because another one of their message is or was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import RowRange, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REPEATS = pa.schema([("source", pa.string()), ("message_id", pa.string()), ("keep", pa.int64())])
"""A message that came more than once: the position of the one copy to handle, or `KNOWN`."""

KNOWN = -1
"""No copy is to be handled: an earlier receive decided the message."""


class Repeats:
    """By `(source, message_id)`, the position of the one copy to handle, or `KNOWN`."""

    def __init__(self, keep: dict[tuple[str, str], int]) -> None:
        self._keep = keep

    @classmethod
    def read(cls, lake: Lake, files: Sequence[RowRange]) -> Repeats:
        """Read what `WriteRepeats` wrote."""
        keep: dict[tuple[str, str], int] = {}
        for _, batch in read_ranges(lake, files, REPEATS, 65_536):
            sources, ids, positions = (column.to_pylist() for column in batch.columns)
            keep.update(zip(zip(sources, ids, strict=True), positions, strict=True))
        return cls(keep)

    def split(self, chunk: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch, pa.RecordBatch]:
        """Divide a chunk: what to handle; what earlier receives decided; what is handled in another copy."""
        if not self._keep:
            return chunk, chunk.slice(0, 0), chunk.slice(0, 0)
        keys = zip(chunk.column("source").to_pylist(), chunk.column("message_id").to_pylist(), strict=True)
        keep = pa.array([self._keep.get(key) for key in keys], pa.int64())
        fresh = pc.fill_null(pc.equal(keep, chunk.column("position")), True)
        decided = pc.fill_null(pc.equal(keep, KNOWN), False)
        return chunk.filter(fresh), chunk.filter(decided), chunk.filter(pc.invert(pc.or_(fresh, decided)))


@dataclass(frozen=True)
class Scan:
    """Task `n` reads the rows `parts[n]` of files that are not part of a table, or not yet."""

    lake: Lake
    parts: Sequence[Sequence[RowRange]]
    schema: pa.Schema

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        for _, batch in read_ranges(self.lake, self.parts[index], self.schema, 65_536):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)


@dataclass(frozen=True)
class WriteRepeats:
    """Writes what `find_repeats` found, for the tasks that handle to read."""

    lake: Lake
    pipeline: str
    receive_id: str
    window: str

    @property
    def table(self) -> str:
        """Where; no batcher has such a name."""
        return f"_receives/{self.receive_id}/_repeats"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition; return its manifest."""
        with Writer(self.lake, self.pipeline, self.receive_id) as writer:
            for batch in batches:
                writer.write(self.table, self.window, batch)
            manifest = writer.close()
        yield from manifest.to_arrow().to_batches()


def find_repeats(received: DataFrame, outcomes: DataFrame | None) -> DataFrame:
    """Find the messages that are decided, or were delivered more than once in this receive.

    Args:
        received: `source`, `message_id`, `position` and `redelivered` of what was received.
        outcomes: `source`, `message_id` and `outcome` of what is known; None where nothing is.

    Returns:
        The columns of `REPEATS`.
    """
    from pyspark.sql import functions as f

    key = ["source", "message_id"]
    # Copies count whether marked or not: the first delivery of a message is rightly not marked, its second is.
    copies = (
        received.groupBy(*key)
        .agg(f.min("position").alias("keep"), f.count("*").alias("n"), f.max("redelivered").alias("redelivered"))
        .where("redelivered or n > 1")
    )
    if outcomes is None:
        return copies.where("n > 1").select(*key, "keep")
    known = outcomes.where("outcome in ('handled', 'failed')").select(*key).distinct().withColumn("known", f.lit(1))
    return (
        copies.join(known, key, "left")
        .where("known is not null or n > 1")
        .select(*key, f.when(f.col("known").isNotNull(), f.lit(KNOWN)).otherwise(f.col("keep")).alias("keep"))
    )
