"""Casts are equal in all lanes: a value is stored in the same way, or refused in all."""

import enum
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError, create_model

from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.columns.crossing import decode, encode
from pipeline_platform.model.columns.schema import row_type


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Price(BaseModel):
    price: Decimal = Field(max_digits=5, decimal_places=2)


KINDS = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "bytes": bytes,
    "datetime": datetime,
    "date": date,
    "time": time,
    "timedelta": timedelta,
    "Decimal": Decimal,
    "limited Decimal": Price.model_fields["price"].rebuild_annotation(),
    "UUID": UUID,
    "Enum": Colour,
    "flags": Level,
    "Literal": Literal["red", "blue"],
}
zones = st.none() | st.integers(-14, 14).map(lambda hours: timezone(timedelta(hours=hours)))
TEXTS = [
    "red",
    "5",
    "true",
    str(UUID(int=7)),
    UUID(int=7).hex.upper(),
    "01:02",
    "01:02:03.1234567",
    "PT5S",
    "1 day, 0:00:00",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.decimals(),
    st.decimals(-2_000, 2_000, places=2),
    st.text(max_size=3),
    st.sampled_from(TEXTS),
    st.binary(max_size=3),
    st.datetimes(timezones=zones),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from([Colour.RED, Level.LOW, Level.LOW | Level.HIGH]),
)
EDGES = [
    datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone(timedelta(hours=-5))),
    datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5))),
    2**63, 2**53 + 1, True, 2.0, Decimal("12345678901234567.89"), b"\xff", "nope", date(1, 1, 1), Decimal("999.99"),
]  # fmt: skip
REFUSED = "refused"


def stored(model: type[BaseModel], value: Any) -> str:
    """Return the stored value as text, because NaN does not equal NaN."""
    try:
        (column,) = row_type(model).columns([{"value": value}])
    except ColumnError:
        return REFUSED
    return repr(column[0].as_py(maps_as_pydicts="strict"))


def cast(model: type[BaseModel], column: pa.Array) -> str:
    """Return the stored value of a column of a block."""
    try:
        (made,) = row_type(model).cast([column])
    except ColumnError:
        return REFUSED
    return repr(made[0].as_py(maps_as_pydicts="strict"))


def crossed(model: type[BaseModel], value: Any) -> str:
    """Return the stored value of data that passed through `handle_batch`."""
    try:
        return stored(model, decode(*encode({"value": value}, model), model).value)
    except (ColumnError, ValidationError):
        return REFUSED


def arrays(value: Any) -> list[pa.Array]:
    """Return the arrays that may contain a value in blocks."""
    try:
        made = [pa.array([value])]
    except (pa.ArrowException, OverflowError, TypeError):
        return []
    if isinstance(value, str | int | date) and not isinstance(value, bool):
        made.append(made[0].dictionary_encode())
    if type(value) in (bool, float, str, bytes, date, timedelta):
        made.append(pl.Series([value]).to_arrow())
    return made


MODELS = {name: create_model("Plain", value=(kind, ...)) for name, kind in KINDS.items()}
NESTED = {name: create_model("Nested", value=(model, ...)) for name, model in MODELS.items()}
LISTS = {name: create_model("Lists", value=(list[kind], ...)) for name, kind in KINDS.items()}
DICTS = {name: create_model("Dicts", value=(dict[str, kind], ...)) for name, kind in KINDS.items()}


def every_edge(test: Any) -> Any:
    for edge in EDGES:
        test = example(value=edge)(test)
    return test


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@every_edge
@given(value=VALUES)
def test_a_value_is_stored_alike_or_refused_at_every_depth_and_in_every_lane(kind, value):
    as_field = stored(MODELS[kind], value)
    within = [
        (NESTED, {"value": value}, "{{'value': {}}}", lambda column: pa.StructArray.from_arrays([column], ["value"])),
        (LISTS, [value], "[{}]", lambda column: pa.ListArray.from_arrays([0, 1], column)),
        (DICTS, {"a": value}, "{{'a': {}}}", lambda column: pa.MapArray.from_arrays([0, 1], ["a"], column)),
    ]
    assert crossed(MODELS[kind], value) == as_field
    for column in arrays(value):
        assert cast(MODELS[kind], column) == as_field, column.type
    for models, given_, text, block in within:
        expected = as_field if as_field == REFUSED else text.format(as_field)
        assert stored(models[kind], given_) == expected
        assert crossed(models[kind], given_) == expected
        for column in arrays(value):
            assert cast(models[kind], block(column)) == expected, column.type
