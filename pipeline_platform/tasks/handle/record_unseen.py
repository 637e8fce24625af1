"""Recording the messages that the query of the Spark lane must not see: repeats, filtered, too large, or fatal."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from pipeline_platform.lake.reader import rows_at
from pipeline_platform.model.failure import Failure
from pipeline_platform.tasks.by_position import count_positions
from pipeline_platform.tasks.callback_process.fork import Death
from pipeline_platform.tasks.handle.handle_messages import Handle, record_repeats
from pipeline_platform.tasks.handle.repeats import REPEATS
from pipeline_platform.tasks.handle.row_lane import Handler, oversized
from pipeline_platform.tasks.isolation import Tries, each_alone, surely
from pipeline_platform.tasks.record.filtered import ONLY, Filter
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.verdicts import record_failed

UNSEEN_TABLE = "_unseen"
"""Table of the messages that are recorded, as `REPEATS`; see `receive_table`."""


@dataclass(frozen=True)
class RecordUnseen(Handle):
    """Task `n` writes the outcomes of the rows in `parts[n]` that the query must not see.

    Attributes:
        failure: Failure of all rows that are not recorded yet, given in `repeats`. None to record repeats, rows that
            are too large, and rows that `only` filters.
    """

    failure: Failure | None = None
    stem = "aside"

    def tries(self, block: Sequence[pa.RecordBatch], known: Death | None) -> Tries:
        """Record the rows that the query must not see, and their number and checksum."""
        (received,) = block
        window, (rows, *repeats) = received.column("window")[0].as_py(), self._repeats.split(received)
        if self.failure is None:
            if any(some.num_rows for some in repeats):
                yield from surely(partial(self._record_repeats, window, *repeats))
            if not Filter(self.pipeline):
                rows = rows_at(rows, oversized(rows, self.pipeline.processors.max_message_bytes))
        yield from each_alone(rows, partial(self._handle, window), partial(self._fail, window), known)

    def _record_repeats(
        self, window: str, decided: pa.RecordBatch, copies: pa.RecordBatch, recording: Recording
    ) -> None:
        record_repeats(window, decided, copies, recording)
        for rows in decided, copies:
            count_positions(rows["position"].to_numpy(), recording.report)

    def _handle(self, window: str, rows: pa.RecordBatch, recording: Recording) -> Sequence[int]:
        if self.failure is not None:
            record_failed(recording, rows, window, [self.failure] * rows.num_rows)
            self._hide(window, rows, recording)
        else:
            self._hide(window, rows.filter(Handler(recording).record_ended(rows, window)), recording)
        return ()

    def _fail(self, window: str, rows: pa.RecordBatch, recording: Recording, death: Death) -> None:
        super()._fail(window, rows, recording, death)
        self._hide(window, rows, recording)

    def _hide(self, window: str, rows: pa.RecordBatch, recording: Recording) -> None:
        hidden = [rows.column("position"), pa.repeat(False, rows.num_rows)]
        recording.stage(UNSEEN_TABLE, window, pa.RecordBatch.from_arrays(hidden, schema=REPEATS))
        count_positions(rows["position"].to_numpy(), recording.report)

    def _stage(self) -> str:
        return ONLY if self.failure is None and Filter(self.pipeline) else "handle_failed"
