"""Recording: the values that the calls of a callback process share when they write what became of messages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Self

import pyarrow as pa

from pipeline_platform.lake.decisions.early_acks import Entry
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.columns.schema import row_type
from pipeline_platform.model.events import EVENTS
from pipeline_platform.model.message import Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.acknowledge.early import EarlyAcks
from pipeline_platform.tasks.callback_process.progress import UNWATCHED, Watch
from pipeline_platform.tasks.callback_process.try_size import TrySize
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.step import Destination, Step, receive_table
from pipeline_platform.telemetry.spans import span


class Recording:
    """Destination of the outcomes of a callback process.

    Attributes:
        step: Step of the messages.
        pipeline: Instance whose `handle_failed` gets failures before they are recorded; None to call no callbacks.
        watch: Watch that is notified of calls of user code.
        report: Report of the task; it gets the counts of the rows written.
        size: Number of rows of the next try.
        early_acks: Early acknowledger; None without `ack_immediately`.
        ack_policy: Ack actions of messages.
        row_types: Casts to the columns of the batchers' tables; a batcher whose data is JSON is left out.
    """

    def __init__(
        self,
        step: Step,
        destination: Destination,
        pipeline: Pipeline | None = None,
        watch: Watch = UNWATCHED,
        early_acks: EarlyAcks | None = None,
        report: TaskReport | None = None,
        size: TrySize | None = None,
    ) -> None:
        self.step, self._destination, self.pipeline, self.watch = step, destination, pipeline, watch
        self.report, self.size = report or TaskReport(), size or TrySize()
        self.early_acks = early_acks or step.early_acks()
        # Retries and replays have no source to acknowledge.
        without_source = (lambda _: None) if step.pipeline.acks_immediately else None
        self.ack_policy = step.ack_policy._replace(at_once=self.early_acks or without_source)
        self.row_types = {
            name: row_type(options.table_schema, step.kept_columns.get(name))
            for name, options in step.pipeline.batchers.items()
            if options.table_schema is not None
        }

    @contextmanager
    def chunk(self, messages: int) -> Iterator[None]:
        """Emit a span of a chunk with its number of messages and the outcomes recorded within it."""
        with span("chunk", self.step.pipeline, messages=messages) as chunk:
            before = self.report.counts()
            yield
            counts = self.report.counts()
            chunk.add(**{name: counts[name] - before[name] for name in EVENTS["chunk"].stop})

    def write(self, table: str, window: str, rows: pa.RecordBatch) -> None:
        """Write rows of a table."""
        self._destination.write(table, window, rows)

    def stage(self, name: str, window: str, rows: pa.RecordBatch) -> None:
        """Write rows for later steps of the receive; see `receive_table`."""
        self.write(receive_table(self.step.receive_id, name), window, rows)

    def without_callbacks(self) -> Self:
        """Return a recording with the same files and report that does not call `handle_failed`."""
        silent = copy(self)
        silent.pipeline = None
        return silent

    def early(self, rows: pa.RecordBatch) -> dict[int, Entry]:
        """Return the early acknowledgements of rows, by index."""
        return {} if self.early_acks is None else self.early_acks.among(rows, by_forks=self.pipeline is None)

    def keep(self, block: Block) -> None:
        """Keep the recorded messages of a block. The testing kit does; other recordings forget them."""

    def keep_rows(self, rows: pa.RecordBatch, batcher: str | None, columns: Sequence[pa.Array]) -> None:
        """Keep handled rows that have no messages: with the columns of their batcher, if any."""

    def keep_children(self, rows: pa.RecordBatch, children: Sequence[tuple[int, Message]]) -> None:
        """Keep children whose parents end later, each with the index of its row."""
