"""Examples and lists of `docs/connect/`, run on real servers and compared with the code."""

import json
import logging
import re
from itertools import chain
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from pipeline_platform.connectors.files import FileSource
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kinesis import KinesisSource, kinesis_api
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.rabbitmq.rabbitmq_options import ACK_ACTIONS, Binding, ConsumeOptions, Declare
from pipeline_platform.connectors.sqs import SqsSource, sqs_api
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.message import Message
from pipeline_platform.source.contract import Source
from pipeline_platform.source.patience import patiently
from pipeline_platform.tasks.handle.row_lane import Handler
from servers import kafka
from tests.fixtures.documents import DOCS, blocks, deployed, source_of
from tests.fixtures.kafka_source import report_no_topic_ids
from tests.fixtures.postgres import administrator
from tests.fixtures.servers import ready
from tests.fixtures.small_lake import recorded

DOCUMENTS = {path.stem: path.read_text() for path in (DOCS / "connect").glob("*.md")}
TABLE, RIGHTS = blocks(DOCS / "connect" / "table-queue.md", "sql")


IMPLIED = {"lease_s"}
"""Options that are set by another option in some sources."""


def shown(document: str) -> dict[str, Any]:
    """Return the names that a document's Python defines in a deployment."""
    return deployed(blocks(DOCS / "connect" / f"{document}.md"))


def handled(pipeline: Any, source: Source) -> list[Message]:
    """Handle and acknowledge all messages of a source, and return them."""
    done, mine = list[Message](), list[tuple[str, list[str]]]()
    for share in source.plan(10, 1, "r1"):
        for batch in source.read(share, "r1"):
            done += chain.from_iterable(Handler(recorded(pipeline())).portions(batch))
            mine.append((batch["ack_ref"][0].as_py(), batch["ack_id"].to_pylist()))
            assert source.acknowledge("ack", *mine[-1]) == []
    source.finish("r1", lambda: mine)
    assert not source.backlog().messages
    assert {producer.source for producer in BoundProducer.all_of(pipeline)} == {source.name}
    return done


def keys_and_reason(done: list[Message]) -> tuple[list[str], str]:
    """Return the batch keys of the handled messages, and the reason of the only failure."""
    (failure,) = [message.failure for message in done if message.failure]
    return sorted(message.batch_key for message in done if not message.failure), failure.reason


def test_kafka(kafka_server, kafka_topic, monkeypatch, tmp_path):
    kafka_topic(2, name="payments")
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", kafka_server)
    names = shown("kafka")
    source = source_of(names, "payments_topic")
    source.open(ControlStore(f"sqlite:///{tmp_path}/control.sqlite"))
    patiently(source.check_ready)
    payment = b'{"number": 1, "amount": 9.5, "country": "PL"}'
    source.send([payment, payment, b"{}"], [{"key": "card"}, None, {"key": "card"}])
    keys, reason = keys_and_reason(handled(names["Payments"], source))
    assert keys == ["card", "unknown"]
    assert "amount" in reason


CONNECTION = (
    "Endpoint=sb://localhost;SharedAccessKeyName=all;SharedAccessKey=a/secret+key=;UseDevelopmentEmulator=true;"
)


@pytest.mark.faults
def test_event_hubs_on_kafka_with_its_login_and_without_topic_ids(servers_folder, monkeypatch, tmp_path):
    ready(kafka)
    report_no_topic_ids(monkeypatch)
    monkeypatch.setenv("EVENT_HUBS_CONNECTION_STRING", CONNECTION)
    with kafka.serve(servers_folder, {"$ConnectionString": CONNECTION}) as server:
        monkeypatch.setenv("EVENT_HUBS_BOOTSTRAP", server.address)
        names = shown("event-hubs")
        source = source_of(names, "orders_hub").model_copy(update={"security_protocol": "SASL_PLAINTEXT"})
        admin = AdminClient(source.settings())  # a variable, because the answer is lost with the client
        admin.create_topics([NewTopic("orders", 2)])["orders"].result(30)
        source.open(ControlStore(f"sqlite:///{tmp_path}/control.sqlite"))
        patiently(source.check_ready)
        order = b'{"number": 1, "total": 9.5}'
        source.send([order, order, b"{}"], [{"partition": partition} for partition in (0, 1, 1)])

        done = handled(names["Orders"], source)
        source.close()

    assert sorted(message.message_id for message in done) == ["orders:0:0", "orders:1:0", "orders:1:1"]
    assert keys_and_reason(done)[0] == ["default", "default"]


