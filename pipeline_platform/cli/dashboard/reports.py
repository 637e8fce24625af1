"""Reports of a pipeline's runs to Dagster in the last hour: materialisations of `messages` with figures of stages."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from pipeline_platform.cli.dashboard.picture import RATES_OVER, Stage
from pipeline_platform.model.options import Batcher, has_table
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.reports.stage_figures import Report, report_of, sum_of_stages

if TYPE_CHECKING:
    import dagster as dg

MOST = 100
"""Maximum number of reports to read: a continuous run reports once a minute."""
_OF_SECONDS = 10
"""Newest reports whose durations are averaged."""


class Reports:
    """The newest reports of a pipeline. A second call reads only later reports."""

    def __init__(self, pipeline: type[Pipeline]) -> None:
        self._pipeline = pipeline
        self._known: deque[Report] = deque(maxlen=MOST)
        self._last_id: int | None = None

    def read(self, instance: dg.DagsterInstance, since: datetime) -> list[Report]:
        """Return the reports since a time, oldest first."""
        import dagster as dg

        later = dg.AssetRecordsFilter(
            dg.AssetKey([self._pipeline.name, "messages"]),
            after_timestamp=since.timestamp(),
            after_storage_id=self._last_id,
        )
        records = instance.fetch_materializations(later, limit=MOST).records
        for record in reversed(records):
            self._last_id = record.storage_id
            if record.asset_materialization is not None:
                self._known.append(report_of(record.timestamp, record.asset_materialization.metadata))
        return [report for report in self._known if report.at >= since]


def stages_by(
    reports: Iterable[Report], pipeline: type[Pipeline], concurrency: int, runs: int, now: datetime
) -> dict[str, Stage]:
    """Return the figures of `receive`, `handle` and each batcher.

    Args:
        reports: Reports, oldest first.
        pipeline: The pipeline.
        concurrency: Tasks of `handle`.
        runs: Runs that may be active at once.
        now: Time of the picture.
    """
    once = list({report.receive_id: report for report in reports}.values())
    recent = sum_of_stages(report for report in once if report.at >= now - RATES_OVER)
    newest = sum_of_stages(once[-_OF_SECONDS:])

    def stage(key: str, tasks: int, **options: Any) -> Stage:
        lately, last = recent[key], newest[key]
        span_s = RATES_OVER.total_seconds()
        return Stage(
            rate=lately.messages / span_s,
            busy=min(1.0, lately.task_seconds / (span_s * tasks * runs)) if tasks else None,
            seconds=last.seconds / last.receives if last.receives and last.seconds else None,
            batch=last.messages / last.batches if last.batches else None,
            **options,
        )

    batchers = {}
    for name, batcher in pipeline.batchers.items():
        stored_in = "table and sink" if batcher.sink else "table" if has_table(batcher) else "no table"
        tasks, size = (batcher.concurrency, batcher.batch_size) if isinstance(batcher, Batcher) else (0, 0)
        most = size if isinstance(size, int) else 0  # a Splitter has no size
        batchers[name] = stage(f"batch-{name}", tasks, batch_size=most, stored_in=stored_in)
    return {"receive": stage("receive", 0), "handle": stage("handle", concurrency), **batchers}


def by_minute(reports: Iterable[Report], since: datetime) -> dict[int, tuple[int | None, float | None]]:
    """Return failed messages and the highest 95th percentile of latency, by the number of the minute since a time.

    Failed messages before the oldest report are unknown (None) if there may be earlier reports.
    """
    minutes: dict[int, tuple[int | None, float | None]] = defaultdict(lambda: (0, None))
    numbers = [(int((report.at - since) / timedelta(minutes=1)), report) for report in reports]
    if len(numbers) == MOST:
        minutes |= dict.fromkeys(range(min(number for number, _ in numbers)), (None, None))
    for number, report in numbers:
        failed, latency = minutes[number]
        p95 = max(filter(None, (latency, report.latency[1] if report.latency else None)), default=None)
        minutes[number] = (failed or 0) + report.failed, p95
    return minutes
