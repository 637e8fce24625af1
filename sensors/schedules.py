"""Schedules: pulling by the clock, driving failures again, keeping the tables."""

from typing import Any

import dagster as dg
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_END_TAG, ASSET_PARTITION_RANGE_START_TAG

from assets.jobs import NO_RETRIES, receive_config
from assets.tags import RunTags
from assets.windows import NoWindowError, contiguous, window_now
from pipeline_platform.control.demand import Limits
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.model.pipeline import Pipeline


def per_run(pipeline: type[Pipeline]) -> int:
    """Messages that a run takes on at most."""
    return Limits(pipeline.producer, pipeline.processors).per_run


def pull_schedule(pipeline: type[Pipeline], job: Any) -> dg.ScheduleDefinition:
    """Build a schedule that pulls, in the sensor's place: each run takes as much as it may.

    On by itself where `producer.schedule` says when; else each five minutes, once somebody turns it on. What others
    hold already is taken off by the run itself, when it claims its room.
    """
    cron, tags = pipeline.producer.schedule, RunTags.of(pipeline)

    @dg.schedule(
        name=f"{pipeline.name}_pull_schedule",
        job=job,
        cron_schedule=cron or "*/5 * * * *",
        default_status=_on(cron is not None),
        description="Pulls by the clock. Turn it on where the sensor is off; both together stay within the limits.",
        required_resource_keys={"control"},
    )
    def pull(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | dg.RunRequest:
        if held := _held_back(pipeline, context):
            return held
        try:
            # Of the tick's own time: a tick that a stopped daemon makes up for knows no later windows.
            window = window_now(pipeline, context.scheduled_execution_time)
        except NoWindowError as error:
            return dg.SkipReason(str(error))
        return dg.RunRequest(
            partition_key=window,
            run_config=receive_config(pipeline, "source"),
            tags={tags.origin: "source", tags.demand: str(per_run(pipeline)), **NO_RETRIES},
        )

    return pull


def redrive_schedule(pipeline: type[Pipeline], job: Any) -> dg.ScheduleDefinition:
    """Build a schedule that drives open failures again, one run a contiguous range of windows.

    On by itself where the pipeline's `redrive` says when; else at three in the night, once somebody turns it on.
    """
    tags = RunTags.of(pipeline)

    @dg.schedule(
        name=f"{pipeline.name}_redrive_schedule",
        job=job,
        cron_schedule=pipeline.redrive or "0 3 * * *",
        default_status=_on(pipeline.redrive is not None),
        description="Drives the open failures of all windows once more.",
        required_resource_keys={pipeline.producer.source, "lake", "control"},
    )
    def redrive(context: dg.ScheduleEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        if held := _held_back(pipeline, context):
            return held
        resources, at = context.resources, context.scheduled_execution_time
        source = getattr(resources, pipeline.producer.source)
        waiting = FailedMessages(name=source.name, lake=resources.lake, pipeline=pipeline.name).open_by_window()
        if not waiting:
            return dg.SkipReason("no failure is open")
        return [
            dg.RunRequest(
                run_key=f"{at.isoformat()} {windows[0]}",
                # What is more than a run's worth is left to the next time.
                run_config=receive_config(pipeline, "failed", per_run(pipeline)),
                tags={
                    ASSET_PARTITION_RANGE_START_TAG: windows[0],
                    ASSET_PARTITION_RANGE_END_TAG: windows[-1],
                    tags.origin: "failed",
                    tags.demand: str(min(sum(waiting[window] for window in windows), per_run(pipeline))),
                    **NO_RETRIES,
                },
            )
            for windows in contiguous(pipeline, waiting)
        ]

    return redrive


def _held_back(pipeline: type[Pipeline], context: dg.ScheduleEvaluationContext) -> dg.SkipReason | None:
    """Why no run is asked for now, or None: a pause holds for the clock as for the sensor."""
    control: ControlStore = context.resources.control
    try:
        reason = control.paused(pipeline.name)
    except ControlStoreError as error:
        return dg.SkipReason(str(error))
    return None if reason is None else dg.SkipReason(f"paused: {reason}")


def _on(on: bool) -> dg.DefaultScheduleStatus:
    return dg.DefaultScheduleStatus.RUNNING if on else dg.DefaultScheduleStatus.STOPPED


def maintenance_schedule(pipeline: type[Pipeline], job: Any) -> dg.ScheduleDefinition:
    """Build a schedule that compacts the tables and drops what is older than the pipeline keeps."""
    return dg.ScheduleDefinition(
        name=f"{pipeline.name}_maintenance_schedule",
        job=job,
        cron_schedule="30 2 * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Compacts tables and drops old windows.",
    )
