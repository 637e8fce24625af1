"""Columns of a model's fields, and the values that fit them."""

import enum
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from msgspec import Struct, defstruct
from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FutureDate,
    FutureDatetime,
    NaiveDatetime,
    PastDate,
    PastDatetime,
    PositiveInt,
    create_model,
)

from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.columns.schema import arrow_schema, row_type


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Place(BaseModel):
    name: str
    height: int | None = None


class Everything(BaseModel):
    flag: bool
    number: int
    share: float
    text: str
    raw: bytes
    at: datetime
    day: date
    price: Decimal
    maybe: int | None
    also: Optional[str] = None  # noqa: UP045
    bounded: Annotated[int, Field(ge=0)]
    colour: Colour
    level: Level
    choice: Literal["a", "b"]
    id: UUID
    clock: time
    span: timedelta
    place: Place
    places: list[Place]
    tags: set[str]
    pair: tuple[int, ...]
    sequence: Sequence[float]
    counts: dict[str, int]
    by_name: dict[str, Place]


EVERYTHING = Everything(
    flag=True,
    number=-5,
    share=0.5,
    text="ñ",
    raw=b"\xff",
    at=datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))),
    day=date(2026, 1, 1),
    price=Decimal("1.5"),
    maybe=None,
    bounded=1,
    colour=Colour.RED,
    level=Level.LOW,
    choice="a",
    id=UUID(int=1),
    clock=time(1, 2),
    span=timedelta(days=1),
    place=Place(name="here"),
    places=[Place(name="there", height=1)],
    tags={"x"},
    pair=(1, 2),
    sequence=[1.0],
    counts={"a": 1},
    by_name={"b": Place(name="b")},
)


class PlaceStruct(Struct):
    name: str
    height: int | None = None


OF_PLACES = {"place": PlaceStruct, "places": list[PlaceStruct], "by_name": dict[str, PlaceStruct]}
EverythingStruct = defstruct(
    "EverythingStruct",
    [
        (name, OF_PLACES.get(name, field.annotation), *([] if field.is_required() else [field.default]))
        for name, field in Everything.model_fields.items()
    ],
    kw_only=True,
)
"""The same as a `msgspec.Struct`."""
HERE = {"place": PlaceStruct("here"), "places": [PlaceStruct("there", 1)], "by_name": {"b": PlaceStruct("b")}}
EVERYTHING_STRUCT = EverythingStruct(**dict(EVERYTHING) | HERE)


def column(model: type[BaseModel], name: str) -> pa.DataType:
    return arrow_schema(model).field(name).type


def rows(model: type[BaseModel], *data: Any) -> list[dict[str, Any]]:
    """Return data after a round trip through the columns."""
    columns = row_type(model).columns(list(data))
    return pa.table(columns, schema=arrow_schema(model)).to_pylist()


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("flag", pa.bool_()),
        ("number", pa.int64()),
        ("share", pa.float64()),
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("price", pa.decimal128(38, 9)),
        ("maybe", pa.int64()),
        ("also", pa.string()),
        ("bounded", pa.int64()),
        ("colour", pa.string()),
        ("level", pa.int64()),
        ("choice", pa.string()),
        ("id", pa.string()),
        ("clock", pa.string()),
        ("span", pa.string()),
        ("place", pa.struct([("name", pa.string()), ("height", pa.int64())])),
        ("places", pa.list_(pa.struct([("name", pa.string()), ("height", pa.int64())]))),
        ("tags", pa.list_(pa.string())),
        ("pair", pa.list_(pa.int64())),
        ("sequence", pa.list_(pa.float64())),
        ("counts", pa.map_(pa.string(), pa.int64())),
    ],
)
def test_each_type_of_field_has_its_column(name, type_):
    assert column(Everything, name) == type_


@pytest.mark.parametrize(
    ("constrained", "plain"),
    [
        (AwareDatetime, datetime),
        (NaiveDatetime | None, datetime),
        (list[PastDatetime], list[datetime]),
        (FutureDatetime, datetime),
        (PastDate, date),
        (FutureDate, date),
        (PositiveInt, int),
    ],
)
def test_a_constrained_type_has_the_column_of_its_base_type(constrained, plain):
    models = [create_model("Model", field=(kind, ...)) for kind in (constrained, plain)]
    assert column(models[0], "field") == column(models[1], "field")


def test_every_column_is_nullable():
    assert all(field.nullable for field in arrow_schema(Everything))


def test_a_model_of_every_type_is_unchanged_after_a_round_trip():
    (row,) = rows(Everything, EVERYTHING)
    assert row["at"] == datetime(2026, 1, 1, 0, tzinfo=UTC), "times are in UTC"
    assert (row["colour"], row["level"], row["id"]) == ("red", 1, str(UUID(int=1)))
    assert (row["clock"], row["span"]) == ("01:02:00", "1 day, 0:00:00")
    assert row["place"] == {"name": "here", "height": None}
    assert row["places"] == [{"name": "there", "height": 1}]
    assert row["counts"] == [("a", 1)]
    assert row["by_name"] == [("b", {"name": "b", "height": None})]
    assert (row["price"], row["raw"], row["maybe"]) == (Decimal("1.5"), b"\xff", None)


def test_a_struct_has_the_columns_of_a_model_of_the_same_fields():
    assert arrow_schema(EverythingStruct) == arrow_schema(Everything)
    assert rows(EverythingStruct, EVERYTHING_STRUCT) == rows(Everything, EVERYTHING)


