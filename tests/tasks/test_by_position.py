"""Lookup of received rows by position, across files, row groups and windows."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline_platform.lake import writer
from pipeline_platform.lake.reader import RowRange
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.message import DELIVERY_KEY, PAYLOAD
from pipeline_platform.tasks import by_position as looked_up
from pipeline_platform.tasks.by_position import ByPosition
from tests.fixtures.small_lake import Memory, ranges, received

WINDOWS = ("2026-01-01T0000", "2026-01-01T0100")
ROWS = 25


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of 25 rows in row groups of four, each with its window."""
    lake = Lake(root=str(tmp_path_factory.mktemp("lake")))
    found: list[RowRange] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "ROW_GROUP_ROWS", 4)
        for number, window in enumerate(WINDOWS):
            first = number * ROWS
            source = Memory(deliveries_=tuple((f"m{n}", b"%d" % n) for n in range(first, first + ROWS)))
            manifest = received(lake, "keeping", source, f"r{number}", window=window)
            found += [part._replace(position=first) for part in ranges(manifest, "keeping")]
    return lake, found


def rows_at(positions: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"position": pa.array(positions, pa.int64())})


@given(positions=st.lists(st.integers(0, 2 * ROWS - 1), min_size=1, max_size=80))
@settings(max_examples=30)
def test_rows_come_in_the_order_of_the_positions_asked_for(files, positions):
    found = ByPosition(*files).take(DELIVERY_KEY, np.array(positions))
    assert found[DELIVERY_KEY.index("message_id")].to_pylist() == [f"m{n}" for n in positions]


@pytest.mark.parametrize("keep", [1, 10**9])
def test_rows_do_not_depend_on_the_size_of_the_cache(files, monkeypatch, keep):
    monkeypatch.setattr(looked_up, "_HELD_BYTES", keep)
    rows = ByPosition(*files)
    for positions in (np.arange(50), np.arange(49, -1, -1), np.array([30, 2, 30])):
        data = rows.take(PAYLOAD, positions)["data"]
        ids = rows.take(DELIVERY_KEY, positions)["message_id"]
        assert data.to_pylist() == [b"%d" % n for n in positions]
        assert ids.to_pylist() == [f"m{n}" for n in positions]


def test_rows_are_divided_by_the_window_of_their_file(files):
    rows = ByPosition(*files)

    def divided(*positions: int) -> dict[str, Any]:
        return {window: part["position"].to_pylist() for window, part in rows.by_window(rows_at(list(positions)))}

    assert divided(3, 1) == {WINDOWS[0]: [3, 1]}
    assert divided(30, 0, 24, 25) == {WINDOWS[1]: [30, 25], WINDOWS[0]: [0, 24]}


@pytest.mark.parametrize("positions", [[50], [-1], [0, None]])
def test_an_unknown_position_is_refused(files, positions):
    with pytest.raises(ValueError, match="position must be from 0 to"):
        list(ByPosition(*files).by_window(rows_at(positions)))
