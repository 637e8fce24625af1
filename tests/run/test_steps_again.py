"""Steps that run again, wake late or are left out: nothing is decided or acknowledged twice, or too early."""

import dataclasses
from typing import Any

import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.decisions.decision import FencedError, UnhandledError
from pipeline_platform.lake.decisions.rewriting import DROPPED
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.tables import CommitError, Table
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.message import Message
from pipeline_platform.run import begin as beginning
from pipeline_platform.run import steps
from pipeline_platform.run.finish import finish_others
from tests.fixtures.flow import begun, finish, flow_of, handled, publish, received, rows, run, worked
from tests.fixtures.flow_pipelines import Obedient
from tests.fixtures.log import Journal, paper_log
from tests.lake.test_decision import SWAP


def test_handling_again_after_the_decision_keeps_what_was_decided(filled):
    """Re-executed from a step that was done: redelivered messages would find themselves decided, by this receive."""
    flow = filled(Obedient, [b"one", b"batch a", b"raise"])
    given_back = received(flow)
    flow.source.abandon(given_back.receive_id, list)
    flow.control.end(given_back.receive_id)
    receive = received(flow)
    for _ in range(2):
        steps.handle_messages(flow, receive)
        steps.batch_messages(flow, receive, "batches")
        steps.decide(flow, receive)

    steps.publish(flow, receive)
    steps.acknowledge(flow, receive)

    assert [rows(flow, name).height for name in ("words", "batches", "failed")] == [1, 1, 1]
    assert sorted(rows(flow, "outcomes")["outcome"]) == ["failed", "handled", "handled"]


def test_what_another_run_decided_is_published_before_it_is_acknowledged_here(filled):
    flow = filled(Obedient, [b"one"])
    stalled = handled(flow, run_id="stalled")
    other = begun(flow, run_id="other")
    steps.decide(flow, stalled)  # after the other has cleared up; and there it stops, past its lease
    flow.source.abandon(stalled.receive_id, list)
    steps.receive_messages(flow, other)
    steps.handle_messages(flow, other)
    answer = finish(flow, other)
    assert answer.acknowledged == 1
    assert rows(flow, "words")["word"].to_list() == ["one"]


def refusing(patch: pytest.MonkeyPatch, refuses: str) -> None:
    """Have a table refuse each commit."""

    def swap(table: Table, *args: Any, **options: Any) -> None:
        if table.name == refuses:
            raise CommitError(f"{refuses} refuses to be committed to")
        SWAP(table, *args, **options)

    patch.setattr(Table, "swap", swap)


def test_a_replay_waits_for_what_it_replaces_to_be_published(filled, monkeypatch):
    """Rows that are published later would be added to those of the replay."""
    flow = filled(Obedient, [b"one", b"two"])
    receive = worked(flow)
    steps.decide(flow, receive)
    with monkeypatch.context() as patch:
        refusing(patch, "words")
        with pytest.raises(CommitError):
            steps.publish(flow, receive)
        flow.control.let_go(receive.run_id)
        with pytest.raises(CommitError, match="words refuses"):
            begun(flow, origin="messages")
    finish(flow, handled(flow, origin="messages"))
    finish_others(flow)
    assert sorted(rows(flow, "words")["word"]) == ["one", "two"]


def test_a_replay_has_published_what_was_decided_while_it_began(filled, monkeypatch):
    flow = filled(Obedient, [b"one", b"two"])
    receive = worked(flow)

    def decided_after(*given: Any) -> list[str]:
        found = finish_others(*given)
        steps.decide(flow, receive)
        return found

    monkeypatch.setattr(beginning, "finish_others", decided_after)
    finish(flow, handled(flow, origin="messages"))
    finish(flow, receive)
    assert sorted(rows(flow, "words")["word"]) == ["one", "two"]


@pytest.mark.parametrize("origin", ["source", "messages"])
def test_nothing_is_decided_where_a_step_was_left_out(filled, origin):
    """A replay would put nothing in the place of everything."""
    flow = filled(Obedient, [b"one", b"batch a"])
    if origin == "messages":
        run(flow)
    receive = received(flow, origin=origin)
    with pytest.raises(UnhandledError, match="has 2 messages, but outcomes of 0"):
        steps.decide(flow, receive)
    steps.handle_messages(flow, receive)
    with pytest.raises(UnhandledError, match="has 2 messages, but outcomes of 1"):
        steps.decide(flow, receive)
    steps.batch_messages(flow, receive, "batches")
    publish(flow, receive)

    assert rows(flow, "words")["word"].to_list() == ["one"]
    assert rows(flow, "batches")["batch_key"].to_list() == ["a"]


class Mended(Obedient):
    """Has no batch of what went to batches before."""

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put_data({"word": message.data.decode()}).put_batcher("words")


def test_offsets_that_wait_for_what_others_decided_are_asked_for_again(tmp_path, tasks_here, monkeypatch):
    """They are in no backlog: only the claim makes the sensor request the run that moves past them."""
    journal = Journal()
    journal.add("p", 2)
    flow = flow_of(tmp_path, Obedient, paper_log(ControlStore(f"sqlite:///{tmp_path}/control.sqlite"), journal))
    receive = handled(flow)
    publish(flow, receive)
    flow.ledger.write(receive, DROPPED, Manifest(reports=[TaskReport(dropped=1)]))
    with monkeypatch.context() as patch:
        patch.setattr(steps, "_publish_others", lambda *_: ["receive x cannot be finished"])
        assert steps.acknowledge(flow, receive).unacknowledged == 2
    assert [claim.receive_id for claim in flow.control.over("obedient")] == [receive.receive_id]
    finish_others(flow)
    assert journal.at("p") == 2


@pytest.mark.parametrize("origin", ["failed", "messages"])
def test_a_failure_that_another_run_ended_and_has_not_published_is_not_ended_again(filled, monkeypatch, origin):
    """The other run decides after recovery, and publishes after the failures were read."""
    flow = filled(Obedient, [b"raise"])
    run(flow)
    mended = dataclasses.replace(flow, producer=BoundProducer(Mended))
    first = handled(mended, origin=origin, run_id="first")

    def decided_after(*given: Any) -> list[str]:
        found = finish_others(*given)
        steps.decide(mended, first)
        return found

    monkeypatch.setattr(beginning, "finish_others", decided_after)
    second = handled(mended, origin="failed", run_id="second")
    finish(mended, first)
    finish(mended, second)
    assert rows(flow, "words")["word"].to_list() == ["raise"]


def test_a_delivery_is_known_again_by_when_it_was_decided_and_not_by_its_window(filled):
    """Pulled into a window of long ago, as one can from the Partitions tab, and delivered once more."""
    flow = filled(Obedient, [b"one"])
    receive = worked(flow, ["2025-01-01T0000"])
    publish(flow, receive)
    flow.source.release(receive.receive_id, ["1"])  # as if the acknowledgement had never come
    run(flow)
    assert rows(flow, "words").height == 1
    assert sorted(rows(flow, "outcomes")["outcome"]) == ["duplicate", "handled"]
    assert flow.source.backlog().messages == 0
    assert [ended.messages for ended in flow.control.ended("obedient")] == [0], "it tells no rate of handling"


def test_a_run_that_was_given_up_before_it_leased_leases_nothing(filled):
    flow = filled(Obedient, [b"one"])
    receive = begun(flow)
    flow.control.end(receive.receive_id)  # it stalled, and another run has taken its place
    finish_others(flow)
    with pytest.raises(FencedError, match="fenced"):
        steps.receive_messages(flow, receive)
    assert flow.source.backlog().messages == 1