def test_a_dict_of_the_fields_gives_the_same_row_as_the_model():
    as_dict = {name: getattr(EVERYTHING, name) for name in Everything.model_fields}
    nested = {**as_dict, "place": {"height": None, "name": "here"}}
    assert rows(Everything, nested) == rows(Everything, EVERYTHING)


class Flight(BaseModel):
    carrier: str
    late: int = 0
    tags: list[str] = Field(default_factory=list)
    remark: str | None = None


class FlightStruct(Struct):
    carrier: str
    late: int = 0
    tags: list[str] = []
    remark: str | None = None


@pytest.mark.parametrize("model", [Flight, FlightStruct])
def test_a_missing_key_of_a_dict_gets_the_default_of_its_field(model):
    assert rows(model, {"carrier": "UA"}) == [{"carrier": "UA", "late": 0, "tags": [], "remark": None}]
    for lacking in ({"late": 1}, *([model.model_construct(late=1)] if model is Flight else [])):
        with pytest.raises(ColumnError, match=rf"data lacks \['carrier'\], which {model.__name__} requires"):
            rows(model, lacking)


class MyDict(dict):
    pass


def test_a_subclass_of_dict_is_accepted():
    assert rows(Flight, MyDict(carrier="UA"))[0]["carrier"] == "UA"


class LongFlight(Flight):
    hours: int = 9

    @cached_property
    def minutes(self) -> int:
        return self.hours * 60


def test_an_instance_of_a_subclass_is_cut_to_the_tables_columns():
    flight = LongFlight(carrier="UA")
    assert flight.minutes == 540, "what it cached is no column either"
    assert set(rows(Flight, flight)[0]) == set(Flight.model_fields)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    text: str


def test_extra_fields_of_a_model_are_not_columns():
    assert rows(Open, Open(text="a", more=1)) == [{"text": "a"}]


class Numbers(BaseModel):
    number: int = 0
    share: float = 0.0
    text: str = ""
    price: Decimal = Decimal(0)
    maybe: int | None = None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"bytes", "data must be Numbers or a dict of its fields, got bytes"),
        (None, "data must be Numbers or a dict of its fields, got NoneType"),
        (Place(name="x"), "must be Numbers or a dict of its fields, got .*test_columns.Place"),
        ({"numbr": 1}, r"data has \['numbr'\], which are not fields of Numbers"),
        ({"numbr": 1} | dict.fromkeys(["share", "text", "price", "maybe"]), r"data has \['numbr'\]"),  # so many fit
        ({1: 1}, r"data has \['1'\]"),
        ({"number": 1.5}, "number must be int, got float"),
        ({"number": None}, "number must not be None"),
        ({"number": "5"}, "number must be int, got str"),
        (Numbers.model_construct(number=1.5), "number must be int, got float"),
        ({"number": 2**63}, "number does not fit its column, which stores 64 bits"),
        ({"text": 5}, "text must be str, got int"),
        ({"text": "\ud83d"}, "text does not fit its column, which stores valid UTF-8"),
        ({"text": b"\xff"}, "valid UTF-8"),
        ({"price": Decimal("0.0000000001")}, "price does not fit .* 29 digits before the decimal point and 9 after it"),
    ],
)
def test_data_that_fits_no_column_is_refused(data, words):
    with pytest.raises(ColumnError, match=words):
        rows(Numbers, data)


@pytest.mark.parametrize(
    "cut",
    [
        {"pair": [1, 2.5]},
        {"counts": {"a": Decimal("2.5")}},
        {"place": {"name": "here", "height": 2.5}},
        {"places": [{"name": "here", "height": None}, {"name": "there", "height": 2.5}]},
        {"by_name": {"b": {"name": "b", "height": 2.5}}},
    ],
)
def test_a_fraction_is_never_truncated_to_an_int_at_any_depth(cut):
    (name,) = cut
    with pytest.raises(ColumnError, match=rf"^{name}[][.a-z]* must be int, got \w+"):
        rows(Everything, EVERYTHING.__dict__ | cut)


@pytest.mark.parametrize(
    "cut",
    [
        {"at": 1_577_836_800},
        {"at": np.int64(1)},
        {"day": 18_262},
        {"day": 1.5},
        {"day": True},
        {"at": Decimal(1)},
    ],
)
def test_a_number_is_not_accepted_as_a_time(cut):
    ((name, number),) = cut.items()
    with pytest.raises(ColumnError, match=f"{name} must be date(time)?, got {type(number).__name__}"):
        rows(Everything, EVERYTHING.__dict__ | cut)


@pytest.mark.parametrize("number", [np.float32(2.5), np.float64(2.5), Decimal("2.5")])
def test_a_fraction_of_numpy_is_never_truncated_to_an_int(number):
    with pytest.raises(ColumnError, match="must be int, got"):
        rows(Numbers, Numbers.model_construct(number=number))
    assert rows(Everything, EVERYTHING.__dict__ | {"number": np.int64(5)})[0]["number"] == 5


def test_an_error_does_not_quote_the_refused_value():
    with pytest.raises(ColumnError) as refused:
        rows(Numbers, {"number": "my secret"})
    assert "secret" not in str(refused.value)


class Keyed(BaseModel):
    by_number: dict[int, str]


class Mixed(enum.Enum):
    A = 1
    B = "b"


class Enumerated(BaseModel):
    mixed: Mixed


class Deep(BaseModel):
    inner: list["Deep"] = []


@pytest.mark.parametrize("model", [Keyed, Enumerated, Deep])
def test_an_unsupported_type_of_field_is_refused_by_model_and_name(model):
    with pytest.raises(ColumnError, match=model.__name__):
        arrow_schema(model)
