"""The customers as they are in a database: one row for each, from the changes that Debezium sends to Kafka.

`customers/changes` contains every change. `customers/changes_latest` contains one row per customer, and none for a
deleted customer. Add both to the definitions:

    platform_definitions([Customers], sources={"customers_topic": KafkaSource(...)}, assets=[customers_latest])
"""

import json

from pydantic import BaseModel

from pipeline_platform import Pipeline, Producer, TableBatcher
from pipeline_platform.orchestration import latest_of
from pipeline_platform.testing import test_batch


class Customer(BaseModel):
    id: int
    name: str | None = None  # null in the change that deletes a customer
    city: str | None = None
    lsn: int  # position in PostgreSQL's log: grows with each change
    offset: int  # position in Kafka: decides between changes with an equal lsn
    deleted: bool = False


class Customers(Pipeline):
    """Every change of a customer. Reads of a snapshot are changes, too."""

    name = "customers"
    producer = Producer(source="customers_topic")
    batchers = {"changes": TableBatcher(schema=Customer)}

    def handle_message(self, message, context):
        if not message.data:
            return message.skip("tombstone of Kafka, which follows a delete")
        event = message.json()
        change = event.get("payload", event)  # `payload` if the converter of Debezium adds schemas
        place = {"lsn": change["source"]["lsn"], "offset": message.metadata["offset"]}
        match change["op"]:
            case "c" | "u" | "r":
                return message.put(Customer(**change["after"], **place), batcher="changes")
            case "d":  # of the row before, only the key is certain
                return message.put(Customer(id=change["before"]["id"], **place, deleted=True), batcher="changes")
            case op:
                return message.failed(f"op {op!r}, such as a truncate, is not a change of one customer", retry=False)


customers_latest = latest_of(Customers, "changes", key="id", order=["lsn", "offset"], deleted="deleted")


def envelope(op, lsn, before=None, after=None):
    return json.dumps({"before": before, "after": after, "op": op, "ts_ms": 0, "source": {"lsn": lsn}})


def test_each_operation_is_a_change_of_its_customer():
    ada = {"id": 1, "name": "Ada", "city": "London"}
    payloads = [
        envelope("r", 10, after=ada),
        json.dumps({"schema": {}, "payload": json.loads(envelope("u", 11, ada, {**ada, "city": "Turin"}))}),
        envelope("d", 12, before={"id": 1, "name": None, "city": None}),
        "",
        envelope("t", 13),
    ]

    done = test_batch(Customers, payloads, metadata=[{"offset": offset} for offset in range(5)])

    changes = [(change.data.city, change.data.lsn, change.data.deleted) for change in done.successful if change.data]
    assert changes == [("London", 10, False), ("Turin", 11, False), (None, 12, True)]
    assert [message.reason for message in done.skipped] == ["tombstone of Kafka, which follows a delete"]
    assert len(done.failed) == 1
