"""Files of an earlier release without some columns, which all readers return as null."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline_platform.lake.reader import Bounds, RowRange, read_ranges, row_groups, rows_with, stored_file
from pipeline_platform.lake.storage import Lake
from pipeline_platform.tasks.by_position import ByPosition
from tests.fixtures.small_lake import Memory, Run, numbered, ranges, received
from tests.lake.test_replay import replay, texts

NOW = pa.schema({"message_id": pa.string(), "sequence": pa.int64(), "data": pa.binary()})
IDS = [f"m{n}" for n in range(10)]


def without(lake: Lake, path: str, *columns: str) -> None:
    """Write a file as a release without these columns did."""
    rows = pq.read_table(lake.open_input(path))
    pq.write_table(rows.drop_columns(list(columns)), lake.uri(path), row_group_size=4)


@pytest.fixture
def earlier(lake):
    """A file of ten messages, four per row group, without the columns of the order."""
    (rows,) = ranges(received(lake, "keeping", Memory(deliveries_=numbered(*[b"x"] * 10))), "keeping")
    without(lake, rows.path, "partition", "sequence", "published_at")
    return rows


def test_every_reader_completes_what_a_file_lacks(lake, earlier):
    position = pa.field("position", pa.int64())
    by_range = [rows for _, rows in read_ranges(lake, [earlier], NOW.append(position), 3)]
    by_group = list(row_groups(lake, earlier.path, NOW))
    by_value = list(rows_with(lake, earlier.path, "message_id", "m5", NOW))
    with stored_file(lake, earlier.path, NOW) as file:
        by_batch = list(file.batches(3, [0, 2]))
        assert file.groups_with("sequence", 1, 2) == [], "no row of the file has one"
        assert file.groups_with("message_id", "m9", "m9") == [2]
    by_place = ByPosition(lake, [earlier]).take(NOW.names, np.array([7, 1]))

    for rows, ids in ((by_range, IDS), (by_group, IDS), (by_value, ["m5"]), (by_batch, IDS[:4] + IDS[8:])):
        assert all(part.schema.field(field.name).type == field.type for part in rows for field in NOW)
        assert [id_ for part in rows for id_ in part.column("message_id").to_pylist()] == ids
        assert {value for part in rows for value in part.column("sequence").to_pylist()} == {None}
    assert [column.to_pylist() for column in by_place] == [["m7", "m1"], [None, None], [b"x", b"x"]]


def test_row_groups_without_values_near_the_bounds_are_not_read(lake, earlier):
    def near(least: str, most: str, rows: RowRange = earlier) -> list[str]:
        found = read_ranges(lake, [rows], NOW, 10, near=Bounds("message_id", least, most))
        return [id_ for _, batch in found for id_ in batch["message_id"].to_pylist()]

    assert near("m0", "m9") == IDS
    assert near("m4", "m5") == IDS[4:8]
    assert near("m35", "m8", earlier._replace(start=5)) == IDS[5:]
    assert near("n", "z") == []
    pq.write_table(pq.read_table(lake.open_input(earlier.path)), lake.uri(earlier.path), write_statistics=False)
    assert near("n", "z") == IDS


def test_a_window_of_an_earlier_release_is_replayed(tables):
    Run(tables, Memory(deliveries_=(("a", b"a"), ("b", b"fail b"))), "r1").finish()
    table = tables["messages"]
    for file in table.files(table.open()):
        without(tables.lake, table.path(file.path), "partition", "sequence", "published_at")
    replay(tables, "r2").finish()
    assert texts(tables) == ["A", "FAIL B"]
