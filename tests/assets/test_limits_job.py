"""The job `<pipeline>_limits`, as the launchpad starts it."""

from pathlib import Path

import dagster as dg
import pytest

from pipeline_platform.control.store import ControlStore
from tests.fixtures.jobs_under_test import job_at


def changed(root: Path, config: dict[str, object], instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    job = job_at("told_limits", str(root), str(root / "spark"))
    return job.execute_in_process({"ops": {"change": {"config": config}}}, instance=instance, raise_on_error=False)


@pytest.mark.parametrize("activity", ["pause", "drain"])
def test_a_run_of_it_changes_what_its_config_says(tmp_path: Path, activity: str) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        limit = {"allowed_messages": 5, "interval_s": 2.0}
        assert changed(tmp_path, {"activity": activity, "reason": "moves", "max_runs": 4, **limit}, instance).success

        store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
        known = store.rate_limiting("told", None)
        assert known is not None
        assert (known.allowed_messages, known.interval.total_seconds()) == (5, 2.0)
        assert (store.paused("told"), store.overrides("told").max_runs) == ("moves", 4)

        assert changed(tmp_path, {"activity": "resume", "reset": True}, instance).success
        assert (store.rate_limiting("told", None), store.paused("told")) == (None, None)


def test_a_value_out_of_bounds_fails_it_and_changes_nothing(tmp_path: Path) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        result = changed(tmp_path, {"max_runs": 0, "activity": "pause"}, instance)

        (failure,) = (event for event in result.all_events if event.is_step_failure)
        said = str(failure.step_failure_data.error)
        assert "max_runs is 0: it must be a whole number from 1 to 1,000" in said
        assert ControlStore(f"sqlite:///{tmp_path}/control.sqlite").paused("told") is None
