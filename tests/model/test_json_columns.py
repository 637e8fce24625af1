"""Fields of several types, as columns of JSON text, and types that are stored as text."""

import json
import typing
from collections import abc
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Annotated, Any, Literal

import polars as pl
import pyarrow as pa
import pytest
from msgspec import Struct
from pydantic import (
    AnyUrl,
    BaseModel,
    Field,
    HttpUrl,
    IPvAnyAddress,
    Json,
    JsonValue,
    SecretStr,
    create_model,
)

from pipeline_platform import Batcher, Pipeline, Producer, TableBatcher, columns
from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.columns.crossing import decode, encode
from pipeline_platform.model.columns.schema import arrow_schema, row_type
from pipeline_platform.orchestration.asset_metadata import metadata_of
from pipeline_platform.testing import test_batch as trial


class Card(BaseModel):
    type: Literal["card"]
    number: int


class Cash(BaseModel):
    type: Literal["cash"]
    amount: float = Field(alias="sum")


class CardStruct(Struct, tag="card", tag_field="type"):
    number: int


class CashStruct(Struct, tag="cash", tag_field="type"):
    amount: float


class Free(BaseModel):
    any: Any
    free: dict[str, Any]
    things: list
    mixed: int | str
    payment: Annotated[Card | Cash, Field(discriminator="type")]
    text: Json
    value: JsonValue


class FreeStruct(Struct):
    payment: CardStruct | CashStruct
    free: dict[str, Any]


FREE = Free(
    any={"a": [1, None]},
    free={"b": {"c": 1.5}},
    things=[1, "é"],
    mixed="5",
    payment=Cash(type="cash", sum=2),
    text='{"d": 1}',
    value=[True],
)
TEXTS = ['{"a":[1,null]}', '{"b":{"c":1.5}}', '[1,"é"]', '"5"', '{"type":"cash","amount":2.0}', '{"d":1}', "[true]"]


def of(type_: Any) -> type[BaseModel]:
    return create_model("Of", value=(type_, ...))


def stored(model: Any, *data: Any) -> list[list[Any]]:
    return [column.to_pylist() for column in row_type(model).columns(list(data))]


def test_a_field_of_several_types_is_json_text():
    assert [field.type for field in arrow_schema(Free)] == [pa.string()] * 7
    assert stored(Free, FREE) == [[text] for text in TEXTS]
    assert stored(FreeStruct, FreeStruct(CardStruct(1), {"a": CardStruct(2)})) == [
        ['{"type":"card","number":1}'],
        ['{"a":{"type":"card","number":2}}'],
    ]


def test_inside_lists_and_dicts_each_item_is_json_text():
    assert arrow_schema(of(dict[str, int | str])).field("value").type == pa.map_(pa.string(), pa.string())
    assert stored(of(list[int | str]), {"value": [1, "1"]}) == [[["1", '"1"']]]


@pytest.mark.parametrize("model", [of(Any), of(Json), of(JsonValue), of(dict[str, Any] | None), of(int | str | None)])
def test_none_is_null(model):
    assert stored(model, {"value": None}) == [[None]]


@pytest.mark.parametrize("value", [object(), b"\xff", "\ud800"])
def test_a_value_without_json_does_not_fit(value):
    with pytest.raises(ColumnError, match="value"):
        stored(of(Any), {"value": value})


def test_text_of_a_block_must_be_json_and_is_not_changed():
    cast = row_type(of(Any)).cast

    assert cast([pa.array(['{"a":  1}', None])])[0].to_pylist() == ['{"a":  1}', None]
    assert cast([pa.array([[1], [2]])])[0].to_pylist() == ["[1]", "[2]"]
    for text in ("not JSON", "NaN"):
        with pytest.raises(ColumnError, match="value"):
            cast([pa.array([text])])


@pytest.mark.parametrize("data", [FREE, FreeStruct(CashStruct(1.5), {"a": 1})])
def test_data_passes_unchanged_to_handle_batch(data):
    assert decode(*encode(data, type(data)), type(data)) == data


@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        (HttpUrl, HttpUrl("http://Example.org/a b"), "http://example.org/a%20b"),
        (AnyUrl, AnyUrl("s3://bucket/key"), "s3://bucket/key"),
        (IPv4Address, IPv4Address("10.0.0.1"), "10.0.0.1"),
        (IPv6Address, IPv6Address("::1"), "::1"),
        (IPv6Network, IPv6Network("2001:db8::/32"), "2001:db8::/32"),
        (IPvAnyAddress, ip_address("10.0.0.1"), "10.0.0.1"),
    ],
)
def test_urls_and_ip_addresses_are_text_in_a_normal_form(type_, value, text):
    model = of(type_)

    assert stored(model, {"value": value}, {"value": text}) == [[text, text]]
    assert row_type(model).cast([pa.array([text])])[0].to_pylist() == [text]
    assert decode(*encode({"value": value}, model), model).value == value
    with pytest.raises(ColumnError):
        stored(model, {"value": "neither of them"})


BARE = {name: getattr(typing, name) for name in ("List", "Dict", "Set", "FrozenSet", "Tuple", "Mapping", "Sequence")}


@pytest.mark.parametrize("type_", [list, BARE["List"], BARE["List"] | None, dict, BARE["Dict"]])
def test_a_list_or_dict_without_types_is_json_text(type_):
    model = of(type_)
    value = {"a": [1]} if type_ in (dict, BARE["Dict"]) else [1, "b"]

    assert [json.loads(text) for text in stored(model, {"value": value})[0]] == [value]
    assert decode(*encode({"value": value}, model), model).value == value


REFUSED = [SecretStr, dict[int, str], tuple[float, float], Literal["a", 1], object, complex]
OTHERS = [
    *(BARE[name] for name in sorted(BARE.keys() - {"List", "Dict"})),
    tuple[()],
    set,
    tuple,
    abc.Mapping,
    abc.Sequence,
]


@pytest.mark.parametrize("type_", [*REFUSED, *OTHERS])
def test_a_refused_type_names_the_way_out(type_):
    with pytest.raises(ColumnError, match="Any, for a column of JSON text"):
        arrow_schema(of(type_))


class Blocks(Pipeline):
    """The fields of `Free` in blocks, to a table and to a callback."""

    name = "free_blocks"
    producer = Producer(source="queue")
    batchers = {"kept": TableBatcher(schema=Free), "sent": Batcher(schema=Free)}

    def handle_messages(self, messages: pl.DataFrame, context: Any) -> pl.DataFrame:
        return columns(messages, Free).with_columns(batcher=pl.lit("sent"))

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


def test_blocks_pass_the_values_to_handle_batch_not_their_text():
    payload = FREE.model_dump_json(by_alias=True, round_trip=True)

    (message,) = trial(Blocks, [payload]).successful

    assert message.data == FREE


def test_dagster_shows_which_columns_are_json_text():
    schema = metadata_of(Blocks, "kept")["dagster/column_schema"]

    assert {column.type for column in schema.columns if column.name in Free.model_fields} == {"JSON text"}


def test_a_field_of_a_reserved_name_is_renamed_by_an_alias():
    class Event(BaseModel):
        source_: str = Field(validation_alias="source")

    class Renamed(Pipeline):
        name = "renamed"
        producer = Producer(source="queue")
        batchers = {"default": TableBatcher(schema=Event)}

        def handle_message(self, message: Any, context: Any) -> Any:
            return message.put(message.json(Event))

    (message,) = trial(Renamed, [json.dumps({"source": "shop"})]).successful

    assert message.data.source_ == "shop"
