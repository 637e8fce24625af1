"""Protobuf payloads: their Python types, and payloads that are refused."""

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pytest
from msgspec import Struct
from pydantic import BaseModel

from pipeline_platform.model.failure import PayloadError
from tests.fixtures import protobuf
from tests.fixtures.fake_schema_registry import framed
from tests.fixtures.small_lake import message_of


def order(**more: Any) -> Any:
    made = protobuf.Order(number=2**40, customer="Zoë", total=9.5, token=b"\xff", status=1, **more)
    made.at.FromJsonString("2026-11-20T10:00:00.123456Z")
    made.took.FromTimedelta(timedelta(seconds=90))
    made.day.year, made.day.month, made.day.day = 2026, 11, 20
    made.opens.hours, made.opens.minutes = 8, 30
    made.tax.value, made.points.value = "1.90", 0
    made.extra["deep"] = [1.5, None]
    made.line.sku = "x"
    made.tags.append("a")
    made.lines.add(sku="y", count=2)
    made.prices["net"] = 7.6
    return made


VALUES = {
    "number": 2**40, "customer": "Zoë", "total": 9.5, "token": b"\xff", "status": "PAID",
    "at": datetime(2026, 11, 20, 10, 0, 0, 123_456, UTC), "took": timedelta(seconds=90), "day": date(2026, 11, 20),
    "opens": time(8, 30), "tax": Decimal("1.90"), "points": 0, "extra": {"deep": [1.5, None]},
    "line": {"sku": "x", "count": 0}, "tags": ["a"], "lines": [{"sku": "y", "count": 2}], "prices": {"net": 7.6},
}  # fmt: skip


def test_the_generated_class_is_decoded_with_and_without_a_header():
    made = order()

    assert message_of(made.SerializeToString()).protobuf(protobuf.Order) == made
    assert message_of(framed(7, b"\x02\x04" + made.SerializeToString())).protobuf(protobuf.Order) == made


def test_values_arrive_as_their_python_types():
    assert message_of(order().SerializeToString()).protobuf(dict, protobuf.Order) == VALUES


class Order(BaseModel):
    number: int
    customer: str
    status: str
    at: datetime | None = None
    note: str | None = None
    points: int | None = None
    tags: list[str]


class OrderStruct(Struct):
    number: int
    customer: str
    status: str
    tags: list[str]
    at: datetime | None = None
    note: str | None = None
    points: int | None = None


@pytest.mark.parametrize("model", [Order, OrderStruct])
def test_a_field_that_is_not_set_gets_the_default_of_the_model_or_of_protobuf(model):
    empty = message_of(protobuf.Order(number=1).SerializeToString()).protobuf(model, protobuf.Order)

    assert empty == model(number=1, customer="", status="NEW", tags=[])
    noted = message_of(protobuf.Order(number=1, note="").SerializeToString()).protobuf(model, protobuf.Order)
    assert noted == model(number=1, customer="", status="NEW", note="", tags=[])


def test_an_unknown_number_of_an_enum_stays_a_number():
    payload = protobuf.Order(status=9).SerializeToString()
    assert message_of(payload).protobuf(dict, protobuf.Order)["status"] == 9


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\xff", "the payload is not a valid shop.Order"),
        (framed(7, b"\0\xff"), "schema 7: the payload is not a valid shop.Order"),
        (framed(7, b"\x80"), "schema 7: the payload ends in its header"),
        (framed(7, b"\xff" * 10**6), "schema 7: the header of the payload has a number of more than 64 bits"),
        (b"\0\0", "the payload has no header of Confluent's wire format: it has 2 bytes"),
    ],
)
def test_invalid_bytes_are_refused(payload, why):
    with pytest.raises(PayloadError) as refused:
        message_of(payload).protobuf(protobuf.Order)
    assert str(refused.value) == why


def test_values_out_of_python_s_range_and_values_that_the_model_refuses_name_the_schema():
    wrong = protobuf.Order()
    wrong.day.month = 13
    for model in (dict, Order):
        with pytest.raises(PayloadError, match="schema 7: "):
            message_of(framed(7, b"\0" + wrong.SerializeToString())).protobuf(model, protobuf.Order)
    refused = protobuf.Order(status=9).SerializeToString()
    with pytest.raises(PayloadError, match="schema 7: Order: status"):
        message_of(framed(7, b"\0" + refused)).protobuf(Order, protobuf.Order)


def test_a_class_that_protoc_did_not_generate_is_refused():
    with pytest.raises(TypeError, match="protoc"):
        message_of(b"").protobuf(Order)
    with pytest.raises(TypeError, match="bytes"):
        message_of(None).protobuf(protobuf.Order)
