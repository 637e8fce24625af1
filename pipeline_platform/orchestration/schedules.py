"""Schedules: pulling by the clock, retrying failures, keeping the tables."""

import dagster as dg

from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.selection import Selection
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.asset_windows import NoWindowError, contiguous, window_now
from pipeline_platform.orchestration.jobs import named, run_request


def pull_schedule(pipeline: type[Pipeline], producer: str = "") -> dg.ScheduleDefinition:
    """Build a schedule that pulls, in the sensor's place: each run takes as much as it may.

    On by itself if `producer.schedule` says when; else each five minutes, once somebody turns it on. The run itself
    leaves out what others hold already, when it claims its room.
    """
    cron = pipeline.producers_of(producer)[producer].schedule

    @dg.schedule(
        name=f"{named(pipeline, producer)}_pull_schedule",
        job_name=f"{pipeline.name}_pull",
        cron_schedule=cron or "*/5 * * * *",
        default_status=_on(cron),
        description="Pulls by the clock. Turn it on where the sensor is off; both together stay within the limits.",
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
        expected = context.resources.control.processors_of(pipeline).per_run
        return run_request(pipeline, "source", [window], expected=expected, producer=producer)

    return pull


def redrive_schedule(pipeline: type[Pipeline]) -> dg.ScheduleDefinition:
    """Build a schedule that retries failures that are not dead, one run a contiguous range of windows.

    On by itself if the pipeline's `redrive` says when; else at three in the night, once somebody turns it on.
    """

    @dg.schedule(
        name=f"{pipeline.name}_redrive_schedule",
        job_name=f"{pipeline.name}_backfill",
        cron_schedule=pipeline.redrive or "0 3 * * *",
        default_status=_on(pipeline.redrive),
        description="Drives the open failures of all windows once more, except dead ones.",
        required_resource_keys={"lake", "control"},
    )
    def redrive(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        if held := _held_back(pipeline.name, context):
            return held
        lake, chosen = context.resources.lake, Selection(state="waiting")
        failed = FailedMessages(name=pipeline.name, lake=lake, pipeline=pipeline.name, selection=chosen)
        waiting, most = failed.chosen_by_window(), context.resources.control.processors_of(pipeline).per_run
        if not waiting:
            return dg.SkipReason("no failure is waiting")
        return [
            run_request(
                pipeline,
                "failed",
                windows,
                expected=min(most, sum(waiting[window] for window in windows)),
                demand=most,  # the next tick drives the rest
                run_key=f"{context.scheduled_execution_time.isoformat()} {windows[0]}",
                selection=chosen,
            )
            for windows in contiguous(pipeline, waiting)
        ]

    return redrive


def maintenance_schedule(pipeline: type[Pipeline]) -> dg.ScheduleDefinition:
    """Build a schedule that compacts the tables and drops what is older than the pipeline keeps."""
    return dg.ScheduleDefinition(
        name=f"{pipeline.name}_maintenance_schedule",
        job_name=f"{pipeline.name}_maintenance",
        cron_schedule="30 2 * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Compacts tables and drops old windows.",
    )


def _held_back(limits_key: str, context: dg.ScheduleEvaluationContext) -> dg.SkipReason | None:
    """Why no run is asked for now, or None: a pause holds for the clock as for the sensor."""
    control: ControlStore = context.resources.control
    try:
        reason = control.paused(limits_key)
    except ControlStoreError as error:
        return dg.SkipReason(str(error))
    return None if reason is None else dg.SkipReason(f"paused: {reason}")


def _on(cron: str | None) -> dg.DefaultScheduleStatus:
    return dg.DefaultScheduleStatus.STOPPED if cron is None else dg.DefaultScheduleStatus.RUNNING
