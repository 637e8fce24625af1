"""Runs that fail, are executed again or are terminated: nothing is lost, and nothing is there twice."""

import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import dagster as dg
import pytest

from pipeline_platform.orchestration import graph
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.run import steps
from tests.fixtures.dagster import figures
from tests.fixtures.pipelines_under_test import Told

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


def test_a_re_execution_handles_what_a_run_that_was_asked_to_end_did_not(location):
    """It was interrupted before it released the remaining messages, as a run whose callback hangs."""
    location.enqueue("one", "two")

    def interrupted(flow: Any, receive: Any) -> Any:
        flow.control.stop(receive.receive_id, timedelta(0))
        raise KeyboardInterrupt

    with mock.patch.object(steps, "handle_messages", interrupted):
        ended = location.run("told_pull")
    run = location.again(ended, from_failure=True)

    assert run.status == SUCCESS
    assert location.texts() == ["one", "two"]


@pytest.mark.faults
@pytest.mark.parametrize(("module", "name"), [(steps, "receive_messages"), (graph, "receive_of")])
def test_a_termination_at_the_end_of_a_step_or_the_start_of_the_next_frees_the_room_at_once(location, module, name):
    """The signal is real, and Dagster's own handler takes it."""
    location.enqueue("one")

    def terminated(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    with mock.patch.object(module, name, terminated):
        run = location.run("told_pull")

    assert run.status == FAILURE
    assert "Execution was interrupted" in location.log(run)
    assert location.control.in_flight("told") == []
    assert location.run("told_pull").status == SUCCESS
    assert location.texts() == ["one"]


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
