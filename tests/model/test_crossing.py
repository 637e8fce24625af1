"""Data arrives in `handle_batch` with the values that `handle_message` put."""

import enum
import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    computed_field,
    create_model,
    field_serializer,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.columns.crossing import decode, encode
from pipeline_platform.model.columns.schema import CONSTRAINED, row_type
from pipeline_platform.model.options import Batcher
from tests.model.test_columns import EVERYTHING, EVERYTHING_STRUCT, Everything, LongFlight, Open


def crossed(data: Any, model: type[BaseModel] | None = None) -> Any:
    """Return data as `handle_batch` gets it."""
    return decode(*encode(data, model), model)


@pytest.mark.parametrize("data", [b"\xff", b"", "ñ", None, 5, 1.5, math.inf, [1, {"a": None}], {"a": "b"}])
def test_data_without_a_model_is_unchanged(data):
    assert crossed(data) == data


def test_bytes_stay_bytes_with_any_model():
    assert crossed(b"\xff", Everything) == b"\xff"


def test_a_model_of_every_type_is_unchanged():
    assert crossed(EVERYTHING, Everything) == EVERYTHING


@pytest.mark.parametrize(
    ("kind", "given", "value", "stored"),
    [
        (bytes, "YWJj", b"YWJj", b"YWJj"),
        (str, "ñ".encode(), "ñ", "ñ"),
        (timedelta, "-1 day, 23:00:00", timedelta(hours=-1), "-1 day, 23:00:00"),
    ],
)
def test_a_value_of_another_type_crosses_as_a_table_stores_it(kind, given, value, stored):
    model: Any = create_model("One", value=(kind, ...))
    assert crossed({"value": given}, model) == model(value=value)
    (column,) = row_type(model).columns([{"value": given}])
    assert column.to_pylist() == [stored]


class Restless(Struct):
    """A struct that changes each time it is created."""

    text: str
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1


@pytest.mark.parametrize("data", [EVERYTHING_STRUCT, Restless("a")])
def test_a_struct_is_unchanged(data):
    assert crossed(data, type(data)) == data
    assert crossed(data) == json.loads(msgspec.json.encode(data)), "without a model as its own JSON"


class Hundredfold(BaseModel):
    """A model that changes its values at each validation and each serialisation."""

    model_config = ConfigDict(alias_generator=str.upper, extra="forbid", frozen=True)
    value: int
    secret: str = "s"

    @field_validator("value")
    @classmethod
    def _a_hundred_times(cls, value: int) -> int:
        return value * 100

    @model_validator(mode="before")
    @classmethod
    def _expected(cls, data: Any) -> Any:
        return {**data, "VALUE": data["VALUE"] + 1}

    @field_serializer("secret")
    def _hidden(self, secret: str) -> str:
        return "*" * 10

    @computed_field
    @property
    def shout(self) -> str:
        return self.secret.upper()


class Holder(BaseModel):
    single: Hundredfold
    maybe: Hundredfold | None = None
    many: list[Hundredfold] = []
    by_name: dict[str, Hundredfold] = {}


def test_validators_and_serializers_of_the_model_do_not_run():
    made = Hundredfold(VALUE=2, SECRET="told")
    assert (made.value, made.secret) == (300, "told")
    assert crossed(made, Hundredfold) == made
    holder = Holder(single=made, maybe=made, many=[made, made], by_name={"a": made})
    assert crossed(holder, Holder) == holder


def test_a_dict_of_the_fields_becomes_the_model_as_a_table_would_have_it():
    assert crossed({"value": 3}, Hundredfold) == Hundredfold.model_construct(value=3, secret="s")
    assert crossed({"single": {"value": 3, "secret": "x"}}, Holder).single.secret == "x"


class Number(enum.Enum):
    HALF = Decimal("0.5")
    ONE = Decimal(1)


class Odd(BaseModel):
    share: float | None = None
    raw: bytes = b""
    text: str = ""
    price: Decimal = Decimal(0)
    at: datetime = datetime(2026, 1, 1)
    day: date = date(2026, 1, 1)
    clock: time = time(0)
    span: timedelta = timedelta(0)
    id: UUID = UUID(int=0)
    number: Number = Number.ONE
    pairs: tuple[int, ...] = ()
    tags: frozenset[str] = frozenset()
    nested: dict[str, list[float | None]] = {}


