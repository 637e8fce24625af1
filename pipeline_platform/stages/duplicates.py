"""Recording the deliveries that need no handling, where handling itself does not see them: the fast lane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline_platform.lake.reader import Range, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.source import Source
from pipeline_platform.stages.checksum import checksum
from pipeline_platform.stages.handle import READ
from pipeline_platform.stages.lookup import Already
from pipeline_platform.stages.record import Recorder


@dataclass(frozen=True)
class SettleDuplicates:
    """Task `n` writes the outcomes of those of the rows `parts[n]` that are not to be handled."""

    pipeline: type[Pipeline]
    source: Source
    origin: str
    lake: Lake
    receive_id: str
    parts: Sequence[Sequence[Range]]
    already: Sequence[Range]

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        already = Already.read(self.lake, self.already)
        dropped = 0
        with Writer(self.lake, self.pipeline.name, f"{self.receive_id}-duplicates-{index}") as writer:
            recorder = Recorder(self.pipeline, self.source, self.origin, self.receive_id, writer, list)
            for _, chunk in read_ranges(self.lake, self.parts[index], READ, 65_536):
                window, split = chunk.column("window")[0].as_py(), already.split(chunk)
                recorder.duplicates(split.decided, window, decided=True)
                recorder.duplicates(split.copies, window, decided=False)
                for rows in (split.decided, split.copies):
                    dropped = (dropped + checksum(rows.column("position").to_numpy())) % 2**64
            manifest = writer.close(**recorder.notes(), dropped_checksum=dropped, task=index)
        yield from manifest.to_arrow().to_batches()
