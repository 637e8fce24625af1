"""Columns of Avro, Protobuf and JSON payloads of a block: the same values and failures as of messages."""

from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, create_model

from pipeline_platform import Pipeline, Producer, TableBatcher, columns
from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.columns.schema import row_type
from pipeline_platform.model.formats.block_formats import _decoded, avro_columns, json_schema_columns, protobuf_columns
from pipeline_platform.model.formats.payload import decoder_of
from pipeline_platform.model.formats.wire_format import fitting
from pipeline_platform.testing import test_batch
from tests.fixtures import protobuf
from tests.fixtures.fake_schema_registry import framed
from tests.fixtures.small_lake import message_of
from tests.model.test_avro import GOOD, TEXT, VALUES, Order, OrderStruct, encoded
from tests.model.test_avro import ORDER as SCHEMA


def block_of(*payloads: bytes | None) -> pa.Table:
    count = len(payloads)
    return pa.table(
        {
            "position": pa.array(range(count), pa.int64()),
            "data": pa.array(payloads, pa.binary()),
            "batcher": ["default"] * count,
            "batch_key": ["default"] * count,
            "status": ["ok"] * count,
            "reason": pa.nulls(count, pa.string()),
        }
    )


@pytest.mark.parametrize("as_block", [lambda table: table, pl.from_arrow], ids=["arrow", "polars"])
@pytest.mark.parametrize("model", [Order, OrderStruct])
def test_avro_becomes_columns_and_a_bad_row_fails_alone(model, as_block):
    known = avro_columns(as_block(block_of(GOOD, GOOD[:-3], None, GOOD)), model, TEXT)
    rows = (known if isinstance(known, pa.Table) else known.to_arrow()).to_pylist()

    assert [row["status"] for row in rows] == ["ok", "failed", "failed", "ok"]
    assert rows[1]["reason"] == "the payload is not Avro of this schema: EOFError"
    assert {name: rows[3][name] for name in ("number", "day", "tax")} == {
        name: VALUES[name] for name in ("number", "day", "tax")
    }
    assert rows[1]["number"] is None


class Flat(BaseModel):
    number: int
    customer: str
    note: str = "none"


def test_protobuf_becomes_columns():
    good = protobuf.Order(number=7, customer="Zoë").SerializeToString()
    known = protobuf_columns(block_of(good, framed(3, b"\0" + good), b"\xff"), Flat, protobuf.Order).to_pylist()

    assert [(row["number"], row["customer"], row["note"]) for row in known[:2]] == [(7, "Zoë", "none")] * 2
    assert (known[2]["status"], known[2]["reason"]) == ("failed", "the payload is not a valid shop.Order")


def test_json_in_the_wire_format_becomes_columns_and_failures_name_the_schema():
    good = framed(3, b'{"number": 7, "customer": "a"}')
    large = b"\0\xff\xff\xff\xff" + good[5:]
    payloads = good, framed(4, b'{"number": "x", "customer": "a"}'), b"{}", None, framed(5, b"{"), large
    known = json_schema_columns(block_of(*payloads), Flat).to_pylist()

    assert [row["status"] for row in known] == ["ok", *["failed"] * 5]
    assert known[0]["number"] == 7
    for row, payload in zip(known[1:], payloads[1:], strict=True):
        with pytest.raises((ValueError, TypeError)) as refused:
            message_of(payload).json_schema(Flat)
        assert row["reason"] == str(refused.value)
    assert known[1]["reason"].startswith("schema 4: Flat: number: ")


class Defaulting(BaseModel):
    number: int
    note: str = Field(default_factory=lambda: 5)  # type: ignore[arg-type]


def test_a_row_that_the_model_accepts_and_its_column_refuses_fails():
    payload = b'{"number": 7}'
    with pytest.raises(ColumnError):
        row_type(Defaulting).columns([message_of(framed(3, payload)).json_schema(Defaulting)])
    for known in (
        json_schema_columns(block_of(framed(3, payload), framed(4, payload)), Defaulting),
        columns(block_of(payload, payload), Defaulting),
    ):
        assert known["status"].to_pylist() == ["failed", "failed"]
        assert None not in known["reason"].to_pylist()


KINDS = [bool, int, float, str, date, datetime, bytes, Decimal, int | None, list[int], dict[str, float], Literal["a"]]
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.dates() | st.datetimes()
    | st.binary(max_size=3) | st.decimals() | st.sampled_from(["a", "1", "1.0", "2026-01-01", "2026-01-01T10:00:00Z",
      "2026-01-01T10:00:00.1234567", 1763632800]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)  # fmt: skip


@given(st.sampled_from(KINDS), VALUE)
def test_a_block_and_a_message_agree_on_every_value(kind, value):
    model: Any = create_model("Value", a=(kind, ...))
    fit, payload = fitting(model), {"a": value}

    def outcome(decode):
        try:
            return repr(decode()["a"])
        except Exception:
            return "refused"

    def in_block():
        failures = {}
        # Plain values stand for payloads.
        values, _ = _decoded(lambda data: data, fit, Plain([payload]), [0], model, failures)
        if failures:
            raise ValueError
        made = decoder_of(model).made
        assert isinstance(values[0], made)
        return {"a": values[0].a}

    assert outcome(in_block) == outcome(lambda: {"a": fit(payload).a})


class Plain:
    """Payloads as `_decoded` gets them."""

    def __init__(self, payloads):
        self._payloads = payloads

    def to_pylist(self):
        return self._payloads


class Orders(Pipeline):
    name = "orders"
    producer = Producer(source="orders_topic")
    batchers = {"kept": TableBatcher(schema=Order)}

    def handle_messages(self, messages: pl.DataFrame, context):
        return avro_columns(messages, Order, TEXT).with_columns(batcher=pl.lit("kept"))


def test_test_batch_handles_a_block_of_avro():
    done = test_batch(Orders, [GOOD, GOOD[:-3], encoded(SCHEMA, {**VALUES, "number": 2**62})])

    assert [message.data["number"] for message in done.successful] == [2**40, 2**62]
    assert [message.failure.kind for message in done.failed if message.failure] == ["PayloadError"]
