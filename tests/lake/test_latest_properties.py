"""One row per key: any order of receives, merges and replays, and columns of all types."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pipeline_platform import TableBatcher
from pipeline_platform.lake.latest import keyed_table, latest
from pipeline_platform.lake.latest.latest import Latest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table
from tests.fixtures.accounts import WINDOWS, Account, Accounts, Ground, newest, of

ROWS = st.builds(
    lambda number, at, gone, balance: of(number, at, float(balance), gone=gone),
    st.integers(0, 4), st.integers(0, 5), st.booleans(), st.integers(0, 99),
)  # fmt: skip


@settings(max_examples=8)
@given(st.data())
def test_any_order_of_receives_merges_and_replays_gives_the_newest_rows(tmp_path_factory, data):
    """Rows of small pieces, which are merged one by one; the oracle is a dict."""
    ground = Ground(Lake(root=str(tmp_path_factory.mktemp("lake"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latest, "MOST_BYTES", data.draw(st.sampled_from([1, 2**20])))
        patch.setattr(latest, "_BATCH_ROWS", 2)
        patch.setattr(keyed_table, "TIDY_EVERY", 3)
        messages: dict[str, list[dict[str, Any]]] = {window: [] for window in WINDOWS}
        for _ in range(data.draw(st.integers(1, 6))):
            window = data.draw(st.sampled_from(WINDOWS))
            if messages[window] and data.draw(st.booleans()):
                flips = data.draw(
                    st.lists(st.booleans(), min_size=len(messages[window]), max_size=len(messages[window]))
                )
                messages[window] = [
                    {**row, "balance": row["balance"] + 0.5, "gone": row["gone"] != flip}
                    for row, flip in zip(messages[window], flips, strict=True)
                ]
                ground.replay(*messages[window], window=window)
            else:
                rows = data.draw(st.lists(ROWS, min_size=1, max_size=6))
                name = ground.messages
                rows = [{**row, "message_id": f"m{name + place:05}"} for place, row in enumerate(rows)]
                ground.store(*rows, window=window)
                messages[window] += rows
            for _ in range(data.draw(st.integers(0, 2))):
                ground.merge()
        ground.merge()
    assert ground.balances() == newest(row for rows in messages.values() for row in rows)


# Types


class Everything(BaseModel):
    pair: int
    text: str
    data: bytes
    count: int
    price: Decimal
    at: datetime
    day: date
    flag: bool
    share: float
    id: UUID
    tags: list[str]
    place: dict[str, int]
    inner: Account | None
    gone: bool = False


class Everythings(Accounts):
    batchers = {"changes": TableBatcher(schema=Everything)}


VALUES: dict[str, list[Any]] = {
    "text": ["a'b", 'ä"c'],
    "data": [b"\x00\xff", b"\x01"],
    "count": [-1, 2**62],
    "price": [Decimal("1.000000001"), Decimal("2")],
    "at": [datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)],
    "day": [date(2026, 1, 1), date(2026, 1, 2)],
    "flag": [False, True],
    "share": [-1.5, 0.0],
    "id": [str(UUID(int=1)), str(UUID(int=2))],
}
REST = {**{name: values[0] for name, values in VALUES.items()}, "tags": ["x"], "place": [("y", 1)], "inner": None}


def test_a_column_of_each_type_is_an_order(lake):
    """Each key has two rows that differ in one column."""
    ground = Ground(lake, Everythings)
    by_order = Latest(Everythings, "changes", "by_order", ("pair",), (*VALUES,), "gone")
    first = [{**REST, "pair": pair, "inner": {"Number": 1}} for pair in range(len(VALUES))]
    last = [{**REST, "pair": pair, name: VALUES[name][1], "tags": ["last"]} for pair, name in enumerate(VALUES)]
    ground.store(*last[::2], *first)
    by_order.merge(lake)
    ground.store(*last[1::2], *first)
    for _ in range(2):
        by_order.merge(lake)

    assert [row["tags"] for row in ground.rows("by_order").to_dicts()] == [["last"]] * len(VALUES)


def test_a_key_of_a_decimal_that_a_float_cannot_represent_has_a_single_row(lake):
    """delta-rs rounds the bounds of decimals."""
    ground = Ground(lake, Everythings)
    by_price = Latest(Everythings, "changes", "by_price", ("price",), ("pair",), None)
    prices = [Decimal(7 * 10**20 + n * (10**17 + 12_345)).scaleb(-9) for n in range(12)]
    for pair in range(2):
        for price in prices:
            ground.store({**REST, "pair": pair, "price": price})
            by_price.merge(lake)

    assert ground.rows("by_price").select("price", "pair").sort("price").rows() == [(price, 1) for price in prices]


class Sized(BaseModel):
    größe: int  # noqa: PLC2401
    price: Decimal


class SizedChanges(Accounts):
    batchers = {"changes": TableBatcher(schema=Sized)}


def test_readers_find_no_rounded_bounds_of_decimals_whatever_other_columns_are_called(lake):
    ground = Ground(lake, SizedChanges)
    ground.store({"größe": 1, "price": Decimal("700000000000.123456789")})
    Latest(SizedChanges, "changes", "by_size", ("größe",), ("price",), None).merge(lake)

    adds = pa.table(Table(lake, "accounts", "by_size", ground.changes.schema).open().get_add_actions(flatten=True))
    assert adds.num_rows == 1
    assert not {"min.price", "max.price"} & {*adds.column_names}


def test_a_column_of_each_type_is_a_key(lake):
    ground = Ground(lake, Everythings)
    by_key = Latest(
        Everythings, "changes", "by_key", tuple(name for name in VALUES if name != "share"), ("pair",), "gone"
    )
    others = [{**REST, "pair": 1, column: values[1]} for column, values in VALUES.items() if column != "share"]
    ground.store(*others, {**REST, "pair": 2, "tags": ["last"]}, {**REST, "pair": 1})
    by_key.merge(lake)
    ground.store({**REST, "pair": 0}, {**others[0], "pair": 3, "gone": True})
    for _ in range(2):
        by_key.merge(lake)

    left = ground.rows("by_key")
    assert len(left) == len(others)
    assert left.filter(pair=2)["tags"].to_list() == [["last"]]
