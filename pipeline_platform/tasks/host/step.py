"""What tasks that call a pipeline's callbacks have in common."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.nested_casts import ModelOf
from pipeline_platform.model.options import TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.schema import row_type
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.record.early import EarlyAcks, SourceEarlyAcks
from pipeline_platform.telemetry.spans import about
from pipeline_platform.telemetry.tracing import within


class Sink(Protocol):
    """Where rows go: the files of a task, or what a host gives back."""

    def write(self, table: str, window: str, batch: pa.RecordBatch) -> None:
        """Add rows to a table; an empty batch adds nothing."""


@dataclass(frozen=True)
class Step:
    """A step of a receive whose tasks call callbacks.

    Attributes:
        pipeline: The class; a task makes its own instance.
        context: What callbacks are handed.
        ack_policy: How messages are acknowledged.
        lake: Where tasks read and write.
        receive_id: Whose lease the messages are under.
        run_id: Of the run that has it.
        traceparent: Of the run's step; empty where nobody traces.
        source: Where `ack_immediately` acknowledges; None where the pipeline does not, or has no source.
        variables: Environment variables of the run that callbacks get. Not part of `repr`: they may be secrets.
        kept_columns: Columns of batchers whose tables have other digits of Decimals than their models.
    """

    pipeline: type[Pipeline]
    context: Any
    ack_policy: AckPolicy
    lake: Lake
    receive_id: str
    run_id: str = field(default="", kw_only=True)
    traceparent: str = field(default="", kw_only=True)
    source: Source | None = field(default=None, kw_only=True)
    variables: Mapping[str, str] = field(default_factory=dict, kw_only=True, repr=False)
    kept_columns: Mapping[str, pa.Schema] = field(default_factory=dict, kw_only=True)

    def early_acks(self) -> EarlyAcks | None:
        """What tells the source early; None where nobody does."""
        if self.source is None:
            return None
        return SourceEarlyAcks(self.source, self.lake, self.pipeline.name, self.receive_id)

    def writer(self, name: str) -> Writer:
        """The files of one task; `name` is part of their names, for people who look."""
        rows_per_file = {
            batcher: options.batch_size
            for batcher, options in self.pipeline.batchers.items()
            if isinstance(options, TableBatcher)
        }
        return Writer(self.lake, self.pipeline.name, f"{self.receive_id}-{name}", rows_per_file)

    def row_type(self, batcher: str) -> ModelOf | None:
        """The casts to the columns of a batcher's table; None where its data is JSON."""
        model = self.pipeline.batchers[batcher].table_schema
        return None if model is None else row_type(model, self.kept_columns.get(batcher))

    @contextmanager
    def traced(self, task: int | None = None) -> Iterator[None]:
        """Have events, and spans of the author's own, belong to this receive and task meanwhile."""
        known = {} if task is None else {"task": task}
        with within(self.traceparent), about(receive_id=self.receive_id, run_id=self.run_id, **known):
            yield
