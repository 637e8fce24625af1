"""Options of a Kafka source: validation, errors and protection of secrets."""

import logging
import time
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kafka.cluster import Cluster, explained
from pipeline_platform.source.contract import SourceAwayError, SourceError
from tests.fixtures.kafka_source import until

SECRET = "s3cret-of-the-user"


def source(**options: Any) -> KafkaSource:
    return KafkaSource(**{
        "name": "orders", "bootstrap_servers": "127.0.0.1:9", "group_id": "g", "topics": ("orders",), **options
    })  # fmt: skip


OTHERS = """api.version.request linger.ms queued.min.messages reconnect.backoff.max.ms reconnect.backoff.ms
socket.connection.setup.timeout.ms"""


def test_other_client_options_reach_the_client_library():
    names = OTHERS.split()
    given = source(client_options=dict.fromkeys(names, "7"))
    for settings in (given.settings(), given.to_read(), given.to_send()):
        assert {settings[name] for name in names} == {"7"}
    assert source().to_read()["queued.min.messages"] == 20_000


def test_options_reach_the_client_library_by_its_names():
    told = source(
        client_id="c", fetch_min_bytes=2, fetch_max_bytes=1_000_001, fetch_max_wait_s=0.2, request_timeout_s=3
    ).to_read()
    names = ("client.id", "fetch.min.bytes", "fetch.max.bytes", "fetch.wait.max.ms", "socket.timeout.ms")
    assert [told[name] for name in names] == ["c", 2, 1_000_001, 200, 3_000]
    assert told["enable.auto.commit"] is False


def test_security_options_fit_together():
    sasl = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_username": "u", "sasl_password": SECRET}
    settings = source(**sasl, ssl_ca_location="/ca.pem").settings()
    assert {name: settings[name] for name in ("security.protocol", "sasl.password", "ssl.ca.location")} == {
        "security.protocol": "SASL_SSL", "sasl.password": SECRET, "ssl.ca.location": "/ca.pem",
    }  # fmt: skip
    encrypted = source(security_protocol="SSL").settings()
    assert encrypted["security.protocol"] == "SSL", "by the certificates that the machine trusts"
    for plain in (source().settings(), encrypted):
        assert not any(name.startswith(("sasl", "ssl")) for name in plain)


def test_errors_and_texts_of_the_source_contain_no_secrets():
    options = {"sasl.oauthbearer.client.secret": SECRET}
    given = source(
        security_protocol="SASL_SSL", sasl_mechanism="PLAIN", sasl_password=SECRET, ssl_key_password=SECRET,
        client_options=options,
    )  # fmt: skip
    assert SECRET not in repr(given) + str(given)
    said = str(explained(ValueError(f"a password like {SECRET}"), given))
    assert SECRET not in said
    assert "***" in said


def test_an_option_that_the_client_library_refuses_is_named():
    with pytest.raises(
        SourceError, match=r'source .orders.: the client library rejected an option: .*"no.such.option"'
    ):
        source(client_options={"no.such.option": "x"}).extents()


def test_an_unavailable_server_is_named_in_the_error(caplog):
    caplog.set_level(logging.INFO)
    away = source(request_timeout_s=2)
    began = time.monotonic()
    with pytest.raises(
        SourceAwayError, match=r"source 'orders': bootstrap_servers '127.0.0.1:9' does not answer: .*(efused|down)"
    ):
        away.extents()
    assert time.monotonic() - began < 30
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "pipeline_platform.connectors.kafka.cluster.client"
    ]
    assert any("onnect" in text for text in said), "what a client says is in Python's log"


def test_a_missing_topic_is_named(kafka):
    with pytest.raises(
        SourceError, match=r"source 'kafka': topic 'nowhere' does not exist at .* Create it, or correct topics"
    ):
        kafka("nowhere").check_ready()
    assert kafka(topic_pattern="nowhere-.*").backlog().messages == 0


