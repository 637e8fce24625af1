"""Recording the messages that the fast lane's query is not to see: duplicates, the too large, what Spark stops at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline_platform.lake.reader import Range, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.checksum import checksum
from pipeline_platform.tasks.handle import READ, oversized, too_large
from pipeline_platform.tasks.isolate import tries_before
from pipeline_platform.tasks.lookup import Already
from pipeline_platform.tasks.record import Recorder


@dataclass(frozen=True)
class SetAside:
    """Task `n` writes the outcomes of those of the rows `parts[n]` that the query is not to see.

    A task that is tried again does not call `handle_failed`: it may have died of it.

    Attributes:
        already: Where the lookup wrote which deliveries are not to be handled.
        failure: What every other row fails with; None where only those fail that are too large.
    """

    pipeline: type[Pipeline]
    context: Any
    source: Source
    origin: str
    lake: Lake
    receive_id: str
    parts: Sequence[Sequence[Range]]
    already: Sequence[Range]
    failure: Failure | None = None

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        already, options, pipeline = Already.read(self.lake, self.already), self.pipeline.processors, self.pipeline()

        def look(messages: list[Message]) -> list[Message]:
            return messages if tries_before() else pipeline.handle_failed(messages, self.context)

        aside = _Aside()
        with Writer(self.lake, self.pipeline.name, f"{self.receive_id}-aside-{index}") as writer:
            recorder = Recorder(self.pipeline, self.source, self.origin, self.receive_id, writer, look)
            for _, chunk in read_ranges(self.lake, self.parts[index], READ, options.chunk_size, options.chunk_bytes):
                window, split = chunk.column("window")[0].as_py(), already.split(chunk)
                failed = self._failed(split.fresh)
                if self.failure is None:
                    recorder.duplicates(split.decided, window, decided=True)
                    recorder.duplicates(split.copies, window, decided=False)
                    aside.count(split.decided, split.copies)
                rows = split.fresh.take(pa.array(list(failed), pa.int64()))
                recorder.handled(rows, window, list(failed.values()))
                aside.count(rows)
            manifest = writer.close(**recorder.tally.notes(), **aside.notes(), task=index)
        yield from manifest.to_arrow().to_batches()

    def _failed(self, rows: pa.RecordBatch) -> dict[int, Message]:
        large = oversized(rows, most := self.pipeline.processors.max_message_bytes)
        if self.failure is None:
            return {row: message.failed(too_large(message.data, most)) for row, message in _some(rows, large)}
        others = sorted(set(range(rows.num_rows)) - set(large))
        return {row: message.failed(self.failure) for row, message in _some(rows, others)}


def _some(rows: pa.RecordBatch, wanted: Sequence[int]) -> Iterator[tuple[int, Message]]:
    return zip(wanted, Message.each(rows.take(pa.array(wanted, pa.int64()))), strict=True)


class _Aside:
    """Counts the rows that were set aside, in a way that tells which they were."""

    def __init__(self) -> None:
        self._rows = self._checksum = 0

    def count(self, *parts: pa.RecordBatch) -> None:
        for rows in parts:
            self._rows += rows.num_rows
            self._checksum = (self._checksum + checksum(rows.column("position").to_numpy())) % 2**64

    def notes(self) -> dict[str, int]:
        return {"aside": self._rows, "aside_checksum": self._checksum}
