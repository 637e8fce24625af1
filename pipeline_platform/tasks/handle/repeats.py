"""Repeats: deliveries that are not handled again, because their message is decided or another delivery is handled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.decisions.decided import are_decided
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange, keys_of, only, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.message import MESSAGE_KEY, MESSAGES
from pipeline_platform.model.portions import portions
from pipeline_platform.tasks.record.step import receive_table

REPEATS = pa.schema([("row", pa.int64()), ("decided", pa.bool_())])
"""Deliveries that are not handled, by `row`, their position. `decided`: an earlier receive decided the message;
otherwise another delivery of this receive is handled. A delivery may have a row for each reason."""
_TABLE = "_repeats"

IN_MEMORY = 262_144
"""Maximum number of redelivered messages in a portion. A task keeps their keys in memory, and reads the outcomes once
for each portion."""
_ROWS = 65_536
_DELIVERED = pa.schema([*only(MESSAGES, *MESSAGE_KEY, "redelivered"), ("position", pa.int64())])


class Repeats:
    """Deliveries of a receive that are not handled."""

    def __init__(self, found: pa.Table) -> None:
        found = found.sort_by([("row", "ascending"), ("decided", "descending")])
        self._rows, self._decided = found["row"].to_numpy(), found["decided"].to_numpy()

    @classmethod
    def read(cls, lake: Lake, files: Sequence[RowRange]) -> Repeats:
        """Read what `FindRepeats` wrote."""
        return cls(pa.Table.from_batches((batch for _, batch in read_ranges(lake, files, REPEATS, _ROWS)), REPEATS))

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
class FindRepeats:
    """Task `n` finds the deliveries whose message is decided in the outcomes `known[n]`, and its share of the copies.

    A delivery that is not marked `redelivered` is the first of its message. It is always handled, so an unrelated
    redelivery in the same receive cannot change its outcome.

    Attributes:
        window: Window of the files to write.
        received: Deliveries of the receive.
        known: Outcomes of earlier receives by task; at least one task, even if it has no outcomes.
    """

    lake: Lake
    pipeline: str
    receive_id: str
    window: str
    received: Sequence[RowRange]
    known: Sequence[Sequence[RowRange]]

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`. Return its manifest."""
        files = write_rows(self.lake, self.pipeline, self.receive_id, self._repeats(index))
        yield from Manifest(files).to_arrow().to_batches()

    def _repeats(self, index: int) -> Iterator[tuple[str, str, pa.Table]]:
        table = receive_table(self.receive_id, _TABLE)
        redelivered = (rows.filter(rows["redelivered"]) for rows in self._received())
        for number, some in enumerate(portions(redelivered, len, IN_MEMORY)):
            again = pa.Table.from_batches(some)
            found = [(again.filter(are_decided(self.lake, again, self.known[index])), True)]
            if number % len(self.known) == index:
                found.append((again.filter(self._are_copies(again)), False))
            for rows, decided in found:
                columns = [rows["position"], pa.repeat(decided, len(rows))]
                yield table, self.window, pa.Table.from_arrays(columns, schema=REPEATS)

    def _received(self) -> Iterator[pa.RecordBatch]:
        return (rows for _, rows in read_ranges(self.lake, self.received, _DELIVERED, _ROWS))

    def _are_copies(self, again: pa.Table) -> pa.Array:
        """Whether another delivery is handled: the message's first without `redelivered`, else its first delivery."""
        keys = keys_of(again, *MESSAGE_KEY)
        same = (rows.filter(pc.is_in(keys_of(rows, *MESSAGE_KEY), value_set=keys)) for rows in self._received())
        rows = pa.Table.from_batches(same).sort_by([("redelivered", "ascending"), ("position", "ascending")])
        first = pa.table({"key": keys_of(rows, *MESSAGE_KEY), "row": rows["position"]})
        handled = first.group_by("key", use_threads=False).aggregate([("row", "first")])["row_first"]
        return pc.invert(pc.is_in(again["position"], value_set=handled.combine_chunks()))
