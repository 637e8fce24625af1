"""The retry sensor: asks for runs that retry failures once they are due."""

from datetime import UTC, datetime, timedelta

import dagster as dg

from pipeline_platform.control import demand
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.selection import Selection
from pipeline_platform.launcher.ended import end_claims
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.asset_windows import contiguous
from pipeline_platform.orchestration.jobs import run_request, runs_by_origin
from pipeline_platform.orchestration.producers import UNDER_WAY, failed_in_a_row, is_under_way

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
        due = Selection(state="due", due_by=now)
        failed = FailedMessages(name=pipeline.name, lake=context.resources.lake, pipeline=pipeline.name, selection=due)
        try:
            if (reason := control.paused(pipeline.name)) is not None:
                return dg.SkipReason(f"paused: {reason}")
            if driving := _driving(pipeline, context.instance, control):
                return dg.SkipReason(f"run {driving} retries failures already")
        except ControlStoreError as error:
            return dg.SkipReason(str(error))
        waiting, most = failed.chosen_by_window(), control.processors_of(pipeline).per_run
        if not waiting:
            return dg.SkipReason("no failure is due")
        runs = failed_in_a_row(pipeline, context.instance, now, origin="failed")
        if held_back := demand.hold_back(runs, LOOKS_EVERY, now):
            return dg.SkipReason(held_back)
        return [
            run_request(
                pipeline,
                "failed",
                windows,
                expected=min(most, sum(waiting[window] for window in windows)),
                demand=most,  # a later look asks for the rest
                selection=Selection(state="due"),
            )
            for windows in contiguous(pipeline, waiting)[:_AT_ONCE]
        ]

    return look


def _driving(pipeline: type[Pipeline], instance: dg.DagsterInstance, control: ControlStore) -> str | None:
    """A run that drives failures of the pipeline, or is to; None where there is none."""
    records = instance.get_run_records(runs_by_origin(pipeline, UNDER_WAY, ["failed"]))
    end_claims(instance, control, pipeline.name)
    live = {claim.run_id for claim in control.in_flight(pipeline.name)}
    dead = {claim.run_id for claim in control.over(pipeline.name)} - live
    for record in records:
        run_id = record.dagster_run.run_id
        if run_id in live or (run_id not in dead and is_under_way(record, pipeline, instance)):
            return run_id
    return None
