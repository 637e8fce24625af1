"""Causes of failures: reasons without the values that differ."""

import pyarrow as pa
import pytest

from pipeline_platform.model.failure import by_cause, cause_of, causes


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("order 4711 has a negative total: -3.50", "order * has a negative total: *"),
        ("no customer 1f0e2a9c-0b0f-4c57-9d0f-5b0f0c1f7f11", "no customer *"),
        ("no customer ABCDEFAB-0b0f-4c57-9d0f-5b0f0c1f7f11", "no customer *"),
        ("commit deadbeefcafe of b2TgZguRTuqz3sv8Y8QfCg:0:17", "commit * of *:*"),
        ("at 2026-11-20T10:03:07.123+01:00 from 10.0.0.1:5432 after 12ms", "at * from * after *"),
        ("object at 0x7f3a9c21, 1,000 rows, +5 %, 1e9", "object at *, * rows, * %, *"),
        ("SKU-00017 in lines.3.price", "SKU-* in lines.*.price"),
        ("no price for 'blue shoes' and \"red 'boots'\"", "no price for '*' and '*'"),
        ("no price for 'O'Brien', b'x' or ''", "no price for '*', '*' or '*'"),
        ("can't read it; didn't try again", "can't read it; didn't try again"),
        ("cannot cast int64 to utf8 in column_a", "cannot cast int64 to utf8 in column_a"),
        ("'price'", "'price'"),
        ("KeyError: 'price'", "KeyError: 'price'"),
        ("'order 4711'", "'order *'"),
        ("größe 12: ungültig", "größe *: ungültig"),
        ("", ""),
    ],
)
def test_a_cause_is_a_reason_without_its_numbers_ids_and_quoted_values(reason, cause):
    assert cause_of(reason) == cause
    assert cause_of(cause) == cause


def test_reasons_that_are_missing_have_no_cause():
    assert causes(pa.chunked_array([["no 1"], [None]])).to_pylist() == ["no *", None]


def test_counts_are_added_up_by_cause_and_an_only_reason_is_kept():
    counted = {"order 1 is late": 2, "no price at 10:00": 1, "order 2 is late": 3}
    assert by_cause(counted) == {"order * is late": 5, "no price at 10:00": 1}
    assert by_cause({"order * is late": 5, "order 3 is late": 1}) == {"order * is late": 6}
    assert by_cause({}) == {}
