"""The demo's queue: a table, or a queue of an SQS server."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import NamedTuple

from demo import sqs
from demo.place import PROJECT, Kind, Place
from resources.table_queue import TableQueue


class Queue(NamedTuple):
    """A queue that exists.

    Attributes:
        environment: Variables by which `definitions.py` finds it.
        fill: Puts payloads into it, a table all or none.
        left: Returns how many messages are not acknowledged.
    """

    environment: Mapping[str, str]
    fill: Callable[[list[bytes]], int]
    left: Callable[[], int]


@contextmanager
def opened(place: Place, source: Kind) -> Iterator[Queue]:
    """Open the queue, and create it if there is none. An SQS queue ends with the block."""
    if source == "table":
        yield _table(place)
    else:
        with sqs.serve(PROJECT / ".servers") as endpoint:
            yield _of_sqs(endpoint)


def _table(place: Place) -> Queue:
    queue = TableQueue(name="flights_queue", url=f"sqlite:///{place.queue}", created_column="created_at")
    queue.create()

    def left() -> int:
        with closing(sqlite3.connect(f"file:{place.queue}?mode=ro", uri=True, timeout=30)) as database:
            return int(database.execute("SELECT count(*) FROM messages").fetchone()[0])

    return Queue({}, queue.enqueue, left)


def _of_sqs(endpoint: str) -> Queue:
    url, client = sqs.create_queue(endpoint, "flights"), sqs.client(endpoint)

    def left() -> int:
        told = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        return int(told["ApproximateNumberOfMessages"]) + int(told["ApproximateNumberOfMessagesNotVisible"])

    environment = sqs.ENVIRONMENT | {
        "AWS_REGION": sqs.REGION,
        "AWS_ENDPOINT_URL": endpoint,
        "FLIGHTS_SQS_URL": url,
        "FLIGHTS_SQS_VISIBILITY": "400",  # seconds: outlasts a run of all flights
    }
    return Queue(environment, lambda payloads: sqs.fill(url, payloads), left)
