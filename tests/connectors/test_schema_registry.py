"""Payloads in Confluent's wire format: schemas of a registry, and a registry that is unavailable."""

import json
from datetime import timedelta
from threading import Timer

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.serialization import MessageField, SerializationContext
from pydantic import BaseModel

from pipeline_platform import Pipeline, Processors, Producer, TableBatcher, avro_columns
from pipeline_platform.connectors import schema_registry
from pipeline_platform.connectors.schema_registry import (
    SchemaRegistry,
    SchemaRegistryAwayError,
    SchemaRegistryError,
    UnknownSchemaError,
)
from pipeline_platform.model.failure import PayloadError, RunError
from pipeline_platform.source.pauses import Patience
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.testing import test_batch
from tests.fixtures import protobuf
from tests.fixtures.fake_schema_registry import framed
from tests.fixtures.small_lake import (
    Memory,
    Shared,
    message_of,
    numbered,
    outcomes,
    ranges,
    received,
    returned,
    rows_of,
)
from tests.model.test_avro import encoded, field

ROW = {"type": "record", "name": "Row", "fields": [field("text", "string")]}
SHORT = Patience(least_s=0.01, most_s=0.05, within_s=0.3)


class Row(BaseModel):
    text: str


@pytest.fixture
def registry(fake_schema_registry):
    return SchemaRegistry({"url": fake_schema_registry.url})


@pytest.fixture
def row(fake_schema_registry):
    """Return a function that encodes a row in the wire format."""
    schema_id = fake_schema_registry.register("rows", json.dumps(ROW))
    return lambda text: framed(schema_id, encoded(ROW, {"text": text}))


def test_payloads_of_several_schemas_are_decoded_and_each_schema_is_requested_once(fake_schema_registry, registry, row):
    other = fake_schema_registry.register("rows", json.dumps({**ROW, "fields": [field("text", ["null", "string"])]}))
    payloads = [row("a"), row("b"), framed(other, encoded(["null", "string"], "c")), row("d")]

    assert [message_of(payload).avro(Row, registry).text for payload in payloads] == ["a", "b", "c", "d"]
    assert len(fake_schema_registry.requests) == 2


def test_schemas_that_refer_to_others_are_decoded(fake_schema_registry, registry):
    line = {"type": "record", "name": "shop.Line", "fields": [field("sku", "string")]}
    fake_schema_registry.register("line", json.dumps(line))
    order = {
        "type": "record",
        "name": "shop.Order",
        "fields": [field("lines", {"type": "array", "items": "shop.Line"})],
    }
    refers = fake_schema_registry.register("orders", json.dumps(order), "AVRO", ("shop.Line", "line", 1))
    both = fake_schema_registry.register("both", '["shop.Line"]', "AVRO", ("shop.Line", "line", 1))
    whole = {**order, "fields": [field("lines", {"type": "array", "items": line})]}

    value = {"lines": [{"sku": "x"}, {"sku": "y"}]}
    assert message_of(framed(refers, encoded(whole, value))).avro(dict, registry) == value
    assert message_of(framed(both, encoded([line], {"sku": "z"}))).avro(dict, registry) == {"sku": "z"}


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "the payload has no header of Confluent's wire format: it has 0 bytes"),
        (b'{"text": "hunter2"}', "the payload has no header of Confluent's wire format: its first byte is 123 instead"),
        (framed(2**31, b"\x02"), "the payload has no header of Confluent's wire format: 2147483648 is not a schema id"),
        (framed(100, b"\x0chunter"), "schema 100: the payload is not Avro of this schema: EOFError"),
        (framed(101, b"\x02"), "schema 101 is of the type JSON, but AVRO is expected"),
        (framed(102, b"\x02"), "schema 102: Row: text: Input should be a valid string"),
        (framed(103, b"\x02"), "schema 103 cannot be parsed"),
    ],
)
def test_a_refused_payload_names_its_schema_and_quotes_nothing(fake_schema_registry, registry, row, payload, why):
    fake_schema_registry.register("json", "{}", "JSON")
    fake_schema_registry.register("numbers", json.dumps({**ROW, "fields": [field("text", "long")]}))
    fake_schema_registry.register("wrong", '{"type": "nothing"}')
    if payload == framed(100, b"\x0chunter"):
        payload = framed(100, b"\x0ehunter")
    with pytest.raises(PayloadError) as refused:
        message_of(payload).avro(Row, registry)
    assert str(refused.value).startswith(why)
    assert "hunter" not in str(refused.value)


