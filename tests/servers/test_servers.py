"""The local servers of tests and the demo: they keep their data, and leave no process behind."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from servers import glue, kafka, kinesis, postgres, pubsub, rabbitmq, s3, sqs
from servers.server import Server
from tests.fixtures.kafka import create_topic
from tests.fixtures.keeper import PROJECT, kept
from tests.fixtures.rabbitmq import create_queue
from tests.fixtures.s3 import lake_on
from tests.fixtures.servers import ready

SERVE = """
import sys
from importlib import import_module
from contextlib import suppress
from pathlib import Path
with import_module(f"servers.{sys.argv[1]}").serve(Path(sys.argv[2])) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


def over_kafka(server: Server) -> Callable[[], bytes]:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

    topic = create_topic(server.address)
    producer = Producer({"bootstrap.servers": server.address})
    producer.produce(topic, b"kept")
    assert producer.flush(30) == 0

    def take() -> bytes:
        consumer = Consumer({"bootstrap.servers": server.address, "group.id": "one"})
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        message = consumer.poll(30)
        consumer.close()
        assert message is not None
        return message.value()

    return take


def over_rabbitmq(server: rabbitmq.RabbitMQ) -> Callable[[], bytes]:
    import pika

    queue = create_queue(server.address)
    assert queue in server.ctl("list_queues", "name"), "its own command finds the server"
    with pika.BlockingConnection(pika.URLParameters(server.address)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue, b"kept", pika.BasicProperties(delivery_mode=2))

    def take() -> bytes:
        with pika.BlockingConnection(pika.URLParameters(server.address)) as connection:
            return connection.channel().basic_get(queue)[2]

    return take


def over_s3(server: Server) -> Callable[[], bytes]:
    lake = lake_on(server)
    lake.write("kept", b"kept")

    def take() -> bytes:
        return lake.read("kept") or b""

    return take


def over_postgres(server: Server) -> Callable[[], bytes]:
    import psycopg

    with psycopg.connect(server.address) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 'kept'::bytea AS data")

    def take() -> bytes:
        with psycopg.connect(server.address) as connection, connection.cursor(binary=True) as cursor:
            (data,) = cursor.execute("SELECT data FROM kept").fetchone() or ()
            return bytes(data)

    return take


@pytest.mark.faults
@pytest.mark.parametrize(
    ("module", "put"),
    [(kafka, over_kafka), (postgres, over_postgres), (rabbitmq, over_rabbitmq), (s3, over_s3)],
    ids=["kafka", "postgres", "rabbitmq", "s3"],
)
def test_a_stopped_server_releases_its_resources(module, put, servers_folder):
    ready(module)
    before = descendants()
    with module.serve(servers_folder) as server:
        address, started = server.address, started_since(before)
        assert started
        take = put(server)
        assert take() == b"kept"

        server.stop()
        assert not remaining(started), "a stopped server leaves nothing running"
        server.start()

        assert (server.address, take()) == (address, b"kept")
        started = started_since(before)
    assert not remaining(started)


def test_pubsub_releases_its_resources_after_a_halt(servers_folder, monkeypatch):
    from google.cloud import pubsub_v1

    ready(pubsub)
    before = descendants()
    with pubsub.serve(servers_folder) as server:
        started = started_since(before)
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.address)
        topic, subscription = "projects/local/topics/t", "projects/local/subscriptions/s"
        publisher = pubsub_v1.PublisherClient()
        publisher.create_topic(request={"name": topic})
        with pubsub_v1.SubscriberClient() as client:
            client.create_subscription(request={"name": subscription, "topic": topic})
            publisher.publish(topic, b"kept").result(30)
            server.stop()
            threading.Timer(0.5, server.start).start()
            pulled = client.pull(request={"subscription": subscription, "max_messages": 10}, timeout=30)
        server.stop()
    assert [received.message.data for received in pulled.received_messages] == [b"kept"]
    assert not remaining(started), "a halted server ends too"


@pytest.fixture
def folder_of_all():
    """A folder that another user can enter, as root's PostgreSQL requires; pytest's folders are private."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.faults
# RabbitMQ and the Iceberg catalog end as Kafka does.
@pytest.mark.parametrize(
    "module",
    [glue, kafka, kinesis, postgres, pubsub, sqs],
    ids=["glue", "kafka", "kinesis", "postgres", "pubsub", "sqs"],
)
def test_no_process_of_a_server_remains_when_its_starter_is_killed(module, servers_folder, folder_of_all):
    before = descendants()
    command = [sys.executable, "-c", SERVE, ready(module), str(servers_folder)]
    place = {**os.environ, "TMPDIR": str(folder_of_all)}  # a killed process cleans nothing up
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=PROJECT, env=place, stdin=pipe, stdout=pipe, text=True) as starter:
        assert starter.stdout is not None
        assert "127.0.0.1:" in starter.stdout.readline()
        started = started_since(before)
        starter.kill()
    assert not remaining(started)


def test_a_shared_server_stops_with_its_last_user(servers_folder, tmp_path):
    name, meeting = ready(sqs), tmp_path / "meeting"
    before = descendants()
    with kept(name, servers_folder, meeting) as first:
        with kept(name, servers_folder, meeting) as second:
            started = started_since(before)
        assert first == second
        assert answers(first), "one user is left"
    assert not remaining(started)
    with kept(name, servers_folder, meeting) as again:
        assert answers(again), "the next user starts it anew"


def answers(endpoint: str) -> bool:
    return sqs.client(endpoint).list_queues()["ResponseMetadata"]["HTTPStatusCode"] == 200


def descendants() -> set[psutil.Process]:
    """Return the descendant processes of this test process."""
    return set(psutil.Process().children(recursive=True))


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """Return descendants started since, without children of earlier ones: Spark of another test may start workers."""
    started = set()
    for process in descendants() - before:
        with suppress(psutil.NoSuchProcess):
            if not before & set(process.parents()):
                started.add(process)
    return started


def remaining(started: set[psutil.Process], within_s: float = 10) -> set[psutil.Process]:
    """Return the processes that still run after a while, without terminated processes that were not reaped yet."""
    end = time.monotonic() + within_s
    while (left := {process for process in started if runs(process)}) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
