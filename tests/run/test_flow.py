"""Whole flows on a real Spark: queue to tables to acknowledgement."""

import dataclasses
import time
from collections import Counter
from typing import Any, NoReturn

import pytest

from pipeline_platform.control.demand import RUN_LASTS
from pipeline_platform.control.store import ControlStore, ControlStoreError
from pipeline_platform.lake.decision import FencedError, UnhandledError
from pipeline_platform.lake.ledger import Origin
from pipeline_platform.lake.replay import ReplayedMessages
from pipeline_platform.model.message import BatchInfo, Message
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.run import lease, steps
from pipeline_platform.run.begin import begin, resume
from pipeline_platform.run.clear_up import clear_up
from pipeline_platform.run.intake import Intake
from pipeline_platform.run.lease import alive
from pipeline_platform.spark.engine import TaskError
from resources.table_queue import TableQueue
from tests.fixtures.flow import WINDOW, Filled, kinds, rows, run, worked
from tests.fixtures.flow_pipelines import Columns, Obedient, Paced, Twisted


def test_few_messages_are_received_without_spark(filled: Filled) -> None:
    def refused() -> NoReturn:
        raise RuntimeError("asked for Spark")

    flow = dataclasses.replace(filled(Obedient, (b"%d" % number for number in range(201))), session=refused)
    few, more = (begin(flow, origin="source", run_id="test", windows=[WINDOW], demand=wanted) for wanted in (100, 101))

    assert steps.receive_messages(flow, few).rows("messages") == 100
    with pytest.raises(RuntimeError, match="asked for Spark"):
        steps.receive_messages(flow, more)


@pytest.mark.parametrize("fault", [b"kill", b"leave"])
def test_a_message_that_kills_its_worker_fails_alone(filled: Filled, fault: bytes) -> None:
    flow = filled(Obedient, [b"one", b"two", fault, b"three", b"raise"])

    run(flow)

    assert kinds(flow) == {fault.decode(): "worker killed", "raise": "ValueError"}
    assert sorted(rows(flow, "words")["word"]) == ["one", "three", "two"]
    assert flow.source.backlog().messages == 0


def test_batches_are_cut_by_key_and_size_and_a_failing_one_fails_alone(filled: Filled) -> None:
    keys = ["a"] * 7 + ["b"] * 2 + ["raise"] * 2 + ["few"] * 3
    flow = filled(Obedient, (f"batch {key}".encode() for key in keys))

    run(flow)

    batches = rows(flow, "batches")
    sizes = batches.group_by("batch_key", "batch_id").len().sort("batch_key", "len")
    assert list(zip(sizes["batch_key"], sizes["len"], strict=True)) == [
        ("a", 1), ("a", 3), ("a", 3), ("b", 2), ("few", 2),
    ]  # fmt: skip
    assert sorted(rows(flow, "failed")["kind"]) == ["ValueError", "ValueError", "not returned"]


def test_a_batch_that_kills_its_worker_fails_alone(filled: Filled) -> None:
    flow = filled(Obedient, [b"batch a", b"batch kill", b"batch kill", b"batch b"])

    run(flow)

    assert sorted(rows(flow, "batches")["batch_key"]) == ["a", "b"]
    assert rows(flow, "failed")["kind"].to_list() == ["worker killed"] * 2


def test_a_failure_is_driven_again_until_it_succeeds_and_a_replay_changes_nothing(filled: Filled) -> None:
    flow = filled(Obedient, [b"one", b"raise", b"none", b"exit"])
    run(flow)

    run(flow, "failed")
    again = rows(flow, "failed")
    run(flow, "messages")

    assert sorted(again["attempt"]) == [1, 1, 1, 2, 2, 2]
    assert sorted(rows(flow, "failed")["attempt"]) == [2, 2, 2], "a replay takes the place of what came before"
    assert rows(flow, "words")["word"].to_list() == ["one"]
    assert rows(flow, "messages")["message_id"].n_unique() == rows(flow, "messages").height == 4


