"""Fan-out in whole runs over a real queue: children share the fate of their message."""

from typing import Any

import pytest

from pipeline_platform.lake.decision import UnhandledError
from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.model.options import Processors, Producer
from pipeline_platform.run import batching, steps
from pipeline_platform.run.flow import Flow
from tests.fixtures import families
from tests.fixtures.flow import Filled, finish, handled, rows, run

TABLES = ("lake", "left", "right")


class Families(families.Families):
    """Over a queue."""

    name = "families"
    producer = Producer(source="queue", max_runs=2)


GOOD = [b"lake=a left=b right=c", b"plain", b"", b"left=d left=e left=f"]
BAD = [b"lake=g left=h right=fail", b"lake=i left=lose right=j", b"right=k nowhere=l", b"left=raise lake=m right=n"]
WORDS = {"lake": ["a", "plain"], "left": ["b", "d", "e", "f"], "right": ["c"]}


def kept(flow: Flow) -> dict[str, list[str]]:
    return {name: sorted(rows(flow, name)["word"]) for name in TABLES}


def decided(flow: Flow) -> list[str]:
    return sorted(rows(flow, "outcomes")["outcome"])


def test_where_a_child_fails_its_message_fails_and_no_table_has_a_row_of_it(filled: Filled) -> None:
    flow = filled(Families, GOOD + BAD)

    run(flow)

    assert kept(flow) == WORDS
    assert decided(flow) == ["failed"] * 4 + ["handled"] * 4
    failed = rows(flow, "failed")
    assert sorted(failed["data"]) == sorted(BAD)
    assert sorted(failed["kind"]) == ["ValueError", "failed", "not returned", "unknown batcher"]
    key = ["source", "message_id", "child"]
    assert all(rows(flow, name).select(key).is_unique().all() for name in TABLES)
    assert flow.source.backlog().messages == 0


def test_a_replay_and_a_backfill_give_the_same(filled: Filled) -> None:
    flow = filled(Families, GOOD + BAD)
    run(flow)

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

    mended = Flow(Mended, flow.source, flow.lake, flow.control, flow.session)
    run(mended, "failed")
    assert kept(flow) == {
        "lake": ["a", "g", "i", "m", "plain"],
        "left": ["b", "d", "e", "f", "h"],
        "right": sorted(["c", "j", "k", "n", *["mended"] * 4]),
    }
    last = rows(flow, "failed").sort("attempt", "at").group_by("message_id", maintain_order=True).last()
    assert set(last["state"]) == {"closed"}


def test_nothing_is_decided_before_the_messages_with_children_ended(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = filled(Families, GOOD + BAD)
    receive = handled(flow)
    steps.batch_messages(flow, receive, "left")
    with pytest.raises(UnhandledError):
        steps.decide(flow, receive)

    real = Ledger.write

    def dies(self: Ledger, receive: Receive, step: str, *written: Any) -> None:
        if step == batching.PARENTS:
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


def test_steps_that_are_executed_again_from_handling_on_give_the_same(filled: Filled) -> None:
    flow = filled(Families, GOOD + BAD)
    receive = handled(flow)
    steps.batch_messages(flow, receive)

    steps.handle_messages(flow, receive)
    steps.batch_messages(flow, receive)
    finish(flow, receive)

    assert kept(flow) == WORDS
    assert decided(flow) == ["failed"] * 4 + ["handled"] * 4


def test_a_child_that_ends_its_worker_fails_its_message_alone(filled: Filled) -> None:
    flow = filled(Families, [*GOOD, b"lake=g left=leave right=h", b"leave"])

    run(flow)

    assert kept(flow) == WORDS
    assert decided(flow) == ["failed"] * 2 + ["handled"] * 4
    assert set(rows(flow, "failed")["kind"]) == {"worker killed"}


def test_many_messages_with_children_end_once_each(filled: Filled) -> None:
    class Many(Families):
        processors = Processors(concurrency=2, chunk_size=50)

    payloads = [b"lake=a left=b right=fail" if n % 7 == 0 else b"lake=a left=b right=c" for n in range(700)]
    flow = filled(Many, payloads)

    run(flow)

    assert decided(flow) == ["failed"] * 100 + ["handled"] * 600
    assert [rows(flow, name).height for name in TABLES] == [600, 600, 600]
    assert rows(flow, "outcomes")["message_id"].is_unique().all()
