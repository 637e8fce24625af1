"""What was received, through the pipeline's callbacks: message by message in Python, or as columns in Spark."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline_platform.control.pace import Pace
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import Range, divide
from pipeline_platform.lake.receives import Receive
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.fast_lane import FastLane
from pipeline_platform.run.spark_work import SparkWork
from pipeline_platform.source.contract import Source
from pipeline_platform.spark import engine
from pipeline_platform.tasks import lookup
from pipeline_platform.tasks.handle import Handle

_LOG = logging.getLogger(__name__)

CLOCKS = timedelta(minutes=15)
"""How far a run's clock may be behind its source's. AWS refuses requests by a clock that is off by as much."""


@dataclass(frozen=True)
class Handling:
    """The handling of one receive.

    Attributes:
        pipeline: The class.
        source: Where the messages come from.
        tables: The pipeline's.
        control: Gives the permits of a rate limit.
        receive: Whose messages they are.
        work: Its Spark work.
    """

    pipeline: type[Pipeline]
    source: Source
    tables: Tables
    control: ControlStore
    receive: Receive
    work: SparkWork

    def handle(self, received: Manifest) -> Manifest:
        """Handle what a manifest says was received; say in another what was written of it."""
        files = received.of_table("messages")
        repeats = self._repeats(files, _oldest(received)) if received.total("redelivered") else []
        if self.pipeline.uses_columns():
            lane = FastLane(self.pipeline, self.source, self.control, self.receive, self.work, files, repeats)
            return lane.handle(received.most("largest"))
        return self._by_message(files, repeats)

    @property
    def _concurrency(self) -> int:
        return self.pipeline.processors.concurrency

    @property
    def _context(self) -> Any:
        return self.pipeline.context_of(self.receive.context)

    def _pace(self) -> Pace:
        return Pace(self.control, self.pipeline.name, self.pipeline.producer.rate_limiting)

    def _by_message(self, files: Sequence[File], repeats: Sequence[Range]) -> Manifest:
        parts = divide(files, self.pipeline.name, self._concurrency)

        def task(*, careful: bool) -> Handle:
            return Handle(
                pipeline=self.pipeline,
                context=self._context,
                source=self.source,
                origin=self.receive.origin,
                lake=self.work.lake,
                receive_id=self.receive.receive_id,
                parts=parts,
                pace=self._pace(),
                repeats=repeats,
                careful=careful,
            )

        try:
            return self.work.run(task(careful=False), len(parts))
        except engine.WorkerDiedError:  # a Spark that tries no task again
            _LOG.warning("a message ended its Python worker: handling again, in forked processes")
            return self.work.run(task(careful=True), len(parts))

    def _repeats(self, files: Sequence[File], published: datetime | None) -> list[Range]:
        """Look up what may have come before, published at this time or later; return where the answer lies."""
        name, lake = self.pipeline.name, self.work.lake
        # By when they were decided, not by their window: one may pull into a window of long ago.
        now = datetime.now(UTC)
        oldest = now - self.pipeline.producer.deduplicate_for
        if published is not None:  # nothing is decided before it is there
            oldest = max(oldest, min(published, now) - CLOCKS)
        outcomes = self.tables["outcomes"]
        known = [
            Range(f"{name}/outcomes/{file.path}", file.window, 0, file.rows, 0)
            for file in outcomes.files(outcomes.open())
            if file.committed_at >= oldest
        ]
        decisions = None
        if known:
            of = self._concurrency
            parts = [known[start::of] for start in range(min(of, len(known)))]
            decisions = self.work.scan(parts, "source", "message_id", "outcome")
        fresh = divide(files, name, self._concurrency)
        copies = self.work.scan(fresh, "source", "message_id", "position", "redelivered")
        write = lookup.WriteRepeats(lake, name, self.receive.receive_id, self.receive.window)
        manifest = self.work.write(lookup.find_repeats(copies, decisions), write)
        return [Range(f"{name}/{file.table}/{file.path}", file.window, 0, file.rows, 0) for file in manifest]


def _oldest(received: Manifest) -> datetime | None:
    """When the oldest message was published that may have come before; None where a source does not say."""
    told = [notes.get("redelivered_since") for notes in received.notes if notes.get("redelivered")]
    known = [datetime.fromisoformat(time) for time in told if time is not None]
    return min(known) if known and len(known) == len(told) else None
