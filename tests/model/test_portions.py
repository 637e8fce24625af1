"""Portions are within their limits, as large as possible, and complete."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.model.portions import halves, portions

TEXTS = st.lists(st.binary(max_size=12))


@given(TEXTS, st.integers(1, 20), st.integers(1, 5))
def test_portions_contain_all_items_in_order_within_both_limits(items, max_bytes, max_items):
    cut = list(portions(iter(items), len, max_bytes, max_items))
    assert [item for portion in cut for item in portion] == items
    sizes = [sum(map(len, portion)) for portion in cut]
    assert all(1 <= len(portion) <= max_items for portion in cut)
    assert all(size <= max_bytes or len(portion) == 1 for size, portion in zip(sizes, cut, strict=True))
    for size, portion, following in zip(sizes, cut, cut[1:], strict=False):
        assert len(portion) == max_items or size + len(following[0]) > max_bytes, "it had room for the next one"


def test_a_full_portion_does_not_wait_for_the_next_item():
    def endless():
        yield from (b"1", b"2")
        pytest.fail("nothing more is wanted")

    assert next(portions(endless(), len, max_bytes=10, max_items=2)) == [b"1", b"2"]


@given(TEXTS, st.integers(1, 200))
def test_halves_contain_all_rows_in_order_within_the_limit(items, max_bytes):
    batch = pa.RecordBatch.from_pydict({"data": pa.array(items, pa.binary())})
    cut = list(halves(batch, max_bytes))
    assert pa.Table.from_batches(cut)["data"].to_pylist() == items
    assert all(part.nbytes <= max_bytes or part.num_rows <= 1 for part in cut)
