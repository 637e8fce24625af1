"""What the tasks that call a pipeline's callbacks have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import pyarrow as pa

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.options import TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.settling import Settling
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.early import SourceTeller, Teller
from pipeline_platform.tasks.fork import Limit
from pipeline_platform.tasks.fresh import tries_before
from pipeline_platform.telemetry.spans import about
from pipeline_platform.telemetry.tracing import within


class Sink(Protocol):
    """Where rows go: the files of a task, or the answer of a fork."""

    def write(self, table: str, window: str, batch: pa.RecordBatch) -> None:
        """Add rows to a table; an empty batch adds nothing."""


@dataclass(frozen=True)
class Step:
    """A step of a receive whose tasks call callbacks.

    Attributes:
        pipeline: The class; a task makes its own instance.
        context: What callbacks are handed.
        settling: How the source is told of messages.
        origin: `source`, `failed` or `messages`: see `Receive.origin`.
        lake: Where tasks read and write.
        receive_id: Whose lease the messages are under.
        run_id: Of the run that has it.
        owner: As `Receive.owner`.
        traceparent: Of the run's step; empty where nobody traces.
        source: What `ack_immediately` tells; None where the pipeline does not, or nobody is to be told.
    """

    pipeline: type[Pipeline]
    context: Any
    settling: Settling
    origin: str
    lake: Lake
    receive_id: str
    run_id: str = field(default="", kw_only=True)
    owner: int = field(default=0, kw_only=True)
    traceparent: str = field(default="", kw_only=True)
    source: Source | None = field(default=None, kw_only=True)

    def teller(self) -> Teller | None:
        """What tells the source early; None where nobody does."""
        if self.source is None:
            return None
        return SourceTeller(self.source, self.lake, self.pipeline.name, self.receive_id, self.owner)

    def writer(self, name: str) -> Writer:
        """The files of one task; `name` is part of their names, for people who look."""
        rows_per_file = {
            batcher: options.batch_size
            for batcher, options in self.pipeline.batchers.items()
            if isinstance(options, TableBatcher)
        }
        return Writer(self.lake, self.pipeline.name, f"{self.receive_id}-{name}", rows_per_file)

    @contextmanager
    def told(self, task: int | None = None) -> Iterator[None]:
        """Have events, and spans of the author's own, belong to this receive and task meanwhile."""
        known = {} if task is None else {"task": task}
        with within(self.traceparent), about(receive_id=self.receive_id, run_id=self.run_id, **known):
            yield


@dataclass(frozen=True)
class CallingStep(Step):
    """A step whose tasks may call callbacks in forks.

    Attributes:
        careful: Whether they do in any case, as a task does that is tried again, or whose calls have a limit.
    """

    careful: bool = field(default=False, kw_only=True)

    def limit(self) -> Limit | None:
        """How long a call may take."""
        return Limit.of("processors.message_timeout", self.pipeline.processors.message_timeout)

    @property
    def forks(self) -> bool:
        """Whether a task that runs now calls callbacks in forks."""
        return self.careful or self.limit() is not None or tries_before() > 0

    def carefully(self) -> Self:
        """The same step, which calls callbacks in forks."""
        return replace(self, careful=True)
