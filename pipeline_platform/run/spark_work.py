"""The Spark work of one receive, tagged with it, so that another run can end it when this one is dead."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline_platform.lake.manifest import MANIFEST, Manifest
from pipeline_platform.lake.reader import RowRange
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.spark import engine
from pipeline_platform.tasks.handle.repeats import Scan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COLUMNS = {field.name: field for field in (*OUTCOMES, *MESSAGES, pa.field("position", pa.int64()))}

FEW = 100
"""Messages that the driver reads, cuts and acknowledges by itself."""


@dataclass(frozen=True)
class SparkWork:
    """Has Spark do the steps of a receive; `run` and `write` give a manifest of what their tasks wrote.

    Attributes:
        receive_id: Whose work it is.
        lake: Where it reads and writes.
        session: Gives the Spark session; asked only when there is work for it.
        name: Pipeline and step, as `flights/batch-lake`: Spark shows it among the tags of each job.
    """

    receive_id: str
    lake: Lake
    session: Callable[[], SparkSession]
    name: str = ""

    @property
    def spark(self) -> SparkSession:
        """The Spark session."""
        return self.session()

    def run(self, task: engine.Task, shares: int, messages: int | None = None) -> Manifest:
        """Run a task for each share.

        Args:
            task: What to run.
            shares: How often.
            messages: In all of them. Up to `FEW` the tasks run in this process: that takes less time than to ask Spark.
        """
        if messages is not None and messages <= FEW:
            return self.run_here(task, shares)
        if not shares:
            return Manifest()
        with self._tagged():
            return Manifest.of(engine.run(self.spark, task, shares, MANIFEST))

    def run_here(self, task: engine.Task, shares: int) -> Manifest:
        """Run a task for each share in this process, one after another."""
        return sum((Manifest.of(rows) for index in range(shares) for rows in task(index)), Manifest())

    def write(self, rows: DataFrame, stage: engine.Stage) -> Manifest:
        """Put every partition of a DataFrame through a stage that writes."""
        with self._tagged():
            return Manifest.of(engine.gather(engine.map_batches(rows, stage, MANIFEST), MANIFEST))

    def evaluate(self, rows: DataFrame) -> None:
        """Work out every value of a DataFrame and throw it away: for the errors alone."""
        with self._tagged(), engine.readable_errors():
            rows.write.format("noop").mode("overwrite").save()

    def scan(self, parts: Sequence[Sequence[RowRange]], *names: str) -> DataFrame:
        """Some columns of rows that were written, each part read by a task: nothing runs yet."""
        schema = pa.schema([_COLUMNS[name] for name in names])
        return engine.frame(self.spark, Scan(self.lake, parts, schema), len(parts), schema)

    def interrupt(self) -> None:
        """End what is under way, whichever run began it."""
        self.spark.interruptTag(self._tag)

    @property
    def _tag(self) -> str:
        return f"receive-{self.receive_id}"

    @contextmanager
    def _tagged(self) -> Iterator[None]:
        # One tag for all work of the receive; and one for this work alone, whose end must not end what is beside it.
        spark, tags = self.spark, (self._tag, f"{self.name}-{uuid.uuid4().hex}")
        for tag in tags:
            spark.addTag(tag)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # what ended the run matters more than what it left behind
                spark.interruptTag(tags[1])
            raise
        finally:
            for tag in tags:
                spark.removeTag(tag)
