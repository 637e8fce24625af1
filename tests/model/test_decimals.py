"""Decimals are exact from the payload to the column, or refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NewType, TypeVar

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    ValidationError,
    create_model,
    field_validator,
)
from typing_extensions import TypeAliasType

from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.columns.schema import arrow_schema, row_type
from pipeline_platform.model.failure import PayloadError
from pipeline_platform.model.formats.exact_decimals import has_decimal
from pipeline_platform.model.formats.payload import decoder

LONG = "12345678901234567.89"


class Price(BaseModel):
    price: Decimal


class PriceStruct(Struct):
    price: Decimal


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, alias_generator=str.upper)
    price: Decimal | None
    share: float = 0.0


@dataclass
class Data:
    price: Decimal


class Node(BaseModel):
    price: Decimal
    next: "Node | None" = None


class Root(RootModel[list[Price]]):
    """Prices."""


class Chosen(BaseModel):
    price: Decimal = Field(validation_alias=AliasChoices("cost", "prix"))


class Metered(BaseModel):
    """A model of types that have no hash."""

    prices: dict[str, Annotated[Decimal, {"unit": "EUR"}]]
    rounded: Callable[[Decimal], Decimal] = round


T = TypeVar("T")
K = TypeVar("K")


@dataclass
class Box(Generic[T]):
    content: T
    price: Decimal
    share: float


Alone = TypeAliasType("Alone", T, type_params=(T,))
Amounts = TypeAliasType("Amounts", list[T], type_params=(T,))
Swapped = TypeAliasType("Swapped", tuple[T, K], type_params=(K, T))


PLACES = [
    (Price, '{"price": %s}', lambda made: made.price),
    (PriceStruct, '{"price": %s}', lambda made: made.price),
    (list[PriceStruct], '[{"price": %s}]', lambda made: made[0].price),
    (Strict, '{"PRICE": %s, "SHARE": 0.12345678901234567890}', lambda made: made.price),
    (Data, '{"price": %s}', lambda made: made.price),
    (Node, '{"price": 1, "next": {"price": %s}}', lambda made: made.next.price),
    (Root, ' [{"price": 1}, {"price":%s}]', lambda made: made.root[1].price),
    (Chosen, '{"prix": %s}', lambda made: made.price),
    (list[Price], '[{"price": %s}]', lambda made: made[0].price),
    (Price | Literal["none"], '{"price": %s}', lambda made: made.price),
    (dict[str, list[Decimal]], '{"\\u00e9": [1, %s]}', lambda made: made["\u00e9"][1]),
    (tuple[int, Decimal], "[1, %s]", lambda made: made[1]),
    (dict[str, NewType("Euro", Decimal)], '{"a": %s}', lambda made: made["a"]),
    (TypeAliasType("Prices", list[Decimal]), "[%s]", lambda made: made[0]),
    (TypeAliasType("Prices", list[Annotated[Decimal, {"unit": "EUR"}]]), "[%s]", lambda made: made[0]),
    (Amounts[Decimal], "[%s]", lambda made: made[0]),
    (Alone[Decimal], "%s", lambda made: made),
    (Amounts[Amounts[Decimal]], "[[%s]]", lambda made: made[0][0]),
    (Swapped[Decimal, list[float]], "[[0.12345678901234567890], %s]", lambda made: made[1]),
    (Box[list[Decimal]], '{"content": [%s], "price": 1, "share": 0}', lambda made: made.content[0]),
    (Box[int], '{"content": 1, "price": %s, "share": 0.12345678901234567890}', lambda made: made.price),
    (Metered, '{"prices": {"a": %s}}', lambda made: made.prices["a"]),
]


@pytest.mark.parametrize(("kind", "payload", "found"), PLACES)
def test_a_number_keeps_all_its_digits_wherever_it_is(kind, payload, found):
    for number in (LONG, f"-{LONG}", "1e-400", "0.1", "12345678901234567890", "1.5E+3", "-0.0"):
        assert found(decoder(kind)((payload % number).encode())) == Decimal(number)


@given(st.decimals(allow_nan=False, allow_infinity=False))
def test_every_decimal_comes_back_from_a_number_of_json(value):
    number = f"{value:f}" if abs(value.adjusted()) < 100 else f"{value:e}"
    assert decoder(Price)(b'{"price": %b}' % number.encode()).price == value


def test_other_numbers_of_the_payload_stay_numbers():
    class Order(BaseModel):
        price: Decimal
        note: Any

    payload = f'{{"price": {LONG}, "note": {{"share": {LONG}}}}}'
    assert decoder(Order)(payload.encode()).note == {"share": float(LONG)}


def test_a_validator_sees_the_number_where_a_float_holds_it():
    seen = []

    class Order(BaseModel):
        price: Decimal

        @field_validator("price", mode="before")
        @classmethod
        def _look(cls, value: Any) -> Any:
            seen.append(value)
            return value

    decoder(Order)(b'{"price": 1.25}')
    assert seen == [1.25]


class All(BaseModel):
    kind: Literal["all"]
    of: list["Rule"]


class Some(BaseModel):
    kind: Literal["some"]
    of: list["Rule"]


class Less(BaseModel):
    kind: Literal["less"]
    than: Decimal


Rule = Annotated[All | Some | Less, Field(discriminator="kind")]


def test_the_time_does_not_grow_with_the_alternatives_of_each_level():
    payload = f'{{"kind": "less", "than": {LONG}}}'
    for kind in ["all", "some"] * 30:
        payload = f'{{"kind": "{kind}", "of": [{payload}]}}'

    rule = decoder(Rule)(payload.encode())
    while not isinstance(rule, Less):
        (rule,) = rule.of
    assert rule.than == Decimal(LONG)


def test_models_that_contain_each_other_are_searched_once():
    models: list[Any] = [
        create_model(f"M{number}", **{f"m{other}": (f"M{other} | None", None) for other in range(20)})
        for number in range(20)
    ]
    for model in models:
        model.model_rebuild(_types_namespace={model.__name__: model for model in models})

    assert not has_decimal(models[0])


def test_an_invalid_payload_has_the_error_of_the_model():
    with pytest.raises(ValidationError, match="price"):
        decoder(Price)(b'{"price": "x%s"}' % LONG.encode())
    with pytest.raises(ValidationError, match="Invalid JSON"):
        decoder(Price)(b'{"price": %s' % LONG.encode())
    with pytest.raises(ValidationError, match="recursion limit"):
        decoder(Node)(b'{"next": ' * 3_000 + b"1" + b"}" * 3_000)


def test_no_digits_are_lost_beside_a_nan():
    class Order(BaseModel):
        price: Decimal
        share: float

    with pytest.raises(PayloadError, match="NaN"):
        decoder(Order)(b'{"price": %s, "share": NaN}' % LONG.encode())


class Limited(BaseModel):
    both: Decimal = Field(Decimal(0), max_digits=12, decimal_places=2)
    places: Annotated[Decimal, Field(decimal_places=12)] | None = None
    digits: Decimal = Field(Decimal(0), max_digits=12)
    items: list[Annotated[Decimal, Field(max_digits=3, decimal_places=1)]] = []


def test_a_decimal_column_has_the_digits_of_its_field():
    schema = arrow_schema(Limited)
    assert [schema.field(name).type for name in ("both", "places", "digits")] == [
        pa.decimal128(12, 2), pa.decimal128(38, 12), pa.decimal128(38, 9),
    ]  # fmt: skip
    assert schema.field("items").type.value_type == pa.decimal128(3, 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"both": Decimal("0.001")}, "both does not fit .* 10 digits before the decimal point and 2 after it"),
        ({"both": Decimal("1e10")}, "10 digits before"),
        ({"digits": Decimal("1e29")}, "29 digits before the decimal point and 9 after it"),
        ({"items": [Decimal("0.5"), Decimal(100)]}, r"items\[\] does not fit .* 2 digits before"),
        ({"both": 0.5}, "both must be Decimal or int, got float"),
        ({"both": Decimal("NaN")}, "both does not fit"),
        *(({"places": Decimal(few)}, "places does not fit") for few in ("1e-48", "1e-60", "1e-999999999", "9.9e-30")),
        *(({"digits": Decimal(f"999.{'9' * more}")}, "digits does not fit") for more in (36, 41, 60, 300)),
        ({"digits": Decimal("42555925159789868479120456930.3707102626")}, "digits does not fit"),
    ],
)
def test_a_decimal_beyond_its_column_is_refused_with_the_limits(data, words):
    with pytest.raises(ColumnError, match=words):
        row_type(Limited).columns([data])


@pytest.mark.parametrize("number", ["1.5" + "0" * 60, "1.50", "-0E-999999999", "0E+99999", "9" * 26 + "." + "9" * 12])
def test_a_decimal_within_its_column_is_stored_exactly(number):
    assert row_type(Limited).columns([{"places": Decimal(number)}])[1].to_pylist() == [Decimal(number)]


@pytest.mark.parametrize(
    ("column", "fits"),
    [
        (pa.array([Decimal("78581.79")], pa.decimal128(12, 2)), True),
        (pa.array([2**64 - 1], pa.uint64()), True),
        (pa.array([Decimal("765759968318974824760885444.8")], pa.decimal128(38, 5)), False),
        (pa.array([Decimal("1.5")], pa.decimal128(38, 37)), True),
        (pa.array([Decimal("1e60")], pa.decimal256(76, 0)), False),
    ],
)
def test_decimals_of_arrow_are_stored_exactly_or_refused(column, fits):
    cast = row_type(create_model("Places", places=(Annotated[Decimal, Field(decimal_places=12)], ...))).cast
    if fits:
        assert cast([column])[0].to_pylist() == column.to_pylist()
    else:
        with pytest.raises(ColumnError, match="places does not fit"):
            cast([column])


def test_more_digits_than_a_table_holds_are_refused():
    class Wide(BaseModel):
        price: Decimal = Field(max_digits=40, decimal_places=2)

    with pytest.raises(ColumnError, match=r"Wide.price has max_digits or decimal_places above 38"):
        arrow_schema(Wide)
