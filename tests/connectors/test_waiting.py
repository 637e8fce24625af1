"""Waiting for messages at real servers: the connections that are kept, and the requests that are made."""

import time
from contextlib import closing
from typing import Any

import pytest

from pipeline_platform import Source, SourceError
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from servers import sqs
from tests.fixtures.postgres import administrator, cut_all_others
from tests.fixtures.sqs_between import between

MOST_S = 60
"""Timeout of a wait that should end early."""


def sessions(url: str) -> list[tuple[Any, ...]]:
    """Return the process id and the state of the waiter's sessions, once they are idle or have ended."""
    query = "SELECT pid, state FROM pg_stat_activity WHERE application_name = 'waiter' ORDER BY pid"
    with administrator(url) as connection:
        end = time.monotonic() + MOST_S
        found = connection.execute(query).fetchall()
        while any(state != "idle" for _, state in found) and time.monotonic() < end:
            time.sleep(0.05)
            found = connection.execute(query).fetchall()
    return found


def test_waits_for_rows_of_postgresql_use_one_session_without_an_open_transaction(postgres_url):
    queue = TableQueue(name="flights", url=f"{postgres_url}?application_name=waiter")
    queue.create()
    found = [queue.wait(0.3), queue.wait(0)]
    session = sessions(postgres_url)
    found += [queue.wait(0.3), queue.wait(0)]
    assert found == [False] * 4
    assert sessions(postgres_url) == session
    assert [state for _, state in session] == ["idle"]

    queue.close()
    end = time.monotonic() + MOST_S
    while sessions(postgres_url) and time.monotonic() < end:
        time.sleep(0.05)
    assert sessions(postgres_url) == []
    assert queue.wait(0) is False, "connects again"
    queue.close()


def test_a_wait_for_rows_survives_the_end_of_its_session(postgres_url):
    queue = TableQueue(name="flights", url=postgres_url)
    queue.create()
    with closing(queue), administrator(postgres_url) as connection:
        assert queue.wait(0) is False
        queue.enqueue([b"1"])
        cut_all_others(connection)
        assert queue.wait(0) is True


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_rows_that_a_receive_has_leased_end_a_wait_when_the_lease_expires(backend, tmp_path, request):
    url = f"sqlite:///{tmp_path}/queue.db" if backend == "sqlite" else request.getfixturevalue("postgres_url")
    short, long = (TableQueue(name="flights", url=url, lease_s=lease_s) for lease_s in (1, 600))
    short.create()
    short.enqueue([b"1", b"2"])
    with closing(short):
        short.plan(2, 1, "lost")
        assert short.wait(MOST_S) is True
        long.plan(2, 1, "held")
        assert short.wait(0) is False
        short.enqueue([b"3"])
        assert [short.wait(0), short.wait(0, taken=1)] == [True, False]


def test_waits_for_messages_of_rabbitmq_keep_the_connection_and_no_channel(rabbitmq):
    source = rabbitmq()
    source.backlog()
    connection = source._opened.connection
    assert [source.wait(0.3), source.wait(0)] == [False, False]
    assert source._opened.connection is connection
    assert len(connection._pika._channels) == 0


def test_waits_for_messages_of_kafka_keep_the_client(kafka_server, kafka_topic, tmp_path):
    topic = kafka_topic(2)
    source = KafkaSource(name="flights", bootstrap_servers=kafka_server, group_id=topic, topics=(topic,))
    with closing(source), closing(ControlStore(f"sqlite:///{tmp_path}/control.sqlite")) as store:
        source.open(store)
        source.backlog()
        clients = source._cluster.admin, source._cluster.member
        assert [source.wait(0.3), source.wait(0)] == [False, False]
        assert (source._cluster.admin, source._cluster.member) == clients
        source.send([b"1"])
        assert source.wait(MOST_S) is True


def test_a_look_at_sqs_is_one_request_and_no_receive(sqs_server, sqs_queue):
    with between(sqs_server) as fake:
        source = SqsSource(name="flights", queue_url=sqs_queue(), endpoint_url=fake.endpoint)
        assert [source.wait(0), source.wait(0.1)] == [False, False]
        sqs.fill(source.queue_url, ["1"])
        assert source.wait(MOST_S) is True
        assert set(fake.calls) == {"GetQueueAttributes"}
        assert source.wait(0.1) is True
        before = fake.calls["GetQueueAttributes"]
        assert [source.wait(0, taken=1), source.wait(0.1, taken=1)] == [False, False]
        assert fake.calls["GetQueueAttributes"] == before + 2


def test_messages_may_always_wait_at_pubsub_and_none_is_pulled(subscribed, monkeypatch):
    source = subscribed()
    pulls = []
    monkeypatch.setattr(source._client, "pull", lambda **asked: pulls.append(asked))
    assert [source.wait(0), source.wait(MOST_S)] == [True, True]
    assert pulls == []
    missing: Source = source.model_copy(update={"subscription": "not-there"})
    with pytest.raises(SourceError):
        missing.wait(0)