def test_an_unknown_schema_fails_its_messages_and_is_requested_once(fake_schema_registry, registry):
    for _ in range(2):
        with pytest.raises(UnknownSchemaError, match="schema 999 is not in the schema registry http://127"):
            message_of(framed(999, b"")).avro(Row, registry)
    assert len(fake_schema_registry.requests) == 1


def test_a_protobuf_payload_of_another_message_type_is_refused(fake_schema_registry, registry):
    schema_id = fake_schema_registry.register("orders", protobuf.SCHEMA, "PROTOBUF")
    order, refund = protobuf.Order(number=1), protobuf.Refund(order=1)
    as_order, as_refund = b"\x02\x04" + order.SerializeToString(), b"\0" + refund.SerializeToString()

    assert message_of(framed(schema_id, as_order)).protobuf(protobuf.Order, registry=registry) == order
    with pytest.raises(PayloadError, match=r"the payload is a shop.Refund, but shop.Order is expected"):
        message_of(framed(schema_id, as_refund)).protobuf(protobuf.Order, registry=registry)
    with pytest.raises(PayloadError, match="no header"):
        message_of(order.SerializeToString()).protobuf(protobuf.Order, registry=registry)
    with pytest.raises(PayloadError, match="which is not there"):
        message_of(framed(schema_id, b"\x02\x63")).protobuf(protobuf.Order, registry=registry)


def test_a_schema_with_rules_for_reading_is_refused():
    from confluent_kafka.schema_registry import Rule, RuleKind, RuleMode, RuleSet, Schema

    rule = Rule(
        "decrypt", "", RuleKind.TRANSFORM, RuleMode.WRITEREAD, "ENCRYPT", ["PII"], None, None, None, None, False
    )
    client = SchemaRegistryClient.new_client({"url": "mock://"})
    schema_id = client.register_schema("rows", Schema(json.dumps(ROW), "AVRO", [], None, RuleSet(None, [rule])))
    with pytest.raises(PayloadError, match="rule 'decrypt'"):
        message_of(framed(schema_id, encoded(ROW, {"text": "a"}))).avro(Row, SchemaRegistry(client))


@pytest.mark.parametrize("kind", ["avro", "protobuf", "json_schema"])
def test_payloads_of_confluent_s_serializers_are_decoded(kind):
    from confluent_kafka.schema_registry import avro, json_schema
    from confluent_kafka.schema_registry import protobuf as confluent_protobuf

    client = SchemaRegistryClient.new_client({"url": "mock://"})
    registry, topic = SchemaRegistry(client), SerializationContext("rows", MessageField.VALUE)
    if kind == "protobuf":
        made, conf = protobuf.Line(sku="x", count=2), {"use.deprecated.format": False}
        payload = confluent_protobuf.ProtobufSerializer(protobuf.Line, client, conf)(made, topic)
        assert message_of(payload).protobuf(protobuf.Line, registry=registry) == made
        assert message_of(payload).protobuf(dict, protobuf.Line, registry) == {"sku": "x", "count": 2}
    elif kind == "avro":
        payload = avro.AvroSerializer(client, json.dumps(ROW))({"text": "a"}, topic)
        assert message_of(payload).avro(Row, registry) == Row(text="a")
    else:
        payload = json_schema.JSONSerializer('{"title": "Row", "type": "object"}', client)({"text": "a"}, topic)
        assert message_of(payload).json_schema(Row) == Row(text="a")


def test_a_registry_that_comes_back_in_time_fails_nothing(fake_schema_registry, registry, row, monkeypatch):
    monkeypatch.setattr(schema_registry, "USUAL", SHORT._replace(within_s=20))
    fake_schema_registry.stop()
    Timer(0.3, fake_schema_registry.start).start()
    assert message_of(row("a")).avro(Row, registry) == Row(text="a")


