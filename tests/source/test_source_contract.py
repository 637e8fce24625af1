"""The promises of every source, checked for each connector on a real server, a promise per test.

A new connector needs one row in `SOURCES`: its class, and a function that builds sources and returns the facts of
its `Server`. It may request the fixtures of its server.
"""

import json
import pickle
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from nats.js.api import ConsumerConfig
from pydantic import Field

from docs.examples.connectors.jetstream import JetStream
from docs.examples.connectors.redis_stream import RedisStream
from pipeline_platform import Source
from pipeline_platform.connectors.files import FileSource, notifications
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.source.leased import LeasedSource
from pipeline_platform.source.patience import patiently
from pipeline_platform.sql.database import Database
from pipeline_platform.testing import PAGES, TEXTS, BrokenPromiseError, Server, check_source, promises_of
from servers import sqs
from tests.connectors.test_file_notifications import event

SHORT_S, LONG_S = 2, 15
"""Leases in seconds. Most promises are verified with a short lease. A slow machine may exceed it, so a failed promise
is checked again with the long lease: it counts as broken only if both fail."""

Row = tuple[Callable[[], Source], Server]
"""A function that builds a source of a new, empty queue, and facts about its server."""
Built = Callable[[pytest.FixtureRequest, int], Row]
"""A function that returns a row for a lease in seconds, which a server without leases ignores."""


UNREACHABLE = "127.0.0.1:1"
"""An address without a server."""


def moved(**where: object) -> Callable[[Source], Source]:
    """Return a function that gives a source another address."""
    return lambda source: source.model_copy(update=where)


def tables(
    request: pytest.FixtureRequest, url: str, lease_s: int, away: Callable[[Source], Source] | None = None
) -> Row:
    """Return a row whose leases follow the database's clock, which is advanced instead of waiting."""
    now, turned = Database.now, [0.0]
    request.getfixturevalue("monkeypatch").setattr(Database, "now", lambda *of: now(*of) + int(sum(turned) * 1_000_000))

    def new() -> TableQueue:
        table = f"queue_{uuid4().hex[:8]}"
        queue = TableQueue(name="contract", url=url, table=table, created_column="created", lease_s=lease_s)
        queue.create()
        return queue

    missing = TableQueue(name="contract", url=url, table="not_there")
    return new, Server(missing=lambda: missing, away=away, sleep=turned.append)


def sqlite(request: pytest.FixtureRequest, lease_s: int) -> Row:
    folder: Path = request.getfixturevalue("tmp_path")
    return tables(request, f"sqlite:///{folder}/queue.sqlite", lease_s)


def postgresql(request: pytest.FixtureRequest, lease_s: int) -> Row:
    url = request.getfixturevalue("postgres_url")
    return tables(request, url, lease_s, moved(url=f"postgresql://local@{UNREACHABLE}/queue"))


def amazon_sqs(request: pytest.FixtureRequest, lease_s: int) -> Row:
    endpoint: str = request.getfixturevalue("sqs_server")
    create: Callable[..., str] = request.getfixturevalue("sqs_queue")

    def at(url: str) -> SqsSource:
        return SqsSource(name="contract", queue_url=url, visibility_timeout=lease_s, endpoint_url=endpoint)

    def send(source: SqsSource, payloads: list[bytes]) -> None:
        sqs.fill(source.queue_url, payloads)

    return lambda: at(create()), Server(
        payloads=TEXTS,
        send=send,
        many=PAGES[:300],  # a call of SQS takes and gives ten
        missing=lambda: at(f"{create()}-not-there"),
        away=moved(endpoint_url=f"http://{UNREACHABLE}"),
        says_lost=False,  # SQS answers that it deleted what another holds, and leaves it
    )


class Hasty(PubsubSource):
    """A source with shorter deadlines, which the local server accepts; Google's minimum is 10 s."""

    ack_deadline_s: int = Field(SHORT_S, ge=1)


