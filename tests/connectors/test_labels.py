"""Labels of a dead letter, in the format of each source."""

from typing import Any

import pytest

from pipeline_platform.connectors.kafka import KafkaSource, kafka_messages
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.pubsub.pubsub_source import requests_of
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.rabbitmq.mailboxes import Parcel
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.sqs.sqs_api import entry_of
from pipeline_platform.connectors.table_queue import TableQueue
from tests.fixtures.small_lake import Memory

LABELS = {"pipeline": "orders", "message_id": "7", "reason": "no price"}
HEADERS = {"headers": LABELS}
AWS = {name: {"DataType": "String", "StringValue": text} for name, text in LABELS.items()}


@pytest.mark.parametrize(
    ("source", "metadata"),
    [
        (Memory(name="m"), LABELS),
        (KinesisSource(name="k", stream="s"), None),
        (KafkaSource(name="k", bootstrap_servers="h:1", group_id="g", topics=["t"]), {**HEADERS, "key": "7"}),
        (RabbitmqSource(name="r", url="amqp://h", queue="q"), HEADERS),
        (PubsubSource(name="p", subscription="projects/p/subscriptions/s"), {"attributes": LABELS}),
        (SqsSource(name="s", queue_url="https://sqs.eu-west-1.amazonaws.com/1/q"), {"message_attributes": AWS}),
        (TableQueue(name="t", url="sqlite:////tmp/none", metadata_column="m"), LABELS),
        (TableQueue(name="t", url="sqlite:////tmp/none"), None),
    ],
    ids=lambda given: type(given).__name__,
)
def test_send_accepts_labels(source, metadata):
    assert source.labelled(LABELS) == metadata


def test_each_client_receives_labels_in_its_own_format():
    rabbitmq = RabbitmqSource(name="r", url="amqp://h", queue="q").labelled(LABELS)
    kafka = KafkaSource(name="k", bootstrap_servers="h:1", group_id="g", topics=["t"])
    pubsub = PubsubSource(name="p", subscription="projects/p/subscriptions/s")
    sqs = SqsSource(name="s", queue_url="https://sqs.eu-west-1.amazonaws.com/1/q.fifo").labelled(LABELS)

    assert Parcel.of(b"x", rabbitmq, "q", "x-id").properties.headers.items() >= LABELS.items()
    produced: list[dict[str, Any]] = []
    assert kafka_messages.produce(Recorder(produced), kafka, [(b"x", kafka.labelled(LABELS))]) == (1, [])
    assert produced[0]["headers"] == [(name, text.encode()) for name, text in LABELS.items()]
    ((published,),) = requests_of([(b"x", pubsub.labelled(LABELS))], pubsub)
    assert published["attributes"] == LABELS
    entry = entry_of(0, "x", sqs, is_fifo=True)
    assert (entry["MessageGroupId"], entry["MessageAttributes"]) == ("orders", AWS)


class Recorder:
    """A producer that records the messages to send."""

    def __init__(self, produced: list[dict[str, Any]]) -> None:
        self._produced = produced

    def produce(self, **message: Any) -> None:
        self._produced.append(message)

    def poll(self, timeout: float) -> None:
        """Do nothing: there are no events."""

    def flush(self) -> None:
        """Do nothing: no message is queued."""


def test_pubsub_labels_are_truncated_to_its_limit():
    source = PubsubSource(name="p", subscription="projects/p/subscriptions/s")

    assert source.labelled({"reason": "x" * 500, "kind": "\N{PACKAGE}" * 500, "stage": "価" * 500}) == {
        "attributes": {"reason": "x" * 500, "kind": "\N{PACKAGE}" * 256, "stage": "価" * 341}
    }


def test_a_fifo_queue_gets_a_group_and_deduplicates_a_repeated_message():
    queue = SqsSource(name="s", queue_url="https://sqs.eu-west-1.amazonaws.com/1/q.fifo")
    first, same, other = (queue.labelled(labels) for labels in (LABELS, LABELS, {**LABELS, "message_id": "8"}))
    assert first["attributes"]["MessageGroupId"] == "orders"
    assert first == same
    assert first["attributes"]["MessageDeduplicationId"] != other["attributes"]["MessageDeduplicationId"]


def test_a_table_queue_stores_a_message_with_or_without_labels(tmp_path):
    for column in (None, "said"):
        queue = TableQueue(name="t", url=f"sqlite:///{tmp_path}/{column}.sqlite", metadata_column=column)
        queue.create()
        said = queue.labelled(LABELS)
        queue.send([b"x"], [said] if said else None)
        rows = [row for share in queue.plan(9, 1, "r") for batch in queue.read(share, "r") for row in batch.to_pylist()]
        assert [row["data"] for row in rows] == [b"x"]
        assert (rows[0]["metadata"] is not None) == (column is not None)
