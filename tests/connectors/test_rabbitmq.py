"""RabbitMQ as a source: receives, messages, connections and sending."""

import json
import logging
import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pika
import pytest

from pipeline_platform.connectors.rabbitmq import RabbitmqSource, mailboxes, rabbitmq_source
from pipeline_platform.connectors.rabbitmq.rabbitmq_connection import Channel
from pipeline_platform.source.contract import Share, SourceError
from tests.fixtures.rabbitmq_source import acknowledged, numbers, texts
from tests.fixtures.received import received

# Receiving


def test_a_receive_leases_no_more_than_prefetch_count(rabbitmq):
    source = rabbitmq(prefetch_count=5)
    source.send(numbers(12))

    rows = received(source)

    assert len(rows) == 5
    assert source.backlog().messages == 7
    acknowledged(source, "ack", rows)
    assert source.backlog().messages == 7, "the consumer has ended: nothing more is sent to it"


def test_a_demand_above_the_maximum_prefetch_count_is_met(rabbitmq, monkeypatch):
    monkeypatch.setattr(mailboxes, "PREFETCH_MAX", 10)
    source = rabbitmq(consume_options={"consumer_tag": "tagged"})
    source.send(numbers(40))

    rows = received(source, 25)

    assert len(rows) == 25
    assert source.backlog().messages == 15
    assert acknowledged(source, "ack", rows) == []


@pytest.mark.parametrize(("bound", "value"), [("MAILBOX_ROWS", 4), ("BATCH_BYTES", 4_000)])
def test_batches_are_bounded_by_rows_and_by_bytes(rabbitmq, monkeypatch, bound, value):
    monkeypatch.setattr(mailboxes, bound, value)
    source = rabbitmq()
    source.send([b"x" * 1_000] * 60)  # so many that the thread stops reading for a while

    batches = list(source.read(Share(messages=50), "r1"))

    assert sum(batch.num_rows for batch in batches) == 50
    assert max(batch.num_rows for batch in batches) <= 4


def test_messages_that_arrive_during_a_receive_go_to_the_next_run_without_a_wait_time(rabbitmq):
    source = rabbitmq()
    patient = rabbitmq(source.queue, wait_time_s=0.5, name="patient")
    source.send([b"1"])

    batches = source.read(Share(messages=10), "r1")
    assert texts(next(batches).to_pylist()) == ["1"]
    source.send([b"2"])
    assert list(batches) == []
    waiting = patient.read(Share(messages=10), "r2")
    assert texts(next(waiting).to_pylist()) == ["2"]
    source.send([b"3"])

    assert [text for batch in waiting for text in texts(batch.to_pylist())] == ["3"]


def test_a_run_ends_empty_if_another_consumer_has_priority(rabbitmq, rabbitmq_queue, monkeypatch, caplog):
    monkeypatch.setattr(rabbitmq_source, "STALLED_S", 0.2)
    first = rabbitmq(rabbitmq_queue(x_single_active_consumer=True), wait_time_s=1.0)
    second = rabbitmq(first.queue)
    first.send(numbers(3))
    batches = first.read(Share(messages=10), "r1")
    next(batches)  # its consumer is the active one until it ends
    first.send(numbers(3))

    with caplog.at_level(logging.WARNING):
        rows = received(second)

    assert rows == [] or "consumers with priority" not in caplog.text
    assert len(rows) + sum(batch.num_rows for batch in batches) == 3


# Contents of a message


