"""Queues of the demo: a table, or a queue of a server from the environment or started by the demo."""

from __future__ import annotations

import gzip
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from uuid import uuid4

from demo.place import PROJECT, Kind, Place
from pipeline_platform.connectors.files import FileSource
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.rabbitmq.rabbitmq_options import Declare
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.source.patience import patiently
from servers import kafka, kinesis, postgres, pubsub, rabbitmq, sqs

Fill = Callable[[list[bytes]], int]

_ROWS_PER_FILE = 10_000


class Queue(NamedTuple):
    """A queue of the demo.

    Attributes:
        environment: Environment variables for `definitions.py`.
        fill: Sends payloads; a table gets all or none.
        left: Returns the number of unacknowledged messages; None if the server cannot count them during runs.
        drained: Returns the exact number of unacknowledged messages while no run is active.
    """

    environment: Mapping[str, str]
    fill: Fill
    left: Callable[[], int | None]
    drained: Callable[[], int]


@contextmanager
def opened(place: Place, source: Kind) -> Iterator[Queue]:
    """Open the queue, and create it if it is missing. Servers that the demo starts end with the block."""
    kinds = {"table": _table, "postgres": _postgres, "sqs": _sqs, "kafka": _kafka, "kinesis": _kinesis}
    kinds |= {"rabbitmq": _rabbitmq, "files": _files}
    with kinds.get(source, _pubsub)(place) as queue:
        yield queue._replace(environment={"FLIGHTS_SOURCE": source, **queue.environment})


@contextmanager
def _address(server: ModuleType, variable: str) -> Iterator[str]:
    """Yield the address in the environment, or the address of a server that runs until the block ends."""
    if given := os.environ.get(variable):
        yield given
        return
    with server.serve(PROJECT / ".servers") as started:
        yield started.address


@contextmanager
def _table(place: Place) -> Iterator[Queue]:
    table = TableQueue(name="flights_queue", url=f"sqlite:///{place.queue}", created_column="created_at")
    table.create()

    def rows() -> int:
        with closing(sqlite3.connect(f"file:{place.queue}?mode=ro", uri=True, timeout=30)) as database:
            return int(database.execute("SELECT count(*) FROM messages").fetchone()[0])

    yield Queue({}, table.send, rows, rows)


@contextmanager
def _files(place: Place) -> Iterator[Queue]:
    catalog = f"sqlite:///{place.catalog}"
    source = FileSource(name="flights_queue", root=str(place.incoming), catalog=catalog)

    @cache
    def rows(path: Path) -> int:
        return gzip.decompress(path.read_bytes()).count(b"\n")

    def fill(payloads: list[bytes]) -> int:
        place.incoming.mkdir()
        for number, first in enumerate(range(0, len(payloads), _ROWS_PER_FILE)):
            content = b"".join(payload + b"\n" for payload in payloads[first : first + _ROWS_PER_FILE])
            path = place.incoming / f"{number:03}.jsonl.gz"
            path.with_suffix(".part").write_bytes(gzip.compress(content, 1))
            path.with_suffix(".part").rename(path)  # only complete files appear
        return len(payloads)

    def left() -> int:
        source.backlog()  # creates the catalog
        with closing(sqlite3.connect(f"file:{place.catalog}?mode=ro", uri=True, timeout=30)) as database:
            done = {path for (path,) in database.execute("SELECT path FROM files WHERE is_done")}
        return sum(rows(path) for path in place.incoming.glob("*.gz") if path.name not in done)

    with closing(source):
        yield Queue({}, fill, left, left)


@contextmanager
def _postgres(_place: Place) -> Iterator[Queue]:
    with _address(postgres, "POSTGRES_URL") as url:
        name = f"flights_{uuid4().hex[:8]}"
        table = TableQueue(name="flights_queue", url=url, table=name, created_column="created_at")
        table.create()

        def left() -> int:
            return (table.backlog().messages or 0) + sum(messages for _, _, messages in table.held())

        yield Queue({"FLIGHTS_POSTGRES_URL": url, "FLIGHTS_TABLE": name}, table.send, left, left)


@contextmanager
def _sqs(_place: Place) -> Iterator[Queue]:
    if url := os.environ.get("FLIGHTS_SQS_URL"):
        yield _sqs_queue(url, {})
        return
    with sqs.serve(PROJECT / ".servers") as server:
        environment = sqs.ENVIRONMENT | {"AWS_REGION": sqs.REGION, "AWS_ENDPOINT_URL": server.address}
        yield _sqs_queue(sqs.create_queue(server.address, "flights"), environment)


