"""Avro payloads: their Python types, and payloads that are refused."""

import enum
import io
import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from fastavro import parse_schema, schemaless_writer
from msgspec import Struct, defstruct
from pydantic import BaseModel

from pipeline_platform.model.failure import PayloadError
from tests.fixtures.small_lake import message_of


def field(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "type": kind}


def logical(kind: str, of: str, **more: int) -> dict[str, Any]:
    return {"type": of, "logicalType": kind, **more}


LINE = {"type": "record", "name": "Line", "fields": [field("sku", "string"), field("count", "int")]}
STATUS = {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID"]}
ORDER = {
    "type": "record", "name": "Order", "namespace": "shop", "fields": [
        field("number", "long"), field("total", "double"), field("token", "bytes"), field("note", ["null", "string"]),
        field("state", STATUS), field("at", logical("timestamp-millis", "long")),
        field("heard", logical("local-timestamp-micros", "long")), field("day", logical("date", "int")),
        field("opens", logical("time-micros", "long")), field("id", logical("uuid", "string")),
        field("tax", logical("decimal", "bytes", precision=8, scale=2)),
        field("tags", {"type": "array", "items": "string"}), field("prices", {"type": "map", "values": "double"}),
        field("lines", {"type": "array", "items": LINE}),
    ],
}  # fmt: skip
TEXT = json.dumps(ORDER)
VALUES = {
    "number": 2**40, "total": 9.5, "token": b"\xff", "note": None, "state": "PAID",
    "at": datetime(2026, 11, 20, 10, 0, 0, 123_000, UTC), "heard": datetime(2026, 11, 20, 11, 0, 0, 7),
    "day": date(2026, 11, 20), "opens": time(8, 30, 0, 5), "id": UUID(int=7), "tax": Decimal("1.90"),
    "tags": ["a", "b"], "prices": {"net": 7.6}, "lines": [{"sku": "x", "count": 2}],
}  # fmt: skip


def encoded(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    schemaless_writer(stream, parse_schema(schema), value)
    return stream.getvalue()


class Status(enum.Enum):
    NEW = "NEW"
    PAID = "PAID"


class Line(BaseModel):
    sku: str
    count: int


class Order(BaseModel):
    number: int
    total: float
    token: bytes
    note: str | None
    state: Status
    at: datetime
    heard: datetime
    day: date
    opens: time
    id: UUID
    tax: Decimal
    tags: list[str]
    prices: dict[str, float]
    lines: list[Line]


LineStruct = defstruct("LineStruct", Line.__annotations__.items())
OrderStruct = defstruct("OrderStruct", {**Order.__annotations__, "lines": list[LineStruct]}.items())


@pytest.mark.parametrize(("model", "line"), [(Order, Line), (OrderStruct, LineStruct)])
def test_values_arrive_as_their_python_types(model, line):
    order = message_of(encoded(ORDER, VALUES)).avro(model, TEXT)

    assert order == model(**{**VALUES, "state": Status.PAID, "lines": [line(sku="x", count=2)]})
    assert [type(getattr(order, name)) for name in ("at", "day", "opens", "id", "tax")] == [
        datetime, date, time, UUID, Decimal,
    ]  # fmt: skip


def test_a_dict_gets_plain_values():
    assert message_of(encoded(ORDER, VALUES)).avro(dict, TEXT) == VALUES


class Created(BaseModel):
    order: int
    customer: str


class Paid(BaseModel):
    order: int
    amount: Decimal


def test_a_union_of_records_becomes_the_model_that_fits():
    schema = [
        {"type": "record", "name": "Created", "fields": [field("order", "long"), field("customer", "string")]},
        {"type": "record", "name": "Paid", "fields": [field("order", "long"), field("amount", "string")]},
    ]
    paid = encoded(schema, ("Paid", {"order": 1, "amount": "2.5"}))

    assert message_of(paid).avro(Created | Paid, json.dumps(schema)) == Paid(order=1, amount=Decimal("2.5"))


def test_a_record_that_contains_itself_is_decoded():
    tree = {"type": "record", "name": "Tree", "fields": [field("name", "string"), field("under", ["null", "Tree"])]}
    value = {"name": "a", "under": {"name": "b", "under": None}}

    assert message_of(encoded(tree, value)).avro(dict, json.dumps(tree)) == value


def test_a_type_may_occur_several_times_in_a_union():
    paid = {"type": "record", "name": "Paid", "fields": [field("line", LINE)]}
    schema = [paid, {"type": "record", "name": "Sent", "fields": [field("line", "Line"), field("back", "Line")]}]
    line = {"sku": "x", "count": 2}
    value = {"line": line, "back": line}

    assert message_of(encoded(schema, ("Sent", value))).avro(dict, json.dumps(schema)) == value


@pytest.mark.parametrize("of", ["bytes", "fixed"])
def test_a_decimal_with_more_digits_than_its_schema_is_exact(of):
    digits = (1_234_567).to_bytes(4, "big")
    kind = logical("decimal", of, precision=4, scale=2) | ({"name": "Four", "size": 4} if of == "fixed" else {})

    payload = encoded(kind | {"logicalType": None}, digits)
    assert message_of(payload).avro(Decimal, json.dumps(kind)) == Decimal("12345.67")


@pytest.mark.parametrize("kind", [["null", "string", "int"], STATUS])
@pytest.mark.parametrize("index", [-1, -2, -3, -4, 3, 2**40])
@pytest.mark.parametrize("place", [lambda kind: kind, lambda kind: {**LINE, "fields": [field("sku", kind)]}])
def test_an_index_outside_a_union_or_an_enum_is_refused(kind, index, place):
    for value in (b"", b"\2"):
        with pytest.raises(PayloadError, match="not Avro of this schema"):
            message_of(encoded("long", index) + value).avro(Any, json.dumps(place(kind)))


GOOD = encoded(ORDER, VALUES)


@pytest.mark.parametrize("payload", [b"", GOOD[:-3], GOOD + b"hunter2", b"\xff" * 40, b"\x02\x02hunter2"])
def test_bytes_that_are_not_the_schema_s_are_refused_without_a_quote(payload):
    with pytest.raises(PayloadError, match="the payload is not Avro of this schema") as refused:
        message_of(payload).avro(Order, TEXT)
    assert "hunter2" not in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None, "its context may quote it"


class Small(BaseModel):
    number: str


class SmallStruct(Struct):
    number: str


@pytest.mark.parametrize("model", [Small, SmallStruct])
def test_values_that_the_model_refuses_are_a_payload_error_with_its_field(model):
    with pytest.raises(PayloadError, match=f"{model.__name__}: .*number") as refused:
        message_of(GOOD).avro(model, TEXT)
    assert str(2**40) not in str(refused.value)


def test_a_wrong_argument_is_refused():
    for schema in (7, ORDER):
        with pytest.raises(TypeError, match="JSON text or a SchemaRegistry"):
            message_of(GOOD).avro(Order, schema)
    for text in ("no schema", '{"type": "array"}', '{"type": "union"}', '"Unknown"', "7"):
        with pytest.raises(ValueError, match="not a valid Avro schema"):
            message_of(GOOD).avro(Order, text)
    with pytest.raises(TypeError, match="bytes"):
        message_of(None).avro(Order, TEXT)
