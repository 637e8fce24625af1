"""Runs in Dagster that are told to end, or that are launched while their pipeline is paused."""

import signal
import subprocess
import time
from typing import Any

import dagster as dg

from assets.jobs import RunTags
from tests.fixtures.dagster import Location, figures
from tests.fixtures.pipelines_under_test import Told

MESSAGES = 90


def handling(location: Location, process: subprocess.Popen[bytes]) -> str:
    """The run that has come to its handling."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be told to"
        for claim in location.control.in_flight("told"):
            steps = location.instance.all_logs(claim.run_id, of_type=dg.DagsterEventType.STEP_START)
            if any(one.step_key == "told.handle_messages" for one in steps):
                return claim.run_id
        time.sleep(0.1)
    raise AssertionError("it never came to that")


def test_a_run_that_is_terminated_keeps_what_it_handled_and_gives_back_the_rest_at_once(location: Location) -> None:
    """What Dagster's launchers do when somebody ends a run in the UI: a signal, which ends it once it is settled."""
    texts = [f"sleep 0.3{number:03}" for number in range(MESSAGES)]
    location.enqueue(*texts)
    process = location.start("told_pull")
    run_id = handling(location, process)

    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0

    run = location.stored(run_id)
    assert run.status == dg.DagsterRunStatus.CANCELED
    back = location.waiting()
    assert back > 0, "two tasks do not handle ninety in two seconds"
    assert len(location.texts()) == MESSAGES - back
    assert location.control.in_flight("told") == []
    assert location.control.over("told") == [], "nothing is left to the next run"
    assert figures(location.materialisations(run, "lines")[0])["acknowledged"] == MESSAGES
    assert location.run("told_pull").tags[RunTags.of(Told).received] == str(back)
    assert location.texts() == texts


def takes_nothing(location: Location, run: dg.DagsterRun) -> Any:
    assert run.status == dg.DagsterRunStatus.SUCCESS
    assert "takes on nothing: told is paused: moves" in location.log(run)
    return run.tags[RunTags.of(Told).demand]


def test_a_run_of_a_paused_pipeline_ends_green_with_nothing_unless_it_is_forced(location: Location) -> None:
    location.enqueue("one", "fail")
    location.control.pause("told", "moves")

    assert takes_nothing(location, location.run("told_pull")) == "0"
    assert location.run("told_pull", although_paused=True).status == dg.DagsterRunStatus.SUCCESS
    assert takes_nothing(location, location.run("told_backfill")) == "0"
    assert location.texts() == ["one"]
    assert sum(location.open_failures().values()) == 1
