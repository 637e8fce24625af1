"""Recording the messages that the fast lane's query is not to see: repeats, the too large, what Spark stops at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from pipeline_platform.lake.reader import RowRange, read_ranges
from pipeline_platform.model.failure import Failure
from pipeline_platform.tasks.by_position import checksum
from pipeline_platform.tasks.handle.handle_messages import READ, oversized, too_large
from pipeline_platform.tasks.handle.repeats import Repeats
from pipeline_platform.tasks.host.calling_step import CallingStep
from pipeline_platform.tasks.host.fork import Death
from pipeline_platform.tasks.host.isolation import Isolation
from pipeline_platform.tasks.host.output import captured
from pipeline_platform.tasks.host.progress import UNWATCHED, Watch
from pipeline_platform.tasks.record.outcomes import Outcomes


@dataclass(frozen=True)
class RecordUnseen(CallingStep):
    """Task `n` writes the outcomes of those of the rows `parts[n]` that the query is not to see.

    Attributes:
        repeats: Files that say which deliveries are not to be handled.
        failure: What every other row fails with; None where only those fail that are too large.
    """

    parts: Sequence[Sequence[RowRange]]
    repeats: Sequence[RowRange]
    failure: Failure | None = None

    def work(self, share: int, watch: Watch | None = UNWATCHED, death: Death | None = None) -> Iterator[pa.RecordBatch]:
        """Do the part of task `share`; note how many rows it recorded, and which, by their checksum."""
        repeats, options, unseen = Repeats.read(self.lake, self.repeats), self.pipeline.processors, list[pa.Array]()
        with self.writer(f"aside-{share}") as writer, captured() as output, self.traced(share):
            isolation = Isolation(self, writer, watch, death)
            outcomes = isolation.outcomes
            for _, chunk in read_ranges(self.lake, self.parts[share], READ, options.chunk_size, options.chunk_bytes):
                window, (fresh, decided, copies) = chunk.column("window")[0].as_py(), repeats.split(chunk)
                if self.failure is None:
                    outcomes.duplicates(decided, window, decided=True)
                    outcomes.duplicates(copies, window, decided=False)
                    unseen += [decided["position"], copies["position"]]
                rows = self._failing(fresh)
                isolation.deal(rows, partial(self._fail, window), partial(self._fail_dead, window))
                unseen.append(rows["position"])
            positions = [column.to_numpy() for column in unseen]
            manifest = writer.close(
                **outcomes.tally.notes(),
                **output.notes(),
                aside=sum(map(len, positions)),
                aside_checksum=sum(map(checksum, positions)) % 2**64,
                task=share,
            )
        yield from manifest.to_arrow().to_batches()

    def _failing(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that fail. Those that are too large failed in a task before the query."""
        large = oversized(rows, self.pipeline.processors.max_message_bytes)
        if self.failure is None:
            return rows.take(pa.array(large, pa.int64()))
        return rows.take(pa.array(sorted(set(range(rows.num_rows)) - set(large)), pa.int64()))

    def _fail(self, window: str, rows: pa.RecordBatch, outcomes: Outcomes, until: float | None) -> Sequence[int]:
        del until  # no permits: nothing is handled
        most = self.pipeline.processors.max_message_bytes
        failures = [self.failure or too_large(data, most) for data in rows.column("data").to_pylist()]
        outcomes.failed(rows, window, failures)
        return ()

    def _fail_dead(self, window: str, rows: pa.RecordBatch, outcomes: Outcomes, death: Death) -> None:
        outcomes.failed(rows, window, [death.failure("handle_failed")] * rows.num_rows)
