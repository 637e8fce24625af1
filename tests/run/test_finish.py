"""One recovery: a run finishes receives of others; a run whose receive was fenced decides and acknowledges nothing."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pipeline_platform import Producer
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.decisions.decision import FencedError
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.tables import DECIDED, CommitConflictError, Table
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.message import Message
from pipeline_platform.run import begin, lease, steps
from pipeline_platform.run.finish import finish_now, finish_others
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import Phase, ReceiveState
from pipeline_platform.run.work.spark_work import SparkWork
from pipeline_platform.source.contract import Refused, SourceError
from tests.fixtures.flow import begun, finish, no_spark, publish, received, rows, run, worked
from tests.fixtures.flow_pipelines import Obedient, Word
from tests.lake.test_decision import SWAP

PAYLOADS = [b"one", b"two", b"raise", b"batch a"]


def before_the_swap(patch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
    """Have something happen right before the next decision is committed, after all checks."""
    pending = [step]

    def swap(table: Table, *args: Any, **options: Any) -> None:
        if table.name == "outcomes" and pending and options.get("state", DECIDED) == DECIDED:
            pending.pop()()
        SWAP(table, *args, **options)

    patch.setattr(Table, "swap", swap)


def failing_once(patch: pytest.MonkeyPatch, error: type[BaseException], *, commits: bool) -> None:
    """Have the next commit to `outcomes` raise, before it is made, or after it is made and the answer is lost."""
    pending = [error]

    def swap(table: Table, *args: Any, **options: Any) -> None:
        fails = table.name == "outcomes" and pending
        if commits or not fails:
            SWAP(table, *args, **options)
        if fails:
            raise pending.pop()("cut off")

    patch.setattr(Table, "swap", swap)


def assert_each_once(flow: Flow) -> None:
    assert sorted(rows(flow, "words")["word"]) == ["one", "two"]
    assert [rows(flow, name).height for name in ("words", "batches", "failed", "outcomes")] == [2, 1, 1, 4]
    assert flow.source.backlog().messages == 0
    assert flow.ledger.unfinished() == []


@pytest.mark.parametrize("then", ["nothing more", "a run that handles", "a run that finishes"])
def test_a_run_that_is_fenced_right_before_its_decision_decides_nothing(filled, monkeypatch, then):
    """It stalled after it had checked its lease; another run finishes its receive meanwhile."""
    flow = filled(Obedient, PAYLOADS)
    stalled = worked(flow)
    later = []

    def finish_it() -> None:
        assert finish_now(flow, stalled)
        if then == "a run that handles":
            later.append(worked(flow))
        if then == "a run that finishes":
            run(flow)

    before_the_swap(monkeypatch, finish_it)
    with pytest.raises(FencedError):
        steps.decide(flow, stalled)
    with pytest.raises(FencedError):
        steps.acknowledge(flow, stalled)

    if then == "nothing more":
        assert rows(flow, "outcomes").height == 0
        assert flow.source.backlog().messages == len(PAYLOADS)
        run(flow)
    for receive in later:
        finish(flow, receive)
    assert_each_once(flow)


def test_a_receive_that_is_decided_right_before_its_fence_is_finished(filled, monkeypatch):
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    pending = [first]

    def swap(table: Table, *args: Any, **options: Any) -> None:
        if table.name == "outcomes" and pending:
            steps.decide(flow, pending.pop())
        SWAP(table, *args, **options)

    flow.control.let_go("test")
    monkeypatch.setattr(Table, "swap", swap)
    assert finish_others(flow) == [first.receive_id]
    assert_each_once(flow)


@pytest.mark.parametrize("phase", ["begun", "leased", "handled", "decided", "published"])
def test_a_receive_is_finished_from_every_phase(filled, phase):
    flow = filled(Obedient, PAYLOADS)
    receive = {"begun": begun, "leased": received}.get(phase, worked)(flow)
    if phase in ("decided", "published"):
        steps.decide(flow, receive)
    if phase == "published":
        steps.publish(flow, receive)
    flow.control.let_go("test")
    reported: list[Receive] = []

    assert finish_others(flow, report=reported.append) == [receive.receive_id]

    assert reported == ([receive] if phase in ("decided", "published") else [])
    ended = Phase.ACKNOWLEDGED if phase in ("decided", "published") else Phase.FENCED
    assert ReceiveState(flow, receive.receive_id).phase is ended
    assert flow.ledger.unfinished() == []
    run(flow)
    assert_each_once(flow)


def test_a_receive_that_its_source_refuses_stays_unfinished(filled, monkeypatch):
    flow, said = filled(Obedient, PAYLOADS), []
    receive = worked(flow)
    publish(flow, receive)
    flow.control.let_go("test")
    with monkeypatch.context() as refusing:
        refusing.setattr(TableQueue, "acknowledge", lambda queue, action, ref, ids: [Refused(id_, "no") for id_ in ids])
        assert finish_others(flow, said.append) == []
    assert said[0].startswith(f"Kept receive {receive.receive_id} until its source acknowledges it: ")
    assert finish_others(flow) == [receive.receive_id]
    assert_each_once(flow)


def test_a_spark_that_cannot_be_asked_keeps_no_receive_from_being_finished(filled, monkeypatch):
    flow, said = filled(Obedient, PAYLOADS), []
    receive = worked(flow)
    flow.control.let_go("test")
    monkeypatch.setattr(SparkWork, "interrupt", no_spark)
    assert finish_others(flow, said.append) == [receive.receive_id]
    assert said[0].startswith(f"Could not interrupt Spark tasks of receive {receive.receive_id}: AssertionError: ")


class InTurn(Obedient):
    """One run at a time."""

    name = "in_turn"
    producer = Producer(source="queue", max_runs=1)
    partition_by = lambda message: "all"  # noqa: E731


def test_a_run_in_turn_keeps_its_claim_while_it_finishes_earlier_receives(filled, monkeypatch):
    flow = filled(InTurn, PAYLOADS)
    monkeypatch.setattr(lease, "CLAIM_S", 1.0)

    def finishing_slowly(flow: Flow, *_: Any) -> list[str]:
        time.sleep(2 * len(flow.control.in_flight("in_turn")))
        return []

    monkeypatch.setattr(begin, "finish_others", finishing_slowly)
    receive = begun(flow)
    assert [claim.receive_id for claim in flow.control.in_flight("in_turn")] == [receive.receive_id]


def test_a_receive_whose_report_fails_is_reported_by_the_next_attempt_and_once(filled):
    flow = filled(Obedient, PAYLOADS)
    receive = worked(flow)
    steps.decide(flow, receive)
    flow.control.let_go("test")
    attempts: list[Receive] = []
    log: list[str] = []

    def report(published: Receive) -> None:
        attempts.append(published)
        if len(attempts) == 1:
            raise OSError("the storage of Dagster is unavailable")

    assert finish_others(flow, log.append, report) == []
    assert log[0].endswith("OSError: the storage of Dagster is unavailable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "acknowledge", Mock(side_effect=SourceError("the queue is unavailable")))
        assert finish_others(flow, log.append, report) == []
    assert finish_others(flow, log.append, report) == [receive.receive_id]
    assert attempts == [receive] * 2
    assert_each_once(flow)


class Quick(Obedient):
    """The same pipeline after an edit."""

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(Word(word="quick"), batcher="words")


class Sleeping(Obedient):
    """Leaves a file, and sleeps."""

    def handle_message(self, message: Message, context: Any) -> Message:
        Path(message.data.decode()).touch()
        time.sleep(3600)
        return message


def test_spark_tasks_of_a_receive_end_when_it_is_finished(filled_on_spark, tmp_path):
    """Its run may have been killed, and the tasks would run for another hour."""
    flow = filled_on_spark(Sleeping, [str(tmp_path / "started").encode()] * 2)
    first = received(flow, run_id="first")
    errors: list[Exception] = []

    def handle() -> None:
        try:
            steps.handle_messages(flow, first)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=handle, daemon=True)
    thread.start()
    while not (tmp_path / "started").exists():
        assert thread.is_alive()
        time.sleep(0.1)

    finish_now(flow := replace(flow, producer=BoundProducer(Quick)), first)
    run(flow)
    thread.join(180)

    assert len(errors) == 1
    assert rows(flow, "words")["word"].to_list() == ["quick", "quick"]


@pytest.mark.parametrize("error", [CommitConflictError, OSError])
def test_a_fence_whose_answer_is_lost_counts(filled, monkeypatch, error):
    """An object store may have taken the commit although the client got an error."""
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    failing_once(monkeypatch, error, commits=True)
    if error is OSError:
        with pytest.raises(OSError, match="cut off"):
            finish_now(flow, first)
    assert finish_now(flow, first)
    run(flow)
    assert_each_once(flow)


def test_a_crash_before_the_fence_leaves_the_receive_to_the_next_run(filled, monkeypatch):
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    failing_once(monkeypatch, SystemExit, commits=False)
    with pytest.raises(SystemExit):
        finish_now(flow, first)
    run(flow)
    assert ReceiveState(flow, first.receive_id).phase is Phase.FENCED
    assert_each_once(flow)


def test_several_runs_may_finish_a_receive_at_once(filled):
    flow = filled(Obedient, PAYLOADS)
    first = worked(flow)
    steps.decide(flow, first)
    errors: list[Exception] = []

    def finish_it() -> None:
        try:
            finish_now(replace(flow), first)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=finish_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert_each_once(flow)


def test_files_of_a_task_that_outlives_its_receive_are_never_read(filled):
    flow = filled(Obedient, PAYLOADS)
    stale = worked(flow)
    handled = flow.ledger.manifest(stale, "handle")
    finish_now(flow, stale)
    later = worked(flow)
    flow.ledger.write(stale, "handle", handled)
    finish(flow, later)
    finish_others(flow)
    assert_each_once(flow)


def test_a_step_that_was_left_out_is_performed_before_a_later_one(filled):
    flow = filled(Obedient, PAYLOADS)
    receive = received(flow)
    steps.advance(flow, receive, Phase.PUBLISHED)
    assert ReceiveState(flow, receive.receive_id).phase is Phase.PUBLISHED
    steps.acknowledge(flow, receive)
    assert_each_once(flow)


def test_handled_messages_are_not_handled_again(filled):
    flow = filled(Obedient, PAYLOADS)
    receive = worked(flow)
    before = flow.ledger.manifest(receive)
    steps.advance(replace(flow, producer=BoundProducer(Quick)), receive, Phase.BATCHED)
    assert flow.ledger.manifest(receive) == before
