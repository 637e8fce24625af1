"""Decision of a large receive beside many small ones: an attempt reads only what was added since the last."""

from typing import Any

import pytest

from pipeline_platform.lake.decision import decide
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table, Tables
from tests.fixtures.small_lake import Keeping, Memory, Run


@pytest.fixture
def tables(tmp_path):
    return Tables(Lake(root=str(tmp_path)), Keeping)


def holding(tables: Tables, receive_id: str, *names: str) -> Run:
    deliveries = tuple((name, b"x") for name in names)
    return Run(tables, Memory(deliveries_=deliveries), receive_id, base=0).work()


def test_a_try_reads_what_was_added_since_the_last_and_the_receive_itself_once(tables, monkeypatch):
    large = holding(tables, "large", *(f"l{n}" for n in range(2_000)))
    others = iter([holding(tables, f"s{n}", f"s{n}") for n in range(6)])
    swap, opened, tries = Table.swap, Lake.open_input, []
    read: list[str] = []

    def crowded(table: Table, handle: Any, receive_id: str, *args: Any, **options: Any) -> None:
        if receive_id == "large" and table.name == "outcomes":
            tries.append([*read])
            read.clear()
            if other := next(others, None):
                other.decide()
                read.clear()
        swap(table, handle, receive_id, *args, **options)

    def reading(lake: Lake, path: str) -> Any:
        if "/window=" in path:
            read.append(path)
        return opened(lake, path)

    monkeypatch.setattr(Table, "swap", crowded)
    monkeypatch.setattr(Lake, "open_input", reading)
    decision = decide(tables, large.ledger, large.receive)

    assert decision == (0, 7)
    first, second, *later = tries
    assert first == []
    assert sorted(path.rpartition("/")[2].partition("-")[0] for path in second) == ["large", "s0"]
    assert [len(paths) for paths in later] == [1] * 5
    assert not any("large" in path for paths in later for path in paths)
