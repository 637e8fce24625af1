"""Recording the messages that the query of the Spark lane must not see: repeats, filtered, too large, or fatal."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from pipeline_platform.model.failure import Failure
from pipeline_platform.tasks.by_position import checksum
from pipeline_platform.tasks.callback_process.fork import Death
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.tasks.handle.repeats import REPEATS
from pipeline_platform.tasks.handle.row_lane import Handler, oversized, too_large
from pipeline_platform.tasks.isolation import Tries, each_alone, surely
from pipeline_platform.tasks.record.filtered import ONLY, Filter
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.verdicts import record_duplicates, record_failed


def unseen_table(receive_id: str) -> str:
    """Return the table of the messages that `only` ended, as `REPEATS`. No batcher can have this name."""
    return f"_receives/{receive_id}/_unseen"


@dataclass(frozen=True)
class RecordUnseen(Handle):
    """Task `n` writes the outcomes of the rows in `parts[n]` that the query must not see.

    Attributes:
        failure: Failure of all other rows; None to fail only rows that are too large, and to evaluate `only`.
    """

    failure: Failure | None = None
    stem = "aside"

    def tries(self, block: Sequence[pa.RecordBatch], known: Death | None) -> Tries:
        """Record the rows that the query must not see, and their number and checksum."""
        (received,) = block
        window, (fresh, *repeats) = received.column("window")[0].as_py(), self._repeats.split(received)
        large = oversized(fresh, self.pipeline.processors.max_message_bytes)
        others = fresh.take(pa.array(sorted(set(range(fresh.num_rows)) - set(large)), pa.int64()))
        # With `failure`, too large rows have failed before the query.
        rows = others if self.failure else fresh.take(pa.array(large, pa.int64()))
        unseen = [rows] if self.failure else [rows, *repeats]
        if any(some.num_rows for some in unseen):
            yield from surely(partial(self._record_repeats, window, repeats, unseen))
        of_only = known is not None and known.callback == ONLY
        record, fail = partial(self._record, window), partial(self._fail, window)
        yield from each_alone(rows, record, fail, None if of_only else known)
        if self.failure is None and Filter(self.pipeline):
            let_through, fail = partial(self._let_through, window), partial(self._fail_in_only, window)
            yield from each_alone(others, let_through, fail, known if of_only else None)

    def _record_repeats(
        self, window: str, repeats: Sequence[pa.RecordBatch], unseen: Sequence[pa.RecordBatch], recording: Recording
    ) -> None:
        if self.failure is None:
            for rows, decided in zip(repeats, (True, False), strict=True):
                record_duplicates(recording, rows, window, decided=decided)
        for rows in unseen:
            _count(rows, recording)

    def _record(self, window: str, rows: pa.RecordBatch, recording: Recording) -> Sequence[int]:
        most = self.pipeline.processors.max_message_bytes
        failures = [self.failure or too_large(data, most) for data in rows.column("data").to_pylist()]
        record_failed(recording, rows, window, failures)
        return ()

    def _let_through(self, window: str, rows: pa.RecordBatch, recording: Recording) -> Sequence[int]:
        """Evaluate `only`, and record the rows that the query must not see."""
        assert recording.pipeline is not None
        handler = Handler(recording.pipeline, self.context, recording.ack_policy, watch=recording.watch)
        ended = handler.record_ended(rows, window, recording)
        self._hide(window, rows.filter(ended), recording)
        return ()

    def _fail_in_only(self, window: str, rows: pa.RecordBatch, recording: Recording, death: Death) -> None:
        record_failed(recording, rows, window, [death.failure(ONLY)] * rows.num_rows)
        self._hide(window, rows, recording)

    def _hide(self, window: str, rows: pa.RecordBatch, recording: Recording) -> None:
        hidden = [rows.column("position"), pa.repeat(False, rows.num_rows)]
        recording.write(unseen_table(self.receive_id), window, pa.RecordBatch.from_arrays(hidden, schema=REPEATS))
        _count(rows, recording)

    def _stage(self) -> str:
        return "handle_failed"


def _count(rows: pa.RecordBatch, recording: Recording) -> None:
    recording.report.positions += rows.num_rows
    recording.report.checksum += checksum(rows["position"].to_numpy())
