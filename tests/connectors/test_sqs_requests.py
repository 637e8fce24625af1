"""Requests to SQS: whole calls within its limits, quotas, sending, and FIFO groups in order."""

import json
import logging
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.sqs.sqs_api import sequence_of
from pipeline_platform.source.contract import Share, SourceError
from servers import sqs
from tests.fixtures.received import received
from tests.fixtures.sqs_between import Cut, Refusal, between

BEYOND_TWELVE_HOURS = (
    "Value 900 for parameter VisibilityTimeout is invalid. Reason: Total VisibilityTimeout for the message is beyond "
    "the limit [43200 seconds]"
)


@pytest.fixture
def fake(sqs_server):
    with between(sqs_server) as server:
        yield server


@pytest.fixture
def made(fake, sqs_queue):
    """Return a source of a new queue with a number of messages, through a fake client."""

    def make(waiting: int = 0, queue: Mapping[str, str] = MappingProxyType({}), **options: Any) -> SqsSource:
        url = sqs_queue(**queue)
        sqs.fill(url, (f"message {number}" for number in range(waiting)))
        options = {"message_attribute_names": ("All",), **options}
        return SqsSource(name="flights", queue_url=url, endpoint_url=fake.endpoint, **options)

    return make


def held(source: SqsSource, share: Share) -> list[str]:
    return [ack_id for batch in source.read(share, "r1") for ack_id in batch.column("ack_id").to_pylist()]


def planned(flights: SqsSource, demand: int, concurrency: int) -> list[int]:
    return [share.messages for share in flights.plan(demand, concurrency, "r1")]


def test_shares_are_equal_numbers_of_whole_calls(made):
    flights = made(110)
    asked = {(100, 2): [50, 50], (101, 2): [60, 41], (3, 4): [3], (25, 4): [10, 10, 5], (99, 1): [99], (0, 2): []}
    assert {(demand, tasks): planned(flights, demand, tasks) for demand, tasks in asked} == asked


def test_a_plan_is_limited_by_the_backlog_but_at_least_a_call_unless_polls_are_long(made):
    assert [planned(made(waiting), 1_000, 2) for waiting in (0, 7, 25)] == [[10], [10], [20, 5]]
    assert planned(made(0, wait_time_seconds=1), 40, 2) == [20, 20]


def test_a_plan_is_limited_by_the_quota(made, caplog):
    flights = made(60, max_in_flight=50)
    assert flights.backlog().messages == 50
    assert len(held(flights, Share(messages=30))) == 30

    with caplog.at_level(logging.WARNING):
        (share,) = flights.plan(30, 1, "r2")

    assert share.messages == 20
    assert "max_in_flight (50) leaves 20" in caplog.text
    assert len(held(flights, share)) == 20
    assert flights.plan(30, 1, "r3") == []
    assert flights.backlog().messages == 0, "no run can be asked for what cannot be received"


@pytest.mark.parametrize("calls", [0, 5])
def test_a_share_ends_when_the_queue_reaches_its_quota(made, fake, caplog, calls):
    flights = made(200)
    fake.refuse("ReceiveMessage", "OverLimit", "Too many messages in flight", beyond=calls)

    with caplog.at_level(logging.WARNING):
        assert len(held(flights, Share(messages=200))) == 10 * calls

    assert "OverLimit" in caplog.text
    assert fake.calls["ReceiveMessage"] < 20, "it is not asked on and on"


def test_a_share_ends_after_a_third_of_the_lease(made, fake):
    flights = made(500, visibility_timeout=1)

    def slow(number: int, body: object) -> None:
        time.sleep(0.2)

    fake.meddle["ReceiveMessage"] = slow

    assert 0 < len(held(flights, Share(messages=500))) < 500


def test_a_refused_extension_after_twelve_hours_is_not_a_lost_lease(made, fake, caplog):
    flights = made(3)
    handles = held(flights, Share(messages=3))
    refused = {"SenderFault": True, "Code": "InvalidParameterValue", "Message": BEYOND_TWELVE_HOURS}
    fake.meddle["ChangeMessageVisibilityBatch"] = lambda _, body: {
        "Failed": [{"Id": entry["Id"], **refused} for entry in body["Entries"]]
    }

    with caplog.at_level(logging.WARNING):
        assert flights.extend("r1", lambda: [(flights.queue_url, handles)])

    assert "Could not renew the leases of 3 of 3 messages from flights: InvalidParameterValue" in caplog.text


def test_a_slow_extension_is_logged_with_the_option_to_change(made, fake, caplog):
    flights = made(20, visibility_timeout=1)
    handles = held(flights, Share(messages=20))

    def slow(number: int, body: object) -> None:
        time.sleep(0.5)

    fake.meddle["ChangeMessageVisibilityBatch"] = slow
    with caplog.at_level(logging.WARNING):
        flights.extend("r1", lambda: [(flights.queue_url, handles)])

    assert "more than a third of visibility_timeout (1 s)" in caplog.text
    assert "Raise it, or lower the demand of a run" in caplog.text