def test_the_client_library_accepts_the_logins_of_event_hubs(monkeypatch, tmp_path):
    away = {"EVENT_HUBS_BOOTSTRAP": "127.0.0.1:1", "ENTRA_TOKEN_URL": "https://127.0.0.1:1/token"}
    secret = {"EVENT_HUBS_CONNECTION_STRING": CONNECTION, "AZURE_CLIENT_ID": "us", "AZURE_CLIENT_SECRET": "hidden"}
    for name, value in {**away, **secret}.items():
        monkeypatch.setenv(name, value)
    names = shown("event-hubs")
    by_key, by_identity = (source_of(names, key) for key in ("orders_hub", "orders_hub_with_entra"))
    shared = {"socket.keepalive.enable": "true", "metadata.max.age.ms": "180000"}
    managed = dict(
        re.findall(r'"(sasl\.oauthbearer\.[\w.]+)": "(\S+)"', DOCUMENTS["event-hubs"].partition("managed")[2])
    )

    assert (by_key.sasl_username, by_key.sasl_password) == ("$ConnectionString", CONNECTION)
    assert by_identity.client_options["sasl.oauthbearer.client.secret"] == "hidden"
    assert {*managed} == {"sasl.oauthbearer.metadata.authentication.type", "sasl.oauthbearer.config"}
    nowhere = {"sasl.oauthbearer.method": "oidc", "sasl.oauthbearer.token.endpoint.url": away["ENTRA_TOKEN_URL"]}
    of_machine = by_identity.model_copy(update={"client_options": {**shared, **managed, **nowhere}})
    for source in (by_key, by_identity, of_machine):
        assert source.client_options.items() >= shared.items()
        Consumer(source.to_read(), logger=logging.getLogger(__name__)).close()


def test_kinesis(kinesis_server, kinesis_stream, monkeypatch, tmp_path):
    monkeypatch.setenv("CLICKS_STREAM", kinesis_stream(2))
    monkeypatch.setenv("AWS_ENDPOINT_URL_KINESIS", kinesis_server)
    names = shown("kinesis")
    source = source_of(names, "clicks_stream")
    source.open(ControlStore(f"sqlite:///{tmp_path}/control.sqlite"))
    click = b'{"user": "zoe", "page": "/"}'
    source.send([click, click, b"{}"], [{"partition_key": key} for key in ("a", "b", "a")])
    keys, reason = keys_and_reason(handled(names["Clicks"], source))
    assert keys == ["a", "b"]
    assert "user" in reason


def test_pubsub(subscribed, monkeypatch):
    there = subscribed()
    payloads = [b'{"number": 1, "total": 9.5}', b'{"number": 2, "total": 1}', b'{"number": 3}']
    there.send(payloads, [{"attributes": {"region": "north"}}, None, None])
    monkeypatch.setenv("ORDERS_SUBSCRIPTION", there._path)
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", str(there.emulator_host))
    names = shown("pubsub")
    keys, reason = keys_and_reason(handled(names["Orders"], source_of(names, "orders_subscription")))
    assert keys == ["north", "unknown"]
    assert "total" in reason


def test_rabbitmq(rabbitmq_server, monkeypatch):
    monkeypatch.setenv("ORDERS_RABBITMQ_URL", rabbitmq_server)
    names = shown("rabbitmq")
    source = source_of(names, "orders_queue")
    assert source.backlog().messages == 0, "the sensor's look made the queue"
    payloads = [b'{"number": 1, "total": 9.5}', b'{"number": 2, "total": 1}', b'{"number": 3}']
    source.send(
        payloads, [{"exchange": "shop", "routing_key": f"orders.{region}"} for region in ("north", "south", "south")]
    )
    waiting = source.model_copy(update={"wait_time_s": 1.0})

    keys, reason = keys_and_reason(handled(names["Orders"], waiting))
    source.close()
    waiting.close()

    assert keys == ["north", "south"]
    assert "total" in reason