def google_pubsub(request: pytest.FixtureRequest, lease_s: int) -> Row:
    subscribed: Callable[..., PubsubSource] = request.getfixturevalue("subscribed")

    def new() -> PubsubSource:
        return subscribed(name="contract", kind=Hasty, ack_deadline_s=lease_s)

    missing = moved(subscription="not-there")
    return new, Server(missing=lambda: missing(new()), away=moved(emulator_host=UNREACHABLE, timeout_s=1.0))


def rabbitmq(request: pytest.FixtureRequest, _: int) -> Row:
    build: Callable[..., RabbitmqSource] = request.getfixturevalue("rabbitmq")

    def cut(source: RabbitmqSource) -> None:
        connection = source._opened.connection
        assert connection is not None
        connection._pika._transport._sock.shutdown(socket.SHUT_RDWR)

    away = moved(url=f"amqp://guest:guest@{UNREACHABLE}/%2F")
    missing = lambda: build("not-there", name="contract")  # noqa: E731
    return lambda: build(name="contract"), Server(missing=missing, away=away, cut=cut)


def kafka(request: pytest.FixtureRequest, _: int) -> Row:
    address: str = request.getfixturevalue("kafka_server")
    create: Callable[..., str] = request.getfixturevalue("kafka_topic")

    def at(topic: str) -> KafkaSource:
        source = KafkaSource(name="contract", bootstrap_servers=address, group_id=topic, topics=(topic,))
        patiently(source._cluster.members)  # a server that has just started does not know its groups yet
        return source

    away = moved(bootstrap_servers=UNREACHABLE, request_timeout_s=1.0)
    return lambda: at(create(2)), Server(missing=lambda: at("not-there"), away=away)


def redis(request: pytest.FixtureRequest, lease_s: int) -> Row:
    url: str = request.getfixturevalue("redis_server")

    def at(stream: str) -> RedisStream:
        return RedisStream(name="contract", url=url, stream=stream, group="contract", lease_s=lease_s)

    def new() -> RedisStream:
        source = at(f"stream-{uuid4().hex[:8]}")
        source._do("xgroup_create", source.stream, source.group, "0", mkstream=True)
        return source

    away = moved(url=f"redis://{UNREACHABLE}/0")
    return new, Server(missing=lambda: at("not-there"), away=away)


def nats(request: pytest.FixtureRequest, lease_s: int) -> Row:
    url: str = request.getfixturevalue("nats_server")

    def at(stream: str) -> JetStream:
        options = {"stream": stream, "durable": "contract", "subject": stream, "fetch_s": 0.2}
        return JetStream(name="contract", url=url, lease_s=lease_s, **options)

    def new() -> JetStream:
        source = at(f"stream-{uuid4().hex[:8]}")
        consumer = ConsumerConfig("contract", ack_wait=lease_s, max_ack_pending=10_000)
        source._do(lambda to: to.client.jetstream().add_stream(name=source.stream, subjects=[source.stream]))
        source._do(lambda to: to.client.jetstream().add_consumer(source.stream, consumer))
        return source

    away = moved(url=f"nats://{UNREACHABLE}")
    return new, Server(missing=lambda: at("not-there"), away=away, says_lost=False)


def files(request: pytest.FixtureRequest, lease_s: int) -> Row:
    folder: Path = request.getfixturevalue("tmp_path")
    now, turned = Database.now, [0.0]
    request.getfixturevalue("monkeypatch").setattr(Database, "now", lambda *of: now(*of) + int(sum(turned) * 1_000_000))

    def at(root: Path) -> FileSource:
        catalog = f"sqlite:///{folder}/catalog.sqlite"
        options = {"catalog": catalog, "table": root.name, "list_every_s": 0.0, "settle_s": 0.0}
        return FileSource(name="contract", root=str(root), lease_s=lease_s, **options)

    def new() -> FileSource:
        root = folder / f"files_{uuid4().hex[:8]}"
        root.mkdir()
        return at(root)

    def send(source: FileSource, payloads: list[bytes]) -> None:
        for payload in payloads:
            Path(source.root, f"{uuid4().hex}.jsonl").write_bytes(payload + b"\n")

    missing = lambda: at(folder / "not_there")  # noqa: E731
    lines = [json.dumps(text.decode()).encode() for text in TEXTS]
    return new, Server(payloads=lines, send=send, many=PAGES[:300], missing=missing, sleep=turned.append)


