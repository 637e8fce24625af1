"""A pipeline with everything that its runs need: what the steps of a run are given, free of Dagster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from pipeline_platform.control.pace import Pace
from pipeline_platform.control.quota import Quota
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.kept_decimals import keep_decimals
from pipeline_platform.lake.ledger import Ledger
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.options import Processors, Producer, RateLimiting
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.spark_work import SparkWork
from pipeline_platform.source.contract import Source

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Flow:
    """One producer of a pipeline with the resources of a run.

    Of a pipeline with several, a run that pulls from none of them (a backfill, a replay) has a flow of no producer.

    Attributes:
        pipeline: The class.
        source: The producer's source; see `no_source`.
        lake: Where its tables are.
        control: Limits and claims of all runs.
        session: Gives the Spark session. Steps ask for it only when they have work for Spark.
        beats: When each lease was last renewed here, by `time.monotonic`; see `run.lease`.
        producer: Its name; empty for the only one, and for none.
        dead_letters: Where dead messages are sent; None for nowhere.
        variables: Environment variables of the run that callbacks get. Not part of `repr`: they may be secrets.
    """

    pipeline: type[Pipeline]
    source: Source
    lake: Lake
    control: ControlStore
    session: Callable[[], SparkSession]
    beats: dict[str, float] = field(default_factory=dict)
    producer: str = ""
    dead_letters: Source | None = None
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Let the sources know who remembers what receives hold."""
        self.source.open(self.control)
        if self.dead_letters is not None:
            self.dead_letters.open(self.control)

    @cached_property
    def tables(self) -> Tables:
        """The pipeline's tables."""
        return Tables(self.lake, self.pipeline)

    @cached_property
    def kept_columns(self) -> Mapping[str, pa.Schema]:
        """The columns of tables that were made with other digits of Decimals; see `kept_decimals`."""
        from deltalake.exceptions import TableNotFoundError

        kept: dict[str, pa.Schema] = {}
        for table in map(self.tables.__getitem__, self.pipeline.batchers):
            if "decimal" in str(table.schema):  # other tables need no look
                with suppress(TableNotFoundError), table.look() as handle:
                    if (columns := keep_decimals(table.schema, handle)) != table.schema:
                        kept[table.name] = columns
        return kept

    @cached_property
    def ledger(self) -> Ledger:
        """Its receives under way."""
        return Ledger(self.lake, self.pipeline.name)

    @cached_property
    def quota(self) -> Quota:
        """What its runs may hold at once."""
        return Quota(self.pipeline, self.control, self.producer)

    @property
    def producers(self) -> Mapping[str, Producer]:
        """The producers that its messages are of, by name: its own, or all if it has none."""
        return self.pipeline.producers_of(self.producer)

    @property
    def has_source(self) -> bool:
        """Whether it has a producer to pull from."""
        return self.producer in self.producers

    @property
    def processors(self) -> Processors:
        """How much its runs take on now: the pipeline's own options, but for what is set at run time."""
        return self.control.processors_of(self.pipeline)

    @property
    def concurrency(self) -> int:
        """Tasks that read, or acknowledge, at once."""
        return max(producer.concurrency for producer in self.producers.values())

    @property
    def rate_limits(self) -> dict[str, RateLimiting | None]:
        """The rate limits that its messages are handled within, by what the control store knows them by."""
        limits_key = self.pipeline.limits_key
        return {limits_key(name): producer.rate_limiting for name, producer in self.producers.items()}

    def pace(self, receive_id: str | None = None) -> Pace:
        """The pace of a task that handles its messages: each message takes a permit of each limit.

        Args:
            receive_id: Of a receive that may give back what is not begun, when it or its pipeline is to stop.
        """
        (key, limit), *others = self.rate_limits.items()
        stops = (self.pipeline.name, self.quota.key, receive_id) if receive_id else ()
        return Pace(self.control, key, limit, dict(others), stops)

    def work(self, receive_id: str, step: str = "") -> SparkWork:
        """The Spark work of a receive, in a step as the ledger names it."""
        return SparkWork(receive_id, self.lake, self.session, f"{self.pipeline.name}/{step}")


def no_source(pipeline: type[Pipeline], lake: Lake) -> Source:
    """What a flow of no producer has for a source: the lake, which nobody leases from or acknowledges to."""
    return FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name)


def looked_at(pipeline: type[Pipeline], lake: Lake, control: ControlStore) -> Flow:
    """A pipeline with what a look at its receives needs: no source, no Spark."""

    def no_session() -> NoReturn:
        raise AssertionError("a look needs no Spark")

    return Flow(pipeline, no_source(pipeline, lake), lake, control, no_session)
