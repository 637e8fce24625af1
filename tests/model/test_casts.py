"""Casts refuse the same values in rows and in blocks, with the name of the field."""

from datetime import date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from pydantic import create_model

from pipeline_platform.model.casts import ColumnError
from pipeline_platform.model.schema import arrow_schema, row_type
from tests.model.test_columns import EVERYTHING, Everything, Place, rows


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"place": {"q": 9}}, r"place has \['q'\], which are not fields of Place"),
        ({"place": {"height": 9}}, r"place lacks \['name'\], which Place requires"),
        ({"place": {}}, r"place lacks \['name'\]"),
        ({"place": {"name": None}}, "place.name must not be None"),
        ({"places": [{"name": "a"}, {"name": "b", "Height": 1}]}, r"places\[\] has \['Height'\]"),
        ({"places": [None]}, r"places\[\] must not be None"),
        ({"by_name": {"secret": {"name": 5}}}, r"by_name\[\].name must be str, got int"),
        ({"counts": {"secret": None}}, r"counts\[\] must not be None"),
        ({"colour": "nope"}, "colour is not a value of Colour"),
        ({"choice": "nope"}, r"choice is not a value of Literal\['a', 'b'\]"),
        ({"level": 7}, "level is not a value of Level"),
        ({"id": "nope"}, "id is not the text of a UUID"),
        ({"span": 5}, "span must be timedelta or its text, got int"),
        ({"day": datetime(2026, 1, 1)}, "day must be date, got datetime"),
    ],
)
def test_nested_models_enums_and_texts_are_checked_like_outer_fields(data, words):
    with pytest.raises(ColumnError, match=words):
        rows(Everything, EVERYTHING.__dict__ | data)
    blocks = Everything.model_construct(**EVERYTHING.__dict__ | data).__dict__
    try:
        columns = [pa.array([blocks[name]]) for name in data]
    except (pa.ArrowException, TypeError):
        return
    (name,) = data
    with pytest.raises(ColumnError, match=f"^{name}"):
        row_type(create_model("One", **{name: (Everything.model_fields[name].annotation, ...)})).cast(columns)


def test_a_missing_key_of_a_nested_dict_gets_the_default_of_its_field():
    struct = pa.array([{"name": "here"}, None])
    model = create_model("Maybe", place=(Place | None, ...))
    assert rows(model, {"place": {"name": "here"}}, {"place": None}) == [
        {"place": {"name": "here", "height": None}}, {"place": None},
    ]  # fmt: skip
    (column,) = row_type(model).cast([struct])
    assert column.to_pylist() == [{"name": "here", "height": None}, None]


def test_nested_fields_that_differ_in_case_only_are_refused_with_the_class():
    inner = create_model("Inner", late=(int, 0), Late=(int, 0))
    with pytest.raises(ColumnError, match=r"Inner has fields that differ only in case.*: \['late'\]"):
        arrow_schema(create_model("Outer", inner=(list[inner], ...)))


BLOCKS = {
    "at": [pa.array([5]), pa.array([date(2026, 1, 1)]), pa.array(["2026-01-01"]), pa.array([5], pa.timestamp("ns"))],
    "day": [pa.array([5], pa.int32()), pa.array([datetime(2026, 1, 1)]), pa.array([3_000_000], pa.date32())],
    "number": [pa.array([5], pa.timestamp("us")), pa.array(["5"]), pa.array([5.0]), pa.array([2**63], pa.uint64())],
    "flag": [pa.array([2.5]), pa.array([float("nan")]), pa.array([1]), pa.array(["true"])],
    "text": [pa.array([2.5]), pa.array([datetime(2026, 1, 1)]), pa.array([b"\xff"])],
    "price": [pa.array([1.5]), pa.array(["1.5"]), pa.array([Decimal("0.0000000001")])],
    "counts": [pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))],
}


@pytest.mark.parametrize(("name", "column"), [(name, column) for name, columns in BLOCKS.items() for column in columns])
def test_a_block_refuses_the_same_values_as_rows(name, column):
    model = create_model("One", **{name: (Everything.model_fields[name].annotation, ...)})
    with pytest.raises(ColumnError, match=f"^{name} "):
        row_type(model).cast([column])


def test_text_of_invalid_bytes_is_refused_in_a_block():
    made = pa.array([b"good", b"\xff"]).cast(pa.string(), safe=False)
    with pytest.raises(ColumnError, match="valid UTF-8"):
        row_type(create_model("One", text=(str, ...))).cast([made])


def test_spans_and_dates_in_lists_are_written_as_in_rows():
    model = create_model("Spans", spans=(list[timedelta], ...))
    (column,) = row_type(model).cast([pa.array([[timedelta(seconds=5)]])])
    assert column.to_pylist() == [["0:00:05"]]
