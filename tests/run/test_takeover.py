"""A re-execution takes a receive over: whatever the run before it still does counts no more, and that run ends red."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pipeline_platform.lake.decision import FencedError, UnhandledError
from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.tables import DECIDED, CommitConflictError, Table
from pipeline_platform.model.message import Message
from pipeline_platform.run import steps
from pipeline_platform.run.begin import resume
from pipeline_platform.run.clear_up import clear_up
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import ReceiveState
from tests.fixtures.flow import begun, finish, received, rows, worked
from tests.fixtures.flow_pipelines import Obedient, Word
from tests.lake.test_decision import SWAP

PAYLOADS = [b"one", b"two", b"raise", b"batch a"]


def before_the_swap(patch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    """Have something happen right before the next decision is committed, when all was asked that can be asked."""
    pending = [step]

    def swap(table: Table, *args: Any, **options: Any) -> None:
        if table.name == "outcomes" and pending and options.get("state", DECIDED) == DECIDED:
            pending.pop()()
        SWAP(table, *args, **options)

    patch.setattr(Table, "swap", swap)


def failing_once(patch: pytest.MonkeyPatch, error: type[BaseException], *, commits: bool) -> None:
    """Have the next commit to `outcomes` raise, before it is made, or once it is made and the answer is lost."""
    pending = [error]

    def swap(table: Table, *args: Any, **options: Any) -> None:
        fails = table.name == "outcomes" and pending
        if commits or not fails:
            SWAP(table, *args, **options)
        if fails:
            raise pending.pop()("cut off")

    patch.setattr(Table, "swap", swap)


def go_on(flow: Flow, receive: Receive) -> None:
    steps.handle_messages(flow, receive)
    steps.batch_messages(flow, receive, "batches")
    finish(flow, receive)


def assert_each_once(flow: Flow) -> None:
    assert sorted(rows(flow, "words")["word"]) == ["one", "two"]
    assert [rows(flow, name).height for name in ("words", "batches", "failed", "outcomes")] == [2, 1, 1, 4]
    assert flow.source.backlog().messages == 0
    assert flow.ledger.unfinished() == []


@pytest.mark.parametrize("gets", ["taken", "handled", "finished"])
def test_a_run_that_is_taken_over_right_before_its_decision_decides_nothing(filled, monkeypatch, gets):
    flow = filled(Obedient, PAYLOADS)
    stale = worked(flow)
    later: list[Receive] = []

    def re_execute() -> None:
        later.append(resume(flow, stale, "another run"))
        if gets == "handled":
            steps.handle_messages(flow, later[0])
        if gets == "finished":
            go_on(flow, later[0])

    before_the_swap(monkeypatch, re_execute)
    with pytest.raises(FencedError, match=r"a re-execution took it over|given up"):
        steps.decide(flow, stale)
    with pytest.raises(FencedError):
        steps.acknowledge(flow, stale)

    if gets != "finished":
        go_on(flow, later[0])
    assert_each_once(flow)


def test_what_a_run_decided_before_it_is_taken_over_is_what_the_other_finishes(filled, monkeypatch):
    """The same moment from the other side: the decision comes right before the re-execution's commit."""
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    pending = [first]

    def swap(table: Table, *args: Any, **options: Any) -> None:
        if table.name == "outcomes" and pending:
            steps.decide(flow, pending.pop())
        SWAP(table, *args, **options)

    monkeypatch.setattr(Table, "swap", swap)
    go_on(flow, resume(flow, first, "another run"))

    assert_each_once(flow)


def test_what_a_run_keeps_after_it_was_taken_over_is_never_read(filled):
    """It was in the middle of handling: what it handled, in files of its own, comes late, even after the decision."""
    flow = filled(Obedient, PAYLOADS)
    stale = worked(flow)
    handled = flow.ledger.manifest(stale, "handle")
    later = resume(flow, stale, "another run")
    steps.handle_messages(flow, later)
    flow.ledger.write(stale, "handle", handled)
    steps.batch_messages(flow, later, "batches")
    steps.decide(flow, later)
    flow.ledger.write(stale, "handle", handled)

    steps.publish(flow, later)
    steps.acknowledge(flow, later)

    assert_each_once(flow)
    assert {row["message_id"] for row in rows(flow, "words").to_dicts()} <= set(rows(flow, "outcomes")["message_id"])


class Quick(Obedient):
    """The same pipeline after an edit."""

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(Word(word="quick"), batcher="words")


def test_tasks_of_the_run_before_are_ended_and_hold_up_nothing(filled_on_spark):
    """That run may have been killed, and its tasks would work on for an hour."""
    flow = filled_on_spark(Obedient, [b"sleep 3600"] * 2)
    first = received(flow, run_id="first")
    errors: list[Exception] = []

    def handle() -> None:
        try:
            steps.handle_messages(flow, first)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=handle, daemon=True)
    thread.start()
    thread.join(4)
    assert thread.is_alive()

    go_on(flow := replace(flow, pipeline=Quick), resume(flow, first, "another run"))
    thread.join(180)

    assert len(errors) == 1
    assert rows(flow, "words")["word"].to_list() == ["quick", "quick"]