def test_the_fast_lane_routes_fails_and_misses_rows_like_the_other(filled: Filled) -> None:
    flow = filled(Columns, [b"one", b"drop", b"fail", b"lost", b"two", b"batch 1", b"batch 2", b"batch 3"])

    run(flow)

    assert sorted(rows(flow, "words")["word"]) == ["one", "two"]
    assert sorted(rows(flow, "batches")["word"]) == ["batch 1", "batch 2", "batch 3"]
    reasons = rows(flow, "failed").sort("message_id")["reason"].to_list()
    assert reasons == [
        "handle_messages did not return it", "told to", "no batcher 'nowhere'; there are ['batches', 'words']",
    ]  # fmt: skip
    assert flow.source.backlog().messages == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("one too many", "got 3 rows and returned 4"),
        ("one for another", "more than once"),
        ("one too many and two lost", "more than once"),
        ("position", "changed the column position"),
    ],
)
def test_the_fast_lane_refuses_rows_that_are_not_those_it_gave(filled: Filled, fault: str, said: str) -> None:
    """None of it is decided: no message is twice in a table, and none is lost."""
    flow = filled(Twisted, [fault.encode(), b"two", b"three"])

    with pytest.raises((PipelineError, TaskError), match=said):
        run(flow)

    assert rows(flow, "words").height == rows(flow, "outcomes").height == 0


@pytest.mark.parametrize("column", ["message_id", "ack_id", "data", "window"])
def test_the_fast_lane_may_use_the_names_of_a_delivery_for_its_own(filled: Filled, column: str) -> None:
    """A row is known again by its position: what was delivered cannot be overwritten."""
    flow = filled(Twisted, [column.encode(), b"two"])

    run(flow)

    assert sorted(rows(flow, "words")["message_id"]) == ["1", "2"]
    assert flow.source.backlog().messages == 0


def test_no_interval_sees_more_than_the_rate_limit_allows(filled: Filled) -> None:
    flow = filled(Paced, [b"word"] * 45)

    run(flow)

    handled = Counter(int(float(at)) for at in rows(flow, "words")["word"])
    assert handled.total() == 45
    # One in each task may have looked at the clock right before an interval's end and been held up there.
    assert max(handled.values()) <= 10 + Paced.processors.concurrency


def test_a_run_that_was_given_up_in_mid_handling_acknowledges_nothing_when_it_wakes(filled: Filled) -> None:
    flow = filled(Obedient, [b"one", b"two"])
    stalled = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, stalled)
    handled = steps.handle_messages(flow, stalled)
    flow.control.end(stalled.receive_id)  # as if its claim were over: another run takes it for dead
    clear_up(flow)
    flow.ledger.write(stalled, "handle", handled)  # it wakes, and its task comes to its end

    with pytest.raises(FencedError, match="given up"):
        steps.decide(flow, stalled)
    with pytest.raises(FencedError, match="given up"):
        steps.acknowledge(flow, stalled)

    assert flow.source.backlog().messages == 2
    run(flow)
    assert rows(flow, "words").height == 2


def test_a_delivery_that_comes_again_is_acknowledged_and_not_handled(filled: Filled) -> None:
    flow = filled(Obedient, [b"one", b"two"])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    steps.handle_messages(flow, receive)
    steps.decide(flow, receive)
    steps.publish(flow, receive)
    flow.source.release(receive.receive_id, ["1", "2"])  # as if the acknowledgement had never come
    flow.ledger.remove(receive.receive_id)
    flow.control.end(receive.receive_id)

    run(flow)

    assert rows(flow, "words").height == 2
    assert sorted(rows(flow, "outcomes")["outcome"]) == ["duplicate", "duplicate", "handled", "handled"]
    assert flow.source.backlog().messages == 0


def test_handling_again_after_the_decision_keeps_what_was_decided(filled: Filled) -> None:
    """Re-executed from a step that was done: redelivered messages would find themselves decided, by this receive."""
    flow = filled(Obedient, [b"one", b"batch a", b"raise"])
    given_back = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, given_back)
    flow.source.abandon(given_back.receive_id)
    flow.control.end(given_back.receive_id)
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    for _ in range(2):
        steps.handle_messages(flow, receive)
        steps.batch_messages(flow, receive, "batches")
        steps.decide(flow, receive)

    steps.publish(flow, receive)
    steps.acknowledge(flow, receive)

    assert [rows(flow, name).height for name in ("words", "batches", "failed")] == [1, 1, 1]
    assert sorted(rows(flow, "outcomes")["outcome"]) == ["failed", "handled", "handled"]


class Unwell(Obedient):
    """Its batches fail by now."""

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> NoReturn:
        raise ValueError("too late")


