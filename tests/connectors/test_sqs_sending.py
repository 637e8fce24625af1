"""Sending to SQS, and FIFO queues: batches within a call's limits, groups in order, refusals named, metadata."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.sqs.sqs_messages import sequence_of
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import SourceError
from tests.fixtures.small_lake import handled
from tests.fixtures.sqs_between import Between, between


@pytest.fixture
def fake(sqs_server: str) -> Iterator[Between]:
    with between(sqs_server) as one:
        yield one


@pytest.fixture
def made(fake: Between, sqs_queue: Callable[..., str]) -> Callable[..., SqsSource]:
    """A source over a new queue, created with attributes by SQS's names."""

    def make(**attributes: str) -> SqsSource:
        url = sqs_queue(**attributes)
        return SqsSource(name="flights", queue_url=url, endpoint_url=fake.endpoint, message_attribute_names=("All",))

    return make


FIFO = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}


def received(source: SqsSource, demand: int = 1_000) -> list[dict[str, Any]]:
    return [
        row for share in source.plan(demand, 2, "r1") for batch in source.read(share, "r1") for row in batch.to_pylist()
    ]


def group(name: str, **attributes: str) -> dict[str, Any]:
    return {"attributes": {"MessageGroupId": name, **attributes}}


def test_messages_are_sent_in_tens(made: Callable[..., SqsSource], fake: Between) -> None:
    flights = made()
    payloads = [f"Żółć {number}".encode() for number in range(205)]

    assert flights.send(payloads) == 205

    assert fake.calls["SendMessageBatch"] == 21
    assert sorted(row["data"] for row in received(flights)) == sorted(payloads)


def test_a_call_takes_no_more_than_a_mebibyte(made: Callable[..., SqsSource], fake: Between) -> None:
    sizes = list[int]()
    fake.meddle["SendMessageBatch"] = lambda _, body: sizes.append(len(body["Entries"]))
    whole, quarter = b"x" * (2**20 - 100), b"a" * (2**18 - 1)

    assert made().send([whole, b"y" * 100, b"z", *[quarter] * 5]) == 8

    assert sorted(sizes) == [1, 2, 5]


def test_what_a_received_message_says_can_be_sent_with_it_again(made: Callable[..., SqsSource]) -> None:
    first, second = made(), made()
    trace = {"DataType": "String", "StringValue": "t1"}
    raw = {"DataType": "Binary", "BinaryValue": "AP8="}
    first.send([b"one", b"two"], [{"message_attributes": {"trace": trace, "raw": raw}}, None])
    rows = sorted(received(first), key=lambda row: bytes(row["data"]))

    second.send([row["data"] for row in rows], [json.loads(row["metadata"]) for row in rows])

    again = {row["data"]: json.loads(row["metadata"]) for row in received(second)}
    assert again[b"one"]["message_attributes"] == {"trace": trace, "raw": raw}
    assert "message_attributes" not in again[b"two"]


@pytest.mark.parametrize(
    ("payloads", "said"),
    [
        ([b"fine", b"not \xff fine"], "message 1 is not UTF-8, and SQS takes nothing else"),
        ([b"fine", b"\x00"], r"refused 1 messages, the first of them number 1: InvalidMessageContents.*1 were sent"),
        ([b"x" * (2**20 + 1)], "BatchRequestTooLong"),
    ],
)
def test_what_cannot_be_sent_is_named(made: Callable[..., SqsSource], payloads: list[bytes], said: str) -> None:
    with pytest.raises(SourceError, match=said):
        made().send(payloads)


def test_more_or_fewer_metadata_than_payloads_are_refused(made: Callable[..., SqsSource]) -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        made().send([b"one", b"two"], [None])


def test_a_fifo_queue_is_sent_groups_in_order_and_wants_a_group(made: Callable[..., SqsSource]) -> None:
    flights = made(**FIFO)
    with pytest.raises(SourceError, match=r"number 0: MissingParameter: .*MessageGroupId"):
        flights.send([b"one"])

    assert flights.send((b"%d" % n for n in range(60)), (group("UA") for _ in range(60))) == 60
    seen = list[dict[str, Any]]()
    while rows := received(flights):
        seen += rows
        assert flights.ack(flights.queue_url, [row["ack_id"] for row in rows]) == []

    assert [row["data"] for row in seen] == [b"%d" % n for n in range(60)]
    assert [row["sequence"] for row in seen] == sorted({row["sequence"] for row in seen})
    assert {row["partition"] for row in seen} == {"UA"}


def test_a_message_of_the_same_deduplication_id_is_there_once(made: Callable[..., SqsSource]) -> None:
    flights = made(FifoQueue="true")
    same = group("UA", MessageDeduplicationId="1")

    assert flights.send([b"one", b"one"], [same, same]) == 2

    assert len(received(flights)) == 1


def test_while_messages_of_a_group_are_held_no_other_receive_is_given_any_of_it(
    made: Callable[..., SqsSource],
) -> None:
    flights = made(**FIFO)
    flights.send((b"%d" % n for n in range(40)), (group("AB"[n % 2]) for n in range(40)))

    first, second = received(flights), received(flights)

    assert {row["partition"] for row in first} == {"A", "B"}
    assert second == []
    flights.release(flights.queue_url, [row["ack_id"] for row in first if row["partition"] == "A"])
    third = received(flights)
    assert {row["partition"] for row in third} == {"A"}
    assert min(row["sequence"] for row in third) == min(row["sequence"] for row in first if row["partition"] == "A")


def test_sequence_numbers_of_aws_keep_their_order_in_63_bits() -> None:
    numbers = ["18849496460467696128", "18858518178214384128", "18877498032037103616", "18950000000000000000"]

    fitted = [sequence_of(number) for number in numbers]

    assert fitted == sorted(fitted)
    assert all(0 <= number < 2**63 for number in fitted)


def test_what_sqs_says_of_a_message_reaches_the_callback(made: Callable[..., SqsSource], tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Seeing(Pipeline):
        name = "seeing"
        producer = Producer(source="flights")

        def handle_message(self, message: Message, context: Any) -> Message:
            seen.append(message.metadata)
            return message

    flights, trace = made(), {"trace": {"DataType": "String", "StringValue": "t1"}}
    flights.send([b"one"], [{"message_attributes": trace}])

    handled(Lake(root=str(tmp_path)), Seeing, source=flights)

    (metadata,) = seen
    assert metadata["message_attributes"] == trace
    assert metadata["attributes"]["ApproximateReceiveCount"] == "1"
    assert metadata["md5_of_body"] == hashlib.md5(b"one").hexdigest()