def bucket(
    request: pytest.FixtureRequest, lease_s: int, queue: Callable[[], tuple[str, Callable[[list[str]], object]]]
) -> Row:
    """Return a row of files in a bucket, which only notifications name; `queue` returns a new queue and its sender."""
    build, server = files(request, lease_s)
    # Without credentials, which are in the environment: their text is also part of names.
    options = {name: value for name, value in request.getfixturevalue("s3").items() if "KEY" not in name}
    notify: dict[str, Callable[[list[str]], object]] = {}

    def new() -> Source:
        address, notify[address] = queue()
        at = {"root": f"s3://lake/{uuid4().hex[:8]}", "storage_options": options}
        return build().model_copy(update={**at, "list_root": False, "notifications": address})

    def send(source: FileSource, payloads: list[bytes]) -> None:
        lake = Lake(root=source.root, storage_options=options)
        names = [f"{uuid4().hex}.jsonl" for _ in payloads]
        for name, payload in zip(names, payloads, strict=True):
            lake.write(name, payload + b"\n")
        notify[str(source.notifications)]([f"{source.root.removeprefix('s3://lake/')}/{name}" for name in names])

    def missing() -> Source:
        source = new()
        return source.model_copy(update={"notifications": f"{source.notifications}-not-there"})

    return new, replace(server, send=send, many=PAGES[:60], missing=missing)


def bucket_through_sqs(request: pytest.FixtureRequest, lease_s: int) -> Row:
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", request.getfixturevalue("sqs_server"))
    monkeypatch.setenv("AWS_REGION", sqs.REGION)
    create: Callable[..., str] = request.getfixturevalue("sqs_queue")

    def queue() -> tuple[str, Callable[[list[str]], object]]:
        url = create()
        return url, lambda keys: sqs.fill(url, [event(key) for key in keys])

    return bucket(request, lease_s, queue)


def bucket_through_pubsub(request: pytest.FixtureRequest, lease_s: int) -> Row:
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", request.getfixturevalue("pubsub_server"))
    monkeypatch.setattr(notifications, "_PULL_S", 0.1)
    subscribed: Callable[..., PubsubSource] = request.getfixturevalue("subscribed")

    def queue() -> tuple[str, Callable[[list[str]], object]]:
        topic = subscribed()

        def notify(keys: list[str]) -> None:
            named = [{"eventType": "OBJECT_FINALIZE", "bucketId": "lake", "objectId": key} for key in keys]
            topic.send([b""] * len(keys), [{"attributes": attributes} for attributes in named])

        return topic._path, notify

    return bucket(request, lease_s, queue)


def amazon_kinesis(request: pytest.FixtureRequest, _: int) -> Row:
    endpoint: str = request.getfixturevalue("kinesis_server")
    create: Callable[..., str] = request.getfixturevalue("kinesis_stream")

    def at(stream: str) -> KinesisSource:
        return KinesisSource(name="contract", stream=stream, endpoint_url=endpoint)

    away = moved(endpoint_url=f"http://{UNREACHABLE}")
    # A call sends 500.
    return lambda: at(create(2)), Server(many=PAGES[:600], missing=lambda: at("not-there"), away=away)


SOURCES = {
    sqlite: TableQueue,
    postgresql: TableQueue,
    amazon_sqs: SqsSource,
    google_pubsub: PubsubSource,
    rabbitmq: RabbitmqSource,
    kafka: KafkaSource,
    redis: RedisStream,
    nats: JetStream,
    files: FileSource,
    bucket_through_sqs: FileSource,
    bucket_through_pubsub: FileSource,
    amazon_kinesis: KinesisSource,
}

