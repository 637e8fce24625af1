"""Fan-out in whole runs over a real queue: children share the outcome of their message."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from pipeline_platform import PipelineError, Producer
from pipeline_platform.lake.decisions.decision import UnhandledError
from pipeline_platform.lake.decisions.ledger import Ledger, Receive
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run import batching, steps
from pipeline_platform.run.flow import Flow
from tests.fixtures import families
from tests.fixtures.flow import finish, handled, received, rows, run

TABLES = ("lake", "left", "right")


class Families(families.Families):
    """A pipeline over a queue."""

    name = "families"
    producer = Producer(source="queue", max_runs=2)


GOOD = [b"lake=a left=b right=c", b"plain", b"", b"left=d left=e left=f"]
BAD = [b"lake=g left=h right=fail", b"lake=i left=lose right=j", b"right=k nowhere=l", b"left=raise lake=m right=n"]
WORDS = {"lake": ["a", "plain"], "left": ["b", "d", "e", "f"], "right": ["c"]}


def kept(flow: Flow) -> dict[str, list[str]]:
    return {name: sorted(rows(flow, name)["word"]) for name in TABLES}


def decided(flow: Flow) -> list[str]:
    return sorted(rows(flow, "outcomes")["outcome"])


def test_where_a_child_fails_no_table_has_a_row_and_a_replay_and_a_backfill_give_the_same(filled):
    flow = filled(Families, GOOD + BAD)
    run(flow)
    assert kept(flow) == WORDS
    assert decided(flow) == ["failed"] * 4 + ["handled"] * 4
    assert sorted(rows(flow, "failed")["kind"]) == ["ValueError", "failed", "not returned", "unknown batcher"]

    run(flow, "failed")
    assert kept(flow) == WORDS, "what fails again leaves no row, and what is handled has its rows once"
    run(flow, "messages")
    assert kept(flow) == WORDS

    class Mended(Families):
        def handle_message(self, message: Any, context: Any) -> Any:
            text = message.data.decode()
            for fault in ("right=fail", "left=lose", "nowhere=l", "left=raise"):
                text = text.replace(fault, "right=mended")
            return super().handle_message(message.put_data(text.encode()), context)

    mended = Flow(BoundProducer(Mended), flow.source, flow.lake, flow.control, flow.session)
    run(mended, "failed")
    assert kept(flow) == {
        "lake": ["a", "g", "i", "m", "plain"],
        "left": ["b", "d", "e", "f", "h"],
        "right": sorted(["c", "j", "k", "n", *["mended"] * 4]),
    }
    last = rows(flow, "failed").sort("attempt", "at").group_by("message_id", maintain_order=True).last()
    assert set(last["state"]) == {"closed"}


def test_nothing_is_decided_before_the_messages_with_children_ended(filled, monkeypatch):
    flow = filled(Families, GOOD + BAD)
    receive = handled(flow)
    steps.batch_messages(flow, receive, "left")
    with pytest.raises(UnhandledError):
        steps.decide(flow, receive)

    real = Ledger.write

    def dies(self: Ledger, receive: Receive, step: str, *written: Any) -> None:
        if step == batching.PARENTS_STEP:
            raise KeyboardInterrupt
        real(self, receive, step, *written)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "write", dies)
        with pytest.raises(KeyboardInterrupt):
            steps.batch_messages(flow, receive)
    with pytest.raises(UnhandledError):
        steps.decide(flow, receive)

    steps.batch_messages(flow, receive)
    steps.batch_messages(flow, receive)
    finish(flow, receive)
    assert kept(flow) == WORDS
    assert decided(flow) == ["failed"] * 4 + ["handled"] * 4


FEW = [b"lake=a left=b right=c", b"plain", b"left=d right=e"]
FEW_WORDS = {"lake": ["a", "plain"], "left": ["b", "d"], "right": ["c", "e"]}


@pytest.mark.faults
@pytest.mark.parametrize("step", ["batch-left", "decided"])
def test_a_replay_that_is_killed_is_finished_or_given_up_and_done_anew(filled, monkeypatch, step):
    flow = filled(Plain, [*FEW, b"lake=x left=fail right=y"])
    run(flow)
    real = Ledger.write

    def dies(self: Ledger, receive: Receive, name: str, *written: Any) -> None:
        real(self, receive, name, *written)
        if name == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "write", dies)
        if step == "decided":
            receive = handled(flow, origin="messages")
            steps.batch_messages(flow, receive)
            steps.decide(flow, receive)
        else:
            with pytest.raises(KeyboardInterrupt):
                run(flow, "messages")
    flow.control.let_go("test")
    assert (kept(flow) == FEW_WORDS) or step == "decided"

    run(flow, "messages")

    assert kept(flow) == FEW_WORDS
    assert Counter(rows(flow, "outcomes")["outcome"]) == {"handled": 3, "failed": 1}
    assert flow.ledger.unfinished() == []


class Plain(families.Families):
    """A pipeline without limits."""

    producer = Producer(source="queue")


@pytest.mark.faults
def test_a_drain_while_children_wait_publishes_what_was_handled(filled):
    flow = filled(Plain, [*FEW, b"lake=x left=fail right=y"])
    receive = handled(flow)
    flow.control.drain("families", "moves", timedelta(microseconds=1))

    steps.batch_messages(flow, receive)
    finish(flow, receive)

    assert kept(flow) == FEW_WORDS
    assert flow.source.backlog().messages == 0
    flow.control.resume("families")
    drained = received(flow, origin="messages")
    flow.control.drain("families", "moves", timedelta(microseconds=1))
    with pytest.raises(PipelineError, match="stay as they were"):
        steps.handle_messages(flow, drained)
    assert kept(flow) == FEW_WORDS
