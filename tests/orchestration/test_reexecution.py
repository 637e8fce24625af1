"""Runs that fail, are executed again or are terminated: nothing is lost, and nothing is there twice."""

import os
import signal
import sqlite3
import subprocess
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import dagster as dg
import pytest

from pipeline_platform.orchestration import graph
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.run import lease, steps
from tests.fixtures.dagster import NEXT, WINDOW, Location, figures
from tests.fixtures.pipelines_under_test import Told

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


def failing_once(name: str, error: Exception) -> Any:
    """Have a step raise the first time it is asked."""
    real = getattr(steps, name)
    left = [error]

    def step(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args, **options)

    return mock.patch.object(steps, name, step)


def test_a_failed_commit_is_made_good_from_failure(location):
    location.enqueue("one", "fail", "letter a")
    with failing_once("publish", OSError(28, "No space left on device")):
        failed = location.run("told_pull")
    assert failed.status == FAILURE
    assert "No space left on device" in location.log(failed)
    assert not location.materialisations(failed, "lines")
    assert location.control.in_flight("told") == [], "nobody waits for the lease of a run that is known to have failed"

    run = location.again(failed, from_failure=True)

    assert run.status == SUCCESS
    assert run.tags[RunTags.of(Told).receive_id] == failed.tags[RunTags.of(Told).receive_id], (
        "nothing was received anew"
    )
    assert location.texts() == ["one"]
    assert location.texts("letters") == ["letter a"]
    assert location.waiting() == 0
    (event,) = location.materialisations(run, "messages")
    assert figures(event)["acknowledged"] == 3
    assert location.flow().ledger.unfinished() == []


def test_a_failed_handling_goes_on_from_failure_under_a_lease_of_its_own(location):
    location.enqueue("one", "two")
    with failing_once("handle_messages", OSError(28, "No space left on device")):
        failed = location.run("told_pull")
    seen = []
    real = steps.handle_messages

    def look(flow: Any, receive: Any) -> Any:
        seen.append([(claim.run_id, claim.messages) for claim in flow.control.in_flight(flow.pipeline.name)])
        return real(flow, receive)

    with mock.patch.object(steps, "handle_messages", look):
        run = location.again(failed, from_failure=True, copied_tags=False)

    assert run.status == SUCCESS
    assert seen[0] == [(run.run_id, 2)]
    assert location.texts() == ["one", "two"]


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


def test_the_next_run_finishes_what_a_failed_one_decided(location):
    location.enqueue("one", "fail")
    with failing_once("publish", OSError(28, "No space left on device")):
        failed = location.run("told_pull")
    location.enqueue("two")

    run = location.run("told_pull", NEXT)
    late = location.again(failed, from_failure=True)

    assert run.status == SUCCESS
    assert "of earlier runs, which crashed" in location.log(run)
    assert location.texts() == ["one", "two"]
    assert location.rows("lines").sort("text")["window"].to_list() == [WINDOW, NEXT]
    assert location.waiting() == 0
    assert late.status == SUCCESS
    assert "is finished: nothing is left to do" in location.log(late)
    assert location.checks(late)["acknowledged"].description == "Had nothing to acknowledge."


@pytest.mark.parametrize("copied_tags", [True, False])
def test_a_re_execution_of_all_steps_receives_anew(location, copied_tags):
    location.enqueue("one")
    first = location.run("told_pull")
    location.enqueue("two", "three")

    run = location.again(first, from_failure=False, copied_tags=copied_tags)

    assert run.status == SUCCESS
    assert run.tags[RunTags.of(Told).receive_id] != first.tags[RunTags.of(Told).receive_id]
    assert location.texts() == ["one", "three", "two"]
    assert figures(location.materialisations(run, "messages")[0])["received"] == 2


def test_a_source_that_will_not_be_told_is_told_by_the_next_run(location):
    location.enqueue("one", "fail")
    mood = location.root / "no ack"
    mood.touch()

    first = location.run("told_pull")
    mood.unlink()
    second = location.run("told_pull")

    check = location.checks(first)["acknowledged"]
    assert first.status == SUCCESS
    assert not check.passed
    assert check.severity == dg.AssetCheckSeverity.WARN
    assert check.metadata["unacknowledged"].value == 2
    assert "told to refuse" in str(check.metadata["errors"].value)
    assert figures(location.materialisations(first, "messages")[0])["unacknowledged"] == 2
    assert location.checks(second)["acknowledged"].passed
    assert location.texts() == ["one"], "once, although its first acknowledgement was refused"
    assert left_in(location) == 0


def left_in(location: Location) -> int:
    with sqlite3.connect(location.root / "queue.sqlite") as database:
        return int(database.execute("SELECT count(*) FROM messages").fetchone()[0])


@pytest.mark.faults
def test_a_termination_in_mid_handling_loses_nothing(location):
    location.enqueue("one", "sleep 300")
    process = location.start("told_pull")
    claim = until(lambda: [claim for claim in location.control.in_flight("told") if claim.messages == 2], process)[0]
    time.sleep(1.0)

    process.send_signal(signal.SIGTERM)
    assert process.wait(30) != 0

    run = location.instance.get_run_by_id(claim.run_id)
    assert run is not None
    assert run.status in (dg.DagsterRunStatus.CANCELED, FAILURE)
    assert location.control.in_flight("told") == [], "its room is free at once"
    with sqlite3.connect(location.root / "queue.sqlite") as database:
        database.execute("UPDATE messages SET data = 'two' WHERE data = CAST('sleep 300' AS BLOB)")
    began = time.monotonic()
    assert location.run("told_pull").status == SUCCESS
    assert location.texts() == ["one", "two"]
    assert left_in(location) == 0
    assert time.monotonic() - began < 150, "the Spark work of the terminated run is ended, not waited for"


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


def until(found: Any, process: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        assert process.poll() is None, "the run ended before it could be hit"
        time.sleep(0.05)
    raise AssertionError("it never came to that")


def test_the_lease_is_renewed_while_a_commit_takes_long(location, monkeypatch):
    monkeypatch.setattr(lease, "CLAIM_S", 1.0)
    location.enqueue("one")
    seen = []

    def slowly(name: str) -> Any:
        real = getattr(steps, name)

        def step(*args: Any) -> Any:
            time.sleep(2.5)
            seen.append([claim.messages for claim in location.control.in_flight("told")])
            return real(*args)

        return mock.patch.object(steps, name, step)

    with slowly("publish"), slowly("_acknowledge"):
        run = location.run("told_pull")

    assert run.status == SUCCESS
    assert seen == [[1], [1]], "while it is decided and published, and while it is acknowledged"
