"""Decoding Avro, Protobuf and JSON in Confluent's wire format, compared with the deserializers of confluent-kafka.

Run it as `python -m benchmarks.decoders [--messages N] [--rounds N]`. Both sides take schemas from the same registry in
memory. The deserializers return a dict or a Protobuf message; `message.avro` and the others return a model, and the
functions for blocks return columns. Peers take turns in random order. The median of the ratios of processor time is
printed, with minimum and maximum.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa

from benchmarks.events import Event, payloads
from benchmarks.handling import ratio
from benchmarks.options import options
from pipeline_platform.connectors.schema_registry import SchemaRegistry
from pipeline_platform.model.blocks import ROUTING
from pipeline_platform.model.formats.block_formats import avro_columns, json_schema_columns, protobuf_columns
from pipeline_platform.model.message import MESSAGES, Message

_BLOCK = 8_192
_AVRO = {"id": "long", "price": "double", "quantity": "int"}
_JSON = {"id": "integer", "price": "number", "quantity": "integer"}
_PROTOBUF = {"id": "INT64", "price": "DOUBLE", "quantity": "INT32"}
"""Types of the fields of an event that are not text."""


def event_type() -> Any:
    """Return the class that protoc would generate for an event."""
    from google.protobuf import descriptor_pb2, descriptor_pool
    from google.protobuf.message_factory import GetMessageClass

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Event")
    for number, name in enumerate(Event.model_fields, 1):
        kind = getattr(field, f"TYPE_{_PROTOBUF.get(name, 'STRING')}")
        message.field.add(name=name, number=number, label=field.LABEL_OPTIONAL, type=kind)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    return GetMessageClass(descriptor_pool.Default().FindMessageTypeByName("shop.Event"))


def formats() -> Iterator[tuple[str, Any, Any, Callable[[Message], Any], Callable[[pa.Table], Any]]]:
    """Yield each format: name, serializer, deserializer, and our functions for a message and for a block."""
    from confluent_kafka.schema_registry import avro, json_schema, protobuf
    from confluent_kafka.schema_registry.schema_registry_client import SchemaRegistryClient

    client = SchemaRegistryClient.new_client({"url": "mock://"})
    registry, kind = SchemaRegistry(client), event_type()
    fields = [{"name": name, "type": _AVRO.get(name, "string")} for name in Event.model_fields]
    schema = json.dumps({"type": "record", "name": "Event", "fields": fields})
    yield (
        "avro", avro.AvroSerializer(client, schema), avro.AvroDeserializer(client),
        lambda message: message.avro(Event, registry), lambda block: avro_columns(block, Event, registry),
    )  # fmt: skip
    serialize = protobuf.ProtobufSerializer(kind, client, {"use.deprecated.format": False})
    yield (
        "protobuf", lambda event, context: serialize(kind(**event), context),
        protobuf.ProtobufDeserializer(kind, {"use.deprecated.format": False}, client),
        lambda message: message.protobuf(kind, registry=registry),
        lambda block: protobuf_columns(block, Event, kind, registry),
    )  # fmt: skip
    properties = {name: {"type": _JSON.get(name, "string")} for name in Event.model_fields}
    schema = json.dumps({"title": "Event", "type": "object", "properties": properties})
    yield (
        "json_schema", json_schema.JSONSerializer(schema, client),
        json_schema.JSONDeserializer(None, schema_registry_client=client),
        lambda message: message.json_schema(Event), lambda block: json_schema_columns(block, Event),
    )  # fmt: skip


def measured(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of processor time of each way in each round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    chance = random.Random(rounds)
    for _ in range(rounds):
        for name in chance.sample(sorted(ways), len(ways)):
            started = time.process_time()
            ways[name]()
            times[name].append(time.process_time() - started)
    return times


def main() -> None:
    """Run the benchmark and print the result."""
    from confluent_kafka.serialization import MessageField, SerializationContext

    given = options(__doc__, messages=20_000, rounds=9)
    events, context = (
        list(map(json.loads, payloads(given.messages))),
        SerializationContext("events", MessageField.VALUE),
    )
    for name, serialize, deserialize, row, block in formats():
        data = [serialize(event, context) for event in events]
        rows = [{"data": payload, "received_at": datetime.now(UTC)} for payload in data]
        messages = list(Message.each(pa.RecordBatch.from_pylist(rows, MESSAGES)))
        table = pa.table({"position": range(len(data)), "data": pa.array(data, pa.binary())})
        for column in ROUTING:
            table = table.append_column(column, pa.array(["ok" if column == "status" else None] * len(data)))
        blocks = [table.slice(start, _BLOCK) for start in range(0, len(data), _BLOCK)]
        assert [found.as_py() for found in block(blocks[0])["id"][:3]] == [0, 1, 2]
        ways: dict[str, Callable[[], object]] = {
            "theirs": partial(_each, partial(_deserialized, deserialize, context), data),
            "rows": partial(_each, row, messages),
            "blocks": partial(_each, block, blocks),
        }
        times = measured(ways, given.rounds)
        for way, took in times.items():
            print(f"{name}, {way}: {min(took) / given.messages * 1e6:.2f} us per message in the best round")
        print(f"{name}, rows / theirs: {ratio(times, 'rows', 'theirs')} (at most 1.2)")
        print(f"{name}, blocks / theirs: {ratio(times, 'blocks', 'theirs')} (at most 0.6)")


def _deserialized(deserialize: Callable[[bytes, Any], Any], context: Any, payload: bytes) -> Any:
    return deserialize(payload, context)


def _each(function: Callable[[Any], object], items: list[Any]) -> None:
    for item in items:
        function(item)


if __name__ == "__main__":
    main()
