"""The local servers of tests and the demo: they keep their data, and leave no process behind."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from servers import glue, kafka, postgres, pubsub, rabbitmq, s3, sqs
from tests.fixtures.keeper import PROJECT, kept
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
# Kinesis ends as SQS does, and the Iceberg catalog as Kafka.
@pytest.mark.parametrize(
    "module",
    [glue, kafka, postgres, pubsub, rabbitmq, s3, sqs],
    ids=["glue", "kafka", "postgres", "pubsub", "rabbitmq", "s3", "sqs"],
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
