"""Casts refuse the same values in rows and in blocks, with the name of the field."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pydantic import create_model

from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.columns.schema import arrow_schema, row_type
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


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (float, np.uint64(2**64 - 1)),
        (float, np.int64(2**53 + 1)),
        (int, np.uint64(2**64 - 1)),
        (datetime, pd.Timestamp(1, unit="ns", tz="UTC")),
        (datetime, pd.NaT),
        (timedelta, pd.Timedelta(1, "ns")),
    ],
)
def test_a_value_of_numpy_or_pandas_is_refused_if_its_column_would_change_it(kind, value):
    with pytest.raises(ColumnError, match="value"):
        rows(create_model("One", value=(kind, ...)), {"value": value})


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (float, np.uint64(2**53), 2.0**53),
        (float, np.float32(0.5), 0.5),
        (datetime, pd.Timestamp("2026-01-01T01:00:00.000001+01:00"), datetime(2026, 1, 1, 0, 0, 0, 1, UTC)),
        (timedelta, pd.Timedelta(-5, "s"), "-1 day, 23:59:55"),
    ],
)
def test_a_value_of_numpy_or_pandas_is_stored_like_python_s(kind, value, stored):
    assert rows(create_model("One", value=(kind, ...)), {"value": value}) == [{"value": stored}]
