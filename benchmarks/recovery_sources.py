"""Sources of `benchmarks.recovery`, each on its own server, which can be killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import sqlalchemy as sa

from pipeline_platform.connectors.files import FileSource
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.rabbitmq.rabbitmq_options import Declare
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.source.patience import patiently
from servers import kafka, kinesis, postgres, pubsub, rabbitmq, sqs
from servers.server import Program, Server

SERVERS = Path(os.environ.get("PIPELINE_SERVERS", Path(__file__).parents[1] / ".servers"))
AWAY_S = 10.0
"""Seconds for which a killed server is unavailable."""

PUBSUB_LEASE_S = 60
"""Lease in seconds, well below the ten minutes after which the local Pub/Sub deletes messages without a lease."""


class Ground(NamedTuple):
    """A source of the benchmark.

    Attributes:
        connector: Name of its class.
        options: Options of the class.
        send: Sends payloads to it.
        left: Returns the number of unacknowledged messages, as far as the source reports it.
        server: Its server; None for a file.
        environment: Variables that its clients need.
    """

    connector: str
    options: dict[str, Any]
    send: Callable[[Sequence[bytes]], object]
    left: Callable[[], int]
    server: Server | None = None
    environment: dict[str, str] = {}

    def outage(self) -> None:
        """Kill the server and start it again after `AWAY_S`; a server with data in memory is halted for this time."""
        assert self.server is not None
        self.server.kill() if isinstance(self.server, Program) else self.server.stop()
        time.sleep(AWAY_S)
        self.server.start()
        patiently(self.left)  # it may be ready and still refuse connections


@contextmanager
def table(folder: Path) -> Iterator[Ground]:
    """Yield a table queue on SQLite."""
    yield _table_queue(f"sqlite:///{folder}/queue.sqlite")


@contextmanager
def on_postgres(folder: Path) -> Iterator[Ground]:
    """Yield a table queue on PostgreSQL."""
    with postgres.serve(SERVERS) as server:
        yield _table_queue(server.address)._replace(server=server)


def _table_queue(url: str) -> Ground:
    options = {"name": "queue", "url": url, "created_column": "created_at"}
    queue = TableQueue(**options)
    queue.create()

    def left() -> int:
        return (queue.backlog().messages or 0) + sum(messages for _, _, messages in queue.held())

    return Ground("TableQueue", options, queue.send, left)


@contextmanager
def files(folder: Path) -> Iterator[Ground]:
    """Yield a folder, which gets a file of lines at each call of `send`; `left` is the number of unfinished files."""
    root = folder / "incoming"
    root.mkdir()
    catalog = f"sqlite:///{folder}/files.sqlite"
    options = {"name": "queue", "root": str(root), "catalog": catalog, "list_every_s": 0.5}
    source = FileSource.model_validate(options)
    done = sa.text("SELECT count(*) FROM files WHERE is_done")

    def send(payloads: Sequence[bytes]) -> None:
        path = root / f"{uuid4().hex}.jsonl"
        path.with_suffix(".part").write_bytes(b"".join(payload + b"\n" for payload in payloads))
        path.with_suffix(".part").rename(path)

    def left() -> int:
        source.backlog()  # creates the catalog
        with sa.create_engine(catalog).connect() as connection:
            return len([*root.glob("*.jsonl")]) - int(connection.execute(done).scalar_one())

    yield Ground("FileSource", options, send, left)


@contextmanager
def on_sqs(folder: Path) -> Iterator[Ground]:
    """Yield a queue of the local SQS server."""
    with sqs.serve(SERVERS) as server:
        url, client = sqs.create_queue(server.address, "recovery"), sqs.client(server.address)

        def left() -> int:
            told = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
            return int(told["ApproximateNumberOfMessages"]) + int(told["ApproximateNumberOfMessagesNotVisible"])

        options = {"name": "queue", "queue_url": url, "endpoint_url": server.address, "region_name": sqs.REGION}
        yield Ground("SqsSource", options, lambda some: sqs.fill(url, some), left, server, sqs.ENVIRONMENT)


@contextmanager
def on_kafka(folder: Path) -> Iterator[Ground]:
    """Yield a topic with four partitions and a group, whose lag is `left`."""
    with kafka.serve(SERVERS) as server:
        topic, address = "recovery", server.address
        _create_topic(topic, address)
        options = {"name": "queue", "bootstrap_servers": address, "group_id": topic, "topics": [topic]}
        with closing(KafkaSource(**options, offset_reset_policy="earliest")) as source:

            def left() -> int:
                extents = patiently(source.extents).values()  # a broker that was just started does not have groups yet
                return sum((end.past or 0) - (end.begin if end.committed is None else end.committed) for end in extents)

            options |= {"offset_reset_policy": "earliest"}
            spread = [{"partition": n % 4} for n in range(100_000)]
            yield Ground("KafkaSource", options, lambda some: source.send(some, spread[: len(some)]), left, server)


def _create_topic(topic: str, address: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    # Closed after this call, because it would log every attempt to reach an unavailable broker.
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(topic, 4)])[topic].result(30)


@contextmanager
def on_kinesis(folder: Path) -> Iterator[Ground]:
    """Yield a stream with four shards. `left` reports whether messages wait or are leased, not their number."""
    with kinesis.serve(SERVERS) as server:
        stream = kinesis.create_stream(server.address, "recovery", 4)
        os.environ.update(kinesis.ENVIRONMENT)
        options = {"name": "queue", "stream": stream, "endpoint_url": server.address, "region_name": kinesis.REGION}
        control = ControlStore(f"sqlite:///{folder}/control.sqlite")
        with closing(control), closing(KinesisSource(**options)) as source:
            source.open(control)

            def left() -> int:
                return len(source.holders()) + (source.backlog().messages is None)

            yield Ground("KinesisSource", options, source.send, left, server, kinesis.ENVIRONMENT)


@contextmanager
def on_rabbitmq(folder: Path) -> Iterator[Ground]:
    """Yield a queue of the local RabbitMQ; its messages have ids."""
    with rabbitmq.serve(SERVERS) as server:
        options = {"name": "queue", "url": server.address, "queue": "recovery"}
        with closing(RabbitmqSource(**options, declare=Declare(durable=True))) as source:
            source.backlog()  # declares the queue

        def left() -> int:
            told = server.ctl("list_queues", "name", "messages", "--no-table-headers")
            return sum(int(line.split()[1]) for line in told.splitlines() if line.startswith("recovery"))

        def send(payloads: Sequence[bytes]) -> None:
            with closing(RabbitmqSource(**options)) as source:
                source.send(payloads)

        yield Ground("RabbitmqSource", options, send, left, server)


@contextmanager
def on_pubsub(folder: Path) -> Iterator[Ground]:
    """Yield a subscription of the local Pub/Sub, whose waiting messages are counted with a pull."""
    from google.api_core.exceptions import Cancelled, DeadlineExceeded
    from google.pubsub_v1 import SubscriberClient

    from pipeline_platform.connectors.pubsub.google_cloud import connected

    with pubsub.serve(SERVERS) as server:
        subscription = pubsub.subscribe(server.address, f"recovery-{uuid4().hex[:8]}", PUBSUB_LEASE_S)
        topic = subscription.replace("/subscriptions/", "/topics/")
        options: dict[str, Any] = {"name": "queue", "subscription": subscription, "topic": topic}
        options |= {"emulator_host": server.address, "ack_deadline_s": PUBSUB_LEASE_S}

        def left() -> int:
            with connected(SubscriberClient, server.address) as client:
                try:
                    found = client.pull(subscription=subscription, max_messages=1_000, timeout=0.5).received_messages
                except (Cancelled, DeadlineExceeded):  # the client may cancel the stream first
                    return 0
                ids = [message.ack_id for message in found]
                if ids:
                    client.modify_ack_deadline(subscription=subscription, ack_ids=ids, ack_deadline_seconds=0)
                return len(ids)

        def send(payloads: Sequence[bytes]) -> None:
            with closing(PubsubSource(**options)) as source:
                source.send(payloads)

        yield Ground("PubsubSource", options, send, left, server)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "table": table,
    "postgres": on_postgres,
    "files": files,
    "sqs": on_sqs,
    "kafka": on_kafka,
    "kinesis": on_kinesis,
    "rabbitmq": on_rabbitmq,
    "pubsub": on_pubsub,
}