@pytest.mark.parametrize("status", [0, 503, 429])
def test_a_registry_that_stays_away_ends_the_run_without_its_secrets(fake_schema_registry, row, monkeypatch, status):
    monkeypatch.setattr(schema_registry, "USUAL", SHORT)
    url = fake_schema_registry.url.replace("//", "//user:hunter2@")
    away = SchemaRegistry({"url": url})
    fake_schema_registry.status = status
    if not status:
        fake_schema_registry.stop()
    with pytest.raises(SchemaRegistryAwayError, match="does not answer") as refused:
        message_of(row("a")).avro(Row, away)
    assert fake_schema_registry.url in str(refused.value)
    assert "hunter2" not in f"{refused.value} {away!r}"
    asked = len(fake_schema_registry.requests)
    with pytest.raises(SchemaRegistryAwayError):
        message_of(row("a")).avro(Row, away)
    assert len(fake_schema_registry.requests) == asked, "another thread does not wait again"


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_a_registry_that_refuses_the_client_ends_the_run_at_once(fake_schema_registry, row, status):
    refused = SchemaRegistry({"url": fake_schema_registry.url, "basic.auth.user.info": "user:hunter2"})
    fake_schema_registry.status = status
    with pytest.raises(SchemaRegistryError) as error:
        message_of(row("a")).avro(Row, refused)
    assert not isinstance(error.value, SchemaRegistryAwayError)
    assert isinstance(error.value, RunError)
    assert "hunter2" not in str(error.value)
    assert len(fake_schema_registry.requests) == 1


TIMEOUT = timedelta(seconds=2)


class Rows(Pipeline):
    """Stores rows; a payload of JSON fails."""

    name = "rows"
    producer = Producer(source="memory")
    processors = Processors(message_timeout=TIMEOUT)
    batchers = {"kept": TableBatcher(schema=Row)}
    url = ""

    def __init__(self):
        self.registry = SchemaRegistry(SchemaRegistryClient({"url": self.url, "max.retries": 0, "timeout": 5}))

    def handle_message(self, message, context):
        try:
            return message.put(message.avro(Row, self.registry), batcher="kept")
        except Exception as error:
            return message.failed(error)


class ThreadedRows(Rows):
    name = "threaded_rows"
    processors = Processors(message_timeout=TIMEOUT, threads=3)


class BlocksOfRows(Pipeline):
    name = "blocks_of_rows"
    producer = Producer(source="memory")
    processors = Processors(message_timeout=TIMEOUT)
    batchers = {"kept": TableBatcher(schema=Row)}
    calls = Shared(0)

    def __init__(self):
        self.registry = SchemaRegistry({"url": Rows.url})

    def handle_messages(self, messages: pa.Table, context):
        self.calls.value += 1
        decoded = avro_columns(messages, Row, self.registry)
        batcher = pa.repeat("kept", decoded.num_rows)
        return decoded.set_column(decoded.schema.get_field_index("batcher"), "batcher", batcher)


@pytest.fixture
def task(lake, fake_schema_registry, monkeypatch):
    """Return a function that handles payloads in a callback process."""
    monkeypatch.setattr(Rows, "url", fake_schema_registry.url)

    monkeypatch.setattr(BlocksOfRows, "calls", Shared(0))

    def handled(pipeline, *payloads):
        source = Memory(deliveries_=numbered(*payloads))
        rows = ranges(received(lake, pipeline.name, source), pipeline.name)
        return returned(Handle(pipeline, None, source.ack_policy, lake, "r1", parts=[rows])(0))

    return handled


@pytest.mark.parametrize("pipeline", [Rows, ThreadedRows, BlocksOfRows])
def test_the_wait_for_a_registry_is_not_a_timeout_of_a_message(
    lake, task, fake_schema_registry, row, monkeypatch, pipeline
):
    monkeypatch.setattr(schema_registry, "USUAL", SHORT._replace(within_s=20))
    payloads = [row("a"), b"{}", row("b")]
    fake_schema_registry.stop()
    Timer(1.5 * TIMEOUT.total_seconds(), fake_schema_registry.start).start()

    manifest = task(pipeline, *payloads)

    assert outcomes(lake, pipeline.name, manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, pipeline.name, manifest, "failed")
    assert "no header of Confluent's wire format" in failure["reason"]


@pytest.mark.parametrize("pipeline", [Rows, ThreadedRows, BlocksOfRows])
def test_a_run_without_its_registry_fails_and_no_message_does(task, fake_schema_registry, row, monkeypatch, pipeline):
    monkeypatch.setattr(schema_registry, "USUAL", SHORT)
    payloads = [row("a"), row("b")]
    fake_schema_registry.stop()
    with pytest.raises(RuntimeError, match=r"schema registry.*does not answer"):
        task(pipeline, *payloads)
    assert BlocksOfRows.calls.value <= 1, "a block is not halved"


def test_test_batch_decodes_with_the_registry_of_the_pipeline(fake_schema_registry, row, monkeypatch):
    monkeypatch.setattr(Rows, "url", fake_schema_registry.url)
    done = test_batch(Rows, [row("a"), b"{}"])
    assert [message.data for message in done.successful] == [Row(text="a")]
    assert ["no header" in str(message.reason) for message in done.failed] == [True]