zones = st.none() | st.integers(-14, 14).map(lambda hours: timezone(timedelta(hours=hours)))
texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.builds(
        Odd,
        share=st.none() | st.floats(allow_nan=False),
        raw=st.binary(),
        text=texts,
        price=st.decimals(allow_nan=False, allow_infinity=False),
        at=st.datetimes(timezones=zones),
        day=st.dates(),
        clock=st.times(),
        span=st.timedeltas(),
        id=st.uuids(),
        number=st.sampled_from(Number),
        pairs=st.lists(st.integers()).map(tuple),
        tags=st.frozensets(texts),
        nested=st.dictionaries(texts, st.lists(st.none() | st.floats(allow_nan=False))),
    )
)
def test_numbers_keep_all_digits(odd):
    back = crossed(odd, Odd)
    assert back == odd
    assert [type(value) for value in back.__dict__.values()] == [type(value) for value in odd.__dict__.values()]


class Remembering(BaseModel):
    value: int
    _half: int = PrivateAttr(0)

    def model_post_init(self, context: Any) -> None:
        self._half = self.value // 2
        self.value *= 100


class Counting(BaseModel):
    value: int
    _seen: list[int] = PrivateAttr(default_factory=list)


def test_private_attributes_are_created_again_and_fields_are_unchanged():
    back = crossed(Remembering(value=3), Remembering)
    assert (back.value, back._half) == (300, 150)
    counting = crossed(Counting(value=1), Counting)
    counting._seen.append(1)
    assert crossed(Counting(value=1), Counting)._seen == []


def test_an_instance_of_a_subclass_crosses_as_the_batchers_model():
    flight = LongFlight(carrier="UA")
    assert flight.minutes == 540, "what it cached does not cross either"
    back = crossed(flight, LongFlight.__base__)
    assert type(back) is LongFlight.__base__
    assert back.__dict__ == {"carrier": "UA", "late": 0, "tags": [], "remark": None}


class OpenAndCached(Open):
    @cached_property
    def size(self) -> int:
        return len(self.text)


def test_extra_fields_cross_where_the_model_takes_them():
    made = OpenAndCached(text="a", more=1, share=math.inf)  # type: ignore[call-arg]
    assert made.size == 1
    back = crossed(made, OpenAndCached)
    assert back.model_extra == {"more": 1, "share": math.inf}
    back.later = 5  # type: ignore[attr-defined]


class Defaulting(BaseModel):
    carrier: str
    tags: list[str] = []
    copies: list[str] = Field(default_factory=lambda data: [data["carrier"]])
    unset: str = None  # type: ignore[assignment]


def test_a_missing_key_of_a_dict_gets_its_own_default():
    first = crossed({"carrier": "UA"}, Defaulting)
    first.tags.append("changed")
    assert crossed({"carrier": "UA"}, Defaulting) == Defaulting(carrier="UA")


@pytest.mark.parametrize("model", [None, Everything])
@pytest.mark.parametrize("data", [{"counts": {"\ud83d": 1}}, {"by_name": {"\ud83d": {"name": "b", "height": None}}}])
def test_lone_surrogates_in_keys_are_refused(data, model):
    """If they were replaced, two keys could become equal."""
    with pytest.raises(ValueError, match="surrogates not allowed"):
        encode({**EVERYTHING.__dict__, **data} if model else data, model)


def test_a_replacement_character_is_unchanged():
    data = {"\ufffd": "\ufffd"}
    assert crossed(data, None) == data


class Letter(enum.Enum):
    A = "a"


NAMED = {
    "bool": (bool, True),
    "int": (int, -(2**63)),
    "float": (float, 0.1),
    "NaN": (float, math.nan),
    "infinity": (float, -math.inf),
    "str": (str, "\x00ñ"),
    "bytes": (bytes, b"\xff"),
    "datetime": (datetime, datetime(2026, 1, 1, 1, 1, 1, 1, tzinfo=timezone(timedelta(hours=5)))),
    "date": (date, date(1, 1, 1)),
    "time": (time, time(23, 59, 59, 999_999)),
    "timedelta": (timedelta, timedelta(days=-1, microseconds=1)),
    "Decimal": (Decimal, Decimal("1.10")),
    "UUID": (UUID, UUID(int=1)),
    "Enum": (Letter, Letter.A),
    "Literal": (Literal["a", "b"], "b"),
    "models": (Open, Open(text="a")),
    "lists": (list[int], [1]),
    "sets": (set[str], {"a"}),
    "tuples": (tuple[int, ...], (1, 2)),
    "dicts": (dict[str, list[Decimal]], {"a": [Decimal("0.10")]}),
}