def test_batching_again_after_the_decision_keeps_what_was_decided(filled: Filled) -> None:
    flow = filled(Obedient, [b"batch a"])
    receive = worked(flow)
    steps.decide(flow, receive)

    steps.batch_messages(dataclasses.replace(flow, pipeline=Unwell), receive, "batches")
    steps.publish(flow, receive)
    steps.acknowledge(flow, receive)

    assert [rows(flow, name).height for name in ("batches", "failed")] == [1, 0]
    assert rows(flow, "outcomes")["outcome"].to_list() == ["handled"]


def test_what_another_run_decided_is_published_before_it_is_acknowledged_here(filled: Filled) -> None:
    flow = filled(Obedient, [b"one"])
    stalled = begin(flow, origin="source", run_id="stalled", windows=[WINDOW])
    steps.receive_messages(flow, stalled)
    steps.handle_messages(flow, stalled)
    other = begin(flow, origin="source", run_id="other", windows=[WINDOW])
    steps.decide(flow, stalled)  # after the other has cleared up; and there it stops, past its lease
    flow.source.abandon(stalled.receive_id)
    steps.receive_messages(flow, other)
    steps.handle_messages(flow, other)

    steps.decide(flow, other)
    steps.publish(flow, other)
    answer = steps.acknowledge(flow, other)

    assert answer.acknowledged == 1
    assert rows(flow, "words")["word"].to_list() == ["one"]


def test_a_control_store_that_does_not_answer_costs_no_lease_at_the_source(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = filled(Obedient, [b"one"])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    extended: list[str] = []

    def unreachable(*args: object) -> bool:
        raise ControlStoreError("no route")

    monkeypatch.setattr(ControlStore, "beat", unreachable)
    monkeypatch.setattr(TableQueue, "extend", lambda queue, receive_id: extended.append(receive_id) or True)
    flow.beats.clear()  # both leases are due
    with alive(flow, receive):
        pass

    assert extended == [receive.receive_id]


def test_leases_are_renewed_when_they_are_due_however_many_steps_there_are(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = filled(Obedient, [b"one"])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    beaten: list[str] = []
    monkeypatch.setattr(ControlStore, "beat", lambda *_, **__: beaten.append("claim") or True)
    monkeypatch.setattr(TableQueue, "extend", lambda *_: beaten.append("messages") or True)

    for _ in range(3):
        with alive(flow, receive):
            time.sleep(0.05)
    assert beaten == []
    monkeypatch.setattr(lease, "CLAIM_S", 0.1)
    with alive(flow, receive):
        time.sleep(0.2)

    assert set(beaten) == {"claim"}


def test_a_pull_that_nobody_sized_takes_on_what_the_rate_limit_gives_while_a_run_lasts(filled: Filled) -> None:
    flow = filled(Paced, [b"word"])

    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])

    assert 0 < receive.demand <= 10 * (RUN_LASTS.total_seconds() + 1)


def test_a_replay_takes_its_windows_whole_or_not_at_all(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "room_within_s", 0.0)
    flow = filled(Obedient, [b"one", b"two", b"three"])
    run(flow)
    flow.control.claim("obedient", "another", "run", wanted=3_998, capacity=4_000, lease_s=60)

    with pytest.raises(PipelineError, match=r"room for 2 of the 3 messages of this replay.*pause the pipeline"):
        run(flow, "messages")
    flow.control.end("another")
    run(flow, "messages")

    assert sorted(rows(flow, "words")["word"]) == ["one", "three", "two"]


def test_a_backfill_without_any_room_is_refused_and_not_green(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "room_within_s", 0.0)
    flow = filled(Obedient, [b"raise"])
    run(flow)
    flow.control.claim("obedient", "another", "run", wanted=4_000, capacity=4_000, lease_s=60)

    with pytest.raises(PipelineError, match="room for 0 of the 1 messages of this backfill"):
        run(flow, "failed")


def test_acknowledging_alone_publishes_what_is_decided_first(filled: Filled) -> None:
    """As when the disk was full while tables were written, and only the last step is executed again."""
    flow = filled(Obedient, [b"one", b"two"])
    receive = worked(flow)
    steps.decide(flow, receive)

    answer = steps.acknowledge(flow, receive)

    assert (answer.acknowledged, answer.unacknowledged) == (2, 0)
    assert sorted(rows(flow, "words")["word"]) == ["one", "two"]


