"""Messages that were acknowledged early by a run that never decided: each becomes an open failure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline_platform.lake.decisions.early_acks import Notes
from pipeline_platform.lake.reader import RowRange, read_ranges
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.tasks.acknowledge.early import ack_keys
from pipeline_platform.tasks.handle.handle_messages import BLOCK_ROWS
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.step import Step
from pipeline_platform.tasks.record.verdicts import record_failed

_STORED = [name for name in MESSAGES.names if name != "window"]

_FAILURE = Failure(
    "not decided",
    "ack_immediately acknowledged it, and its run ended before its decision: it may have been handled or not",
    "",
    "ack_immediately",
)


@dataclass(frozen=True)
class KeepForgotten(Step):
    """Task `n` keeps the rows of `parts[n]` that the source has forgotten, as failures and as received messages.

    Attributes:
        parts: Received rows of the fenced receive, by task.
        fenced: Id of the fenced receive, whose tasks noted what they acknowledged.
    """

    parts: Sequence[Sequence[RowRange]]
    fenced: str

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        noted = Notes(self.lake, self.pipeline.name, self.fenced).read()
        with self.writer(f"forgotten-{index}") as writer:
            early_acks = self.early_acks()
            assert early_acks is not None
            # Uncertain acknowledgements too: if the source redelivers a message, its id identifies it as a duplicate.
            early_acks.acknowledged |= noted
            recording = Recording(self, writer, early_acks=early_acks, report=TaskReport(task=index))
            columns = MESSAGES.append(pa.field("position", pa.int64()))
            for _, block in read_ranges(self.lake, self.parts[index], columns, BLOCK_ROWS):
                gone = [key in noted and self.ack_policy.ends(noted[key].action) for key in ack_keys(block)]
                if any(gone):
                    rows, window = block.filter(pa.array(gone)), block.column("window")[0].as_py()
                    ids = pa.repeat(self.receive_id, rows.num_rows)
                    rows = rows.set_column(rows.schema.get_field_index("receive_id"), "receive_id", ids)
                    writer.write("messages", window, rows.select(_STORED))
                    record_failed(recording, rows, window, [_FAILURE] * rows.num_rows)
            manifest = writer.close(recording.report.bounded())
        yield from manifest.to_arrow().to_batches()
