"""Blocks decode payloads by the rules of `message.json(model)`, and have the annotated class."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_validator

from pipeline_platform import Message, columns
from pipeline_platform.model.blocks import ROUTING, annotated, as_arrow, as_block
from pipeline_platform.model.columns.fields import ModelClass
from pipeline_platform.model.columns.schema import row_type
from pipeline_platform.model.failure import reason_of
from pipeline_platform.model.formats.payload import decoder_of
from tests.fixtures.small_lake import batch_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Place(BaseModel, frozen=True):
    name: str
    height: int | None = None


class Plain(BaseModel):
    number: int = Field(alias="n")
    share: float
    text: str = "none"
    flag: bool | None = None
    at: datetime | None = None
    day: date | None = None
    colour: Literal["red", "blue"] = "red"
    places: list[Place] = Field(default_factory=list)
    counts: dict[str, int] = {}


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int = Field(alias="n")
    place: Place | None = None


class Strict(BaseModel):
    """A model with a validator."""

    number: Annotated[int, Field(ge=0)] = Field(alias="n")
    price: Decimal = Decimal(0)
    seen: AwareDatetime | None = None

    @field_validator("number")
    @classmethod
    def _even(cls, number: int) -> int:
        if number % 2:
            raise ValueError("it is odd")
        return number


class Structure(Struct, rename={"number": "n"}):
    number: int
    share: float = 0.5
    at: datetime | None = None


MODELS = [Plain, Closed, Strict, Structure]
VALUES = {
    "n": st.one_of(st.integers(), st.integers(-9, 9), st.floats(), st.sampled_from(["7", "x", True, None, 7.0])),
    "share": st.one_of(st.floats(), st.integers(), st.text(max_size=2)),
    "text": st.one_of(st.text(), st.integers(), st.none()),
    "flag": st.sampled_from([True, None, "true", 1, 2]),
    "at": st.one_of(st.datetimes().map(str), st.sampled_from(["2026-01-01T00:00:00.9999999Z", "2026-01-01", 5, "x"])),
    "seen": st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-01T00:00:00", None]),
    "day": st.sampled_from(["2026-01-01", "2026-01-01T00:00:00", 5, None]),
    "colour": st.sampled_from(["red", "green", 1]),
    "places": st.sampled_from([[], [{"name": "a"}], [{"name": "a", "height": "5", "b": 1}], [{}], None]),
    "counts": st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    "place": st.sampled_from([None, {"name": "a", "height": 2.0}, {"height": 1}]),
    "more": st.sampled_from([1, {"a": [1]}, "\ud83d"]),
}
OBJECTS = st.fixed_dictionaries({"n": VALUES.pop("n"), "share": VALUES.pop("share")}, optional=VALUES)
GOOD = b'{"n": 8, "share": 1'
ENDS = [
    b"", b"}", b"} x", b',"n":9}', b',"more":"\xff"}', b',"\xff":1}', b',"more":' + b"[" * 300 + b"]" * 300 + b"}",
    b',"more":' + b"1" * 5_000 + b"}", b',"more":1e999}', b',"more":NaN}', b',"text":"\xff"}', b',"at":"x"}',
    rb',"places":[],"counts":{},"at":"2026-01-01T00:00:00.99999\u0039\u0039"}',
    rb',"places":[],"counts":{},"at":"2026-01-01T00:00\u003a00\u002e9999999"}',
]  # fmt: skip
NUMBERS = [b"1" * 30, b'8, "share": 1e999', b'8, "share": NaN', b"-0", b"8.0", b"1e3", b'"8"']
ODD = [None, b"", b"{", b"[]", b"null", b"\xef\xbb\xbf" + GOOD + b"}", *(GOOD + end for end in ENDS)]
ODD += [b'{"share": 1, "n": %b}' % number for number in NUMBERS]
PAYLOADS = st.lists(st.one_of(OBJECTS.map(lambda made: json.dumps(made).encode()), st.sampled_from(ODD)), max_size=6)


def block_of(payloads: list[bytes | None], kind: Any = pa.Table) -> Any:
    rows = pa.table(batch_of(*payloads))
    said = dict(zip(ROUTING, ("default", "default", "ok", None), strict=True))
    for name, value in said.items():
        rows = rows.append_column(name, pa.repeat(pa.scalar(value, pa.string()), rows.num_rows))
    return as_block(rows, kind)


def by_rows(payloads: list[bytes | None], model: ModelClass) -> list[dict[str, Any]]:
    """Return the results of rows with the same payloads."""
    casts, rows = row_type(model), []
    for message in Message.each(batch_of(*payloads)):
        try:
            (row,) = pa.table(casts.columns([message.json(model)]), schema=casts.schema).to_pylist()
            rows.append({**row, "status": "ok", "reason": None})
        except BaseException as error:
            rows.append({**dict.fromkeys(casts.schema.names), "status": "failed", "reason": reason_of(error)})
    return rows


@pytest.mark.parametrize(("model", "kind"), [*((model, pa.Table) for model in MODELS), (Plain, pl.DataFrame)])
@settings(max_examples=40)
@given(payloads=PAYLOADS)
@example(payloads=ODD)
@example(payloads=[GOOD + b"}"] * 3)
def test_a_block_is_decoded_like_its_single_rows(model, kind, payloads):
    made = columns(block_of(payloads, kind), model)

    assert type(made) is kind
    expected = by_rows(payloads, model)
    names = [*row_type(model).schema.names, "status", "reason"]
    assert repr(as_arrow(made).select(names).to_pylist()) == repr(expected), "as text: NaN equals nothing"


def test_only_a_model_of_plain_fields_has_a_twin():
    assert {model: decoder_of(model).made is not model for model in MODELS} == {
        Plain: True, Closed: True, Strict: False, Structure: False,
    }  # fmt: skip


def test_a_row_that_has_failed_is_not_decoded():
    block = block_of([b"{", GOOD + b"}"])
    at = block.schema.get_field_index("status")
    block = block.set_column(at, "status", pa.array(["failed", "ok"]))

    made = columns(block, Plain)

    assert (made["status"].to_pylist(), made["reason"].to_pylist()) == (["failed", "ok"], [None, None])
    assert made["share"].to_pylist() == [None, 1.0]


def test_a_field_with_the_name_of_a_routing_column_is_refused():
    class Order(BaseModel):
        status: str

    with pytest.raises(ValueError, match=r"Order has the fields \['status'\]"):
        columns(block_of([b"{}"]), Order)


class Lanes:
    def polars(self, messages: pl.DataFrame, context: Any) -> Any: ...

    def arrow(self, messages: pa.Table, context: Any) -> Any: ...

    def spark(self, messages: DataFrame, context: Any) -> Any: ...

    def unsaid(self, messages, context): ...

    def other(self, messages: timedelta, context: Any) -> Any: ...


@pytest.mark.parametrize(
    ("callback", "kind"),
    [
        (Lanes.polars, pl.DataFrame),
        (Lanes.arrow, pa.Table),
        (Lanes.spark, None),
        (Lanes.unsaid, None),
        (Lanes.other, timedelta),
    ],
)
def test_the_annotation_of_the_first_argument_determines_the_class_of_block(callback, kind):
    assert annotated(callback) is kind


def test_a_block_class_that_only_type_checkers_import_is_found_by_its_usual_name():
    names: dict[str, Any] = {}
    exec("from __future__ import annotations\ndef callback(self, messages: pl.DataFrame, context): ...", names)

    assert annotated(names["callback"]) is pl.DataFrame
