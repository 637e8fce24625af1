"""Options of the connectors: invalid values are refused by the name of their option, without secrets."""

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline_platform import Source
from pipeline_platform.connectors.files import FileSource
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource, sqs_source
from pipeline_platform.connectors.table_queue import TableQueue

SECRET = "hush-this-is-secret"
AMQPS = f"amqps://user:{SECRET}@rabbit.example:5671/flights?heartbeat=30"
ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/clicks"
PATH = "projects/shop/subscriptions/flights"
VALID: dict[type[Source], dict[str, Any]] = {
    FileSource: {"root": "s3://lake/a", "catalog": "sqlite:///c.sqlite"},
    KafkaSource: {"bootstrap_servers": "127.0.0.1:9", "group_id": "g", "topics": ("orders",)},
    KinesisSource: {"stream": "clicks"},
    PubsubSource: {"subscription": PATH},
    RabbitmqSource: {"url": AMQPS, "queue": "flights"},
    SqsSource: {"queue_url": "https://sqs.eu-west-1.amazonaws.com/123456789012/flights"},
    TableQueue: {"url": "sqlite:///q.sqlite"},
}


def built(kind: type[Source], **options: Any) -> Any:
    return kind(**{"name": "flights", **VALID[kind], **options})


def values(option: str, said: str, *given: Any, **others: Any) -> list[tuple[dict[str, Any], str]]:
    """Return a refusal for each value of an option."""
    return [({option: value, **others}, said) for value in given]


