"""JSON payloads: valid values, invalid values and their errors."""

import enum
import gzip
import json
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from pydantic import BaseModel, Field, ValidationError

from pipeline_platform.model.failure import PayloadError
from pipeline_platform.model.formats.compression import format_of
from pipeline_platform.model.message import Message
from tests.fixtures.small_lake import message_of


class Order(BaseModel):
    number: int
    price: float = 0.0


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(_JSON)
def test_json_is_unchanged_after_a_round_trip(value):
    text = json.dumps(value)
    assert message_of(text.encode()).json() == value


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b" [1.5] \n", [1.5]),
        (b"null", None),
    ],
)
def test_unusual_valid_json_is_decoded(payload, value):
    assert message_of(payload).json() == value


REFUSED = [
    (b"", "EOF while parsing a value at line 1 column 0"),
    (b'{"password": hunter2}', "expected value at line 1 column 14"),
    (b'{"a": 1} hunter2', "trailing characters at line 1 column 10"),
    (b'{\n  "a": tru}', "expected ident at line 2 column 11"),
    (b"[NaN]", "expected value at line 1 column 2"),
    (b"[-Infinity]", "invalid number at line 1 column 3"),
    (b'{"hunter2": [1e999]}', "Number out of range - at `$[...][0]`"),
    (b"1" * 5_000, "number out of range at line 1 column 4302"),
    (b'"\\ud83d"', "unexpected end of hex escape at line 1 column 8"),
    (b'"hunter2 \xed\xa0\xbd"', "invalid unicode code point at line 1 column 10"),
    (b'"hunter2 \xff"', "invalid unicode code point at line 1 column 10"),
    (b"\xef\xbb\xbf{}", "it starts with a byte order mark. Decode it with 'utf-8-sig' first"),
    ("{}".encode("utf-16"), "it is UTF-16. Decode it with 'utf-16' first"),
    ("{}".encode("utf-16-le"), "it is UTF-16. Decode it with 'utf-16-le' first"),
    ("[]".encode("utf-16-be"), "it is UTF-16. Decode it with 'utf-16-be' first"),
    (gzip.compress(b"{}", mtime=0), "it is compressed with gzip. Use message.update_data(decompressed) first"),
    (b"[" * 50_000 + b"]" * 50_000, "recursion limit exceeded at line 1 column 202"),
    (b'"\x01"', "control character (\\u0000-\\u001F) found while parsing a string at line 1 column 2"),
]


@pytest.mark.parametrize(("payload", "why"), REFUSED)
def test_invalid_json_is_refused_with_the_position_and_without_a_quote(payload, why):
    with pytest.raises(PayloadError) as refused:
        message_of(payload).json()
    before = why.replace("code point at line 1 column 10", "code point at line 1 column 11")  # pydantic up to 2.14.2
    assert str(refused.value) in (f"the payload is not valid JSON: {why}", f"the payload is not valid JSON: {before}")
    assert "hunter2" not in str(refused.value)
    assert refused.value.__suppress_context__, "what it arose from may quote the payload"


@pytest.mark.parametrize(("data", "kind"), [(None, "NoneType"), ({"a": 1}, "dict")])
def test_data_that_is_not_bytes_is_refused(data, kind):
    with pytest.raises(TypeError, match=rf"json\(\) requires data of type bytes, got {kind}"):
        message_of(b"{}").put_data(data).json()


def test_a_pydantic_model_decodes_by_its_own_rules():
    order = message_of(b'{"number": 7, "price": 2}').json(Order)
    assert (type(order), order) == (Order, Order(number=7, price=2.0))
    with pytest.raises(ValidationError, match="number"):
        message_of(b'{"number": "seven"}').json(Order)
    with pytest.raises(ValidationError, match="Invalid JSON"):
        message_of(b"{number: 7}").json(Order)


class Refund(BaseModel):
    refund: int


def test_a_union_and_a_list_of_models_are_decoded_by_pydantic():
    assert message_of(b'{"refund": 5}').json(Order | Refund) == Refund(refund=5)
    assert message_of(b'[{"number": 7}]').json(list[Order]) == [Order(number=7)]
    assert message_of(b'[{"number": 7, "price": 2}]').json(list[OrderStruct]) == [OrderStruct(number=7, price=2.0)]
    with pytest.raises(ValidationError, match="Refund"):
        message_of(b"{}").json(Order | Refund)


@pytest.mark.parametrize("payload", [b"\xef\xbb\xbf{}", "{}".encode("utf-16"), gzip.compress(b"{}", mtime=0)])
def test_pydantics_error_names_the_format_of_a_payload_that_is_not_json(payload):
    for model in (Order, Order | Refund, list[Order]):
        with pytest.raises(ValidationError) as refused:
            message_of(payload).json(model)

        (error,) = refused.value.errors()
        assert error["type"] == "json_invalid"
        assert error["ctx"]["error"] == format_of(payload)


class Created(BaseModel):
    type: Literal["created"]
    number: int


class Paid(BaseModel):
    type: Literal["paid"]
    number: int


class CreatedStruct(Struct, tag="created", tag_field="type"):
    number: int


class PaidStruct(Struct, tag="paid", tag_field="type"):
    number: int


@pytest.mark.parametrize(
    ("union", "expected"),
    [
        (Annotated[Created | Paid, Field(discriminator="type")], Paid(type="paid", number=1)),
        (CreatedStruct | PaidStruct, PaidStruct(number=1)),
    ],
)
def test_a_field_of_the_payload_chooses_among_several_types(union, expected):
    assert message_of(b'{"type": "paid", "number": 1}').json(union) == expected
    assert message_of(b'[{"type": "paid", "number": 1}]').json(list[union]) == [expected]
    with pytest.raises((ValidationError, PayloadError)):
        message_of(b'{"type": "sent", "number": 1}').json(union)


def test_an_unsupported_type_is_refused():
    with pytest.raises(TypeError, match="cannot decode to"):
        message_of(b"{}").json(Message)


class Colour(enum.Enum):
    RED = "red"


class OrderStruct(Struct, forbid_unknown_fields=True):
    number: int
    price: float
    colour: Colour = Colour.RED


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b'{"number": "hunter2", "price": 2}', "OrderStruct: Expected `int`, got `str` - at `$.number`"),
        (b'{"number": 7}', "OrderStruct: Object missing required field `price`"),
        (b'{"number": 7, "price": 2, "colour": "hunter2"}', "OrderStruct: Invalid enum value - at `$.colour`"),
        (b'{"number": 7, "price": 2, "hunter2": 1}', "OrderStruct: Object contains unknown field"),
        (b'{"hunter2"', "the payload is not valid JSON: EOF while parsing an object at line 1 column 10"),
    ],
)
def test_a_struct_decodes_a_payload_or_refuses_it_without_a_quote(payload, why):
    assert message_of(b'{"number": 7, "price": 2}').json(OrderStruct) == OrderStruct(number=7, price=2.0)
    with pytest.raises(PayloadError) as refused:
        message_of(payload).json(OrderStruct)
    assert str(refused.value) == why
