"""Labels of a dead letter, as each source takes them beside a payload."""

import pytest

from pipeline_platform.source.contract import Source
from resources.kafka import KafkaSource
from resources.pubsub import PubsubSource
from resources.rabbitmq import RabbitmqSource
from resources.sqs import SqsSource
from resources.table_queue import TableQueue
from tests.fixtures.small_lake import Memory

LABELS = {"pipeline": "orders", "message_id": "7", "reason": "no price"}
HEADERS = {"headers": LABELS}
AWS = {name: {"DataType": "String", "StringValue": text} for name, text in LABELS.items()}


@pytest.mark.parametrize(
    ("source", "metadata"),
    [
        (Memory(name="m"), LABELS),
        (KafkaSource(name="k", bootstrap_servers="h:1", group_id="g", topics=["t"]), {**HEADERS, "key": "7"}),
        (RabbitmqSource(name="r", url="amqp://h", queue="q"), HEADERS),
        (PubsubSource(name="p", subscription="projects/p/subscriptions/s"), {"attributes": LABELS}),
        (SqsSource(name="s", queue_url="https://sqs.eu-west-1.amazonaws.com/1/q"), {"message_attributes": AWS}),
        (TableQueue(name="t", url="sqlite:////tmp/none", metadata_column="m"), LABELS),
        (TableQueue(name="t", url="sqlite:////tmp/none"), None),
    ],
    ids=lambda given: type(given).__name__,
)
def test_labels_are_what_send_takes(source: Source, metadata: object) -> None:
    assert source.labelled(LABELS) == metadata


def test_a_fifo_queue_gets_a_group_and_knows_a_letter_that_comes_again() -> None:
    queue = SqsSource(name="s", queue_url="https://sqs.eu-west-1.amazonaws.com/1/q.fifo")

    first, same, other = (queue.labelled(labels) for labels in (LABELS, LABELS, {**LABELS, "message_id": "8"}))

    assert first["attributes"]["MessageGroupId"] == "orders"
    assert first == same
    assert first["attributes"]["MessageDeduplicationId"] != other["attributes"]["MessageDeduplicationId"]


def test_a_table_queue_keeps_a_letter_with_or_without_labels(tmp_path) -> None:
    for column in (None, "said"):
        queue = TableQueue(name="t", url=f"sqlite:///{tmp_path}/{column}.sqlite", metadata_column=column)
        queue.create()
        said = queue.labelled(LABELS)
        queue.send([b"x"], [said] if said else None)

        rows = [row for share in queue.plan(9, 1, "r") for one in queue.read(share, "r") for row in one.to_pylist()]
        assert [row["data"] for row in rows] == [b"x"]
        assert (rows[0]["metadata"] is not None) == (column is not None)