FIFO = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}


def test_messages_are_sent_in_tens(made, fake):
    flights = made()
    payloads = [f"Żółć {number}".encode() for number in range(205)]

    assert flights.send(payloads) == 205

    assert fake.calls["SendMessageBatch"] == 21
    assert sorted(row["data"] for row in received(flights)) == sorted(payloads)


def test_a_call_takes_no_more_than_a_mebibyte(made, fake):
    sizes = list[int]()
    fake.meddle["SendMessageBatch"] = lambda _, body: sizes.append(len(body["Entries"]))
    whole, quarter = b"x" * (2**20 - 100), b"a" * (2**18 - 1)

    assert made().send([whole, b"y" * 100, b"z", *[quarter] * 5]) == 8

    assert sorted(sizes) == [1, 2, 5]


def test_metadata_of_a_received_message_can_be_sent_again(made):
    first, second = made(), made()
    trace = {"DataType": "String", "StringValue": "t1"}
    raw = {"DataType": "Binary", "BinaryValue": "AP8="}
    first.send([b"one", b"two"], [{"message_attributes": {"trace": trace, "raw": raw}}, None])
    rows = sorted(received(first), key=lambda row: bytes(row["data"]))

    second.send([row["data"] for row in rows], [json.loads(row["metadata"]) for row in rows])

    again = {row["data"]: json.loads(row["metadata"]) for row in received(second)}
    assert again[b"one"]["message_attributes"] == {"trace": trace, "raw": raw}
    assert "message_attributes" not in again[b"two"]


def test_a_binary_value_is_sent_as_bytes_or_base64_and_nothing_else(made):
    flights = made()
    text, data, other = ({"message_attributes": {"raw": binary(value)}} for value in ("AP8=", b"\x00\xff", "no base64"))

    flights.send([b"one", b"two"], [text, data])

    assert [json.loads(row["metadata"])["message_attributes"]["raw"] for row in received(flights)] == [
        binary("AP8=")
    ] * 2
    with pytest.raises(SourceError, match="a BinaryValue of message 1 must be bytes or base64"):
        flights.send([b"one", b"two"], [None, other])


def binary(value: str | bytes) -> dict[str, Any]:
    return {"DataType": "Binary", "BinaryValue": value}


@pytest.mark.parametrize(
    ("payloads", "said"),
    [
        ([b"fine", b"not \xff fine"], "message 1 must be UTF-8 text"),
        ([b"fine", b"\x00"], r"refused 1 of 2 messages.*message 1: InvalidMessageContents"),
        ([b"x" * (2**20 + 1)], "BatchRequestTooLong"),
    ],
)
def test_messages_that_cannot_be_sent_are_named(made, payloads, said):
    with pytest.raises(SourceError, match=said):
        made().send(payloads)


def test_a_fifo_queue_requires_a_group(made):
    with pytest.raises(SourceError, match=r"message 0: MissingParameter: .*MessageGroupId"):
        made(queue=FIFO).send([b"one"])


def test_a_repeated_receive_of_a_fifo_queue_gets_the_messages_of_the_lost_reply(made, fake):
    flights, ids = made(queue=FIFO), list[str | None]()

    def cut_first(number: int, body: dict[str, Any]) -> Cut | None:
        ids.append(body.get("ReceiveRequestAttemptId"))
        return Cut(after=True) if number == 1 else None

    fake.meddle["ReceiveMessage"] = cut_first
    list(flights.read(Share(messages=10), "r1"))

    first, repeated, *later = ids
    assert first == repeated, "by this id, SQS finds the messages"
    assert first is not None
    assert len({first, *later}) == 1 + len(later)


def test_a_receive_continues_with_another_id_if_the_messages_of_the_lost_reply_have_changed(made, fake):
    flights = made(queue=FIFO)
    flights.send([b"one"], [{"attributes": {"MessageGroupId": "group"}}])
    changed = "Value 1 for parameter ReceiveRequestAttemptId is invalid. Reason: The messages have changed."
    fake.meddle["ReceiveMessage"] = lambda number, _: Refusal("InvalidParameterValue", changed) if number == 1 else None

    assert [row["data"] for row in received(flights)] == [b"one"]


def test_sequence_numbers_of_aws_keep_their_order_in_63_bits():
    numbers = ["18849496460467696128", "18858518178214384128", "18877498032037103616", "18950000000000000000"]

    fitted = [sequence_of(number) for number in numbers]

    assert fitted == sorted(fitted)
    assert all(0 <= number < 2**63 for number in fitted)