def test_every_type_in_the_docstring_of_batcher_is_unchanged():
    said = re.search(r"arrives unchanged: (.*?)\.", " ".join((Batcher.__doc__ or "").split()))
    assert said is not None
    assert {*re.findall(r"\w+", said[1])} - {"too", "and", "of", "them"} == NAMED.keys()
    for name, (kind, value) in NAMED.items():
        model: Any = create_model("Named", value=(kind, ...))
        seen = crossed(model(value=value), model).value
        assert type(seen) is type(value), name
        assert seen == value or repr(seen) == repr(value) == "nan", name


LOCAL = datetime(1890, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))
"""A time whose offset to UTC has seconds."""
EARLY = datetime.min.replace(tzinfo=timezone(timedelta(seconds=1)))


class Stay(BaseModel):
    """A model whose values need no cast."""

    since: datetime | None = None
    until: datetime | None = None


@pytest.mark.parametrize("first", [Stay(), Stay(since=LOCAL)])
def test_an_offset_with_seconds_crosses_as_utc(first):
    for stay in (first, Stay(since=datetime(2026, 1, 1, tzinfo=UTC)), Stay(since=LOCAL), Stay(until=LOCAL)):
        assert crossed(stay, Stay) == stay
    model: Any = create_model("Nested", value=(list[datetime], ...))
    assert crossed({"value": [LOCAL]}, model).value == [LOCAL]
    with pytest.raises(ColumnError, match="since does not fit"):
        encode(Stay(since=EARLY), Stay)


class Clock(BaseModel):
    value: time


def test_a_time_of_day_keeps_the_seconds_of_its_offset():
    for seconds in (0, 3_661, 3_661):
        value = time(1, 2, 3, 4, timezone(timedelta(seconds=seconds)))
        assert crossed(Clock(value=value), Clock).value == value
        assert crossed({"value": value}, Clock).value == value


class Anytime(BaseModel, extra="allow"):
    value: datetime | int


def test_in_json_text_and_extra_fields_an_offset_with_seconds_crosses_as_utc():
    back = crossed(Anytime(value=LOCAL, more=LOCAL), Anytime)  # type: ignore[call-arg]
    assert back.value == LOCAL
    assert datetime.fromisoformat(back.model_extra["more"]) == LOCAL
    assert row_type(Anytime).columns([{"value": LOCAL}])[0].to_pylist() == ['"1889-12-31T23:06:32Z"']
    with pytest.raises(ColumnError, match="value cannot be written as JSON"):
        encode(Anytime(value=EARLY), Anytime)


class Raw(TypedDict):
    raw: bytes


@dataclass
class RawData:
    raw: bytes


class RawEnum(enum.Enum):
    A = b"\xff"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bytes | int, b"abcd"),
        (list[bytes | int], [b"abcd", 1]),
        (Raw | int, {"raw": b"abcd"}),
        (RawData | int, RawData(b"abcd")),
        (dict[str, bytes | int], {"a": b"abcd"}),
        (bytes | None, b"\xff\xfe\xfb"),
        (list[bytes], [b"\xff"]),
        (Literal[b"\xff", b"a"], b"\xff"),
        (RawEnum, RawEnum.A),
    ],
)
def test_bytes_are_unchanged_in_each_type_of_field(kind, value):
    model: Any = create_model("Raws", value=(kind, ...), other=(bytes, b"\xff"))
    back = crossed({"value": value}, model)
    assert (back.value, back.other) == (value, b"\xff")


@pytest.mark.parametrize("kind", CONSTRAINED)
def test_constraints_of_pydantic_types_are_not_checked_again(kind):
    model: Any = create_model("Constrained", value=(kind | None, ...))
    for value in (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1)):
        data = model.model_construct(value=value if CONSTRAINED[kind] is datetime else value.date())
        assert crossed(data, model).value == data.value


@pytest.mark.parametrize(
    ("put", "seen"),
    [
        (datetime(2026, 1, 1, tzinfo=UTC), "2026-01-01T00:00:00Z"),
        (Decimal("1.10"), "1.10"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (timedelta(seconds=90), "PT1M30S"),
        (Letter.A, "a"),
        ((1, (2,)), [1, [2]]),
        ({1: "a"}, {"1": "a"}),
        ({"a": b"text"}, {"a": "text"}),
        (Odd(price=Decimal("1.10"), pairs=(1,)).price, "1.10"),
        (2**70, 2**70),
        (-0.0, -0.0),
    ],
)
def test_without_a_model_all_but_bytes_comes_as_plain_json(put, seen):
    assert (type(crossed(put)), repr(crossed(put))) == (type(seen), repr(seen))
