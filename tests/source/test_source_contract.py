"""The promises of every source, checked for each connector on a real server, a promise per test.

A new connector needs one row in `SOURCES`: its class, and a function of `source_rows` that builds sources and returns
the facts of its `Server`. It may request the fixtures of its server.
"""

import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from docs.examples.connectors.jetstream import JetStream
from docs.examples.connectors.redis_stream import RedisStream
from pipeline_platform.connectors.files import FileSource
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.source.leased import LeasedSource
from pipeline_platform.sql.database import Database
from pipeline_platform.testing import BrokenPromiseError, Report, check_source, promises_of
from tests.fixtures.postgres import new_database
from tests.fixtures.source_rows import (
    SHORT_S,
    Built,
    Row,
    amazon_kinesis,
    amazon_sqs,
    bucket,
    fifo,
    files,
    google_pubsub,
    kafka,
    kafka_by_partition,
    nats,
    postgresql,
    rabbitmq,
    redis,
    sqlite,
    table_of_accounts,
    turned,
)  # fmt: skip

LONG_S = 15
"""Lease in seconds for promises that fail with the short lease, which a slow machine may exceed: a promise counts as
broken only if both fail."""
AT_ONCE = 6
"""Promises of a server that are checked at the same time: most of their time is waits for leases and answers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="module")
def database(postgres_server: str) -> Iterator[str]:
    with new_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    now = Database.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "now", lambda *of: now(*of) + int(sum(turned) * 1_000_000))
        yield patch


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Callable[[Built, int], Row]:
    """Return a function that builds the row of a source, once for each lease."""
    return cache(lambda built, lease_s: built(request, lease_s))


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
    bucket: FileSource,
    amazon_kinesis: KinesisSource,
}

EXACTLY_ONCE = (
    "acknowledging_late_touches_nothing", "acknowledging_late_is_refused", "extending_what_is_lost_says_so",
    "abandoning_touches_nothing_else",
)  # fmt: skip
"""Promises that Pub/Sub keeps only for subscriptions with exactly-once delivery, which the local server does not have,
and that JetStream does not keep."""

FOUND = (
    "nothing_is_lost", "many_are_delivered_and_acknowledged", "equal_payloads_are_two_messages",
    "no_more_than_demanded", "a_second_planner_gets_others", "shares_give_the_same_again",
    "nothing_is_acknowledged_early", "places_and_times_are_stable", "backlogs_are_right", "backlogs_take_nothing",
    "waits_take_nothing", "waits_end_with_a_message", "what_is_missing_is_refused_by_name", "places_are_by_queue",
    "secrets_stay_secret", "pickles_without_clients", "closing_unused_is_harmless",
)  # fmt: skip
"""Promises that depend on how files are found. The others depend on the catalog, which is that of a folder."""


def is_asked(row: Built, promise: str) -> bool:
    if row in (google_pubsub, nats):
        return promise not in EXACTLY_ONCE
    return promise in FOUND or row is not bucket


PROMISES = [
    pytest.param(row, promise, id=f"{row.__name__}-{promise}")
    for row, kind in SOURCES.items()
    for promise in promises_of(kind)
    if is_asked(row, promise)
]


@pytest.fixture(scope="module")
def check(request: pytest.FixtureRequest, rows: Callable[[Built, int], Row]) -> Callable[[Built, str], Report]:
    """Return a function that checks a promise, the first time together with the other promises of its source."""
    checked: dict[Built, dict[str, Future[Report]]] = {}

    def check(row: Built, promise: str) -> Report:
        build, server = rows(row, SHORT_S)
        if server.sleep is not time.sleep:  # the others would notice that the clock is advanced
            return check_source(build, server, only=promise)
        if row not in checked:
            items = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            names = [given["promise"] for given in items if given.get("row") is row and "promise" in given]
            with ThreadPoolExecutor(AT_ONCE) as pool:
                checked[row] = {name: pool.submit(check_source, build, server, only=name) for name in names}
        return checked[row][promise].result()

    return check


@pytest.mark.parametrize(("row", "promise"), PROMISES)
def test_it_keeps(row, promise, check, rows):
    try:
        check(row, promise)
    except BrokenPromiseError as error:
        if not issubclass(SOURCES[row], LeasedSource):
            raise
        warnings.warn(f"not within a lease of {SHORT_S} s: {error}", stacklevel=1)
        check_source(*rows(row, LONG_S), only=promise)


@pytest.mark.parametrize("row", [table_of_accounts, fifo, kafka_by_partition], ids=lambda row: row.__name__)
def test_it_keeps_and_leases_partitions(row, rows):
    promises = ["partitions_are_in_order", "partitions_are_leased_once"]
    assert check_source(*rows(row, SHORT_S), only=promises).kept == promises


@pytest.mark.parametrize("row", [row for row in SOURCES if row not in (sqlite, files)], ids=lambda row: row.__name__)
def test_a_source_delivers_the_requested_number_and_can_be_used_after_it_was_closed(row, rows, tmp_path):
    build, server = rows(row, SHORT_S)
    source = build()
    source.open(ControlStore(f"sqlite:///{tmp_path}/control.sqlite"))
    send = server.sender(source)
    assert send is not None
    send(server.payloads)
    received = [batch for share in source.plan(15, 2, "a") for batch in source.read(share, "a")]
    assert sum(batch.num_rows for batch in received) == 15
    for _ in range(2):
        type(source).close(source)
    source.backlog()
    source.close()


@pytest.mark.parametrize("row", [redis, nats], ids=lambda row: row.__name__)
def test_example_sources_mark_every_delivery_because_their_servers_may_forget_deliveries(row, rows):
    build, server = rows(row, SHORT_S)
    with closing(build()) as source:
        assert source.send(server.payloads) == len(server.payloads)
        received = [batch for share in source.plan(5, 1, "a") for batch in source.read(share, "a")]
    assert {is_marked for batch in received for is_marked in batch["redelivered"].to_pylist()} == {True}


def test_the_promises_that_jetstream_does_not_keep_are_documented():
    page = Path(__file__).parents[2] / "docs" / "connect" / "your-own.md"
    (left_out,) = re.findall(r"leave out\n(.*?):", page.read_text(), re.S)
    assert {*re.findall(r"`(\w+)`", left_out)} == {*EXACTLY_ONCE}


def test_a_relative_path_is_resolved_for_tasks_in_other_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    queue = TableQueue(name="contract", url="sqlite:///queue.sqlite")
    queue.create()
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(queue)).backlog().messages == 0
