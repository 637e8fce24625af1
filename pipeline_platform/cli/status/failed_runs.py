"""Reasons why the newest runs of a producer failed, from Dagster's event log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pipeline_platform.cli.status.status_data import FailedRunsStatus
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer

if TYPE_CHECKING:
    import dagster as dg

_LONGEST = 300
"""Maximum number of characters of a reason."""


def failed_runs(
    producer: BoundProducer, instance: dg.DagsterInstance, control: ControlStore
) -> FailedRunsStatus | None:
    """Return the newest runs that pull from a source, if they failed in a row.

    None if the newest run that ended did not fail, or if it alone failed and a run has acknowledged messages since.
    """
    from pipeline_platform.orchestration.sensors.runs_under_way import failed_in_a_row

    found = failed_in_a_row(producer, instance, datetime.now(UTC))
    if not found.runs or (found.runs == 1 and control.ended(producer.key, since=found.ended, last=1)):
        return None
    step, reason = reason_of_run(found.run_id, instance)
    return FailedRunsStatus(runs=found.runs, run_id=found.run_id, ended_at=found.ended, step=step, reason=reason)


def reason_of_run(run_id: str, instance: dg.DagsterInstance) -> tuple[str | None, str]:
    """Return the step of a run that failed, and the reason: of the step, or else of the run."""
    import dagster as dg

    for kind in dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE:
        for event in (entry.dagster_event for entry in instance.all_logs(run_id, of_type=kind)):
            if event is not None:
                data = event.step_failure_data if kind is dg.DagsterEventType.STEP_FAILURE else None
                text = data.user_failure_data.description if data and data.user_failure_data else None
                if text is None and data and data.error:
                    text = (data.error.cause or data.error).message  # Dagster wraps the error of a step
                reason = (text or event.message or "").strip().partition("\n")[0]
                return (event.step_key or "").rpartition(".")[2] or None, reason[:_LONGEST]
    return None, ""