def _sqs_queue(url: str, environment: Mapping[str, str]) -> Queue:
    import boto3

    endpoint = environment.get("AWS_ENDPOINT_URL")
    client = sqs.client(endpoint) if endpoint else boto3.client("sqs")
    fill = SqsSource(name="flights_queue", queue_url=url).send

    def left() -> int:
        attributes = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        waiting = attributes["ApproximateNumberOfMessages"]
        return int(waiting) + int(attributes["ApproximateNumberOfMessagesNotVisible"])

    # 400 s are longer than a run of all flights.
    found = {**environment, "FLIGHTS_SQS_URL": url, "FLIGHTS_SQS_VISIBILITY": "400"}
    return Queue(found, (lambda payloads: sqs.fill(url, payloads)) if endpoint else fill, left, left)


@contextmanager
def _kafka(_place: Place) -> Iterator[Queue]:
    from confluent_kafka.admin import AdminClient, NewTopic

    with _address(kafka, "KAFKA_BOOTSTRAP_SERVERS") as address:
        topic = f"flights-{uuid4().hex[:8]}"
        admin = AdminClient({"bootstrap.servers": address})
        admin.create_topics([NewTopic(topic, 4)])[topic].result(30)
        source = KafkaSource(
            name="flights_queue",
            bootstrap_servers=address,
            group_id=topic,
            topics=(topic,),
            offset_reset_policy="earliest",
        )

        def left() -> int:
            extents = patiently(source.extents).values()  # a broker that was just started does not have groups yet
            return sum(
                (extent.past or 0) - (extent.begin if extent.committed is None else extent.committed)
                for extent in extents
            )

        with closing(source):
            environment = {"KAFKA_BOOTSTRAP_SERVERS": address, "FLIGHTS_TOPIC": topic}
            yield Queue(environment, source.send, left, left)
            admin.delete_topics([topic])[topic].result(30)


@contextmanager
def _kinesis(place: Place) -> Iterator[Queue]:
    if stream := os.environ.get("FLIGHTS_STREAM"):
        yield _kinesis_queue(place, stream, {})
        return
    with kinesis.serve(PROJECT / ".servers") as server:
        environment = kinesis.ENVIRONMENT | {"AWS_REGION": kinesis.REGION, "AWS_ENDPOINT_URL": server.address}
        yield _kinesis_queue(place, kinesis.create_stream(server.address, "flights", 4), environment)


def _kinesis_queue(place: Place, stream: str, environment: Mapping[str, str]) -> Queue:
    options = {"endpoint_url": environment.get("AWS_ENDPOINT_URL"), "region_name": environment.get("AWS_REGION")}
    source = KinesisSource(name="flights_queue", stream=stream, **options)

    def still_there() -> int:
        source.open(place.control_store())
        shares = source.plan(1_000, 1, "drained")
        left = sum(batch.num_rows for share in shares for batch in source.read(share, "drained"))
        source.abandon("drained", list)
        return int(left)

    return Queue({**environment, "FLIGHTS_STREAM": stream}, source.send, lambda: None, still_there)


@contextmanager
def _rabbitmq(_place: Place) -> Iterator[Queue]:
    with _address(rabbitmq, "RABBITMQ_URL") as url:
        name = f"flights-{uuid4().hex[:8]}"
        source = RabbitmqSource(name="flights_queue", url=url, queue=name, declare=Declare(durable=True))

        def ready() -> int:
            return source.backlog().messages or 0

        with closing(source):
            environment = {"RABBITMQ_URL": url, "FLIGHTS_RABBITMQ_QUEUE": name}

            def fill(payloads: list[bytes]) -> int:
                return source.send(payloads, [{"message_id": str(number)} for number in range(len(payloads))])

            # The count leaves out messages of open connections, which exist only during runs.
            yield Queue(environment, fill, lambda: None, ready)


@contextmanager
def _pubsub(_place: Place) -> Iterator[Queue]:
    with _address(pubsub, "PUBSUB_EMULATOR_HOST") as address:
        name = f"flights-{uuid4().hex[:8]}"
        subscription = pubsub.subscribe(address, name)
        source = PubsubSource(
            name="flights_queue", subscription=name, topic=name, project=pubsub.PROJECT, emulator_host=address
        )

        def still_there() -> int:
            (share,) = source.plan(10, 1, "drained")
            return sum(batch.num_rows for batch in source.read(share, "drained"))

        with closing(source):
            environment = {"PUBSUB_EMULATOR_HOST": address, "FLIGHTS_SUBSCRIPTION": subscription}
            yield Queue(environment, source.send, lambda: None, still_there)
