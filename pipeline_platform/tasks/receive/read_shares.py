"""Reading a source: each task reads its share once and writes it to files."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.readable import refuse_unreadable
from pipeline_platform.lake.reader import filled
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.task_report import TaskReport, earliest
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.message import DELIVERY_KEY, MESSAGES
from pipeline_platform.source.contract import Share, Source, SourceError
from pipeline_platform.source.patience import patiently


@dataclass(frozen=True)
class ReadShares:
    """Task `n` reads share `n` into the table `messages`.

    Later steps read these files and never the source: reading the source again would lease other messages.
    """

    source: Source
    shares: Sequence[Share]
    lake: Lake
    pipeline: str
    receive_id: str
    window: str

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        share, report, started = self.shares[index], TaskReport(task=index, began=time.time()), time.monotonic()
        window = share.window or self.window
        oldest: list[datetime | None] = []
        with Writer(self.lake, self.pipeline, f"{self.receive_id}-receive-{index}") as writer:
            for batch in self._batches(share):
                report.received += batch.num_rows
                published = batch.column("published_at")
                report.count_published(published)
                newest = report.published_until, pc.max(published).as_py()
                report.published_until = max(filter(None, newest), default=None)
                again = published.filter(batch.column("redelivered"))
                report.redelivered += len(again)
                if len(again):
                    is_known = self.source.dates_by_own_clock and not again.null_count
                    oldest.append(pc.min(again).as_py() if is_known else None)
                report.largest = max(report.largest, pc.max(pc.binary_length(batch.column("data"))).as_py() or 0)
                writer.write("messages", window, self._stamped(batch))
            report.redelivered_since = earliest(oldest)
            report.seconds = time.monotonic() - started
            manifest = writer.close(report)
        yield from manifest.to_arrow().to_batches()

    def _batches(self, share: Share) -> Iterator[pa.RecordBatch]:
        """Read a share. Retry while the source is unavailable and has returned no batch."""

        def begin() -> tuple[pa.RecordBatch | None, Iterator[pa.RecordBatch]]:
            batches = self.source.read(share, self.receive_id)
            return next(batches, None), batches

        first, rest = patiently(begin, self.source.patience)
        if first is not None:
            yield first
            yield from rest

    def _stamped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name in DELIVERY_KEY:
            if batch.column(name).null_count:  # later steps identify the message by these columns
                raise SourceError(f"source {self.source.name} delivered a message without {name}: fix its connector")
        try:
            refuse_unreadable(batch.schema.names, batch.columns)
        except ColumnError as error:
            raise SourceError(
                f"source {self.source.name} delivered a message whose {error}: fix its connector"
            ) from None
        # A replay delivers this column and `first_receive_id` with the values of the first delivery.
        given = {} if "received_at" in batch.schema.names else {"received_at": datetime.now(UTC)}
        return filled(batch, MESSAGES, receive_id=self.receive_id, **given)