def test_acknowledging_what_was_never_handled_is_refused(filled: Filled) -> None:
    flow = filled(Obedient, [b"one"])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)

    with pytest.raises(FencedError, match="not decided"):
        steps.acknowledge(flow, receive)

    assert flow.ledger.get(receive.receive_id), "the next run finds it"


@pytest.mark.parametrize("origin", ["source", "messages"])
def test_nothing_is_decided_where_a_step_was_left_out(filled: Filled, origin: Origin) -> None:
    """A replay would put nothing in the place of everything."""
    flow = filled(Obedient, [b"one", b"batch a"])
    if origin == "messages":
        run(flow)
    receive = begin(flow, origin=origin, run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    with pytest.raises(UnhandledError, match=r"2 messages and the outcomes of 0.*from `handle_messages` on"):
        steps.decide(flow, receive)
    steps.handle_messages(flow, receive)
    with pytest.raises(UnhandledError, match="2 messages and the outcomes of 1"):
        steps.decide(flow, receive)
    steps.batch_messages(flow, receive, "batches")
    steps.decide(flow, receive)
    steps.publish(flow, receive)

    assert rows(flow, "words")["word"].to_list() == ["one"]
    assert rows(flow, "batches")["batch_key"].to_list() == ["a"]


class Mended(Obedient):
    """Has no batch of what went to batches before."""

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put_data({"word": message.data.decode()}).put_batcher("words")


def test_what_an_earlier_try_batched_is_not_kept_beside_what_is_handled_again(filled: Filled) -> None:
    flow = filled(Obedient, [b"batch a", b"batch b"])
    receive = worked(flow)
    flow = dataclasses.replace(flow, pipeline=Mended)

    steps.handle_messages(flow, receive)
    steps.batch_messages(flow, receive, "batches")
    steps.decide(flow, receive)
    steps.publish(flow, receive)

    assert sorted(rows(flow, "words")["word"]) == ["batch a", "batch b"]
    assert rows(flow, "batches").height == 0
    assert rows(flow, "outcomes").height == 2


def test_a_delivery_is_known_again_by_when_it_was_decided_and_not_by_its_window(filled: Filled) -> None:
    """Pulled into a window of long ago, as one can from the Partitions tab, and delivered once more."""
    flow = filled(Obedient, [b"one"])
    receive = worked(flow, ["2026-01-01T0000"])
    steps.decide(flow, receive)
    steps.publish(flow, receive)
    flow.source.release(receive.receive_id, ["1"])

    run(flow)

    assert rows(flow, "words").height == 1
    assert sorted(rows(flow, "outcomes")["outcome"]) == ["duplicate", "handled"]


def test_a_run_whose_receive_another_executes_again_keeps_and_decides_nothing(filled: Filled) -> None:
    """Its process outlived its being cancelled, and comes to its end while the other is at work."""
    flow = filled(Obedient, [b"one"])
    receive = worked(flow)
    again = resume(flow, receive, "another run")

    with pytest.raises(FencedError, match="re-execution"):
        steps.handle_messages(flow, receive)
    with pytest.raises(FencedError, match="a re-execution took it over"):
        steps.decide(flow, receive)
    flow.control.let_go("test")
    assert [claim.run_id for claim in flow.control.in_flight("obedient")] == ["another run"]
    steps.decide(flow, again)
    steps.publish(flow, again)

    assert rows(flow, "words")["word"].to_list() == ["one"]


def test_a_run_that_was_given_up_before_it_leased_leases_nothing(filled: Filled) -> None:
    flow = filled(Obedient, [b"one"])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    flow.control.end(receive.receive_id)  # it stalled, and another run has taken its place
    clear_up(flow)

    with pytest.raises(FencedError, match="given up for dead"):
        steps.receive_messages(flow, receive)

    assert flow.source.backlog().messages == 1


def test_a_replay_claims_its_room_last_for_nobody_renews_it_while_it_looks(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = filled(Obedient, [b"one"])
    run(flow)
    held: list[int] = []
    look = ReplayedMessages.finished

    def finished(source: ReplayedMessages) -> tuple[str, ...]:
        held.append(len(flow.control.in_flight("obedient")))
        return look(source)

    monkeypatch.setattr(ReplayedMessages, "finished", finished)
    begin(flow, origin="messages", run_id="test", windows=[WINDOW])

    assert held == [0]
