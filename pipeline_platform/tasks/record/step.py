"""Common parts of tasks that call a pipeline's callbacks."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import pyarrow as pa

from pipeline_platform.lake.readable import refuse_nul
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.options import TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.acknowledge.early import EarlyAcks, SourceEarlyAcks
from pipeline_platform.telemetry.spans import about
from pipeline_platform.telemetry.tracing import within


def receive_table(receive_id: str, name: str) -> str:
    """Return the table of rows that only later steps of a receive read: staged messages of a batcher, or others.

    Names that are not of a batcher begin with `_` or contain a `-`, which the name of a batcher cannot.
    """
    return f"_receives/{receive_id}/{name}"


class Destination(Protocol):
    """Destination of rows: the files of a task, or the results of a callback process."""

    def write(self, table: str, window: str, batch: pa.RecordBatch) -> None:
        """Add rows to a table. Empty batches are ignored."""


@dataclass(frozen=True)
class Step:
    """A step of a receive whose tasks call callbacks.

    Attributes:
        pipeline: Class of the pipeline. Each callback process makes an instance.
        context: Context passed to callbacks.
        ack_policy: Ack actions of messages.
        lake: Lake in which tasks read and write.
        receive_id: Receive of the messages.
        run_id: Run of the receive.
        base: Version of `outcomes` before the receive, which is greater in a later receive.
        started_at: Start of the receive. No failure is recorded as earlier, even if the clock of a host is behind.
        traceparent: Trace of the run's step; empty without tracing.
        source: Source for `ack_immediately`; None if the pipeline does not use it or has no source.
        variables: Environment variables of the run for callbacks. Not part of `repr`: they may be secrets.
        kept_columns: Columns of batchers whose tables have Decimals with other digits than their models.
    """

    pipeline: type[Pipeline]
    context: Any
    ack_policy: AckPolicy
    lake: Lake
    receive_id: str
    run_id: str = field(default="", kw_only=True)
    base: int = field(default=0, kw_only=True)
    started_at: datetime = field(default=datetime.min.replace(tzinfo=UTC), kw_only=True)
    traceparent: str = field(default="", kw_only=True)
    source: Source | None = field(default=None, kw_only=True)
    variables: Mapping[str, str] = field(default_factory=dict, kw_only=True, repr=False)
    kept_columns: Mapping[str, pa.Schema] = field(default_factory=dict, kw_only=True)

    def early_acks(self) -> EarlyAcks | None:
        """Return the early acknowledger; None without `ack_immediately`."""
        if self.source is None:
            return None
        return SourceEarlyAcks(self.source, self.lake, self.pipeline.name, self.receive_id)

    def writer(self, name: str) -> Writer:
        """Return a writer of the files of one task. `name` becomes part of their names."""
        rows_per_file = {
            batcher: options.batch_size
            for batcher, options in self.pipeline.batchers.items()
            if isinstance(options, TableBatcher)
        }
        return Writer(self.lake, self.pipeline.name, f"{self.receive_id}-{name}", rows_per_file)

    def check_sink(self, batcher: str, names: Iterable[str], columns: Iterable[pa.Array]) -> None:
        """Refuse rows that the sink of a batcher cannot store.

        Raises:
            ColumnError: A text contains the character NUL.
        """
        if self.pipeline.batchers[batcher].sink is not None:
            refuse_nul(names, columns)

    @contextmanager
    def traced(self, task: int | None = None) -> Iterator[None]:
        """Attach events, and spans of user code, to this receive and task."""
        known = {} if task is None else {"task": task}
        with within(self.traceparent), about(receive_id=self.receive_id, run_id=self.run_id, **known):
            yield
