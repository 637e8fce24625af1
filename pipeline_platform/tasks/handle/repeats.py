"""Repeats: deliveries that are not handled again, because their message is decided or another delivery is handled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pipeline_platform.lake.reader import RowRange, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import DECISIONS
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.message import MESSAGE_KEY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REPEATS = pa.schema([("row", pa.int64()), ("decided", pa.bool_())])
"""Deliveries that are not handled, by `row`, their position. `decided`: an earlier receive decided the message;
otherwise another delivery of this receive is handled."""


class Repeats:
    """Deliveries of a receive that are not handled."""

    def __init__(self, found: pa.Table) -> None:
        found = found.sort_by("row")
        self._rows, self._decided = found["row"].to_numpy(), found["decided"].to_numpy()

    @classmethod
    def read(cls, lake: Lake, files: Sequence[RowRange]) -> Repeats:
        """Read what `WriteRepeats` wrote."""
        return cls(pa.Table.from_batches((batch for _, batch in read_ranges(lake, files, REPEATS, 65_536)), REPEATS))

    def split(self, chunk: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch, pa.RecordBatch]:
        """Split a chunk into rows to handle, rows that earlier receives decided, and copies of rows to handle."""
        if not len(self._rows):
            return chunk, chunk.slice(0, 0), chunk.slice(0, 0)
        positions = chunk.column("position").to_numpy()
        at = np.searchsorted(self._rows, positions).clip(max=len(self._rows) - 1)
        is_repeat, is_decided = self._rows[at] == positions, self._decided[at]
        parts = (~is_repeat, is_repeat & is_decided, is_repeat & ~is_decided)
        fresh, decided, copies = (chunk.filter(pa.array(part)) for part in parts)
        return fresh, decided, copies


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
    """Writes what `find_repeats` found, for the tasks that handle messages."""

    lake: Lake
    pipeline: str
    receive_id: str
    window: str

    @property
    def table(self) -> str:
        """Table of the repeats. No batcher can have this name."""
        return f"_receives/{self.receive_id}/_repeats"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition; return its manifest."""
        with Writer(self.lake, self.pipeline, self.receive_id) as writer:
            for batch in batches:
                writer.write(self.table, self.window, batch)
            manifest = writer.close()
        yield from manifest.to_arrow().to_batches()


def find_repeats(received: DataFrame, outcomes: DataFrame | None) -> DataFrame:
    """Find the deliveries whose message is decided or is handled in another delivery of this receive.

    A delivery that is not marked `redelivered` is the first of its message. It is always handled, so an unrelated
    redelivery in the same receive cannot change its outcome.

    Args:
        received: `source`, `message_id`, `position` and `redelivered` of all deliveries of the receive.
        outcomes: `source`, `message_id` and `outcome` of earlier receives; None if there are none.

    Returns:
        The columns of `REPEATS`.
    """
    from pyspark.sql import functions as f

    key = list(MESSAGE_KEY)
    # A redelivery may be in the same receive as the first delivery, whose lease expired meanwhile.
    handled = received.groupBy(*key).agg(f.min(f.struct("redelivered", "position")).alias("handled"))
    again = received.where("redelivered").join(handled, key)
    is_copy = f.col("position") != f.col("handled.position")
    if outcomes is None:
        return again.where(is_copy).select(f.col("position").alias("row"), f.lit(False).alias("decided"))
    decided = outcomes.where(f.col("outcome").isin(*DECISIONS)).select(*key, f.lit(True).alias("decided")).distinct()
    again = again.join(decided, key, "left").withColumn("decided", f.coalesce("decided", f.lit(False)))
    return again.where(f.col("decided") | is_copy).select(f.col("position").alias("row"), "decided")
