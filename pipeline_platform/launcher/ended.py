"""Which runs have ended, and what follows from it: they hold nothing, and what they leased is the next run's."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import dagster as dg

from pipeline_platform.launcher.run_process import is_gone, is_lost

if TYPE_CHECKING:
    from pipeline_platform.control.store import ControlStore

STARTS_WITHIN = timedelta(minutes=15)
"""A run that was launched and has claimed nothing after so long is taken for dead, if its process cannot be asked."""
_MARKING = "StandbyRunLauncher"


def end_claims(instance: dg.DagsterInstance, control: ControlStore, pipeline: str) -> None:
    """End the claims of a pipeline's runs that have ended: by what Dagster knows of them, or by their processes.

    A run that is killed cannot end its own. Nobody waits for them to run out: sensors, `status` and runs that begin
    call this before they look at claims. A run that Dagster does not know keeps its claim.
    """
    claims = {claim.run_id for claim in control.in_flight(pipeline, of_all=True)}
    for run in instance.get_runs(dg.RunsFilter(run_ids=sorted(claims))) if claims else ():
        if run.is_finished or is_gone(run):
            control.let_go(run.run_id)


def never_begins(record: dg.RunRecord, instance: dg.DagsterInstance, now: datetime) -> bool:
    """Whether a run that Dagster takes for one under way, and that holds no claim, will never ask for one."""
    run = record.dagster_run
    if run.status is dg.DagsterRunStatus.QUEUED:
        return False
    gone = is_gone(run)
    if gone is not None:
        return gone
    launcher = instance.get_ref().run_launcher_data if instance.is_persistent else None
    if launcher and launcher.class_name == _MARKING and is_lost(record, now):
        return True
    return now - record.update_timestamp.astimezone(UTC) > STARTS_WITHIN