def test_a_group_with_active_members_is_refused_before_a_receive(kafka, kafka_topic):
    topic = kafka_topic()
    ours = kafka(topic)
    ours.check_ready()
    ours.send([b"1"])
    member = Consumer({
        "bootstrap.servers": ours.bootstrap_servers, "group.id": ours.group_id, "enable.auto.commit": False
    })  # fmt: skip
    member.subscribe([topic])
    until(lambda: member.poll(0.1) is not None or bool(member.assignment()))

    with pytest.raises(SourceError, match=r"group_id 'group-.*' has 1 active member: .* Stop them"):
        ours.check_ready()
    ours.plan(10, 1, "a")
    with pytest.raises(SourceError, match=r"group_id 'group-.*' has active members"):
        ours.finish("a")
    member.close()
    ours.finish("a")
    assert ours.backlog().messages == 0


def test_extents_take_four_calls_once_connected(kafka, kafka_topic, monkeypatch):
    """The number of calls is asserted instead of a time: a look makes four, however many partitions there are."""
    ours = kafka(kafka_topic(50))
    until(lambda: len(ours.extents()) == 50)
    ours.backlog()
    calls: list[str] = []
    for name in ("topic_ids", "offsets", "committed", "commit", "_begin"):
        method = getattr(Cluster, name)
        counted = lambda *given, _name=name, _method=method, **more: calls.append(_name) or _method(*given, **more)  # noqa: E731
        monkeypatch.setattr(Cluster, name, counted)
    assert ours.backlog().messages == 0
    assert calls == ["topic_ids", "_begin", "offsets", "_begin", "offsets", "_begin", "committed"]


def test_refused_messages_are_counted_and_the_others_are_sent(kafka, kafka_topic):
    topic = kafka_topic(max_message_bytes="2000")
    ours = kafka(topic)
    with pytest.raises(SourceError, match=r"1 of 3 messages were refused.* exceeds the size limit of topic"):
        ours.send([b"1", b"x" * 5_000, b"3"])
    with pytest.raises(SourceError, match="2 of 3 messages were refused"):
        ours.send([b"1", b"2", b"4"], [{"partition": 7}, {"partition": 8}, None])
    with pytest.raises(SourceError, match=r"cannot send a message to .*: a key or header value must be text, bytes"):
        ours.send([b"1"], [{"key": 7}])
    assert ours.backlog().messages == 3, "what was sent beside them is there"


class SlowProducer:
    """A producer that sends a message per poll that waits."""

    def __init__(self, error: KafkaError | None = None) -> None:
        self.queue, self.error, self.most = list[tuple[int, Any]](), error, 0

    def produce(self, *, value: bytes, on_delivery: Any, **_: Any) -> None:
        self.queue.append((len(value), on_delivery))
        self.most = max(self.most, sum(size for size, _ in self.queue))

    def poll(self, timeout: float) -> None:
        if self.queue and timeout:
            self.queue.pop(0)[1](self.error, None)

    def flush(self) -> None:
        while self.queue:
            self.poll(1)


def test_messages_of_a_slow_connection_do_not_wait_in_the_client(monkeypatch):
    slow = SlowProducer()
    monkeypatch.setattr(KafkaSource, "_client", lambda *_: slow)
    sizes = [9 * 2**20, *[2**20] * 20]

    assert source().send(bytes(size) for size in sizes) == len(sizes)
    assert slow.most <= max(sizes)


def test_an_unavailable_broker_delays_the_messages_after_the_first_refusal_together(monkeypatch):
    away = SlowProducer(KafkaError(KafkaError._MSG_TIMED_OUT))
    monkeypatch.setattr(KafkaSource, "_client", lambda *_: away)

    with pytest.raises(SourceError, match="21 of 21 messages were refused"):
        source().send(bytes(2**20) for _ in range(21))
    assert away.most == 20 * 2**20


def test_a_missing_topic_is_named_when_sending_to_it(kafka, kafka_topic):
    source = kafka(kafka_topic(), request_timeout_s=2)

    with pytest.raises(
        SourceError, match=r"1 of 2 messages were refused.*topic 'nowhere' does not exist at .*Create the topic"
    ):
        source.send([b"1", b"2"], [None, {"topic": "nowhere"}])


def test_an_unexpected_error_names_its_type():
    said = str(explained(RuntimeError("odd"), source()))
    assert said == "source 'orders': a topic at 127.0.0.1:9 failed with RuntimeError: odd"