def test_metadata_contain_all_amqp_properties(rabbitmq):
    source = rabbitmq()
    headers = {
        "text": "ä", "bytes": b"\xff\x00", "number": 7, "none": None, "list": [1, b"\xff"], "table": {"true": True},
        "when": datetime(2026, 1, 2, tzinfo=UTC), "price": Decimal("1.25"),
    }  # fmt: skip
    properties = {
        "content_type": "application/json", "content_encoding": "utf-8", "priority": 3, "correlation_id": "c",
        "reply_to": "r", "expiration": "60000", "message_id": "m1", "timestamp": 1_700_000_000, "type": "t",
        "user_id": "guest", "app_id": "a", "delivery_mode": 1,
    }  # fmt: skip
    source.send([b"{}"], [{**properties, "headers": headers}])

    (row,) = received(source)
    metadata = json.loads(row["metadata"])

    assert (row["message_id"], row["published_at"]) == ("m1", None), "a publisher's clock may be wrong"
    assert {name: metadata[name] for name in properties} == properties
    assert (metadata["exchange"], metadata["routing_key"], metadata["redelivered"]) == ("", source.queue, False)
    assert metadata["headers"] == {
        "text": "ä", "bytes": {"base64": "/wA="}, "number": 7, "none": None, "list": [1, {"base64": "/w=="}],
        "table": {"true": True}, "when": "2026-01-02T00:00:00Z", "price": "1.25",
    }  # fmt: skip


def test_no_metadata_cost_a_message_or_its_neighbours(rabbitmq):
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"in": deep}
    source = rabbitmq()
    notes = [{"message_id": b"\xff", "correlation_id": b"\xfe", "headers": {"n": [b"\xfd"]}}, {"headers": deep}, None]
    source.send(numbers(3), notes)

    rows = received(source)
    first, second, _ = [json.loads(row["metadata"]) for row in rows]

    assert texts(rows) == texts_of(3)
    assert (rows[0]["message_id"], first["correlation_id"]) == ("ff", {"base64": "/g=="})
    assert first["headers"] == {"n": [{"base64": "/Q=="}]}
    assert "depth" in second["headers"]


def test_what_other_clients_write_in_headers_arrives_and_costs_no_message(rabbitmq, monkeypatch):
    class Raw(bytes):
        """A value of a table in its encoded form."""

    def encoded(pieces: list[bytes], value: Any, by_pika: Any = pika.data.encode_value) -> int:
        if not isinstance(value, Raw):
            return int(by_pika(pieces, value))
        pieces.append(value)
        return len(value)

    monkeypatch.setattr(pika.data, "encode_value", encoded)
    values = {
        "half": struct.pack(">cd", b"d", 1.5), "quarter": struct.pack(">cf", b"f", -0.25),
        "milliseconds": struct.pack(">cQ", b"T", 1_700_000_000_000), "largest": struct.pack(">cQ", b"T", 2**64 - 1),
    }  # fmt: skip
    deep = b""
    for _ in range(1_000):
        deep = struct.pack(">cI", b"A", len(deep)) + deep
    source = rabbitmq()
    raw = {name: Raw(value) for name, value in values.items()}
    headers = {**raw, "list": [raw["half"]], "last": "text"}
    source.send(numbers(3), [{"headers": headers}, {"headers": {"deep": Raw(deep)}}, None])

    rows = received(source)

    assert texts(rows) == texts_of(3)
    assert json.loads(rows[0]["metadata"])["headers"] == {
        "half": 1.5, "quarter": -0.25, "milliseconds": 1_700_000_000_000,
        "largest": 2**64 - 1, "list": [1.5], "last": "text",
    }  # fmt: skip


def test_an_id_may_be_in_a_header(rabbitmq):
    source = rabbitmq(message_id_header="event-id")
    source.send([b"1", b"2", b"3"], [{"headers": {"event-id": 17}}, {"headers": {"event-id": b"\xff"}}, None])

    ids = [row["message_id"] for row in received(source)]

    assert ids[:2] == ["17", "ff"]
    assert len(ids[2]) == 32, "send() gives ids where the source looks for them"


def test_messages_without_an_id_get_one_for_this_delivery_alone(rabbitmq):
    source = rabbitmq()
    source.send(numbers(3), [{"message_id": None}, {"message_id": ""}, {"message_id": "m3"}])
    before = received(source)
    source.close()
    again = received(source)

    assert [row["message_id"] for row in (before[2], again[2])] == ["m3", "m3"]
    assert len({row["message_id"] for row in before + again}) == 5
    assert acknowledged(source, "ack", again) == []
    assert source.backlog().messages == 0


