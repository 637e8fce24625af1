"""Gathering of the picture of a deployment, from the control store, the lake, the sources and Dagster.

Each read is bounded, so that a picture does not cost more as the history grows. What costs much processor time is read
less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import dagster as dg

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import Instance, unavailable
from pipeline_platform.cli.dashboard import reports as reporting
from pipeline_platform.cli.dashboard.causes import CausesOfFailures
from pipeline_platform.cli.dashboard.looks import BackgroundLook, look_at_all
from pipeline_platform.cli.dashboard.picture import (
    HOUR_MINUTES,
    TIME_LINE,
    Minute,
    Picture,
    PipelinePicture,
    RunLine,
    Stage,
)
from pipeline_platform.cli.dashboard.run_lines import run_lines
from pipeline_platform.cli.status.status_gathering import pipeline_status
from pipeline_platform.control.quota import Quota
from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.reports.stage_figures import Report
from pipeline_platform.orchestration.sensors.asking import last_seen
from pipeline_platform.orchestration.sensors.runs_under_way import UNDER_WAY

_SHARE = 0.1
"""Share of a processor that looks at all pipelines may use together, on average."""
_RECENT, _ACTIVE = 50, 100
"""Maximum number of runs to read from Dagster: active runs and the newest runs."""
_RECEIVES = 300
"""Maximum number of receives of a pipeline on the time line."""


@dataclass
class _Dagster:
    """Active and newest runs, and the last heartbeat of the daemon; or the reason why they are unknown."""

    unknown: str = ""
    daemon_seen: datetime | None = None
    records: dict[str, dg.RunRecord] = field(default_factory=dict)

    @property
    def queued(self) -> int:
        runs = (record.dagster_run for record in self.records.values())
        return sum(run.status is dg.DagsterRunStatus.QUEUED for run in runs)

    def of(self, pipeline: type[Pipeline]) -> list[dg.RunRecord]:
        origin = RunTags.of(pipeline).origin
        return [record for record in self.records.values() if origin in record.dagster_run.tags]


class Gatherer:
    """Pictures of a deployment.

    Args:
        opened: The deployment.
        instance: The Dagster instance, or the reason why it is unavailable.
        pipelines: Pipelines to show.
    """

    def __init__(self, opened: loading.Deployment, instance: Instance, pipelines: Sequence[type[Pipeline]]) -> None:
        self._instance = instance
        share = _SHARE / max(1, len(pipelines))
        self._pipelines = [_Pipeline(opened, instance, pipeline, share) for pipeline in pipelines]

    def picture(self, within_s: float) -> Picture:
        """Return the current picture. A pipeline whose look takes longer than `within_s` is shown as it was before."""
        look_at_all([pipeline.look for pipeline in self._pipelines], within_s)
        now, dagster = datetime.now(UTC), self._dagster()
        pictures = tuple(pipeline.picture(dagster, now) for pipeline in self._pipelines)
        return Picture(now, dagster.daemon_seen, dagster.unknown, dagster.queued, pictures)

    def _dagster(self) -> _Dagster:
        instance = self._instance
        if isinstance(instance, str):
            return _Dagster(instance)
        try:
            seen = last_seen(instance, ["SENSOR"])["SENSOR"]
            active = instance.get_run_records(dg.RunsFilter(statuses=UNDER_WAY), limit=_ACTIVE)
            records = {each.dagster_run.run_id: each for each in (*active, *instance.get_run_records(limit=_RECENT))}
        except Exception as error:  # any error of the instance's storage
            return _Dagster(unavailable(error))
        return _Dagster("", seen, records)


class _Pipeline:
    def __init__(self, opened: loading.Deployment, instance: Instance, pipeline: type[Pipeline], share: float) -> None:
        self._control, self._pipeline, self._instance = opened.control, pipeline, instance
        self._tags, whole = RunTags.of(pipeline), BoundProducer(pipeline)
        self._keys = list(dict.fromkeys([whole.key, *(producer.key for producer in whole.each)]))
        self._reports, causes = reporting.Reports(pipeline), CausesOfFailures(opened.lake, pipeline)

        self.look = BackgroundLook(
            lambda waits: pipeline_status(opened, pipeline, instance, waits),
            lambda status: causes.newest(status.failures),
            share,
        )

    def picture(self, dagster: _Dagster, now: datetime) -> PipelinePicture:
        unknown: dict[str, str] = {}
        hour_ago = now.replace(second=0, microsecond=0) - timedelta(minutes=HOUR_MINUTES - 1)
        reports = self._read_reports(hour_ago, unknown)
        look = self.look.last()
        try:
            capacity = {each.name: Quota(each, self._control).capacity for each in BoundProducer.all_of(self._pipeline)}
            minutes = self._minutes(reports, hour_ago)
            runs, stages = self._runs(dagster, now), self._stages(reports, now)
        except ControlStoreError as error:
            unknown["runs"] = str(error)
            capacity, minutes, runs, stages = {}, (), (), {}
        latency = next((report.latency for report in reversed(reports) if report.latency), ())
        if look.causes.unknown:
            unknown["causes"] = look.causes.unknown
        return PipelinePicture(self._pipeline.name, look, capacity, stages, latency, minutes, runs, unknown)

    def _read_reports(self, since: datetime, unknown: dict[str, str]) -> list[Report]:
        if isinstance(self._instance, str):
            unknown["reports"] = self._instance
            return []
        try:
            return self._reports.read(self._instance, since)
        except Exception as error:  # any error of the instance's storage
            unknown["reports"] = unavailable(error)
            return []

    def _stages(self, reports: Sequence[Report], now: datetime) -> dict[str, Stage]:
        producers = BoundProducer.all_of(self._pipeline)
        runs = sum(self._control.options_of(producer).max_runs for producer in producers)
        concurrency = self._control.processors_of(self._pipeline).concurrency
        return reporting.stages_by(reports, self._pipeline, concurrency, runs, now)

    def _minutes(self, reports: Sequence[Report], since: datetime) -> tuple[Minute, ...]:
        acknowledged = self._control.ended_by_minute(self._keys, since)
        messages = {round((each.at - since) / timedelta(minutes=1)): each.messages for each in acknowledged}
        failures = reporting.by_minute(reports, since)
        return tuple(
            Minute(messages.get(number, 0), *failures.get(number, (0, None))) for number in range(HOUR_MINUTES)
        )

    def _runs(self, dagster: _Dagster, now: datetime) -> tuple[RunLine, ...]:
        control, name = self._control, self._pipeline.name
        live, expired = control.in_flight(name, of_all=True), control.over(name, of_all=True)
        ended = control.ended(*self._keys, since=now - TIME_LINE, last=_RECEIVES)
        return run_lines(live, expired, ended, dagster.of(self._pipeline), self._tags, now)
