"""The Spark lane: received messages as columns through the user's query. A row that stops the query fails alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline_platform.control.pace import Pace
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import RowRange, between, divide, spread, whole
from pipeline_platform.model.failure import Failure, words
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common
from pipeline_platform.run.work.spark_work import SparkWork
from pipeline_platform.spark import engine
from pipeline_platform.tasks.by_position import checksum_of_all
from pipeline_platform.tasks.handle import spark_lane
from pipeline_platform.tasks.handle.handle_messages import READ
from pipeline_platform.tasks.handle.record_unseen import UNSEEN_TABLE, RecordUnseen
from pipeline_platform.tasks.record.filtered import Filter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LOG = logging.getLogger(__name__)

_NOT_ABOUT_ROWS = ("INVALID_HANDLE", "FAILED_READ_FILE", "UNABLE_TO_ACQUIRE_MEMORY", "OPERATION_")
"""Error conditions of Spark that are not caused by a value."""

_CLIENT = "pyspark.errors.exceptions.base"
"""Module of errors raised while a query is built. Errors of running queries are in other modules."""

MOST_APART = 100
"""Maximum number of rows to isolate that stop the query. Each takes two queries per halving of the receive. If there
are more, all messages of the remaining ranges fail; a query with `try_cast` avoids this."""


@dataclass(frozen=True)
class SparkLane:
    """Handling of a receive in the Spark lane.

    Attributes:
        flow: The pipeline and its resources.
        receive: The receive.
        files: Files of the received messages.
        repeats: Files with the deliveries that must not be handled.
    """

    flow: Flow
    receive: Receive
    files: Sequence[File]
    repeats: Sequence[RowRange]

    def handle(self, largest: int) -> Manifest:
        """Handle all received messages.

        Args:
            largest: Size of the largest message in bytes.
        """
        _keep_values_out_of_the_log()
        name, has_large = self.pipeline.name, largest > self.pipeline.processors.max_message_bytes
        sees_all = not self.repeats and not has_large and not Filter(self.pipeline)
        unseen = Manifest() if sees_all else self._record_unseen(whole(self.files, name))
        ended = whole(unseen.staged(UNSEEN_TABLE), name)
        return replace(self, repeats=[*self.repeats, *ended])._seen(unseen, sees_all=sees_all)

    def _seen(self, unseen: Manifest, *, sees_all: bool) -> Manifest:
        """Handle the messages that are not recorded yet."""
        received = whole(self.files, self.pipeline.name)
        try:
            return unseen + self._handled(received, unseen, as_they_lie=sees_all)
        except Exception as error:
            if _why(error) is None:
                raise
            _LOG.warning("%s: handle_messages stopped at a row; isolating it", self.pipeline.name)
            stopping = list(self._stopping(received))
            if not stopping:
                raise
        good = received
        for failure in dict.fromkeys(failure for _, _, failure in stopping):
            mine = [(first, end) for first, end, why in stopping if why == failure]
            unseen += self._record_unseen([part for bounds in mine for part in between(received, *bounds)], failure)
        for first, end, _ in stopping:
            good = [*between(good, 0, first), *between(good, end, self._rows)]
        return unseen + (self._handled(good, unseen, as_they_lie=False) if good else Manifest())

    @cached_property
    def pipeline(self) -> type[Pipeline]:
        """The pipeline."""
        return self.flow.pipeline

    @cached_property
    def work(self) -> SparkWork:
        """The Spark work of the receive."""
        return self.flow.work(self.receive.receive_id, "handle")

    @cached_property
    def _rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def _context(self) -> Any:
        return self.pipeline.context_of(self.receive.context)

    def _record_unseen(self, rows: Sequence[RowRange], failure: Failure | None = None) -> Manifest:
        parts = spread(rows, self.flow.processors.concurrency)
        task = RecordUnseen(**common(self.flow, self.receive), parts=parts, repeats=self.repeats, failure=failure)
        return self.work.run(task, len(parts))

    def _handled(self, rows: Sequence[RowRange], unseen: Manifest, *, as_they_lie: bool) -> Manifest:
        """Run the query over rows, and check that it returned each message that is not recorded yet exactly once."""
        name = self.pipeline.name
        is_limited = any(self.flow.control.rate_limiting(*limit) for limit in self.flow.rate_limits.items())
        if as_they_lie and not is_limited and self.work.lake.is_local:
            received = spark_lane.read_locally(self.work.spark, self.work.lake, name, self.files)
        else:
            pace = self.flow.pace()
            pace.portion(1)  # so that tasks need not look if there is no limit
            received = self._read(rows, pace)
        write = spark_lane.WriteColumns(**common(self.flow, self.receive), received=whole(self.files, name))
        manifest = self.work.write(self._query(received), write)
        expected = self._rows - unseen.totals.positions
        returned = manifest.totals.positions
        if returned > expected:
            raise PipelineError(
                f"{name}: handle_messages returned {returned:,} rows for {expected:,} messages. Return each only once"
            )
        if returned < expected:
            seen = [file for file in manifest if file.table == "outcomes" or "/" in file.table]
            parts = divide(seen, name, self.flow.processors.concurrency)
            keys = spark_lane.ReadKeys(self.work.lake, parts)
            ids = engine.frame(self.work.spark, keys, len(parts), spark_lane.KEYS)
            again = self._read(rows, Pace(None, name))  # their permits are taken
            manifest += self.work.write(spark_lane.not_returned(self.pipeline, again, ids), write)
        left = checksum_of_all(self._rows) - unseen.totals.checksum
        if manifest.totals.positions != expected or (manifest.totals.checksum - left) % 2**64:
            raise PipelineError(
                f"{name}: handle_messages returned some messages more than once. Join only with tables that have one "
                "row per key, and do not use explode"
            )
        return manifest

    def _query(self, received: DataFrame) -> DataFrame:
        handled = self.pipeline().handle_messages(spark_lane.offered(received), self._context)
        return spark_lane.taken(self.pipeline, handled)

    def _read(self, rows: Sequence[RowRange], pace: Pace) -> DataFrame:
        parts = spread(rows, self.flow.processors.concurrency)
        read = spark_lane.ReadColumns(self.work.lake, parts, self.pipeline.processors, pace, self.repeats)
        return engine.frame(self.work.spark, read, len(parts), READ)

    def _stopping(self, received: Sequence[RowRange]) -> Iterator[tuple[int, int, Failure]]:
        """Find the rows that stop the query, by halving. Yield start, end and failure of each range."""
        waiting, found = [(0, self._rows)], 0
        while waiting:
            first, end = waiting.pop()
            failure = self._stops(between(received, first, end))
            if failure is None:
                continue
            if end - first == 1 or found >= MOST_APART:
                found += 1
                yield first, end, failure
            else:
                middle = (first + end) // 2
                waiting += [(middle, end), (first, middle)]

    def _stops(self, rows: Sequence[RowRange]) -> Failure | None:
        """Run the query on rows for its errors only. It takes no permits: expressions have no effects outside."""
        try:
            self.work.evaluate(self._query(self._read(rows, Pace(None, self.pipeline.name))))
        except Exception as error:
            failure = _why(error)
            if failure is None:
                raise
            return failure
        return None


def _keep_values_out_of_the_log() -> None:
    """Turn off a log of Spark's client that would contain payload: the value that a query stopped at."""
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL + 1)


def _why(error: Exception) -> Failure | None:
    """Return the failure of the rows that caused an error; None if the query itself or Spark caused it."""
    if isinstance(error, engine.TaskError):
        if error.is_of_a_stage:  # an error of the platform's own tasks, such as an unavailable lake
            return None
        lines = str(error).strip().splitlines()
        kind = "worker killed" if isinstance(error, engine.WorkerDiedError) else "TaskError"
        return Failure(kind, words(lines[-1], 2_000), words("\n".join(lines[1:])[-8_000:]), "handle_messages")
    condition = getattr(error, "getCondition", lambda: None)()
    if condition is None or condition.startswith(_NOT_ABOUT_ROWS):
        return None
    if type(error).__name__ in ("AnalysisException", "ParseException") or type(error).__module__ == _CLIENT:
        return None
    # Spark's own text quotes the value.
    way_out = "Use try_cast, try_to_timestamp or similar functions for values that may be invalid"
    return Failure(condition, f"Spark stopped at this message with {condition}. {way_out}", "", "handle_messages")
