"""History of a message, from its first delivery to its current lease."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from pipeline_platform.cli.lake.deliveries import Delivery, deliveries_of
from pipeline_platform.cli.loading import Deployment
from pipeline_platform.cli.main import app
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run import handling, steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.contract import Share, Source
from tests.fixtures.flow import WINDOW, finish, handled, run
from tests.fixtures.flow_pipelines import Word


class Second(Pipeline):
    """A message that starts with `late` succeeds at its second attempt."""

    name = "second"
    producer = Producer(source="queue", concurrency=1)
    processors = Processors(concurrency=1, max_demand=2)
    batchers = {"words": TableBatcher(schema=Word)}

    def handle_message(self, message: Message, context: Any) -> Message:
        text = message.data.decode()
        if text.startswith("late") and message.attempt == 1:
            raise ValueError("not yet")
        return message.put({"word": text}, batcher="words", batch_key=text[0])


@pytest.fixture
def flow(filled):
    return filled(Second, [b"early", b"late", b"last"])


def one(flow: Flow, message_id: str) -> Delivery:
    (delivery,) = deliveries_of(flow, message_id)
    return delivery


def test_a_life_has_each_attempt_with_its_failure_its_rows_and_its_acknowledgement(flow):
    received = run(flow)
    retried = run(flow, "failed")

    first, second = deliveries_of(flow, "2")
    assert [(d.receive_id, d.attempt, d.outcome) for d in (first, second)] == [
        (received.receive_id, 1, "failed"),
        (retried.receive_id, 2, "handled"),
    ]
    assert first.received
    assert first.received["received_at"]
    assert [(e["state"], e["kind"], e["reason"]) for e in first.failures] == [("open", "ValueError", "not yet")]
    assert [e["state"] for e in second.failures] == ["closed"]
    assert first.rows == []
    assert [(r["table"], r["word"], r["batch_key"]) for r in second.rows] == [("words", "late", "l")]
    assert (first.run_id, first.action) == ("test", "ack")
    assert first.acknowledged_at
    assert second.acknowledged_at
    assert first.acknowledged_at < second.acknowledged_at
    assert first.unfinished is second.unfinished is None


def test_after_replays_a_life_still_has_the_first_delivery(flow, printed):
    received = run(flow)
    arrived = one(flow, "1").received
    assert arrived
    run(flow, "messages")
    replayed = run(flow, "messages")

    first, last = deliveries_of(flow, "1")
    assert (first.receive_id, first.replayed_by) == (received.receive_id, replayed.receive_id)
    assert first.received
    assert (first.received["received_at"], first.run_id) == (arrived["received_at"], "test")
    assert first.acknowledged_at
    assert (first.outcome, first.rows) == (None, [])
    assert (last.receive_id, last.received, last.outcome) == (replayed.receive_id, None, "handled")
    assert [row["word"] for row in last.rows] == ["early"]
    assert f"replaced by the replay in receive {replayed.receive_id}" in printed("1")


class Marking(TableQueue):
    """A source that marks every delivery as redelivered."""

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        for batch in super().read(share, receive_id):
            at = batch.schema.get_field_index("redelivered")
            yield batch.set_column(at, batch.schema.field(at), pa.repeat(True, batch.num_rows))


def test_a_marked_delivery_is_redelivered_if_an_earlier_one_is_known(flow, printed, monkeypatch):
    monkeypatch.setattr(handling, "_look_up", lambda *_: [])  # nothing is decided before
    marking = dataclasses.replace(flow, source=Marking(**{**flow.source.model_dump(), "on_failure": "nack"}))
    finish(marking, handled(marking))

    first = one(flow, "2")
    assert first.received
    assert first.received["redelivered"]
    assert not first.redelivered
    assert "redelivered" not in printed("2")

    finish(marking, handled(marking))
    assert [delivery.redelivered for delivery in deliveries_of(flow, "2")] == [False, True]
    assert printed("2").count("redelivered") == 1


def test_a_life_names_the_receive_that_holds_the_message_and_how_far_it_is(flow):
    receive = begin(flow, origin="source", run_id="test", windows=[WINDOW])
    assert deliveries_of(flow, "1") == [], "leased, and not written down"

    phases = []
    for step in (steps.receive_messages, steps.handle_messages, steps.decide, steps.publish):
        step(flow, receive)
        unfinished = one(flow, "1").unfinished
        assert unfinished
        assert unfinished.lease_until
        assert unfinished.lease_until > unfinished.started_at
        phases.append(unfinished.phase)
    assert phases == ["leased", "batched", "decided", "published"]
    assert (one(flow, "1").run_id, one(flow, "1").acknowledged_at) == ("test", None)

    steps.acknowledge(flow, receive)
    assert one(flow, "1").unfinished is None
    assert one(flow, "1").acknowledged_at


def test_what_a_dead_run_left_is_held_by_nobody(flow):
    receive = handled(flow)
    flow.control.let_go("test")
    unfinished = one(flow, "1").unfinished
    assert unfinished
    assert unfinished.lease_until is None
    finish(flow, receive)
    assert one(flow, "1").unfinished is None


@pytest.fixture
def printed(flow, monkeypatch):
    deployment = Deployment({"second": Second}, flow.control, flow.lake, {"queue": flow.source})
    monkeypatch.setattr("pipeline_platform.cli.loading.opened", lambda *_, **__: nullcontext(deployment))

    def call(*arguments: str) -> str:
        answer = CliRunner().invoke(app, ["trace", "second", *arguments])
        assert answer.exit_code == 0, answer.output
        return answer.stdout

    return call


def test_the_command_prints_a_life_as_text_and_as_json(flow, printed):
    first = "second has not received message 3, or its windows are older than retention.messages (30 days)."
    assert printed("3").splitlines() == [first, "Now at queue: waiting"]
    run(flow)
    run(flow, "failed")

    text = printed("2")
    for part in ("attempt 1 in window", "open in handle_message, ValueError: not yet", "attempt 2", '{"word": "late"}'):
        assert part in text
    assert text.count(" acknowledged: ack") == 2
    found = json.loads(printed("2", "--json"))
    assert [each["attempt"] for each in found["deliveries"]] == [1, 2]
    assert "no such row" in found["at_source"]["queue"]["place"]
    assert "has not received message 2" in printed("2", "--source", "another")


def test_of_a_source_that_tells_nothing_of_one_message_it_says_how_many_wait(flow, printed, monkeypatch):
    monkeypatch.setattr(TableQueue, "location", Source.location)
    last = printed("3").splitlines()[-1]
    assert last.startswith("Now at queue: this source cannot look up")
    assert last.endswith(str(flow.source.backlog()))