def test_another_message_under_the_same_id_has_an_id_of_its_own(rabbitmq):
    source = rabbitmq()
    source.send([b"created", b"paid", b"created", b"shipped"], [{"message_id": "order-1"}] * 4)

    rows = received(source)

    first, paid, sent_twice, shipped = (row["message_id"] for row in rows)
    assert first == sent_twice == "order-1"
    assert len({first, paid, shipped}) == 3
    assert all(id_.startswith("order-1/") for id_ in (paid, shipped))
    assert acknowledged(source, "ack", rows) == []
    assert source.backlog().messages == 0


def test_repeated_publishes_are_deduplicated_if_the_option_is_set(rabbitmq):
    source = rabbitmq(deduplicate_publishes=True)
    source.send([b"1", b"1 later"], [{"message_id": "m"}] * 2)

    assert [(row["message_id"], row["redelivered"]) for row in received(source)] == [("m", True)] * 2


def test_a_message_returned_by_a_dead_letter_exchange_is_marked(rabbitmq):
    queue, later = f"queue-{uuid4().hex[:8]}", f"later-{uuid4().hex[:8]}"
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue, "x-message-ttl": 1}
    rabbitmq(later, declare={"arguments": back}).backlog()
    to_later = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": later}
    source = rabbitmq(queue, declare={"arguments": to_later}, wait_time_s=5.0)
    source.send([b"1"], [{"message_id": "m"}])
    acknowledged(source, "reject", received(source, 1))

    (row,) = received(source, 1)

    assert (row["message_id"], row["redelivered"]) == ("m", True)
    assert json.loads(row["metadata"])["redelivered"] is False, "the server takes it for a new one"


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_classic_and_quorum_queues_report_redeliveries(rabbitmq, rabbitmq_queue, kind):
    source = rabbitmq(rabbitmq_queue(x_queue_type=kind), wait_time_s=2.0)
    source.send([b"1"])
    acknowledged(source, "reject_and_requeue", received(source, 1))

    (row,) = received(source, 1)

    assert row["redelivered"]
    count = json.loads(row["metadata"]).get("headers", {}).get("x-delivery-count")
    assert count == {"classic": None, "quorum": 1}[kind]


# Connecting, declaring, sending


def test_a_queue_is_declared_and_bound_after_a_subclass_prepared_the_server(rabbitmq):
    class Prepared(RabbitmqSource):
        def after_connect(self, channel: Channel) -> None:
            channel.ask("exchange_declare", exchange=f"events of {self.queue}", exchange_type="topic", durable=True)

    queue = f"declared-{uuid4().hex[:8]}"
    source = rabbitmq(
        queue,
        kind=Prepared,
        declare={"arguments": {"x-queue-type": "quorum"}},
        bindings=[{"exchange": f"events of {queue}", "routing_key": "flight.*"}],
    )

    assert source.backlog().messages == 0, "a sensor, too, declares what is not there yet"
    assert source.send([b"1"], [{"exchange": f"events of {queue}", "routing_key": "flight.new"}]) == 1
    (row,) = received(rabbitmq(queue, wait_time_s=2.0), 1)
    assert json.loads(row["metadata"])["routing_key"] == "flight.new"


def test_unroutable_messages_are_named(rabbitmq, rabbitmq_queue):
    source = rabbitmq(rabbitmq_queue(x_max_length=1, x_overflow="reject-publish"))

    with pytest.raises(
        SourceError, match=r"1 of 2 messages were not accepted.*'amq.topic' has no queue for routing_key 'nowhere'"
    ):
        source.send(numbers(2), [None, {"exchange": "amq.topic", "routing_key": "nowhere"}])
    with pytest.raises(SourceError, match=r"3 of 3 messages were not accepted by a queue: a queue is full or failed"):
        source.send(numbers(3))
    with pytest.raises(
        TypeError, match=r"has invalid keys \['colour'\]. Valid keys: exchange, routing_key, .*priority"
    ):
        source.send([b"1"], [{"colour": "red"}])
    with pytest.raises(TypeError, match="a payload must be bytes, got str"):
        source.send(["text"])  # type: ignore[list-item]
    assert texts(received(source)) == ["0"]


def texts_of(count: int) -> list[str]:
    return [str(number) for number in range(count)]
