"""The job `<pipeline>_limits`, as the launchpad starts it."""

from datetime import timedelta
from typing import Any

import dagster as dg
import pytest
from pydantic import ValidationError

from pipeline_platform.control.drain import DrainCancelledError
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.options import Overrides, RateLimiting
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.orchestration.limits_job import LimitsConfig, change
from tests.fixtures.jobs_under_test import job_at
from tests.fixtures.pipelines_under_test import Coasts, Told


def test_a_run_of_it_changes_what_its_config_says_and_is_recorded_with_its_user_and_options(tmp_path):
    job = job_at("told_limits", str(tmp_path), str(tmp_path / "spark"))
    assert job.executor_def is dg.in_process_executor, "whatever the deployment uses"
    with dg.DagsterInstance.ephemeral() as instance:

        def changed(**config: object) -> dg.ExecuteInProcessResult:
            given, tags = {"ops": {"change": {"config": config}}}, {"user": "anna@example.com"}
            return job.execute_in_process(given, instance=instance, tags=tags)

        limit = {"allowed_messages": 5, "interval_s": 2.0}
        run = changed(pause=True, reason="moves", max_runs=4, **limit)
        store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
        known = store.rate_limiting("told", None)
        assert known is not None
        assert (known.allowed_messages, known.interval.total_seconds()) == (5, 2.0)
        assert (store.paused("told"), store.overrides("told").max_runs) == ("moves", 4)
        (act,) = store.acts("told")
        assert act[1:4] == ("told", "pause", f"run {run.run_id} of anna@example.com")
        assert (act.reason, act.options) == ("moves", {"max_runs": 4, **limit})
        assert changed(resume=True, reset=True).success
        assert (store.rate_limiting("told", None), store.paused("told")) == (None, None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"allowed_messages": -5, "interval_s": 1.0}, "RateLimiting.allowed_messages: must be an int from 1 to"),
        ({"allowed_messages": 5, "interval_s": 1e300}, "less than or equal to 3153600000"),
        ({"allowed_messages": 5}, "told has no rate limit. Set both allowed_messages and interval"),
        ({"resume": True}, "told: pause and resume exclude each other. Set one of them to true"),
        ({"max_runs": 0}, "Overrides.max_runs: must be an int from 1 to 1,000, got 0"),
    ],
)
def test_a_change_that_is_refused_changes_nothing_of_what_holds(tmp_path, wrong, said):
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    store.override(Told, Overrides(max_demand=7))
    with pytest.raises((PipelineError, ValidationError), match=said):
        change(Told, store, LimitsConfig(**{"pause": True, "reset": True, "max_runs": 3, **wrong}), print)
    assert store.overrides("told") == Overrides(max_demand=7)
    assert (store.rate_limiting("told", None), store.paused("told")) == (None, None)


def test_an_option_that_is_not_the_producer_s_is_refused_before_anything_is_reset(tmp_path):
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    store.override(Coasts, Overrides(max_demand=7))
    with pytest.raises(PipelineError, match="max_runs applies to a single producer"):
        change(Coasts, store, LimitsConfig(reset=True, max_runs=3), print)
    assert store.overrides("coasts") == Overrides(max_demand=7)


def test_a_part_of_the_limit_that_holds_may_be_changed(tmp_path):
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    change(Told, store, LimitsConfig(allowed_messages=5, interval_s=2.0), print)
    change(Told, store, LimitsConfig(interval_s=4.0), print)
    assert store.rate_limiting("told", None) == RateLimiting(allowed_messages=5, interval=timedelta(seconds=4))


def test_what_another_changes_of_the_limit_at_the_same_moment_stays(tmp_path, monkeypatch):
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    store.set_rate_limiting("told", RateLimiting(allowed_messages=5, interval=timedelta(seconds=2)))
    override = store.override

    def override_meanwhile(*given: Any) -> Overrides:
        store.update_rate_limiting("told", None, allowed_messages=9)
        return override(*given)

    monkeypatch.setattr(store, "override", override_meanwhile)
    change(Told, store, LimitsConfig(interval_s=4.0), print)

    assert store.rate_limiting("told", None) == RateLimiting(allowed_messages=9, interval=timedelta(seconds=4))


def test_it_logs_what_it_changed_and_no_option_that_is_unset(tmp_path):
    store, said = ControlStore(f"sqlite:///{tmp_path}/control.sqlite"), []
    change(Told, store, LimitsConfig(pause=True, reason="moves"), said.append)
    change(Told, store, LimitsConfig(max_runs=3), said.append)
    assert said == ["Paused told: moves", "told: set at run time: max_runs 3"]


@pytest.mark.parametrize(("reason", "kept"), [("", "moves"), ("ends", "ends")])
def test_a_drain_without_a_reason_keeps_that_of_the_pause(tmp_path, reason, kept):
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    change(Told, store, LimitsConfig(pause=True, reason="moves"), print)
    change(Told, store, LimitsConfig(drain=True, reason=reason), print)
    assert store.paused("told") == kept


def test_a_drain_that_somebody_cancels_fails(tmp_path, monkeypatch):
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    store.claim("told", "r1", "run", wanted=5, capacity=10, lease_s=600)
    monkeypatch.setattr(store, "draining", lambda _: None)
    with pytest.raises(DrainCancelledError, match="5 messages in 1 run still active"):
        change(Told, store, LimitsConfig(drain=True), print)


def test_a_config_that_changes_nothing_is_not_recorded(tmp_path):
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    change(Told, store, LimitsConfig(), print)
    assert store.acts() == []
