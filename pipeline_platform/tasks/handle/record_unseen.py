"""Recording the messages that the query of the Spark lane must not see: repeats, too large, or fatal to Spark."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from pipeline_platform.model.failure import Failure
from pipeline_platform.tasks.by_position import checksum
from pipeline_platform.tasks.callback_process.fork import Death
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.tasks.handle.row_lane import oversized, too_large
from pipeline_platform.tasks.isolation import Tries, each_alone, surely
from pipeline_platform.tasks.record.outcomes import Outcomes


@dataclass(frozen=True)
class RecordUnseen(Handle):
    """Task `n` writes the outcomes of the rows in `parts[n]` that the query must not see.

    Attributes:
        failure: Failure of all other rows; None to fail only rows that are too large.
    """

    failure: Failure | None = None
    stem = "aside"

    def tries(self, block: Sequence[pa.RecordBatch], known: Death | None) -> Tries:
        """Record the rows that the query must not see, and their number and checksum."""
        (received,) = block
        window, (fresh, *repeats) = received.column("window")[0].as_py(), self._repeats.split(received)
        rows = self._failing(fresh)
        unseen = [rows] if self.failure else [rows, *repeats]
        if any(some.num_rows for some in unseen):
            yield from surely(partial(self._record_repeats, window, repeats, unseen))
        yield from each_alone(rows, partial(self._record, window), partial(self._fail, window), known)

    def _record_repeats(
        self, window: str, repeats: Sequence[pa.RecordBatch], unseen: Sequence[pa.RecordBatch], outcomes: Outcomes
    ) -> None:
        if self.failure is None:
            for rows, decided in zip(repeats, (True, False), strict=True):
                outcomes.duplicates(rows, window, decided=decided)
        for rows in unseen:
            outcomes.report.positions += rows.num_rows
            outcomes.report.checksum += checksum(rows["position"].to_numpy())

    def _failing(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that fail. With `failure`, too large rows have failed before the query."""
        large = oversized(rows, self.pipeline.processors.max_message_bytes)
        if self.failure is None:
            return rows.take(pa.array(large, pa.int64()))
        return rows.take(pa.array(sorted(set(range(rows.num_rows)) - set(large)), pa.int64()))

    def _record(self, window: str, rows: pa.RecordBatch, outcomes: Outcomes) -> Sequence[int]:
        most = self.pipeline.processors.max_message_bytes
        failures = [self.failure or too_large(data, most) for data in rows.column("data").to_pylist()]
        outcomes.failed(rows, window, failures)
        return ()

    def _stage(self) -> str:
        return "handle_failed"
