"""Re-executions of any steps of any run: every message once in the tables, and none left at the source."""

import threading
from typing import Any
from unittest import mock

import dagster as dg
import pytest

from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.run import steps
from tests.fixtures.dagster import WINDOW, Location
from tests.fixtures.pipelines_under_test import Told

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE
STEPS = ["receive_messages", "handle_messages", "batch_messages", "decide", "publish", "acknowledge"]
SELECTIONS = {
    "from failure": None,
    "all steps": [],
    "the last step": ["told.acknowledge"],
    "commit alone, then the rest": ["told.commit"],
}


def failing(step: str) -> Any:
    return mock.patch.object(steps, step, mock.Mock(side_effect=OSError(28, "No space left on device")))


def again(location: Location, run: dg.DagsterRun, selection: str, job: str = "told_pull") -> dg.DagsterRun:
    chosen = SELECTIONS[selection]
    options = (
        dg.ReexecutionOptions.from_failure(run.run_id, location.instance)
        if chosen is None
        else dg.ReexecutionOptions(run.run_id, step_selection=chosen)
    )
    return location.run(job, tags=location.stored(run.run_id).tags, again=options)


def assert_each_once(location: Location) -> None:
    assert location.texts() == ["one", "two"]
    assert location.texts("letters") == ["letter a"]
    outcomes = location.rows("outcomes").filter(location.rows("outcomes")["outcome"].is_in(["handled", "failed"]))
    assert outcomes["message_id"].is_unique().all()
    assert location.waiting() == 0
    assert location.control.in_flight("told") == []
    assert location.flow().ledger.unfinished() == []


@pytest.mark.parametrize(
    ("step", "selection"),
    [
        *((step, "from failure") for step in STEPS),
        ("handle_messages", "all steps"),
        ("handle_messages", "the last step"),
        ("batch_messages", "the last step"),
        ("publish", "all steps"),
        ("publish", "the last step"),
        ("handle_messages", "commit alone, then the rest"),
    ],
)
def test_a_pull_that_failed_at_a_step_is_re_executed_by_a_selection_of_steps(location, step, selection):
    location.enqueue("one", "two", "letter a")
    with failing(step):
        failed = location.run("told_pull")
    assert failed.status == FAILURE

    run = again(location, failed, selection)
    if "then the rest" in selection:
        run = again(location, run, "the last step")

    assert run.status == SUCCESS
    assert location.checks(run)["acknowledged"].passed
    assert [event.partition for event in location.materialisations(run, "messages")] == [WINDOW]
    assert_each_once(location)


@pytest.mark.parametrize("job", ["told_retry", "told_replay"])
@pytest.mark.parametrize("step", ["handle_messages", "publish"])
def test_a_backfill_and_a_replay_that_failed_are_re_executed(location, job, step):
    location.enqueue("one", "two", "letter a", "fail")
    location.run("told_pull")
    with failing(step):
        failed = location.run(job)
    assert failed.status == FAILURE

    run = again(location, failed, "from failure", job)

    assert run.status == SUCCESS
    assert location.open_failures() == {WINDOW: 1}
    assert location.texts() == ["one", "two"]
    assert location.flow().ledger.unfinished() == []


def test_a_re_execution_of_a_finished_run_from_a_later_step_does_nothing(location):
    location.enqueue("one", "two", "letter a")
    first = location.run("told_pull")
    location.enqueue("three")

    run = again(location, first, "the last step")

    assert run.status == SUCCESS
    assert location.waiting() == 1
    assert location.texts() == ["one", "two"]


def test_a_run_that_is_alive_while_it_is_re_executed_ends_red_and_the_re_execution_handles_its_messages(location):
    location.enqueue("one", "two", "letter a")
    ended, receives = [], []
    may_go_on, handles = threading.Event(), threading.Event()
    handle = steps.handle_messages

    def wait(*args: Any) -> Any:
        receives.append(args[1])
        handles.set()
        assert may_go_on.wait(120)
        return handle(*args)

    def run_first() -> None:
        ended.append(location.run("told_pull"))

    with mock.patch.object(steps, "handle_messages", wait):
        thread = threading.Thread(target=run_first)
        thread.start()
        assert handles.wait(120)

    run = again(location, location.stored(receives[0].run_id), "all steps")
    may_go_on.set()
    thread.join(120)

    assert run.status == SUCCESS
    assert [red.status for red in ended] == [FAILURE]
    assert "FencedError" in location.log(ended[0])
    assert_each_once(location)


def test_a_run_that_is_re_executed_twice_is_finished_once(location):
    location.enqueue("one", "two", "letter a")
    with failing("publish"):
        failed = location.run("told_pull")

    first, second = (again(location, failed, "from failure") for _ in range(2))

    assert (first.status, second.status) == (SUCCESS, SUCCESS)
    assert location.checks(second)["acknowledged"].description == "Had nothing to acknowledge."
    assert_each_once(location)


def test_a_re_execution_that_fails_is_re_executed_itself(location):
    location.enqueue("one", "two", "letter a")
    with failing("handle_messages"):
        failed = location.run("told_pull")
        second = again(location, failed, "from failure")
    receive_id = RunTags.of(Told).receive_id
    assert second.status == FAILURE
    assert second.tags[receive_id] != failed.tags[receive_id]

    third = again(location, second, "from failure")

    assert third.status == SUCCESS
    assert_each_once(location)


def test_a_red_run_of_which_all_is_acknowledged_is_re_executed_to_no_effect(location, monkeypatch):
    monkeypatch.setattr(Told, "max_failed_share", 0.0)
    location.enqueue("one", "two", "letter a", "fail")
    red = location.run("told_pull")
    assert red.status == FAILURE

    run = again(location, red, "from failure")

    assert run.status == SUCCESS
    assert location.open_failures() == {WINDOW: 1}
    assert location.texts() == ["one", "two"]
