"""Pulling by the clock, retrying failures by the clock and once they are due, keeping the tables."""

from datetime import UTC, datetime, timedelta

import dagster as dg

from pipeline_platform.control import demand
from pipeline_platform.control.quota import Quota
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.failure_events import Selection
from pipeline_platform.lake.maintenance import CROWDED, is_crowded
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.launcher.run_process import end_claims
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.asset_windows import NoWindowError, contiguous, window_now
from pipeline_platform.orchestration.jobs import named, run_request, runs_of
from pipeline_platform.orchestration.sensors.runs_under_way import UNDER_WAY, failed_in_a_row, is_under_way

_NIGHT = 2
"""The hour, UTC, of which half is past when all tables are seen to."""


def pull_schedule(pipeline: type[Pipeline], cron: str, producer: str = "") -> dg.ScheduleDefinition:
    """Build a schedule that pulls, in the sensor's place: each run takes as much as it may.

    The run itself leaves out what others hold already, when it claims its room.
    """

    @dg.schedule(
        name=f"{named(pipeline, producer)}_pull_schedule",
        job_name=f"{pipeline.name}_pull",
        cron_schedule=cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Pulls by the clock. With the sensor on, too, both together stay within the limits.",
        required_resource_keys={"control"},
    )
    def pull(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | dg.RunRequest:
        if held := _held_back(pipeline.limits_key(producer), context):
            return held
        try:
            # At the tick's own time: a tick that a stopped daemon makes up for knows no later windows.
            window = window_now(pipeline, context.scheduled_execution_time)
        except NoWindowError as error:
            return dg.SkipReason(str(error))
        expected = Quota(pipeline, context.resources.control, producer).per_pull
        return run_request(pipeline, "source", [window], expected=expected, producer=producer)

    return pull


def redrive_schedule(pipeline: type[Pipeline], cron: str) -> dg.ScheduleDefinition:
    """Build a schedule that retries failures that are not dead, one run a contiguous range of windows."""

    @dg.schedule(
        name=f"{pipeline.name}_redrive_schedule",
        job_name=f"{pipeline.name}_backfill",
        cron_schedule=cron,
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Retries the open failures of all windows, except dead ones.",
        required_resource_keys={"lake", "control"},
    )
    def redrive(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        if held := _held_back(pipeline.name, context):
            return held
        chosen, tick = Selection(state="waiting"), context.scheduled_execution_time.isoformat()
        waiting = _failed(pipeline, context.resources.lake, chosen)
        if not waiting:
            return dg.SkipReason("no failure is waiting")
        return _to_drive(pipeline, context.resources.control, waiting, chosen, tick)

    return redrive


def maintenance_schedule(pipeline: type[Pipeline]) -> dg.ScheduleDefinition:
    """Build a schedule that compacts the tables and drops what is older than the pipeline keeps."""

    @dg.schedule(
        name=f"{pipeline.name}_maintenance_schedule",
        job_name=f"{pipeline.name}_maintenance",
        cron_schedule="30 * * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Compacts tables and drops old windows: each night, and once there are many small files.",
        required_resource_keys={"lake"},
    )
    def maintenance(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | dg.RunRequest:
        is_night = context.scheduled_execution_time.hour == _NIGHT
        if not is_night and not is_crowded(Tables(context.resources.lake, pipeline)):
            return dg.SkipReason(
                f"no table has {CROWDED} files that could be fewer; the rest waits until {_NIGHT:02}:30 UTC"
            )
        return dg.RunRequest()

    return maintenance


def _held_back(limits_key: str, context: dg.ScheduleEvaluationContext) -> dg.SkipReason | None:
    """Why no run is asked for now, or None: a pause holds for the clock as for the sensor."""
    control: ControlStore = context.resources.control
    try:
        reason = control.paused(limits_key)
    except ControlStoreError as error:
        return dg.SkipReason(str(error))
    return None if reason is None else dg.SkipReason(f"paused: {reason}")


LOOKS_EVERY = timedelta(seconds=30)
_AT_ONCE = 10
"""Runs that one look asks for at most: each is about neighbouring windows. Later looks ask for the others."""


def retry_sensor(pipeline: type[Pipeline]) -> dg.SensorDefinition:
    """Build the sensor that has failures retried when their `retry` says so; dead ones are left to people.

    A look reads what lies in the lake of windows whose failures have changed. It asks for nothing while a run retries
    failures already: it may be these.
    """

    @dg.sensor(
        name=f"{pipeline.name}_retry",
        job_name=f"{pipeline.name}_backfill",
        minimum_interval_seconds=round(LOOKS_EVERY.total_seconds()),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Asks for runs that retry failures once they are due.",
        required_resource_keys={"lake", "control"},
    )
    def look(context: dg.SensorEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        control: ControlStore = context.resources.control
        now = datetime.now(UTC)
        try:
            if (reason := control.paused(pipeline.name)) is not None:
                return dg.SkipReason(f"paused: {reason}")
            if driving := _driving(pipeline, context.instance, control):
                return dg.SkipReason(f"run {driving} retries failures already")
        except ControlStoreError as error:
            return dg.SkipReason(str(error))
        waiting = _failed(pipeline, context.resources.lake, Selection(state="due", due_by=now))
        if not waiting:
            return dg.SkipReason("no failure is due")
        runs = failed_in_a_row(pipeline, context.instance, now, origin="failed")
        if held_back := demand.hold_back(runs, LOOKS_EVERY, now):
            return dg.SkipReason(held_back)
        return _to_drive(pipeline, control, waiting, Selection(state="due"))[:_AT_ONCE]

    return look


def _failed(pipeline: type[Pipeline], lake: Lake, chosen: Selection) -> dict[str, int]:
    """How many failures a selection is about, by window."""
    return FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name, selection=chosen).chosen_by_window()


def _to_drive(
    pipeline: type[Pipeline], control: ControlStore, waiting: dict[str, int], chosen: Selection, tick: str = ""
) -> list[dg.RunRequest]:
    """Ask for a run for each range of windows; what it has no room for, a later look asks for."""
    most = control.processors_of(pipeline).per_run
    return [
        run_request(
            pipeline,
            "failed",
            windows,
            expected=min(most, sum(waiting[window] for window in windows)),
            demand=most,
            run_key=f"{tick} {windows[0]}" if tick else None,
            selection=chosen,
        )
        for windows in contiguous(pipeline, waiting)
    ]


def _driving(pipeline: type[Pipeline], instance: dg.DagsterInstance, control: ControlStore) -> str | None:
    """A run that retries failures of the pipeline, or is to; None where there is none."""
    records = instance.get_run_records(runs_of(pipeline, UNDER_WAY, "failed"))
    end_claims(instance, control, pipeline.name)
    live = {claim.run_id for claim in control.in_flight(pipeline.name)}
    dead = {claim.run_id for claim in control.over(pipeline.name)} - live
    for record in records:
        run_id = record.dagster_run.run_id
        if run_id in live or (run_id not in dead and is_under_way(record, pipeline, instance)):
            return run_id
    return None
