"""Work of a receive: in Spark, with a tag by which another run can interrupt it, or without Spark for few messages."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline_platform.lake.manifest import MANIFEST, Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.run.work.local_worker import LocalWorker, LocalWorkerError
from pipeline_platform.spark import engine
from pipeline_platform.tasks.calling_step import CallingStep

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOG = logging.getLogger(__name__)

FEW = 100
"""Maximum number of messages that are received, handled, batched and acknowledged without Spark."""

_ACTIVE: list[str] = []
"""Tags of receives with active Spark work of this process."""


@dataclass(frozen=True)
class SparkWork:
    """Spark work of a step of a receive. `run` and `write` return a manifest of the files that their tasks wrote.

    Attributes:
        receive_id: Id of the receive.
        lake: Storage to read and write.
        session: Returns the Spark session; called only if there is work for it.
        name: Pipeline and step, such as `flights/batch-lake`: a tag of each job in Spark's UI.
        worker: Process for callbacks that need no Spark; None if Spark calls all of them.
    """

    receive_id: str
    lake: Lake
    session: Callable[[], SparkSession]
    name: str = ""
    worker: LocalWorker | None = None

    @property
    def spark(self) -> SparkSession:
        """The Spark session."""
        return self.session()

    def run(self, task: engine.Task, shares: int, messages: int | None = None) -> Manifest:
        """Run a task for each share.

        Args:
            task: The task.
            shares: Number of shares.
            messages: Number of messages in all shares. Tasks for up to `FEW` need no Spark: they run in this process,
                or in the local worker if they call callbacks.
        """
        if not shares:
            return Manifest()
        if messages is not None and messages <= FEW:
            if not isinstance(task, CallingStep):
                return self.run_here(task, shares)
            if self.worker is not None:
                try:
                    return self.worker.run(task, shares)
                except LocalWorkerError as error:
                    _LOG.warning("Running %s in Spark: the local worker failed: %s", self.name, error)
        with self._tagged():
            return Manifest.of(engine.run(self.spark, task, shares, MANIFEST))

    def run_here(self, task: engine.Task, shares: int) -> Manifest:
        """Run a task for each share in this process, one after another."""
        return sum((Manifest.of(rows) for index in range(shares) for rows in task(index)), Manifest())

    def write(self, rows: DataFrame, stage: engine.Stage) -> Manifest:
        """Write every partition of a DataFrame by a stage."""
        with self._tagged():
            return Manifest.of(engine.gather(engine.map_batches(rows, stage, MANIFEST), MANIFEST))

    def evaluate(self, rows: DataFrame) -> None:
        """Compute every value of a DataFrame and discard it, to raise its errors."""
        with self._tagged(), engine.readable_errors():
            rows.write.format("noop").mode("overwrite").save()

    def interrupt(self) -> None:
        """Interrupt active work on the receive, also of another run."""
        self.spark.interruptTag(self._tag)

    def interrupt_here(self) -> None:
        """Interrupt active work of this process on the receive, in all threads."""
        if self.worker is not None:
            self.worker.close()
        if self._tag in _ACTIVE:
            self.interrupt()

    @property
    def _tag(self) -> str:
        return f"receive-{self.receive_id}"

    @contextmanager
    def _tagged(self) -> Iterator[None]:
        # A tag for all work of the receive, and a tag for this work, so that it can be interrupted on its own.
        spark, tags = self.spark, (self._tag, f"{self.name}-{uuid.uuid4().hex}")
        for tag in tags:
            spark.addTag(tag)
        _ACTIVE.append(self._tag)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                spark.interruptTag(tags[1])
            raise
        finally:
            _ACTIVE.remove(self._tag)
            for tag in tags:
                spark.removeTag(tag)
