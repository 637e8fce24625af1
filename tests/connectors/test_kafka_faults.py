"""Failures of Kafka: lost messages are reported, all others arrive once, and no run waits forever."""

import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.model.portions import BATCH_BYTES
from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.source.patience import patiently
from pipeline_platform.source.pauses import Patience
from servers import kafka as local
from tests.fixtures.kafka import create_topic
from tests.fixtures.kafka_source import delete_topic, lag, offsets, patiently_send, received, sources, until


@pytest.fixture
def own(own_kafka_server, tmp_path):
    """Sources of a server that the test may stop."""
    with sources(own_kafka_server.address, tmp_path) as make:
        yield make


def later(seconds: float, call: Callable[[], object]) -> threading.Thread:
    thread = threading.Timer(seconds, call)
    thread.start()
    return thread


# Server failures


def test_a_server_restart_during_a_read_and_a_commit_loses_nothing(own, own_kafka_server, monkeypatch):
    source = own(topic := create_topic(own_kafka_server.address, 2))
    source.send((b"%d" % n for n in range(20_000)), ({"partition": n % 2} for n in range(20_000)))
    monkeypatch.setattr("pipeline_platform.connectors.kafka.offset_ranges._ROWS", 100)
    ours = source.model_copy(update={"client_options": {"queued.min.messages": "1", "fetch.queue.backoff.ms": "1"}})
    (share,) = source.plan(20_000, 1, "a")

    rows: list[Any] = []
    back = None
    for batch in ours.read(share, "a"):
        rows += batch.column("data").to_pylist()
        if back is None:
            own_kafka_server.stop()
            back = later(1, own_kafka_server.start)
    assert sorted(map(int, rows)) == [*range(20_000)]
    assert back is not None
    back.join()

    own_kafka_server.stop()
    back = later(1, own_kafka_server.start)
    patiently(lambda: source.finish("a"))
    back.join()
    until(lambda: lag(source, topic, 2) == [0, 0])
    assert source.backlog().messages == 0


def test_an_unavailable_server_is_an_error_and_the_next_attempt_commits(own, own_kafka_server, monkeypatch):
    monkeypatch.setattr(KafkaSource, "patience", Patience(within_s=2))
    source = own(topic := create_topic(own_kafka_server.address), request_timeout_s=2)
    source.send([b"1", b"2"])
    shares = source.plan(10, 1, "a")
    own_kafka_server.stop()

    away = "source 'kafka': bootstrap_servers '127.0.0.1:.*' does not answer"
    for ask in (source.backlog, source.check_ready, lambda: source.plan(10, 1, "b"), lambda: source.finish("a")):
        with pytest.raises(SourceAwayError, match=away):
            ask()
    with pytest.raises(SourceAwayError):
        [*pickle.loads(pickle.dumps(source)).read(shares[0], "a")]
    with pytest.raises(SourceError, match=r"1 of 1 messages were refused.* does not answer"):
        source.send([b"3"])

    own_kafka_server.start()
    patiently(lambda: source.finish("a"))
    assert lag(source, topic) == [0]


# Deleted messages and topics


def test_messages_removed_between_plan_and_read_are_an_error_and_are_then_logged(
    kafka, kafka_topic, kafka_server, caplog
):
    source = kafka(topic := kafka_topic())
    source.send(b"%d" % number for number in range(10))
    (share,) = source.plan(8, 1, "a")
    remove_before(kafka_server, topic, 5)
    with pytest.raises(SourceError, match=rf"{topic} \[0\] from offset 0 up to 8 lost messages before they were read"):
        [*source.read(share, "a")]
    source.abandon("a", list)
    assert offsets(received(source, "b")) == [5, 6, 7, 8, 9]
    assert any("lost its messages from offset 0 to before 5" in text for text in caplog.messages)


@pytest.mark.parametrize("again", [False, True])
def test_a_topic_that_is_deleted_between_plan_and_read_is_named(kafka, kafka_topic, kafka_server, *, again):
    source = kafka(topic := kafka_topic())
    source.send([b"1", b"2"])
    (share,) = source.plan(10, 1, "a")
    delete_topic(kafka_server, topic)
    if again:
        kafka_topic(name=topic)
        patiently_send(source, [b"another", b"one"])

    with pytest.raises(SourceError, match=f"topic '{topic}' was deleted{' and recreated' if again else ''} since this"):
        [*source.read(share, "a")]

    source.abandon("a", list)
    source.finish("a")
    if again:
        assert [row["data"] for row in received(source, "b")] == [b"another", b"one"]
    else:
        with pytest.raises(SourceError, match=f"topic '{topic}' does not exist at"):
            source.backlog()


def test_acknowledged_offsets_of_a_deleted_topic_do_not_block_other_topics(kafka, kafka_topic, kafka_server):
    kept, gone = kafka_topic(), kafka_topic()
    source = kafka(kept, gone)
    source.send([b"1", b"2"], [{"topic": kept}, {"topic": gone}])
    assert len(received(source, "a")) == 2
    delete_topic(kafka_server, gone)
    source.finish("a")
    assert lag(source, kept) == [0]


# Large messages


def test_large_messages_among_small_ones_arrive_in_small_batches(kafka, kafka_topic):
    largest = 9 * 2**20
    source = kafka(kafka_topic(max_message_bytes="10000000"))
    payloads = [os.urandom(largest), *(b"small" for _ in range(50)), os.urandom(largest), os.urandom(largest), b"last"]
    source.send(payloads)
    (share,) = source.plan(100, 1, "a")
    batches = [batch.column("data").to_pylist() for batch in source.read(share, "a")]
    assert [payload for batch in batches for payload in batch] == payloads
    assert max(sum(map(len, batch)) for batch in batches) <= BATCH_BYTES


# Credentials


@pytest.fixture(scope="module")
def guarded(servers_folder):
    if lack := local.missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no Kafka server: {lack}")
    with local.serve(servers_folder, {"reader": "correct-horse"}) as server:
        yield server


def test_a_login_works_and_a_rejected_login_names_the_options_without_the_password(
    guarded, tmp_path, caplog, monkeypatch
):
    login: dict[str, Any] = {
        "security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "sasl_username": "reader"
    }  # fmt: skip
    options = {**login, "sasl_password": "correct-horse"}
    topic = created(guarded.address, options)
    with sources(guarded.address, tmp_path) as make:
        source = make(topic, **options)
        source.send([b"1"])
        (share,) = source.plan(10, 1, "a")
        assert [batch.num_rows for batch in source.read(share, "a")] == [1]
        source.finish("a")
        wrong = source.model_copy(update={"sasl_password": "battery-staple"})

    said = []
    for ask in (
        wrong.extents,
        wrong.check_ready,
        lambda: [*wrong.read(share, "a")],
        lambda: wrong.commit({"t:i:0": 1}),
    ):
        with pytest.raises(
            SourceError, match=r"rejected this client .* Correct sasl_mechanism, sasl_username"
        ) as error:
            ask()
        assert not isinstance(error.value, SourceAwayError)
        said.append(str(error.value))
    assert "battery-staple" not in "".join(said) + caplog.text


def created(address: str, options: dict[str, Any]) -> str:
    from confluent_kafka.admin import NewTopic

    settings = KafkaSource(name="a", bootstrap_servers=address, group_id="a", topics=("guarded",), **options).settings()
    admin = AdminClient(settings)
    admin.create_topics([NewTopic("guarded", 1, 1)])["guarded"].result(30)
    return "guarded"


def remove_before(server: str, topic: str, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": server})
    (done,) = admin.delete_records([TopicPartition(topic, 0, offset)]).values()
    done.result(10)
