"""RabbitMQ messages that are read without pika have the contents that pika gives them."""

import json
from typing import Any
from uuid import uuid4

import pytest
from pika.adapters.utils import io_services_utils

from pipeline_platform.connectors.rabbitmq import mailboxes
from pipeline_platform.connectors.rabbitmq.amqp_deliveries import DeliveryStream
from pipeline_platform.source.contract import Share
from tests.fixtures.rabbitmq_source import acknowledged, numbers, texts
from tests.fixtures.received import received

KEY = f"ä {uuid4().hex}"
PROPERTIES: list[dict[str, Any] | None] = [
    None,
    {"message_id": None, "delivery_mode": None},
    {
        "content_type": "application/json", "content_encoding": "utf-8", "headers": {"n": [1, "ä"]}, "priority": 255,
        "correlation_id": "c", "reply_to": "r", "expiration": "60000", "message_id": "m1", "timestamp": 2**40,
        "type": "t", "user_id": "guest", "app_id": "ä" * 100, "cluster_id": "k",
    },
    {"headers": {}, "timestamp": 0},
    {"exchange": "amq.direct", "routing_key": KEY},
]  # fmt: skip


@pytest.fixture
def by_pika(monkeypatch):
    """Payloads that pika decoded."""
    seen: list[bytes] = []
    arrived = mailboxes.Inbox._arrived_by_pika

    def spy(inbox: mailboxes.Inbox, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        seen.append(body)
        arrived(inbox, channel, method, properties, body)

    monkeypatch.setattr(mailboxes.Inbox, "_arrived_by_pika", spy)
    return seen


@pytest.fixture
def filled(rabbitmq):
    """A source with messages of all properties, in the default exchange and another one."""
    source = rabbitmq(bindings=[{"exchange": "amq.direct", "routing_key": KEY}])
    source.send([b"%d" % n * 50 for n in range(len(PROPERTIES))], PROPERTIES)
    return source


def contents(rows: list[dict[str, Any]]) -> list[tuple[bytes, dict[str, Any]]]:
    return [(row["data"], {**json.loads(row["metadata"]), "redelivered": None}) for row in rows]


def test_all_properties_are_read_as_by_pika(filled, by_pika, monkeypatch):
    mine = received(filled)
    assert acknowledged(filled, "reject_and_requeue", mine) == []
    assert by_pika == []

    monkeypatch.setattr(DeliveryStream, "_on_data_available", DeliveryStream.__mro__[1]._on_data_available)
    theirs = received(filled)

    assert len(by_pika) == len(PROPERTIES)
    assert contents(mine) == contents(theirs)
    assert [row["redelivered"] for row in mine + theirs] == [False] * len(mine) + [True] * len(theirs)


@pytest.mark.parametrize("size", [1, 7, 64, 131])
def test_messages_may_arrive_in_any_pieces(filled, by_pika, monkeypatch, size):
    monkeypatch.setattr(io_services_utils._AsyncTransportBase, "_MAX_RECV_BYTES", size)

    rows = received(filled)

    assert [row["data"] for row in rows] == [b"%d" % n * 50 for n in range(len(PROPERTIES))]
    assert json.loads(rows[2]["metadata"])["app_id"] == "ä" * 100
    assert by_pika == []
    assert acknowledged(filled, "ack", rows) == []


def test_pika_reads_empty_and_large_payloads_and_binary_properties_in_order(rabbitmq, by_pika):
    source = rabbitmq()
    large = b"x" * 300_000
    payloads = [b"first", b"", large, b"between", b"binary", b"last"]
    source.send(payloads, [None, None, None, None, {"correlation_id": b"\xff"}, None])

    rows = received(source)

    assert [row["data"] for row in rows] == payloads
    assert by_pika == [b"", large, b"binary"]
    assert acknowledged(source, "ack", rows) == []


def test_messages_after_the_end_of_a_receive_return_to_the_queue(rabbitmq):
    source = rabbitmq(wait_time_s=5.0)
    source.send(numbers(1))
    batches = source.read(Share(messages=100), "r1")
    assert texts(next(batches).to_pylist()) == ["0"]
    batches.close()

    source.send(numbers(50))

    assert source.backlog().messages == 50
    assert sorted(texts(received(source, 50)), key=int) == texts([{"data": number} for number in numbers(50)])
