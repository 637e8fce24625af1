"""A pipeline with everything that its runs need: what the steps of a run are given, free of Dagster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline_platform.control.room import Room
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.ledger import Ledger
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.spark_work import SparkWork
from pipeline_platform.source.contract import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Flow:
    """One pipeline with the resources of a run.

    Attributes:
        pipeline: The class.
        source: Its producer's source.
        lake: Where its tables are.
        control: Limits and claims of all runs.
        session: Gives the Spark session. Steps ask for it only when they have work for Spark.
        beats: When each lease was last renewed here, by `time.monotonic`; see `run.lease`.
    """

    pipeline: type[Pipeline]
    source: Source
    lake: Lake
    control: ControlStore
    session: Callable[[], SparkSession]
    beats: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let the source know who remembers what receives hold."""
        self.source.open(self.control)

    @cached_property
    def tables(self) -> Tables:
        """The pipeline's tables."""
        return Tables(self.lake, self.pipeline)

    @cached_property
    def ledger(self) -> Ledger:
        """Its receives under way."""
        return Ledger(self.lake, self.pipeline.name)

    @cached_property
    def room(self) -> Room:
        """What its runs may hold at once."""
        return Room(self.pipeline, self.control)

    def work(self, receive_id: str) -> SparkWork:
        """The Spark work of a receive."""
        return SparkWork(receive_id, self.lake, self.session)
