"""History of a pipeline: an observation every two hours, whose numbers Dagster plots over eight days."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg

from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.reports.stage_figures import (
    SHARES,
    Report,
    latency_name,
    report_of,
    slowest,
    sum_of_stages,
)
from pipeline_platform.orchestration.resources.source_resources import source_of
from pipeline_platform.orchestration.sensors.timely_calls import timely
from pipeline_platform.source.contract import SourceError

_EVERY = timedelta(hours=2)
"""Time between two observations: Dagster plots the last 100 events of an asset, which are then eight days."""
_MOST_REPORTS = 500
"""Maximum number of reports to read."""


def history_key(pipeline: type[Pipeline]) -> dg.AssetKey:
    """Return the key of the asset with the history of a pipeline. No batcher can have it."""
    return dg.AssetKey([f"{pipeline.name}_history"])


def history_asset(pipeline: type[Pipeline]) -> dg.AssetSpec:
    """Build the asset whose events are observed, not materialised."""
    return dg.AssetSpec(
        history_key(pipeline),
        group_name=pipeline.name,
        owners=list(pipeline.owners),
        deps=[dg.AssetKey([pipeline.name, "messages"])],
        description="Throughput, failure share, latency, lag and the slowest batcher, observed every two hours. For "
        "plots of the last eight days, press *Plots* under *Metadata*.",
    )


def history_sensor(pipeline: type[Pipeline]) -> dg.SensorDefinition:
    """Build the sensor that observes the history."""
    producers = BoundProducer.all_of(pipeline)

    @dg.sensor(
        name=f"{pipeline.name}_history",
        minimum_interval_seconds=round(_EVERY.total_seconds()),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Observes the figures of the last two hours for the plots of the asset `{pipeline.name}_history`.",
        required_resource_keys={*(producer.source for producer in producers), "control"},
    )
    def observe(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        now = datetime.now(UTC)
        since = datetime.fromisoformat(context.cursor) if context.cursor else now - _EVERY
        if not _EVERY / 2 <= now - since <= _EVERY * 3:  # the daemon was off, or the clock was set
            since = now - _EVERY
        try:
            figures = _figures(pipeline, context.resources, context.instance, since, now)
        except ControlStoreError as error:
            return dg.SkipReason(str(error))
        event = dg.AssetObservation(history_key(pipeline), metadata=figures)
        reason = f"observed the last {(now - since) / timedelta(minutes=1):.0f} minutes"
        return dg.SensorResult(asset_events=[event], skip_reason=reason, cursor=now.isoformat())

    return observe


def _figures(
    pipeline: type[Pipeline], resources: Any, instance: dg.DagsterInstance, since: datetime, now: datetime
) -> dict[str, Any]:
    control: ControlStore = resources.control
    producers = BoundProducer.all_of(pipeline)
    keys = [pipeline.name, *(producer.key for producer in producers if producer.key != pipeline.name)]  # and retries
    acknowledged = sum(minute.messages for minute in control.ended_by_minute(keys, since))
    filter_ = dg.AssetRecordsFilter(dg.AssetKey([pipeline.name, "messages"]), after_timestamp=since.timestamp())
    records = instance.fetch_materializations(filter_, limit=_MOST_REPORTS).records
    reports = [report_of(each.timestamp, event.metadata) for each in records if (event := each.asset_materialization)]
    return {
        "messages": acknowledged,
        "messages per second": round(acknowledged / (now - since).total_seconds(), 3),
        **_failures(reports),
        **_latency(reports),
        **_lag(producers, resources, now),
        **slowest(sum_of_stages({report.receive_id: report for report in reports}.values())),
    }


def _failures(reports: Sequence[Report]) -> dict[str, float]:
    received, failed = (sum(getattr(report, name) for report in reports) for name in ("received", "failed"))
    return {"failed": failed, **({"failure share": round(failed / received, 4)} if received else {})}


def _latency(reports: Sequence[Report]) -> dict[str, float]:
    """Return each percentile from the report in which it is highest."""
    known = [report.latency for report in reports if report.latency]
    return {
        f"highest {latency_name(share)}": max(each[number] for each in known)
        for number, share in enumerate(SHARES)
        if known
    }


def _lag(producers: Sequence[BoundProducer], resources: Any, now: datetime) -> dict[str, float]:
    """Return the messages that wait now, and the age of the oldest message, without sources that do not answer."""
    waiting, ages = list[int](), list[float]()
    for producer in producers:
        source = source_of(resources, producer.source)
        try:
            backlog = timely(source, "backlog", source.backlog)
        except SourceError:
            continue
        if backlog.counted is not None:
            waiting.append(backlog.counted)
        if (age := backlog.age(now)) is not None:
            ages.append(age)
    return {
        **({"backlog": sum(waiting)} if waiting else {}),
        **({"oldest, seconds": round(max(ages), 1)} if ages else {}),
    }