def test_sqs(sqs_queue, monkeypatch):
    url = sqs_queue()
    monkeypatch.setenv("ORDERS_QUEUE_URL", url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SQS", url.rsplit("/", 2)[0])
    names = shown("sqs")
    queue = source_of(names, "orders_queue")
    queue.send([json.dumps({"id": n, "customer": "Zoë", "total": 1.5}).encode() for n in range(3)] + [b"no order"])
    messages = handled(names["Orders"], queue)
    assert sorted(message.data.id for message in messages if not message.failure) == [0, 1, 2]
    assert [message.data for message in messages if message.failure] == [b"no order"]


@pytest.fixture
def outbox(postgres_url, monkeypatch):
    """Return the names of the document on table queues, and its source with its table."""
    monkeypatch.setenv("OUTBOX_URL", postgres_url)
    names = shown("table-queue")
    queue = source_of(names, "outbox")
    with administrator(postgres_url) as connection:
        connection.execute(TABLE)
    queue.create()
    return names, queue


def test_a_table_queue(outbox, postgres_url):
    names, queue = outbox
    with psycopg.connect(postgres_url) as connection:
        for number in range(3):
            row = (f"customer {number % 2}", json.dumps({"number": number, "total": 1.5}))
            connection.execute("INSERT INTO sales.outbox (customer, body) VALUES (%s, %s)", row)
        connection.execute("INSERT INTO sales.outbox (customer, body) VALUES ('nobody', '[]')")

    (share,) = queue.plan(10, 1, "looks")
    (batch,) = queue.read(share, "looks")
    assert batch["partition"].to_pylist() == ["customer 0", "customer 1", "customer 0", "nobody"]
    queue.abandon("looks", list)

    messages = handled(names["Orders"], queue)

    assert [message.data.number for message in messages if not message.failure] == [0, 1, 2]
    assert [message.data for message in messages if message.failure] == [b"[]"]


def test_the_rights_that_the_document_of_table_queues_grants_are_enough_for_a_run(outbox, postgres_url):
    _, queue = outbox
    with administrator(postgres_url) as connection:
        connection.execute("INSERT INTO sales.outbox (customer, body) SELECT 'one', '{}' FROM generate_series(1, 5)")
        connection.execute("CREATE ROLE runs LOGIN PASSWORD 'theirs'")
        try:
            connection.execute(RIGHTS)
            url = sa.make_url(queue.url).set(username="runs", password="theirs")
            theirs = queue.model_copy(update={"url": url.render_as_string(hide_password=False)})
            theirs.check_ready()
            theirs.plan(5, 2, "given up")
            theirs.abandon("given up", list)
            assert sum(share.messages for share in theirs.plan(5, 2, "r1")) == 5
            assert theirs.extend("r1", list)
            assert theirs.release("r1", ["5"], 60) == []
            assert theirs.ack("r1", ["1", "2", "3", "4"]) == []
        finally:
            connection.execute("DROP OWNED BY runs")
            connection.execute("DROP ROLE runs")


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ("files", FileSource),
        ("kafka", KafkaSource),
        ("kinesis", KinesisSource),
        ("pubsub", PubsubSource),
        ("rabbitmq", RabbitmqSource),
        ("sqs", SqsSource),
        ("table-queue", TableQueue),
    ],
)
def test_the_options_that_a_document_lists_are_all_there_are(document, kind):
    section = DOCUMENTS[document].partition("## Options")[2].partition("\n## ")[0]
    listed = {
        name
        for row in re.findall(r"^\| (`.*) \|$", section, re.M)
        for name in re.findall(r"`(\w+)`", row.split(" | ")[0])
    }
    assert kind.model_fields.keys() - {"name"} - IMPLIED <= listed
    assert listed - kind.model_fields.keys() == set()


def test_the_document_of_rabbitmq_describes_options_within_options():
    described = DOCUMENTS["rabbitmq"].partition("## Options")[2].partition("\n\n`")[0]
    inner = {*Declare.model_fields, *Binding.model_fields, *ConsumeOptions.model_fields, *ACK_ACTIONS}
    assert {name for name in inner if f"`{name}`" not in described} == {"auto_delete"}


@pytest.mark.parametrize(
    ("document", "explanations", "number"),
    [("sqs", sqs_api.EXPLANATIONS, 5), ("kinesis", kinesis_api._EXPLANATIONS, 7)],
)
def test_the_document_names_the_permissions_that_an_error_names(document, explanations, number):
    (said,) = [text for codes, text in explanations.items() if codes.startswith("AccessDenied")]
    asked = set(re.findall(rf"(?:{document}|kms):\w+", said))
    assert len(asked) == number
    assert asked <= set(re.findall(r"\w+:\w+", DOCUMENTS[document]))
