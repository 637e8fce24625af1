"""Flows: a producer of a pipeline with the resources of its runs, without Dagster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from pipeline_platform.control.pace import Pace
from pipeline_platform.control.quota import Quota
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.decisions.ledger import Ledger
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.schema_changes import merged
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Processors, RateLimiting
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.work.local_worker import LocalWorker
from pipeline_platform.run.work.spark_work import SparkWork
from pipeline_platform.sinks.contract import Sink
from pipeline_platform.source.contract import Source

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Flow:
    """A producer of a pipeline with the resources of a run.

    Attributes:
        producer: The producer; for retries and replays of a pipeline with several producers, the whole pipeline.
        source: The producer's source; see `no_source`.
        lake: Storage of the tables.
        control: Limits and claims of all runs.
        session: Returns the Spark session. Steps call it only when they need Spark.
        beats: Times by `time.monotonic` of the last renewals in this process; see `run.lease`.
        dead_letters: Source that dead messages are sent to; None for none.
        variables: Environment variables of the run for callbacks. Not part of `repr`: they may be secrets.
        sinks: Sinks of batchers, by the batcher's name.
        worker: Process that calls the callbacks for few messages; None if Spark does.
    """

    producer: BoundProducer
    source: Source
    lake: Lake
    control: ControlStore
    session: Callable[[], SparkSession]
    beats: dict[str, float] = field(default_factory=dict)
    dead_letters: Source | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    worker: LocalWorker | None = None

    def __post_init__(self) -> None:
        """Open the sources with the control store, which may store their leases."""
        self.source.open(self.control)
        if self.dead_letters is not None:
            self.dead_letters.open(self.control)

    @property
    def pipeline(self) -> type[Pipeline]:
        """The class."""
        return self.producer.pipeline

    @cached_property
    def tables(self) -> Tables:
        """The pipeline's tables."""
        return Tables(self.lake, self.pipeline, self.sinks)

    @cached_property
    def kept_columns(self) -> Mapping[str, pa.Schema]:
        """Columns of tables that were created with another precision of Decimals; see `kept_decimals`."""
        from deltalake.exceptions import TableNotFoundError

        kept: dict[str, pa.Schema] = {}
        for table in map(self.tables.__getitem__, self.pipeline.batchers_with_tables()):
            if "decimal" in str(table.schema):  # other tables need not be opened
                with suppress(TableNotFoundError), table.look() as handle:
                    if (columns := merged(table.schema, handle)) != table.schema:
                        kept[table.name] = columns
        return kept

    @cached_property
    def ledger(self) -> Ledger:
        """Active receives of the pipeline."""
        return Ledger(self.lake, self.pipeline.name)

    @cached_property
    def quota(self) -> Quota:
        """Capacity of the runs."""
        return Quota(self.producer, self.control)

    @property
    def processors(self) -> Processors:
        """Current options: those of the pipeline, with overrides set at run time."""
        return self.control.processors_of(self.pipeline)

    @property
    def concurrency(self) -> int:
        """Number of tasks that read or acknowledge in parallel."""
        return max(producer.options.concurrency for producer in self.producer.each)

    @property
    def rate_limits(self) -> dict[str, RateLimiting | None]:
        """Rate limits of the messages, by key in the control store."""
        return {producer.key: producer.options.rate_limiting for producer in self.producer.each}

    def pace(self, receive_id: str | None = None) -> Pace:
        """Return the pace of tasks that handle messages: each message takes a permit of each limit.

        Args:
            receive_id: Id of the receive, if it may release unstarted messages when it or its pipeline is to stop.
        """
        (key, limit), *others = self.rate_limits.items()
        stops = (self.pipeline.name, self.quota.key, receive_id) if receive_id else ()
        return Pace(self.control, key, limit, dict(others), stops)

    def work(self, receive_id: str, step: str = "") -> SparkWork:
        """Return the work of a receive in a step."""
        return SparkWork(receive_id, self.lake, self.session, f"{self.pipeline.name}/{step}", self.worker)


def no_source(pipeline: type[Pipeline], lake: Lake) -> Source:
    """Return the source of a flow without a producer: failures in the lake, without leases or acknowledgements."""
    return FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name)


def looked_at(pipeline: type[Pipeline], lake: Lake, control: ControlStore) -> Flow:
    """Return a flow to read the receives of a pipeline, without a source or Spark."""

    def no_session() -> NoReturn:
        raise AssertionError("this flow has no Spark session")

    return Flow(BoundProducer(pipeline), no_source(pipeline, lake), lake, control, no_session)
