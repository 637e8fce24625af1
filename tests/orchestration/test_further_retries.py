"""Retries of more failures than fit into one receive."""

import dagster as dg
import pytest

from pipeline_platform.lake.failures import closing
from pipeline_platform.model.options import Overrides
from pipeline_platform.run.intake import RetryFailures
from tests.fixtures.dagster import WINDOW, figures
from tests.fixtures.pipelines_under_test import Told

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


@pytest.fixture
def failed(location):
    """A pipeline with five failures, two of which fit into a receive."""
    location.enqueue("fail 1", "fail 2", "fail 3", "fail 4", "fail 5")
    location.run("told_pull")
    location.control.override(Told, Overrides(concurrency=1, max_demand=2))
    return location


@pytest.fixture
def after_receive(failed, monkeypatch):
    """Decorate a function that is called after each receive is acknowledged."""
    finish = failed.control.__class__.finish

    def decorate(then):
        def finishing(control, receive_id):
            finish(control, receive_id)
            then(control)

        monkeypatch.setattr(failed.control.__class__, "finish", finishing)

    return decorate


def test_a_run_retries_all_failures_once_in_several_receives_and_is_green(failed, after_receive):
    assert failed.by_hand("failed").status == SUCCESS
    assert failed.rows("failed")["attempt"].sort().to_list() == [1] * 5 + [2] * 5, "not once more if they fail again"
    active = []

    @after_receive
    def look(control):
        active.append([claim.run_id for claim in control.in_flight("told")])

    run = failed.by_hand("failed", forgiving=True)

    assert run.status == SUCCESS
    assert run.tags["told/received"] == "5"
    reports = [figures(event) for event in failed.materialisations(run, "failed")]
    assert [report["open"] for report in reports] == [3, 1, 0]
    assert failed.rows("lines")["text"].sort().to_list() == ["fail 1", "fail 2", "fail 3", "fail 4", "fail 5"]
    assert active == [[run.run_id]] * 3, "sensors and drains see the run between its receives"
    assert failed.control.in_flight("told") == []


def test_failures_that_are_closed_meanwhile_leave_the_run_green(failed, after_receive):
    @after_receive
    def close(control):
        flow = failed.flow()
        closing.close(flow.tables, RetryFailures(flow, (WINDOW,), 0).source, "ops", "not needed")

    run = failed.by_hand("failed")

    assert run.status == SUCCESS
    assert run.tags["told/received"] == "2"


def test_a_re_execution_continues_a_retry_that_a_pause_ended_red(failed, after_receive):
    @after_receive
    def pause(control):
        control.pause("told", "moves")

    run = failed.run("told_retry")

    assert run.status == FAILURE
    assert "3 open failures were not retried, because the pipeline is paused" in failed.log(run)
    paused = failed.again(run, from_failure=True)
    assert paused.status == FAILURE
    assert "3 open failures were not retried, because the pipeline is paused" in failed.log(paused)
    after_receive(lambda control: None)
    failed.control.resume("told")
    resumed = failed.again(paused, from_failure=True)
    assert resumed.status == SUCCESS
    assert resumed.tags["told/received"] == "5"
    assert failed.rows("failed")["attempt"].sort().to_list() == [1] * 5 + [2] * 5


def test_a_retry_that_ends_red_states_the_number_of_failures_that_it_did_not_retry(failed, monkeypatch):
    monkeypatch.setattr(Told, "max_failed_share", 0.5)

    run = failed.by_hand("failed")

    assert run.status == FAILURE
    assert "All outcomes are published and acknowledged. 3 open failures were not retried" in failed.log(run)


def test_a_retry_without_capacity_for_further_receives_ends_red_with_the_number_that_is_left(
    failed, after_receive, monkeypatch
):
    monkeypatch.setattr(RetryFailures, "room_within_s", 0.0)

    @after_receive
    def use_the_capacity(control):
        control.claim("told", "other", "other run", wanted=4, capacity=4, lease_s=600)

    run = failed.by_hand("failed")

    assert run.status == FAILURE
    assert "3 open failures were not retried: told: capacity for 0 of the 2 messages of this retry" in failed.log(run)
    assert run.tags["told/published"] == run.run_id
