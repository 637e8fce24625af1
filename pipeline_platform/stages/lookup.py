"""Looking up what is decided: of the deliveries that may have come before, those not to be handled again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from pipeline_platform.lake.reader import Range, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ALREADY = pa.schema([("source", pa.string()), ("message_id", pa.string()), ("keep", pa.int64())])
"""A message that came more than once: the position of the one copy to handle, or -1 for none."""


@dataclass(frozen=True)
class Scan:
    """Task `n` reads the rows `parts[n]` of files that are not part of a table, or not yet."""

    lake: Lake
    parts: Sequence[Sequence[Range]]
    schema: pa.Schema

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        for _, batch in read_ranges(self.lake, self.parts[index], self.schema.names, 65_536):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)


@dataclass(frozen=True)
class KeepAlready:
    """Writes what `already` found, for the tasks that handle to read."""

    table: ClassVar[str] = "already"
    lake: Lake
    pipeline: str
    receive_id: str
    window: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition; return its manifest."""
        with Writer(self.lake, self.pipeline, self.receive_id) as writer:
            for batch in batches:
                writer.write(f"_receives/{self.receive_id}/{self.table}", self.window, batch)
            manifest = writer.close()
        yield from manifest.to_arrow().to_batches()


def already(received: DataFrame, outcomes: DataFrame | None) -> DataFrame:
    """Find the messages that are decided, or were delivered more than once in this receive.

    Args:
        received: `source`, `message_id`, `position` and `redelivered` of what was received.
        outcomes: `source`, `message_id` and `outcome` of what is known; None where nothing is.

    Returns:
        The columns of `ALREADY`.
    """
    from pyspark.sql import functions as f

    key = ["source", "message_id"]
    copies = received.where("redelivered").groupBy(*key).agg(f.min("position").alias("keep"), f.count("*").alias("n"))
    if outcomes is None:
        return copies.where("n > 1").select(*key, "keep")
    known = outcomes.where("outcome in ('handled', 'failed')").select(*key).distinct().withColumn("known", f.lit(1))
    return (
        copies.join(known, key, "left")
        .where("known is not null or n > 1")
        .select(*key, f.when(f.col("known").isNotNull(), f.lit(-1)).otherwise(f.col("keep")).alias("keep"))
    )