OWNED = """
acks auto.commit.enable auto.offset.reset bootstrap.servers client.id enable.auto.commit enable.auto.offset.store
enable.idempotence enable.partition.eof fetch.max.bytes fetch.min.bytes fetch.wait.max.ms group.id group.instance.id
group.protocol isolation.level metadata.broker.list partition.assignment.strategy request.required.acks sasl.mechanism
sasl.mechanisms sasl.password sasl.username security.protocol socket.timeout.ms ssl.ca.location ssl.certificate.location
ssl.key.location ssl.key.password transactional.id
"""
"""Options of the client library of Kafka that the connector sets."""
AMQP = r"url\n.*must be amqp://user:password@host:port/vhost"
REFUSED: dict[type[Source], list[tuple[dict[str, Any], str]]] = {
    FileSource: [
        ({"root": "/data", "notifications": "https://sqs/1/q"}, "notifications must not be set for a folder"),
        ({"notifications": "orders"}, "must be the URL of an SQS queue or projects/<project>/subscriptions/<name>"),
        ({"notifications": f"https://user:{SECRET}@sqs/1/q"}, "must be the URL of an SQS queue"),
        ({"list_root": False}, "list_root is False, and notifications is not set"),
    ],
    KafkaSource: [
        *values("bootstrap_servers", r"bootstrap_servers\n.*must be host:port",
            "a", "", "a:1,,b:2", "http://a:1", "a:port"),
        ({"group_id": ""}, r"group_id\n.*at least 1 character"),
        ({"begin_offset": "reset"}, r"begin_offset\n.*Extra inputs"),
        ({"topics": ()}, "exactly one of topics and topic_pattern must be set"),
        ({"topic_pattern": "o"}, "exactly one of topics and topic_pattern must be set"),
        ({"topics": (), "topic_pattern": "("}, r"topic_pattern '\(' is not a valid regular expression"),
        ({"topics": "orders"}, r"topics\n"),
        ({"topics": ("with space",)}, r"topics\.0\n"),
        *values("offset_reset_policy", r"must be earliest, latest or timestamp.* got",
            "", "smallest", "timestamp:", "timestamp:2026-01-31", "timestamp:2026-01-31T10:00:00"),
        *values("fetch_max_wait_s", r"fetch_max_wait_s\n", -1, 301, "long", request_timeout_s=300),
        ({"fetch_max_wait_s": 10}, "request_timeout_s must exceed fetch_max_wait_s by at least 1, got 10 and 10"),
        ({"security_protocol": "SSL", "sasl_password": SECRET},
            "sasl_password is set, but security_protocol SSL .*SASL_PLAINTEXT"),
        *(
            ({"client_options": {name: "x"}}, rf"{name!r} is set by this connector: .*\. Remove it")
            for name in OWNED.split()
        ),
        ({"ssl_ca_location": "/ca.pem"}, "ssl_ca_location is set, but security_protocol PLAINTEXT"),
        ({"security_protocol": "SASL_SSL"}, "security_protocol SASL_SSL requires sasl_mechanism"),
    ],
    KinesisSource: [
        *values("stream", r"stream\n", "", "a/b", "a:b", "x" * 129, ARN.replace("kinesis", "sqs"), f"{ARN}/more"),
        *values("start", r"start\n", "", "latest", "AT_TIMESTAMP", "AT_TIMESTAMP:2026-01-31",
            "timestamp:2026-01-31T00:00:00Z"),
        *values("endpoint_url", r"endpoint_url\n", "localhost:4566", "ftp://host", f"http://user:{SECRET}@host",
            f"http://host?key={SECRET}"),
        *values("on_failure", "on_failure", "nack", "reject"),
    ],
    PubsubSource: [
        *values("subscription", "subscription", "", "shop/flights", "projects/shop/topics/flights",
            "projects//subscriptions/f", PATH + "/", None, project="shop"),
        *values("project", "subscription 'flights' is only a name, and project is .*Set project", None, "projects/shop",
            subscription="flights"),
        ({"topic": "flights"}, "topic 'flights' is only a name, and project is .*Set project"),
        ({"lease_s": 60}, "lease_s must equal ack_deadline_s"),
        *values("on_success", "on_success: '.*' is not a valid ack action of flights", "nack:601", "reject"),
        *values("on_failure", "on_failure: 'nack:601' is not a valid ack action of flights.*up to 600", "nack:601"),
    ],
    RabbitmqSource: [
        *values("url", AMQP, "", "rabbit.example", "http://rabbit.example", f"amqp://user:{SECRET}@",
            f"amqp://user:{SECRET}@host:port"),
        ({"queue": ""}, r"queue\n.*at least 1 character"),
        ({"url": f"{AMQPS}&hartbeat=5"}, r"url\n.*Did you mean 'heartbeat'\?"),
        ({"url": f"{AMQPS}&heartbeat=30"}, r"url\n.*'heartbeat' must be given once"),
        ({"url": "amqp://h/?heartbeat=x"}, r"url\n.*'heartbeat' .* a whole number from 0 to 65,535"),
        ({"url": "amqp://h/?frame_max=1"}, r"url\n.*'frame_max' .* from 4,096 to 131,072"),
        ({"url": "amqp://h/?socket_timeout=inf"}, r"url\n.*'socket_timeout' .* seconds"),
        ({"url": "amqp://h/?tcp_options=[1]"}, r"url\n.*'tcp_options' .* dict"),
        ({"prefetch_count": 0}, r"prefetch_count\n.*greater than or equal to 1"),
        ({"wait_time_s": 61}, r"wait_time_s\n.*less than or equal to 60"),
        ({"declare": {"exclusive": True}}, r"declare.exclusive\n.*deleted between two runs"),
        ({"declare": {"auto_delete": True}}, r"declare.auto_delete\n.*x-expires"),
        ({"declare": {"arguments": {"x-queue-type": "stream"}}}, r"declare.arguments\n.*x-queue-type is a stream"),
        ({"declare": {"nowait": True}}, r"declare.nowait\n.*Extra inputs"),
        ({"bindings": [{"routing_key": "a"}]}, r"bindings.0.exchange\n.*required"),
        ({"bindings": [{"exchange": "a", "nowait": True}]}, r"bindings.0.nowait\n.*Extra inputs"),
        ({"consume_options": {"no_ack": True}}, r"consume_options.no_ack\n.*Extra inputs"),
        ({"backoff_type": "linear"}, r"backoff_type\n.*'exp', 'rand', 'rand_exp' or 'stop'"),
        ({"backoff_min_s": 0}, r"backoff_min_s\n.*greater than 0"),
        ({"backoff_max_s": 0}, r"backoff_max_s\n.*greater than 0"),
        ({"backoff_min_s": 31}, r"backoff_min_s must not exceed backoff_max_s \(30\), got 31"),
        ({"colour": "red"}, r"colour\n.*Extra inputs"),
    ],
    SqsSource: [
        *values("queue_url", r"queue_url\n", "", "flights", "sqs.eu-west-1.amazonaws.com/1/flights", "ftp://sqs/1/f",
            None, 1),
        ({"queue_url": "https://sqs.eu-west-1.amazonaws.com/"}, "aws sqs get-queue-url"),
        ({"queue_name": "flights"}, r"queue_name\n.*Extra inputs"),
        ({"lease_s": 60}, "lease_s must equal visibility_timeout"),
        ({"attribute_names": ["All", "Sender"]}, r"attribute_names\.1\n.*SenderId"),
        ({"message_attribute_names": ["trace", ""]}, r"message_attribute_names\.1\n.*at least 1 character"),
        ({"message_attribute_names": "trace"}, r"message_attribute_names\n"),
        *values("on_success", "on_success: '.*' is not a valid ack action of flights", "nack:42301", "reject"),
        *values("on_failure", "on_failure: 'nack:42301' is not a valid ack action of flights.*up to 42,300",
            "nack:42301"),
    ],
    TableQueue: [({"one_receive_per_partition": True}, "one_receive_per_partition requires partition_column")],
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_invalid_options_are_refused_by_name(kind):
    for options, said in REFUSED[kind]:
        with pytest.raises(ValidationError, match=said) as refused:
            built(kind, **options)
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "option", "lowest", "highest"),
    [
        (KafkaSource, "fetch_min_bytes", 1, None),
        (KafkaSource, "fetch_max_bytes", 1_000_000, 2_147_483_135),
        (KafkaSource, "request_timeout_s", 2, 300),
        (PubsubSource, "max_number_of_messages", 1, 1_000),
        (PubsubSource, "ack_deadline_s", 10, 600),
        (PubsubSource, "pull_timeout_s", 0.1, 60),
        (PubsubSource, "timeout_s", 1, 20),
        (SqsSource, "max_number_of_messages", 1, 10),
        (SqsSource, "wait_time_seconds", 0, 20),
        (SqsSource, "visibility_timeout", 1, 43_200),
    ],
)
def test_numbers_keep_to_what_the_server_allows(kind, option, lowest, highest):
    for allowed in (lowest, highest or 10**9):
        assert getattr(built(kind, **{option: allowed}), option) == allowed
    for refused in (lowest - 1, lowest - 0.01, highest + 1 if highest else "few", "many"):
        with pytest.raises(ValidationError, match=rf"{option}\n"):
            built(kind, **{option: refused})


