"""Children at their worst: they hang, their run is asked to stop, is killed in a replay, or their parent is dead."""

import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.model.retry import Retry
from pipeline_platform.run import batching, steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from tests.fixtures import families
from tests.fixtures.families import Word
from tests.fixtures.flow import WINDOW, Filled, finish, rows, run

pytestmark = pytest.mark.faults
TABLES = ("lake", "left", "right")
GOOD = [b"lake=a left=b right=c", b"plain", b"left=d right=e"]
WORDS = {"lake": ["a", "plain"], "left": ["b", "d"], "right": ["c", "e"]}
CALL = timedelta(seconds=3)


class Families(families.Families):
    """Hangs at `hang`."""

    name = "families"
    producer = Producer(source="queue", max_runs=2)
    processors = Processors(concurrency=2, message_timeout=CALL)
    batchers = {
        "lake": TableBatcher(schema=Word),
        "left": Batcher(schema=Word, batch_size=2, message_timeout=CALL),
        "right": Batcher(schema=Word, message_timeout=CALL),
    }

    def _child(self, message: Any, batcher: str, word: str) -> Any:
        child = super()._child(message, batcher, word)
        return child.put_batch_key(message.message_id) if word == "hang" else child

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        if "hang" in map(self._word, messages):
            time.sleep(10**6)
        return super().handle_batch(batcher, messages, batch_info, context)


class Dead(Families):
    """Sends on what failed."""

    retry = Retry(max_attempts=1)
    dead_letters = "letters"


def kept(flow: Flow) -> dict[str, list[str]]:
    return {name: sorted(rows(flow, name)["word"]) for name in TABLES}


def test_a_child_whose_batch_hangs_or_dies_fails_its_message_alone(filled: Filled) -> None:
    flow = filled(Families, [*GOOD, b"lake=x left=hang right=y", b"lake=z right=leave left=w"])

    run(flow)

    assert kept(flow) == WORDS
    assert sorted(rows(flow, "failed")["kind"]) == ["timeout", "worker killed"]
    assert flow.source.backlog().messages == 0


def test_a_dead_message_is_sent_once_whichever_of_its_children_failed(filled: Filled, tmp_path: Any) -> None:
    bad = [b"left=fail right=fail left=raise", b"lake=x right=leave"]
    letters = TableQueue(name="letters", url=f"sqlite:///{tmp_path}/letters.sqlite", metadata_column="metadata")
    letters.create()
    made = filled(Dead, [*GOOD, *bad])
    flow = Flow(Dead, made.source, made.lake, made.control, made.session, dead_letters=letters)

    run(flow)

    assert kept(flow) == WORDS
    assert set(rows(flow, "failed")["state"]) == {"dead"}
    assert letters.backlog().messages == len(bad)
    run(flow, "messages")
    assert kept(flow) == WORDS
    assert Counter(rows(flow, "outcomes")["outcome"]) == {"handled": 3, "failed": 2}


@pytest.mark.parametrize("step", ["handle", "batch-left", batching.PARENTS, "decided", "published"])
def test_a_replay_that_is_killed_is_finished_or_given_up_and_done_anew(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    flow = filled(Plain, [*GOOD, b"lake=x left=fail right=y"])
    run(flow)
    real = Ledger.write

    def dies(self: Ledger, receive: Receive, name: str, *written: Any) -> None:
        real(self, receive, name, *written)
        if name == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "write", dies)
        if step in ("decided", "published"):
            receive = begin(flow, origin="messages", run_id="test", windows=[WINDOW])
            steps.receive_messages(flow, receive)
            steps.handle_messages(flow, receive)
            steps.batch_messages(flow, receive)
            steps.decide(flow, receive)
            if step == "published":
                steps.publish(flow, receive)
        else:
            with pytest.raises(KeyboardInterrupt):
                run(flow, "messages")
    flow.control.let_go("test")
    assert (kept(flow) == WORDS) or step == "decided"

    run(flow, "messages")

    assert kept(flow) == WORDS
    assert Counter(rows(flow, "outcomes")["outcome"]) == {"handled": 3, "failed": 1}
    assert flow.ledger.unfinished() == []


class Plain(families.Families):
    """Without limits."""

    producer = Producer(source="queue")


def test_a_drain_while_children_wait_publishes_what_was_handled(filled: Filled) -> None:
    flow = filled(Families, [*GOOD, b"lake=x left=fail right=y"])
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, receive)
    steps.handle_messages(flow, receive)
    flow.control.drain("families", "moves", timedelta(microseconds=1))

    steps.batch_messages(flow, receive)
    finish(flow, receive)

    assert kept(flow) == WORDS
    assert flow.source.backlog().messages == 0
    flow.control.resume("families")
    drained = begin(flow, origin="messages", run_id="test", windows=[WINDOW])
    steps.receive_messages(flow, drained)
    flow.control.drain("families", "moves", timedelta(microseconds=1))
    with pytest.raises(PipelineError, match="stay as they were"):
        steps.handle_messages(flow, drained)
    assert kept(flow) == WORDS
