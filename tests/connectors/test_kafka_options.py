"""Options of a Kafka source: validation, errors and protection of secrets."""

import logging
import time
from typing import Any

import pytest
from confluent_kafka import Consumer
from pydantic import ValidationError

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kafka.cluster import Cluster, explained
from pipeline_platform.source.contract import SourceAwayError, SourceError
from tests.fixtures.kafka_source import until

SECRET = "s3cret-of-the-user"


def source(**options: Any) -> KafkaSource:
    return KafkaSource(**{
        "name": "orders", "bootstrap_servers": "127.0.0.1:9", "group_id": "g", "topics": ("orders",), **options
    })  # fmt: skip


def test_servers_are_text_or_a_list_with_ports():
    assert source(bootstrap_servers=["a:1", "b.c:2"]).bootstrap_servers == "a:1,b.c:2"
    assert source(bootstrap_servers="a:1, [::1]:2").bootstrap_servers == "a:1, [::1]:2"
    for refused in ("a", "", "a:1,,b:2", "http://a:1", "a:port"):
        with pytest.raises(ValidationError, match=r"bootstrap_servers\n.*must be host:port"):
            source(bootstrap_servers=refused)


def test_servers_and_a_group_are_required_and_unknown_options_refused():
    with pytest.raises(ValidationError) as refused:
        KafkaSource(name="orders", topics=("orders",))  # type: ignore[call-arg]
    assert [(error["loc"], error["type"]) for error in refused.value.errors()] == [
        (("bootstrap_servers",), "missing"), (("group_id",), "missing"),
    ]  # fmt: skip
    with pytest.raises(ValidationError, match=r"group_id\n.*at least 1 character"):
        source(group_id="")
    with pytest.raises(ValidationError, match=r"begin_offset\n.*Extra inputs"):
        source(begin_offset="reset")


def test_topics_and_topic_pattern_exclude_each_other():
    assert source(topics=(), topic_pattern="orders-.*").topic_pattern == "orders-.*"
    for refused in ({"topics": ()}, {"topic_pattern": "o"}):
        with pytest.raises(ValidationError, match=r"exactly one of topics and topic_pattern must be set"):
            source(**refused)
    with pytest.raises(ValidationError, match=r"topic_pattern '\(' is not a valid regular expression"):
        source(topics=(), topic_pattern="(")
    with pytest.raises(ValidationError, match=r"topics\n"):
        source(topics="orders")
    with pytest.raises(ValidationError, match=r"topics\.0\n"):
        source(topics=("with space",))


@pytest.mark.parametrize(
    "policy", ["", "smallest", "timestamp:", "timestamp:2026-01-31", "timestamp:2026-01-31T10:00:00"]
)
def test_offset_reset_policy_must_be_valid(policy):
    with pytest.raises(ValidationError, match=r"must be earliest, latest or timestamp.* got"):
        source(offset_reset_policy=policy)


@pytest.mark.parametrize(
    ("option", "lowest", "highest"),
    [("fetch_min_bytes", 1, None), ("fetch_max_bytes", 1_000_000, 2_147_483_135), ("request_timeout_s", 2, 300)],
)
def test_numbers_keep_to_what_kafka_allows(option, lowest, highest):
    for allowed in (lowest, highest or 10**9):
        assert getattr(source(**{option: allowed}), option) == allowed
    for refused in (lowest - 1, (highest + 1) if highest else "many", "few"):
        with pytest.raises(ValidationError, match=rf"{option}\n"):
            source(**{option: refused})
    for refused in (-1, 301, "long"):
        with pytest.raises(ValidationError, match=r"fetch_max_wait_s\n"):
            source(fetch_max_wait_s=refused, request_timeout_s=300)
    with pytest.raises(
        ValidationError, match=r"request_timeout_s must exceed fetch_max_wait_s by at least 1, got 10 and 10"
    ):
        source(fetch_max_wait_s=10)


OWNED = """
acks auto.commit.enable auto.offset.reset bootstrap.servers client.id enable.auto.commit enable.auto.offset.store
enable.idempotence enable.partition.eof fetch.max.bytes fetch.min.bytes fetch.wait.max.ms group.id group.instance.id
group.protocol isolation.level metadata.broker.list partition.assignment.strategy request.required.acks sasl.mechanism
sasl.mechanisms sasl.password sasl.username security.protocol socket.timeout.ms ssl.ca.location ssl.certificate.location
ssl.key.location ssl.key.password transactional.id
"""


@pytest.mark.parametrize("name", OWNED.split())
def test_client_options_cannot_override_options_of_the_connector(name):
    with pytest.raises(ValidationError, match=rf"{name!r} is set by this connector: .*\. Remove it"):
        source(client_options={name: "x"})


@pytest.mark.parametrize(
    "name",
    ["api.version.request", "linger.ms", "queued.min.messages", "reconnect.backoff.max.ms", "reconnect.backoff.ms",
     "socket.connection.setup.timeout.ms"],
)  # fmt: skip
def test_other_client_options_reach_the_client_library(name):
    given = source(client_options={name: "7"})
    assert [settings[name] for settings in (given.settings(), given.to_read(), given.to_send())] == ["7"] * 3
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
    with pytest.raises(ValidationError, match=r"sasl_username is set, but security_protocol SSL .*SASL_PLAINTEXT"):
        source(security_protocol="SSL", sasl_username="u")
    with pytest.raises(ValidationError, match="ssl_ca_location is set, but security_protocol PLAINTEXT"):
        source(ssl_ca_location="/ca.pem")
    with pytest.raises(ValidationError, match="security_protocol SASL_SSL requires sasl_mechanism"):
        source(security_protocol="SASL_SSL")


def test_errors_and_texts_of_the_source_contain_no_secrets():
    options = {"sasl.oauthbearer.client.secret": SECRET}
    given = source(
        security_protocol="SASL_SSL", sasl_mechanism="PLAIN", sasl_password=SECRET, ssl_key_password=SECRET,
        client_options=options,
    )  # fmt: skip
    assert SECRET not in repr(given) + str(given)
    with pytest.raises(ValidationError) as refused:
        source(security_protocol="SSL", sasl_password=SECRET)
    assert SECRET not in str(refused.value)
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
        SourceAwayError, match=r"source 'orders': bootstrap_servers '127.0.0.1:9' does not answer: .*efused"
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


def test_a_closed_source_reconnects_when_it_is_used(kafka, kafka_topic):
    ours = kafka(kafka_topic())
    ours.backlog()
    before = ours._cluster
    ours.close()
    ours.close()
    assert ours.backlog().messages == 0
    assert ours._cluster is not before


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


def test_a_missing_topic_is_named_when_sending_to_it(kafka, kafka_topic):
    source = kafka(kafka_topic(), request_timeout_s=2)

    with pytest.raises(
        SourceError, match=r"1 of 2 messages were refused.*topic 'nowhere' does not exist at .*Create the topic"
    ):
        source.send([b"1", b"2"], [None, {"topic": "nowhere"}])


def test_an_unexpected_error_names_its_type():
    said = str(explained(RuntimeError("odd"), source()))
    assert said == "source 'orders': a topic at 127.0.0.1:9 failed with RuntimeError: odd"
