"""Runs in Dagster that are asked to end, or that are launched while their pipeline is paused."""

import signal
import time
from typing import Any

import dagster as dg

from pipeline_platform.orchestration.jobs import RunTags
from tests.fixtures.dagster import Location, figures
from tests.fixtures.pipelines_under_test import Told

MESSAGES = 40


def test_a_run_that_is_terminated_keeps_what_it_handled_and_gives_back_the_rest_at_once(location):
    """Dagster's launchers send this signal when a user ends a run in the UI. The run ends after its acknowledgement."""
    begun = location.root / "begun"
    texts = [f"sleep 0.3{number:03}" for number in range(MESSAGES)]
    location.enqueue(f"touch {begun}", *texts)
    process = location.start("told_pull")
    deadline = time.monotonic() + 120
    while not begun.exists():
        assert process.poll() is None, "the run ended before it could be told to"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (claim,) = location.control.in_flight("told")

    process.send_signal(signal.SIGTERM)
    assert process.wait(90) != 0

    run = location.stored(claim.run_id)
    assert run.status in (dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.FAILURE)
    failed = location.instance.all_logs(claim.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    assert failed == [], "it acknowledged all"
    assert "Stopped as requested: receive " in location.log(run)
    back = location.waiting()
    assert back > 0, "two tasks do not handle forty in a few seconds"
    assert len(location.texts()) == MESSAGES + 1 - back
    assert location.control.in_flight("told") + location.control.over("told") == [], "nothing is left to the next run"
    assert figures(location.materialisations(run, "messages")[0])["acknowledged"] == MESSAGES + 1
    assert location.run("told_pull").tags[RunTags.of(Told).received] == str(back)
    assert location.texts() == sorted([f"touch {begun}", *texts])


def takes_nothing(location: Location, run: dg.DagsterRun) -> Any:
    assert run.status == dg.DagsterRunStatus.SUCCESS
    assert "told is paused: moves" in location.log(run)
    return run.tags[RunTags.of(Told).demand]


def test_a_run_of_a_paused_pipeline_ends_green_with_nothing_unless_it_is_forced(location):
    location.enqueue("one", "fail")
    location.control.pause("told", "moves")

    assert takes_nothing(location, location.run("told_pull")) == "0"
    assert location.run("told_pull", ignore_pause=True).status == dg.DagsterRunStatus.SUCCESS
    assert takes_nothing(location, location.run("told_retry")) == "0"
    assert location.texts() == ["one"]
    assert sum(location.open_failures().values()) == 1
