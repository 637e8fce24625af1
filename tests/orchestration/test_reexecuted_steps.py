"""Re-executions of any steps of any run: every message once in the tables, and none left at the source."""

import threading
from typing import Any
from unittest import mock

import dagster as dg
import pytest

from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.run import steps
from tests.fixtures.dagster import WINDOW, Location, figures
from tests.fixtures.pipelines_under_test import Told

pytestmark = pytest.mark.usefixtures("open_spark")  # a re-execution interrupts what Spark does for an earlier run

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE
STEPS = ["receive_messages", "handle_messages", "batch_messages", "decide", "publish", "acknowledge"]
SELECTIONS = {
    "from failure": None,
    "all steps": [],
    "the last step": ["told.acknowledge"],
    "commit alone": ["told.commit"],
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


def test_a_pull_that_fails_at_each_of_its_steps_is_re_executed_from_failure_and_finished_once(location):
    location.enqueue("one", "two", "letter a")
    failed: list[dg.DagsterRun] = []
    for step in STEPS:
        with failing(step):
            failed.append(again(location, failed[-1], "from failure") if failed else location.run("told_pull"))
        assert failed[-1].status == FAILURE, step

    first, second = (again(location, failed[-1], "from failure") for _ in range(2))

    assert (first.status, second.status) == (SUCCESS, SUCCESS)
    assert location.checks(first)["acknowledged"].passed
    assert [event.partition for event in location.materialisations(first, "messages")] == [WINDOW]
    assert location.checks(second)["acknowledged"].description == "Had nothing to acknowledge."
    receives = [run.tags[RunTags.of(Told).receive_id] for run in failed]
    assert len({*receives}) == 5, "each run starts a new receive until a receive is decided"
    assert receives[-2] == receives[-1], "a decided receive is finished"
    assert_each_once(location)


@pytest.mark.parametrize("selection", ["all steps", "the last step", "commit alone"])
def test_a_pull_that_failed_before_and_after_its_decision_is_re_executed_by_a_selection_of_steps(location, selection):
    location.enqueue("one", "two", "letter a")
    with failing("handle_messages"):
        undecided = location.run("told_pull")
    with failing("publish"):
        decided = again(location, undecided, selection)
    assert (undecided.status, decided.status) == (FAILURE, FAILURE)

    run = again(location, decided, selection)
    if selection == "commit alone":
        run = again(location, run, "the last step")

    assert run.status == SUCCESS
    assert location.checks(run)["acknowledged"].passed
    assert_each_once(location)
    if selection == "all steps":
        location.enqueue("three")
        more = again(location, run, selection)
        assert more.status == SUCCESS
        assert more.tags[RunTags.of(Told).receive_id] != run.tags[RunTags.of(Told).receive_id]
        assert location.texts() == ["one", "three", "two"]
        assert figures(location.materialisations(more, "messages")[0])["received"] == 1
    if selection == "the last step":
        location.enqueue("three")
        assert again(location, run, selection).status == SUCCESS
        assert location.waiting() == 1, "a finished run receives nothing more"
        assert location.texts() == ["one", "two"]


def test_a_retry_and_a_replay_that_failed_before_and_after_their_decision_are_re_executed(location):
    location.enqueue("one", "two", "letter a", "fail")
    location.run("told_pull")
    for job in ("told_retry", "told_replay"):
        with failing("handle_messages"):
            undecided = location.run(job)
        with failing("publish"):
            decided = again(location, undecided, "from failure", job)
        assert (undecided.status, decided.status) == (FAILURE, FAILURE)

        run = again(location, decided, "from failure", job)

        assert run.status == SUCCESS
        assert location.open_failures() == {WINDOW: 1}
        assert location.texts() == ["one", "two"]
        assert location.flow().ledger.unfinished() == []


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