EXACTLY_ONCE = (
    "acknowledging_late_touches_nothing", "acknowledging_late_is_refused", "extending_what_is_lost_says_so",
    "abandoning_touches_nothing_else",
)  # fmt: skip
"""Promises that Pub/Sub keeps only for subscriptions with exactly-once delivery, which the local server does not have,
and that JetStream does not keep."""


def marks(row: Built, promise: str) -> list[pytest.MarkDecorator]:
    is_beyond = row in (google_pubsub, nats) and promise in EXACTLY_ONCE
    return [pytest.mark.skip("the server lets any receive acknowledge a message")] if is_beyond else []


PROMISES = [
    pytest.param(row, promise, id=f"{row.__name__}-{promise}", marks=marks(row, promise))
    for row, kind in SOURCES.items()
    for promise in promises_of(kind)
]


@pytest.mark.parametrize(("row", "promise"), PROMISES)
def test_it_keeps(row, promise, request):
    try:
        check_source(*row(request, SHORT_S), only=promise)
    except BrokenPromiseError as error:
        if not issubclass(SOURCES[row], LeasedSource):
            raise
        warnings.warn(f"not within a lease of {SHORT_S} s: {error}", stacklevel=1)
        check_source(*row(request, LONG_S), only=promise)


def table_of_accounts(request: pytest.FixtureRequest, lease_s: int) -> Row:
    build, server = sqlite(request, lease_s)

    def new() -> Source:
        options = {"partition_column": "account", "one_receive_per_partition": True}
        queue = build().model_copy(update={**options, "table": f"accounts_{uuid4().hex[:8]}"})
        assert isinstance(queue, TableQueue)
        queue.create()
        return queue

    def send(source: Source, payloads: Sequence[bytes]) -> None:
        source.send(payloads, [{"account": f"{number % 3}"} for number in range(len(payloads))])

    return new, replace(server, send=send)


def fifo(request: pytest.FixtureRequest, lease_s: int) -> Row:
    endpoint, create = request.getfixturevalue("sqs_server"), request.getfixturevalue("sqs_queue")
    options = {"visibility_timeout": lease_s, "endpoint_url": endpoint}

    def new() -> Source:
        url = create(FifoQueue="true", ContentBasedDeduplication="true")
        return SqsSource(name="contract", queue_url=url, **options)

    def send(source: Source, payloads: Sequence[bytes]) -> None:
        source.send(payloads, [{"attributes": {"MessageGroupId": f"{n % 3}"}} for n in range(len(payloads))])

    return new, Server(payloads=TEXTS, send=send)


def kafka_by_partition(request: pytest.FixtureRequest, lease_s: int) -> Row:
    build, server = kafka(request, lease_s)
    return lambda: build().model_copy(update={"one_receive_per_partition": True}), server


@pytest.mark.parametrize("row", [table_of_accounts, fifo, kafka_by_partition], ids=lambda row: row.__name__)
def test_it_keeps_and_leases_partitions(row, request):
    promises = ["partitions_are_in_order", "partitions_are_leased_once"]
    assert check_source(*row(request, SHORT_S), only=promises).kept == promises


@pytest.mark.parametrize("row", SOURCES, ids=lambda row: row.__name__)
def test_a_source_delivers_the_requested_number_of_messages(row, request, tmp_path):
    build, server = row(request, SHORT_S)
    source = build()
    source.open(ControlStore(f"sqlite:///{tmp_path}/control.sqlite"))
    send = server.sender(source)
    assert send is not None
    send(server.payloads)
    received = [batch for share in source.plan(15, 2, "a") for batch in source.read(share, "a")]
    assert sum(batch.num_rows for batch in received) == 15


def test_a_relative_path_is_resolved_for_tasks_in_other_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    queue = TableQueue(name="contract", url="sqlite:///queue.sqlite")
    queue.create()
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(queue)).backlog().messages == 0