@pytest.mark.parametrize(("kind", "option"), [(PubsubSource, "ack_deadline_s"), (SqsSource, "visibility_timeout")])
def test_the_lease_equals_the_option_of_the_server(kind, option):
    source = built(kind, **{option: "30"})
    assert (source.lease_s, source.extend_every_s) == (30.0, 10.0)
    assert kind.model_validate(source.model_dump()) == source, "dumped options can be loaded"


@pytest.mark.parametrize(("kind", "longest"), [(PubsubSource, 600), (SqsSource, 42_300)])
def test_ack_actions_keep_to_the_longest_delay_of_the_server(kind, longest):
    for option in ("on_success", "on_failure"):
        for action in ("ack", "noop", "nack", "nack:0", f"nack:{longest}"):
            assert getattr(built(kind, **{option: action}), option) == action
    assert (built(kind).on_success, built(kind).on_failure) == ("ack", "ack")


def test_servers_of_kafka_are_text_or_a_list_with_ports():
    assert built(KafkaSource, bootstrap_servers=["a:1", "b.c:2"]).bootstrap_servers == "a:1,b.c:2"
    assert built(KafkaSource, bootstrap_servers="a:1, [::1]:2").bootstrap_servers == "a:1, [::1]:2"
    assert built(KafkaSource, topics=(), topic_pattern="orders-.*").topic_pattern == "orders-.*"
    with pytest.raises(ValidationError) as refused:
        KafkaSource(name="orders", topics=("orders",))  # type: ignore[call-arg]
    assert [(error["loc"], error["type"]) for error in refused.value.errors()] == [
        (("bootstrap_servers",), "missing"), (("group_id",), "missing"),
    ]  # fmt: skip


def test_attribute_names_exist_in_sqs():
    every = sqs_source.AttributeName.__args__
    assert built(SqsSource, attribute_names=list(every)).attribute_names == every
    assert built(SqsSource, message_attribute_names=["All"]).message_attribute_names == ("All",)


def test_names_of_pubsub_are_completed_with_the_project():
    assert built(PubsubSource, subscription="flights", project="shop")._path == PATH
    assert built(PubsubSource, project="other")._path == PATH
    assert built(PubsubSource, topic="late", project="shop")._topic == "projects/shop/topics/late"


@pytest.mark.parametrize(
    ("stream", "region_name", "region"),
    [
        ("clicks", None, None),
        ("clicks", "us-east-2", "us-east-2"),
        (ARN, None, "eu-west-1"),
        (ARN, "us-east-2", "us-east-2"),
        (ARN.replace("arn:aws:", "arn:aws-us-gov:"), None, "eu-west-1"),
    ],
)
def test_a_stream_has_a_name_and_perhaps_a_region(stream, region_name, region):
    found = built(KinesisSource, stream=stream, region_name=region_name)
    assert (found.stream_name, found.region) == ("clicks", region)
    assert built(KinesisSource, start="AT_TIMESTAMP:2026-01-31T00:00:00Z").start_time == 1_769_817_600
    assert built(KinesisSource, start="LATEST").start_time is None
