"""Retries of more failures than fit into one receive."""

import dagster as dg
import pytest

from pipeline_platform.model.options import Overrides
from tests.fixtures.dagster import figures
from tests.fixtures.pipelines_under_test import Told

SUCCESS = dg.DagsterRunStatus.SUCCESS


@pytest.fixture
def failed(location):
    """A pipeline with five failures, two of which fit into a receive."""
    location.enqueue("fail 1", "fail 2", "fail 3", "fail 4", "fail 5")
    location.run("told_pull")
    location.control.override(Told, Overrides(concurrency=1, max_demand=2))
    return location


def test_a_run_retries_all_failures_in_several_receives_and_is_green(failed):
    run = failed.by_hand("failed", forgiving=True)

    assert run.status == SUCCESS
    assert run.tags["told/received"] == "5"
    reports = [figures(event) for event in failed.materialisations(run, "failed")]
    assert [report["open"] for report in reports] == [3, 1, 0]
    assert failed.rows("lines")["text"].sort().to_list() == ["fail 1", "fail 2", "fail 3", "fail 4", "fail 5"]


def test_a_failure_that_fails_again_is_not_retried_once_more(failed):
    run = failed.by_hand("failed")

    assert run.status == SUCCESS
    assert failed.rows("failed")["attempt"].sort().to_list() == [1] * 5 + [2] * 5


def test_a_pause_ends_the_retry_red_with_the_number_of_failures_that_are_left(failed, monkeypatch):
    finish = failed.control.__class__.finish

    def pausing(control, receive_id):
        finish(control, receive_id)
        control.pause("told", "moves")

    monkeypatch.setattr(failed.control.__class__, "finish", pausing)
    run = failed.by_hand("failed")

    assert run.status == dg.DagsterRunStatus.FAILURE
    assert "3 open failures were not retried, because the pipeline is paused" in failed.log(run)
