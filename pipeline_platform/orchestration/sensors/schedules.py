"""Schedules for pulls, retries and maintenance, and the sensor that retries due failures."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import chain

import dagster as dg

from pipeline_platform.control.quota import Quota
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.lake.maintenance.maintenance import CROWDED, is_crowded
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.launcher.run_process import end_claims
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import WINDOW_FORMAT
from pipeline_platform.orchestration.asset_windows import NoWindowError, contiguous, window_now
from pipeline_platform.orchestration.jobs import run_request, tags_of
from pipeline_platform.orchestration.sensors.runs_under_way import (
    UNDER_WAY,
    failed_in_a_row,
    hold_back,
    is_under_way,
    runs_with,
)
from pipeline_platform.telemetry.configuration import export
from pipeline_platform.telemetry.spans import span

_NIGHT = 2
"""Hour (UTC) of the nightly maintenance of all tables."""


def pull_schedule(producer: BoundProducer, cron: str) -> dg.ScheduleDefinition:
    """Build a schedule that pulls instead of the sensor. Each run receives as many messages as it may.

    The run reduces its demand to the free capacity when it makes its claim.
    """

    @dg.schedule(
        name=f"{producer.prefix}_pull_schedule",
        job_name=f"{producer.pipeline.name}_pull",
        cron_schedule=cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Pulls on a schedule. If the producer's sensor is on too, both together stay within the limits.",
        required_resource_keys={"control"},
    )
    def pull(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | dg.RunRequest:
        if held := _held_back(lambda: Quota(producer, context.resources.control).paused):
            return held
        try:
            # At the scheduled time: a stopped daemon evaluates missed ticks later, for their own windows.
            window = window_now(producer.pipeline, context.scheduled_execution_time)
        except NoWindowError as error:
            return dg.SkipReason(str(error))
        expected = Quota(producer, context.resources.control).per_pull
        return run_request(producer, "source", [window], expected=expected)

    return pull


def retry_schedule(pipeline: type[Pipeline], cron: str) -> dg.ScheduleDefinition:
    """Build a schedule that retries failures that are not dead, with one run per contiguous range of windows.

    Instead of more than `_AT_ONCE` runs, it requests runs that include windows without failures. Left to the next tick,
    ranges might never be retried, because failures of the ranges before them may fail again.
    """

    @dg.schedule(
        name=f"{pipeline.name}_retry_schedule",
        job_name=f"{pipeline.name}_retry",
        cron_schedule=cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Retries the open failures of all windows, except dead ones.",
        required_resource_keys={"lake", "control"},
    )
    def retry(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        if held := _held_back(lambda: context.resources.control.paused(pipeline.name)):
            return held
        chosen, tick = Selection(state="waiting"), context.scheduled_execution_time.isoformat()
        waiting = _failed(pipeline, context.resources.lake, chosen)
        if not waiting:
            return dg.SkipReason("there are no open failures to retry")
        at_once = 1 if pipeline.takes_turns() else _AT_ONCE
        return _to_drive(pipeline, context.resources.control, waiting, chosen, tick, at_once)

    return retry


def maintenance_schedule(pipeline: type[Pipeline]) -> dg.ScheduleDefinition:
    """Build a schedule that compacts tables and deletes windows older than the pipeline's retention."""

    @dg.schedule(
        name=f"{pipeline.name}_maintenance_schedule",
        job_name=f"{pipeline.name}_maintenance",
        cron_schedule="30 * * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Compacts tables and deletes old windows: every night, and when a table has many small files.",
        required_resource_keys={"lake"},
    )
    def maintenance(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | dg.RunRequest:
        is_night = context.scheduled_execution_time.hour == _NIGHT
        if not is_night and not is_crowded(Tables(context.resources.lake, pipeline)):
            return dg.SkipReason(
                f"no table has {CROWDED} small files to compact; all tables are maintained at {_NIGHT:02}:30 UTC"
            )
        return dg.RunRequest()

    return maintenance


def _held_back(paused: Callable[[], str | None]) -> dg.SkipReason | None:
    """Return a skip reason if runs are paused or the control store is unavailable, or None."""
    try:
        reason = paused()
    except ControlStoreError as error:
        return dg.SkipReason(str(error))
    return None if reason is None else dg.SkipReason(f"paused: {reason}")


LOOKS_EVERY = timedelta(seconds=30)
_AT_ONCE = 10
"""Maximum number of runs that a tick requests, each for a range of windows."""


def retry_sensor(pipeline: type[Pipeline]) -> dg.SensorDefinition:
    """Build the sensor that retries failures when they are due. Dead failures are retried manually.

    A tick reads the failures of windows that changed. It requests no run while another run retries failures, which may
    be the same.
    """

    @dg.sensor(
        name=f"{pipeline.name}_retry",
        job_name=f"{pipeline.name}_retry",
        minimum_interval_seconds=round(LOOKS_EVERY.total_seconds()),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Requests runs that retry failures when they are due.",
        required_resource_keys={"lake", "control"},
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        control: ControlStore = context.resources.control
        now = datetime.now(UTC)
        try:
            if (reason := control.paused(pipeline.name)) is not None:
                return dg.SkipReason(f"paused: {reason}")
            if driving := _driving(pipeline, context.instance, control):
                return dg.SkipReason(f"run {driving} is already retrying failures")
        except ControlStoreError as error:
            return dg.SkipReason(str(error))
        export()
        with span("count_failures", pipeline) as event:
            waiting = _failed(pipeline, context.resources.lake, Selection(state="due", due_by=now))
            event.add(due=sum(waiting.values()))
        if not waiting:
            return dg.SkipReason("no failure is due")
        runs = failed_in_a_row(BoundProducer(pipeline), context.instance, now, origin="failed")
        if held_back := hold_back(runs, LOOKS_EVERY, now):
            return dg.SkipReason(held_back)
        # Later ticks request the others: failures that fail again are due later.
        at_once = 1 if pipeline.takes_turns() else _AT_ONCE
        return _to_drive(pipeline, control, waiting, Selection(state="due"))[:at_once]

    return look


def _failed(pipeline: type[Pipeline], lake: Lake, chosen: Selection) -> dict[str, int]:
    failed = FailedMessages(
        name=pipeline.name, lake=lake, pipeline=pipeline.name, selection=chosen, holds=pipeline.holds_partitions()
    )
    return failed.chosen_by_window()


def _to_drive(
    pipeline: type[Pipeline],
    control: ControlStore,
    waiting: dict[str, int],
    chosen: Selection,
    tick: str = "",
    at_once: int | None = None,
) -> list[dg.RunRequest]:
    """Request a run for each range of windows. Failures beyond the limit of a run are left to later ticks.

    With `at_once`, a run gets several of the nearest ranges if there are more, and may retry more failures accordingly.
    """
    most = control.processors_of(pipeline).per_run
    ranges = contiguous(pipeline, waiting)
    groups = _groups(ranges, len(ranges) if at_once is None else at_once)
    return [
        run_request(
            BoundProducer(pipeline),
            "failed",
            windows,
            expected=min(most, sum(waiting[window] for window in windows)),
            demand=most * len(group),
            run_key=f"{tick} {windows[0]}" if tick else None,
            selection=chosen,
        )
        for group in groups
        for windows in [list(chain.from_iterable(group))]
    ]


def _groups(ranges: list[list[str]], most: int) -> list[list[list[str]]]:
    """Put the nearest of some ranges of windows into the same group, so that there are at most `most` groups."""

    def gap(number: int) -> timedelta:
        before, after = ranges[number - 1][-1], ranges[number][0]
        return datetime.strptime(after, WINDOW_FORMAT) - datetime.strptime(before, WINDOW_FORMAT)

    nearest = sorted(range(1, len(ranges)), key=gap)[: max(0, len(ranges) - most)]
    groups: list[list[list[str]]] = []
    for number, windows in enumerate(ranges):
        if number in nearest:
            groups[-1].append(windows)
        else:
            groups.append([windows])
    return groups


def _driving(pipeline: type[Pipeline], instance: dg.DagsterInstance, control: ControlStore) -> str | None:
    """Return the id of a run that retries failures of the pipeline, or will; None if there is none."""
    records = runs_with(instance, UNDER_WAY, tags_of(pipeline, "failed"))
    end_claims(instance, control, pipeline.name)
    live = {claim.run_id for claim in control.in_flight(pipeline.name)}
    dead = {claim.run_id for claim in control.over(pipeline.name)} - live
    for record in records:
        run_id = record.dagster_run.run_id
        if run_id in live or (run_id not in dead and is_under_way(record, pipeline, instance)):
            return run_id
    return None