def test_every_step_of_a_re_execution_goes_on_as_the_same_owner(filled):
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    owners = {resume(flow, first, "another run").owner for _ in range(3)}
    assert len(owners) == 1
    assert flow.tables["outcomes"].open().version() == 1, "taken over once"


@pytest.mark.parametrize("error", [CommitConflictError, OSError])
def test_a_take_over_whose_answer_is_lost_goes_on_with_what_was_received(filled, monkeypatch, error):
    """An object store may have taken the commit all the same, and say on the next try that it is there."""
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    failing_once(monkeypatch, error, commits=True)
    if error is OSError:
        with pytest.raises(OSError, match="cut off"):
            resume(flow, first, "another run")
    finish(flow, resume(flow, first, "another run"))
    assert_each_once(flow)


def test_a_take_over_that_died_before_its_commit_is_tried_again(filled, monkeypatch):
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    failing_once(monkeypatch, SystemExit, commits=False)
    with pytest.raises(SystemExit):
        resume(flow, first, "another run")
    steps.handle_messages(flow, first)

    later = resume(flow, first, "another run")

    assert flow.ledger.steps(later) == flow.ledger.steps(first) == ["handle", "receive"], "as they are by now"
    steps.batch_messages(flow, later, "batches")
    finish(flow, later)
    assert_each_once(flow)


def test_a_re_execution_that_is_re_executed_itself_ends_red(filled):
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    second = resume(flow, first, "second")
    third = resume(flow, first, "third")

    with pytest.raises(FencedError, match="not run second's any more"):
        resume(flow, first, "second")
    with pytest.raises(FencedError, match="not run second's any more"):
        steps.decide(flow, second)
    go_on(flow, third)
    state = ReceiveState(flow, first.receive_id)
    with pytest.raises(FencedError, match="not run second's any more"):
        state.expect_finished(["second", "first"])
    state.expect_finished(["fourth", "third", "first"])

    assert_each_once(flow)


def test_a_receive_that_was_given_up_cannot_be_taken_over(filled):
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    flow.control.end(first.receive_id)
    clear_up(flow)
    with pytest.raises(FencedError, match="was given up"):
        resume(flow, first, "another run")
    with pytest.raises(FencedError, match="was given up"):
        ReceiveState(flow, first.receive_id).expect_finished(["another run", "test"])
    assert flow.source.backlog().messages == len(PAYLOADS)


def test_a_run_that_is_given_up_right_before_its_decision_decides_nothing(filled, monkeypatch):
    """It stalled once it had asked whether its lease holds, for longer than that; the next run has begun meanwhile."""
    flow = filled(Obedient, PAYLOADS)
    stalled = worked(flow)

    def begin_another() -> None:
        flow.control.end(stalled.receive_id)
        assert clear_up(flow) == [stalled.receive_id]

    before_the_swap(monkeypatch, begin_another)
    with pytest.raises(FencedError, match="given up"):
        steps.decide(flow, stalled)
    with pytest.raises(FencedError):
        steps.acknowledge(flow, stalled)

    assert rows(flow, "outcomes").height == 0
    assert flow.source.backlog().messages == len(PAYLOADS)
    go_on(flow, worked(flow))
    assert_each_once(flow)


def test_a_receive_whose_first_step_did_not_end_is_not_taken_for_empty(filled):
    """It died between its lease and its first manifest, and the steps after that were chosen to be executed again."""
    flow = filled(Obedient, PAYLOADS)
    first = begun(flow)
    later = resume(flow, first, "another run")
    steps.handle_messages(flow, later)
    steps.decide(flow, later)
    with pytest.raises(UnhandledError, match="did not come to the end of `receive_messages`"):
        steps.acknowledge(flow, later)
    assert flow.ledger.unfinished() == [first.receive_id], "the next run gives its leases back"


def test_what_a_re_execution_decided_and_left_is_finished_by_the_next_run(filled):
    flow = filled(Obedient, PAYLOADS)
    stale = worked(flow)
    later = resume(flow, stale, "another run")
    steps.handle_messages(flow, later)
    steps.batch_messages(flow, later, "batches")
    steps.decide(flow, later)
    flow.control.let_go("another run")  # it is killed here
    assert clear_up(flow) == [later.receive_id]
    assert_each_once(flow)


def test_of_several_runs_that_take_a_receive_over_at_once_one_decides(filled):
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    ended: list[str] = []

    def re_execute(name: str) -> None:
        try:
            mine = resume(flow, first, name)
            finish(flow, mine)
            ended.append("well")
        except FencedError:
            ended.append("red")

    threads = [threading.Thread(target=re_execute, args=(f"run {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(ended) == 4
    assert "well" in ended
    assert_each_once(flow)
