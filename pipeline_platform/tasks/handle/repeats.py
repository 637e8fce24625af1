"""Repeats: deliveries that are not handled again, because their message is decided or another delivery is handled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import Bounds, RowRange, keys_of, only, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import DECISIONS, OUTCOMES
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.message import MESSAGE_KEY, MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REPEATS = pa.schema([("row", pa.int64()), ("decided", pa.bool_())])
"""Deliveries that are not handled, by `row`, their position. `decided`: an earlier receive decided the message;
otherwise another delivery of this receive is handled. A delivery may have a row for each reason."""

IN_MEMORY = 65_536
"""Maximum number of deliveries whose keys tasks look up in memory. A join in Spark takes 3 s of processor time."""
_ROWS = 65_536
_DELIVERED = pa.schema([*only(MESSAGES, *MESSAGE_KEY, "redelivered"), ("position", pa.int64())])
_DECIDED = only(OUTCOMES, *MESSAGE_KEY, "outcome")


class Repeats:
    """Deliveries of a receive that are not handled."""

    def __init__(self, found: pa.Table) -> None:
        found = found.sort_by([("row", "ascending"), ("decided", "descending")])
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
    """Task `n` reads the rows `parts[n]` of files, near some bounds if they are given; see `read_ranges`."""

    lake: Lake
    parts: Sequence[Sequence[RowRange]]
    schema: pa.Schema
    near: Bounds | None = None

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        for _, batch in read_ranges(self.lake, self.parts[index], self.schema, _ROWS, near=self.near):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=self.schema)


@dataclass(frozen=True)
class _Repeats:
    """Destination of the repeats of a receive, for the tasks that handle messages."""

    lake: Lake
    pipeline: str
    receive_id: str
    window: str

    @property
    def table(self) -> str:
        """Table of the repeats. No batcher can have this name."""
        return f"_receives/{self.receive_id}/_repeats"


@dataclass(frozen=True)
class WriteRepeats(_Repeats):
    """Writes what `find_repeats` found."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write one partition; return its manifest."""
        with Writer(self.lake, self.pipeline, self.receive_id) as writer:
            for batch in batches:
                writer.write(self.table, self.window, batch)
            manifest = writer.close()
        yield from manifest.to_arrow().to_batches()


@dataclass(frozen=True)
class FindRepeats(_Repeats):
    """Task `n` looks up the deliveries in the outcomes `known[n]`, and writes what `find_repeats` would find.

    It needs no shuffle, because each task keeps the keys of all deliveries, at most `IN_MEMORY`, in memory.

    Attributes:
        received: Deliveries of the receive.
        known: Outcomes of earlier receives by task; at least one task, even if it has no outcomes.
        near: Bounds of the ids of the deliveries, if they are known.
    """

    received: Sequence[RowRange]
    known: Sequence[Sequence[RowRange]]
    near: Bounds | None = None

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`; task 0 also finds the copies. Return its manifest."""
        batches = [batch for _, batch in read_ranges(self.lake, self.received, _DELIVERED, _ROWS)]
        received = pa.Table.from_batches(batches, _DELIVERED)
        again = received.filter(received["redelivered"])
        is_decided = self._are_decided(again, self.known[index])
        found = [(again["position"].filter(is_decided), True)]
        if index == 0:
            is_copy = pc.and_not(_are_copies(again, received), is_decided)
            found.append((again["position"].filter(is_copy), False))
        return WriteRepeats(self.lake, self.pipeline, self.receive_id, self.window)(
            pa.RecordBatch.from_arrays([rows.combine_chunks(), pa.repeat(decided, len(rows))], schema=REPEATS)
            for rows, decided in found
        )

    def _are_decided(self, again: pa.Table, known: Sequence[RowRange]) -> pa.Array:
        ids, decisions = again["message_id"].combine_chunks(), [pa.array([], pa.string())]
        for _, rows in read_ranges(self.lake, known, _DECIDED, _ROWS, near=self.near):
            near = rows.filter(pc.is_in(rows["message_id"], value_set=ids))
            decided = near.filter(pc.is_in(near["outcome"], value_set=pa.array(DECISIONS)))
            decisions.append(pc.unique(keys_of(decided, *MESSAGE_KEY)))
        return pc.is_in(keys_of(again, *MESSAGE_KEY), value_set=pa.concat_arrays(decisions))


def _are_copies(again: pa.Table, received: pa.Table) -> pa.Array:
    """Whether another delivery of the message is handled: its first without `redelivered`, else its first delivery."""
    rows = pa.table({"key": keys_of(received, *MESSAGE_KEY), "row": received["position"]})
    rows = rows.take(pc.sort_indices(received, [("redelivered", "ascending"), ("position", "ascending")]))
    handled = rows.group_by("key", use_threads=False).aggregate([("row", "first")])["row_first"]
    return pc.invert(pc.is_in(again["position"], value_set=handled.combine_chunks()))


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
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    # Not a join: Spark chooses joins by the compressed size of ids, which may be a hundredth of their size in memory.
    key = list(MESSAGE_KEY)
    rows = received.select(*key, "position", "redelivered", f.lit(False).alias("decided"))
    if outcomes is not None:
        decided = outcomes.where(f.col("outcome").isin(*DECISIONS))
        rows = rows.unionByName(decided.select(*key, f.lit(True).alias("decided")), allowMissingColumns=True)
    of_message = Window.partitionBy(*key)
    # A redelivery may be in the same receive as the first delivery, whose lease expired meanwhile.
    delivery = f.when(f.col("position").isNotNull(), f.struct("redelivered", "position"))
    found = rows.select(
        "position",
        "redelivered",
        f.max("decided").over(of_message).alias("decided"),
        f.min(delivery).over(of_message).alias("handled"),
    )
    is_copy = f.col("position") != f.col("handled.position")
    again = found.where(f.col("redelivered") & (f.col("decided") | is_copy))
    return again.select(f.col("position").alias("row"), "decided")
