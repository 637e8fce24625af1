"""Statistics: every reader that uses them finds every row, before and after maintenance."""

import json
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import QueryBuilder
from deltalake.transaction import AddAction, CommitProperties
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from pipeline_platform.lake import writer
from pipeline_platform.lake.maintenance.compaction import compact, drop_bounds
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table
from tests.fixtures.small_lake import WINDOW, put

INNER = pa.struct([("price", pa.decimal128(38, 9)), ("share", pa.float64()), ("text", pa.string())])
COLUMNS = pa.schema(
    {
        "number": pa.int64(),
        "price": pa.decimal128(38, 9),
        "share": pa.float64(),
        "text": pa.string(),
        "data": pa.binary(),
        "at": pa.timestamp("us", "UTC"),
        "day": pa.date32(),
        "flag": pa.bool_(),
        "inner": INNER,
        "many": pa.list_(pa.float64()),
        "window": pa.string(),
    }
)
LONG = "\U0010ffff" * 80
PRICE = Decimal("1234567890.123456789")
AT = datetime(2026, 1, 1, 0, 0, 0, 123_456, UTC)

PRICES = st.decimals(Decimal(-10) ** 28, Decimal(10) ** 28, allow_nan=False, places=9) | st.sampled_from([PRICE])
SHARES = st.floats() | st.sampled_from([math.inf, -math.inf, math.nan, -0.0, 0.0])
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40) | st.just(LONG)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "number": st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3),
    "price": PRICES,
    "share": SHARES,
    "text": TEXTS,
    "data": st.binary(max_size=40) | st.just(b"\xff" * 80),
    "at": st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)).map(lambda at: at.replace(tzinfo=UTC)) | st.just(AT),
    "day": st.dates(),
    "flag": st.booleans(),
    "inner": st.fixed_dictionaries({"price": st.none() | PRICES, "share": st.none() | SHARES, "text": TEXTS}),
    "many": st.lists(SHARES, max_size=2),
}
ROWS = st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()})
FLAT = [name for name in VALUES if name not in ("inner", "many")]


DUCKDB = duckdb.connect(config={"threads": 1})


def row(**values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(VALUES), **values}


def table_of(lake: Lake, files: list[list[dict[str, Any]]]) -> Table:
    """Return a table with a file for each list of rows, in row groups of two."""
    table = Table(lake, "p", "t", COLUMNS)
    table.ensure()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "ROW_GROUP_ROWS", 2)
        for number, rows in enumerate(files):
            put(table, f"r{number}", *rows)
    return table


def found(table: Table, name: str, value: Any) -> dict[str, int]:
    """Return the number of rows that each reader finds by an equality filter, or by `is null`."""
    handle, type_ = table.open(), COLUMNS.field(name).type
    column, wanted = pl.col(name), pl.lit(pl.from_arrow(pa.array([value], type_))).first()
    polars = pl.scan_delta(table.uri).filter(column.is_null() if value is None else column == wanted).collect().height
    root = SubTreeFileSystem(table.uri, LocalFileSystem())  # delta-rs's own handler may abort the process at its end
    field, scalar = pc.field(name), pa.scalar(value, type_)
    dataset = handle.to_pyarrow_dataset(filesystem=root)
    rows = dataset.to_table(filter=field.is_null() if value is None else field == scalar)
    files = [path.removeprefix("file://") for path in handle.file_uris()]
    where = f'"{name}" is null' if value is None else f'"{name}" = ?'
    parameters = [files] if value is None else [files, value]
    query = f"select count(*) from read_parquet(?) where {where}"
    ((in_duckdb,),) = DUCKDB.execute(query, parameters).fetchall()
    return {"polars": polars, "deltalake": rows.num_rows, "duckdb": in_duckdb}


def equal(value: Any, other: Any, *, nan: bool) -> bool:
    if isinstance(value, float) and isinstance(other, float) and math.isnan(value):
        return nan and math.isnan(other)
    return bool(value == other)


@settings(max_examples=4)
@given(st.lists(st.lists(ROWS, min_size=1, max_size=4), min_size=1, max_size=3), st.data())
@example([[row(price=PRICE), row(price=Decimal(5))], [row(price=None)]], None)
@example([[row(share=math.inf), row(share=1.0)], [row(share=math.nan), row(share=-0.0)]], None)
@example([[row(at=AT), row(at=AT + timedelta(microseconds=1))], [row(day=date(9999, 12, 31), text=LONG)]], None)
def test_every_row_is_found_by_each_of_its_values_before_and_after_compaction(tmp_path_factory, files, data):
    table = table_of(Lake(root=str(tmp_path_factory.mktemp("lake"))), files)
    rows = [row for file in files for row in file]
    for _ in range(2):
        for wanted in rows[:2] if data is None else [data.draw(st.sampled_from(rows))]:
            for name in FLAT:
                value = wanted[name]
                expected = {
                    reader: sum(equal(row[name], value, nan=reader != "deltalake") for row in rows)
                    for reader in ("polars", "deltalake", "duckdb")
                }
                assert found(table, name, value) == expected, (name, value)
        compact(table, errors := [])
        assert errors == []
    assert len(table.files(table.open())) == 1


NESTED = [
    row(inner={"price": PRICE, "share": math.inf, "text": "a"}, many=[math.inf]),
    row(inner={"price": -PRICE, "share": -0.0, "text": LONG}, many=[1.0, math.nan]),
    row(inner=None, many=None),
]


def test_readers_find_rows_by_nested_values_and_ranges(lake):
    table = table_of(lake, [[nested] for nested in [*NESTED, row(share=math.inf)]])
    for _ in range(2):
        reader = QueryBuilder().register("t", table.open())
        for where, count in (
            (f"inner['price'] = cast('{PRICE}' as decimal(38, 9))", 1),
            ("inner['share'] > 3", 1),
            ("inner['share'] = 0", 1),
            (f"inner['text'] = '{LONG}'", 1),
            ("inner is null", 2),
            ("many is null", 2),
            ("array_has(many, 1.0)", 1),
            ("share > 3", 1),
            ("number is null", 4),
        ):
            assert pa.table(reader.execute(f"select * from t where {where}")).num_rows == count, where
        compact(table, [])


def test_bounds_of_other_writers_leave_the_log(lake):
    table = table_of(lake, [[row(price=PRICE)], [row(price=Decimal(5))]])
    handle = table.open()
    bounds = {"numRecords": 1, "minValues": {"price": 5.0}, "maxValues": {"price": 1234567890.1234567}}
    adds = [
        AddAction(file.path, file.bytes, {"window": WINDOW}, 0, data_change=False, stats=json.dumps(bounds))
        for file in table.files(handle)
    ]
    schema = handle.schema()
    handle.create_write_transaction(adds, "append", schema, ["window"], commit_properties=CommitProperties())
    assert found(table, "price", PRICE)["deltalake"] == 0, "a reader skips the file"

    drop_bounds(table)

    assert found(table, "price", PRICE) == {"polars": 1, "deltalake": 1, "duckdb": 1}
    version = table.version()
    drop_bounds(table)
    assert table.version() == version
