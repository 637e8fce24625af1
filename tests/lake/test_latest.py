"""One row per key: the newest row of each key, however often and in whichever order rows are merged."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline_platform import PipelineError, Retention, TableBatcher
from pipeline_platform.lake.latest import keyed_table
from pipeline_platform.lake.latest.keyed_table import KeyedTable
from pipeline_platform.lake.latest.latest import Latest, MergeError, _Merge
from pipeline_platform.lake.maintenance.maintenance import maintain
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import CommitConflictError
from tests.fixtures.accounts import NEWEST, WINDOWS, Account, Accounts, Ground, of


class Wider(Account):
    owner: str | None = None


class WiderAccounts(Accounts):
    batchers = {"changes": TableBatcher(schema=Wider)}


@pytest.fixture
def ground(lake: Lake) -> Ground:
    return Ground(lake)


def test_a_key_has_its_newest_row(ground):
    ground.store(of(1, 1, 10.0), of(2, 1, 20.0))
    ground.store(of(1, 2, 11.0), window=WINDOWS[1])

    done = ground.merge()

    assert ground.balances() == {1: 11.0, 2: 20.0}
    assert (done.read, done.rows, done.changes["inserted"]) == (3, 2, 2)
    assert "gone" not in ground.rows().columns
    assert set(ground.rows()["window"]) == {WINDOWS[0], WINDOWS[1]}


def test_only_new_rows_are_read(ground):
    ground.store(of(1, 1, 10.0))
    ground.merge()
    ground.store(of(1, 2, 11.0), of(3, 1, 30.0))

    assert [ground.merge().read, ground.merge().read] == [2, 0]
    assert ground.balances() == {1: 11.0, 3: 30.0}


def test_a_batcher_without_rows_has_an_empty_table(ground):
    assert ground.merge().rows == 0
    assert ground.balances() == {}


def test_several_columns_decide_in_order_of_importance(ground):
    ground.store(of(1, 2, 10.0, step=1), of(1, 1, 11.0, step=9))
    ground.merge()
    ground.store(of(1, 2, 12.0, step=0), of(2, 1, 20.0))
    ground.merge()
    assert ground.balances() == {1: 10.0, 2: 20.0}
    ground.store(of(1, 2, 13.0, step=2))
    ground.merge()
    assert ground.balances() == {1: 13.0, 2: 20.0}


def test_of_rows_with_an_equal_order_the_greatest_message_counts(ground):
    first, last = of(1, 1, 10.0, message_id="b", child=1), of(1, 1, 11.0, message_id="b", child=2)
    ground.store(last, of(1, 1, 9.0, message_id="a", child=7), of(1, 1, 8.0, message_id="b"))
    ground.merge()
    ground.store(first, window=WINDOWS[1])
    ground.merge()
    assert ground.balances() == {1: 11.0}


def test_a_key_of_several_columns(ground):
    both = Latest(Accounts, "changes", "current", ("Number", "place"), ("at",), None)
    ground.store(of(1, 1, 10.0, place="a"), of(1, 2, 11.0, place="b"), of(1, 3, 12.0, place="a"))

    ground.merge(both)

    assert sorted(ground.rows().select("place", "balance").rows()) == [("a", 12.0), ("b", 11.0)]
    assert "gone" in ground.rows().columns


# Deletions


def test_a_deletion_removes_the_key_and_an_older_row_does_not_bring_it_back(ground):
    ground.store(of(1, 1, 10.0), of(2, 1, 20.0))
    ground.merge()
    ground.store(of(1, 3, gone=True))
    done = ground.merge()
    assert done.changes["deleted"] == 1
    assert ground.balances() == {2: 20.0}

    ground.store(of(1, 2, 12.0), window=WINDOWS[1])
    ground.merge()

    assert ground.balances() == {2: 20.0}


def test_null_is_not_deleted(ground):
    ground.store({**of(1, 1, 10.0), "gone": None})
    ground.merge()
    assert ground.balances() == {1: 10.0}


def test_tombstones_contain_keys_and_orders_but_no_data(ground):
    ground.store(of(1, 3, 99.0, gone=True, place="secret"))
    ground.merge()
    (stone,) = ground.rows("current/_deleted").to_dicts()
    assert stone == {
        "Number": 1, "at": 3, "step": 0, "source": "queue", "message_id": "m00001", "child": None, "receive_id": "r1",
    }  # fmt: skip


# Merges that repeat, and changes of the batcher's table


def test_a_replay_with_fixed_code_replaces_rows_of_equal_order(ground):
    ground.store(of(1, 1, 10.0, message_id="a"), of(2, 1, message_id="b", gone=True), of(3, 1, 30.0, message_id="c"))
    ground.merge()
    assert ground.balances() == {1: 10.0, 3: 30.0}

    ground.replay(of(1, 1, 10.5, message_id="a"), of(2, 1, 20.0, message_id="b"), of(3, 1, message_id="c", gone=True))
    ground.merge()

    assert ground.balances() == {1: 10.5, 2: 20.0}


def test_a_message_that_a_replay_no_longer_deletes_is_safe_from_its_tombstone(ground):
    ground.store(of(1, 4, message_id="a", gone=True))
    ground.merge()
    ground.replay(of(1, 4, 14.0, message_id="a"))
    ground.merge()
    ground.store(of(1, 3, 13.0), window=WINDOWS[1])
    ground.merge()
    assert ground.balances() == {1: 14.0}


def test_rows_that_retention_drops_and_files_that_compaction_creates_change_nothing(ground):
    for balance in (10.0, 11.0):
        for window in WINDOWS[:2]:
            ground.store(of(1, int(balance), balance), of(int(balance), 1, balance), window=window)
    ground.merge()
    before = ground.balances()
    report = maintain(ground.tables, Retention(batchers=None), datetime.now(UTC))
    assert report["changes"]["compacted"] == 4
    assert ground.merge().changes.total() == 0
    assert ground.balances() == before

    ground.store(of(5, 1, 50.0), window=WINDOWS[2])
    assert ground.merge().read == 1
    ground.remove(*WINDOWS[:2])
    assert ground.merge().read == 0
    assert ground.balances() == {**before, 5: 50.0}


def test_everything_is_merged_again_when_the_log_no_longer_has_the_last_merged_version(ground):
    ground.store(of(1, 1, 10.0))
    ground.merge()
    ground.store(of(1, 2, 11.0))
    log, handle = "accounts/changes/_delta_log", ground.changes.open()
    handle.create_checkpoint()
    for name in ground.lake.names(log):
        if name.endswith(".json") and int(name.partition(".")[0]) < handle.version():
            ground.lake.remove_file(f"{log}/{name}")

    assert ground.merge().read == 2
    assert ground.balances() == {1: 11.0}


def test_a_table_that_starts_over_is_merged_from_its_beginning(ground):
    for at in range(3):
        ground.store(of(1, at, float(at)))
    ground.merge()
    ground.lake.remove("accounts/changes")
    again = Ground(ground.lake)
    again.store(of(1, 9, 90.0))
    again.merge()
    assert again.balances() == {1: 90.0}


def test_maintenance_of_the_pipeline_leaves_the_table_alone(ground):
    ground.store(of(1, 1, 10.0), of(2, 2, gone=True))
    ground.merge()
    assert "current" not in maintain(ground.tables, Retention())
    assert ground.balances() == {1: 10.0}


def test_it_removes_its_old_files_itself(ground, monkeypatch):
    monkeypatch.setattr(keyed_table, "TIDY_EVERY", 4)
    monkeypatch.setattr(keyed_table, "KEEP_HOURS", 0)
    for at in range(6):
        ground.store(of(1, at, float(at)), of(2, at, gone=True))
        ground.merge()
    files = [name for name in ground.lake.names("accounts/current") if name.endswith(".parquet")]
    assert len(files) < 4
    assert ground.balances() == {1: 5.0}
    ground.store(of(2, 1, 1.0))
    ground.merge()
    assert ground.balances() == {1: 5.0}, "vacuum leaves the tombstones"


def test_a_new_field_becomes_a_column(ground):
    ground.store(of(1, 1, 10.0), of(2, 1, 20.0))
    ground.merge()
    wider = Ground(ground.lake, WiderAccounts)
    wider.receives, wider.messages = 9, 9
    wider.store({**of(1, 2, 11.0), "owner": "Ada"})
    Latest(WiderAccounts, "changes", "current", ("Number",), ("at", "step"), "gone").merge(wider.lake)
    assert wider.balances() == {1: 11.0, 2: 20.0}
    assert sorted(wider.rows()["owner"].to_list(), key=str) == ["Ada", None]


class Closable(Wider):
    closed: bool = False


class ClosableAccounts(Accounts):
    batchers = {"changes": TableBatcher(schema=Closable)}


def test_an_option_may_name_a_new_column_before_a_run_adds_it_to_the_table(ground):
    ground.store(of(1, 1, 10.0))
    ground.merge(Latest(ClosableAccounts, "changes", "current", ("Number",), ("at",), "closed"))
    assert ground.balances() == {1: 10.0}

    with pytest.raises(MergeError, match="owner is null in the row of message 'm00001'"):
        ground.merge(Latest(ClosableAccounts, "changes", "by_owner", ("owner",), ("at",), None))


# Errors


@pytest.mark.parametrize("column", ["Number", "at"])
def test_a_row_without_key_or_order_is_refused_with_its_message(ground, column):
    ground.store(of(1, 1, 10.0))
    ground.merge()
    ground.store(of(2, 1, 20.0), {**of(3, 1), column: None})
    with pytest.raises(
        MergeError, match=rf"accounts/changes: {column} is null in the row of message 'm00003' of 'queue'"
    ):
        ground.merge()
    assert ground.balances() == {1: 10.0}

    ground.replay(of(2, 1, 20.0))
    ground.merge()
    assert ground.balances() == {2: 20.0, 1: 10.0}


def test_the_table_of_a_removed_batcher_is_not_overwritten(ground):
    ground.store(of(1, 1, 10.0))
    with pytest.raises(
        PipelineError, match=r"latest_of: must have the options of the table accounts/changes, none, got"
    ):
        ground.merge(Latest(**{**vars(NEWEST), "name": "changes"}))


def test_files_are_on_disk_before_the_commit_that_names_them(ground, monkeypatch):
    synced, sync = list[str](), Lake.sync
    monkeypatch.setattr(Lake, "sync", lambda lake, *paths: (synced.extend(paths), sync(lake, *paths)))
    ground.store(of(1, 1, 10.0))
    ground.merge()
    places = [Path(path).suffix for path in synced if path.startswith("accounts/current/") and "_deleted" not in path]
    assert ".parquet" in places
    assert places.index(".parquet") < len(places) - places[::-1].index(".json") - 1


def test_a_column_that_is_added_while_a_merge_begins_is_stored(ground, monkeypatch):
    ground.store(of(1, 1, 10.0))
    wider = Ground(ground.lake, WiderAccounts)
    wider.receives, wider.messages = 9, 9
    table, later = _Merge._table, iter([{**of(2, 1, 20.0), "owner": "Ada"}])

    def widening(merge: _Merge, *given: Any) -> Any:
        for row in later:
            wider.store(row)
        return table(merge, *given)

    monkeypatch.setattr(_Merge, "_table", widening)
    ground.merge()
    assert wider.rows().sort("Number")["owner"].to_list() == [None, "Ada"]


@pytest.mark.parametrize("changed", [{"key": ("Number", "place")}, {"order": ("at",)}, {"deleted": None}])
def test_other_options_for_an_existing_table_are_refused(ground, changed):
    ground.store(of(1, 1, 10.0))
    ground.merge()
    with pytest.raises(PipelineError, match=r"the options of the table accounts/current, key=.*got key=.*another name"):
        ground.merge(Latest(**{**vars(NEWEST), **changed}))


# Several merges at once, and crashes


def test_merges_at_once_repeat_and_lose_nothing(ground, monkeypatch):
    """Another merge commits while the first has read its rows, twice."""
    ground.store(of(1, 1, 10.0), of(2, 1, 20.0, gone=True))
    merge, others = KeyedTable.merge, iter([of(1, 5, 15.0), of(2, 5, 25.0)])

    def crowded(table: KeyedTable, *args: Any) -> Any:
        if other := next(others, None):
            ground.store(other)
            Latest(**vars(NEWEST)).merge(Lake(root=ground.lake.root))
        return merge(table, *args)

    monkeypatch.setattr(KeyedTable, "merge", crowded)
    ground.merge()
    assert next(others, None) is None
    assert ground.balances() == {1: 15.0, 2: 25.0}


def test_a_merge_that_always_loses_ends_with_a_reason(ground, monkeypatch):
    ground.store(of(1, 1, 10.0))

    def conflict(*_: Any) -> None:
        raise CommitConflictError

    monkeypatch.setattr(KeyedTable, "merge", conflict)
    with pytest.raises(MergeError, match="accounts/current: other runs committed to it during 20 merges"):
        ground.merge()


@pytest.mark.parametrize("kill", ["merge 1", "merge 2", "record"])
def test_a_merge_that_crashes_is_completed_by_the_next(ground, monkeypatch, kill):
    """The first merge is of the tombstones, the second of the rows."""
    ground.store(of(1, 1, 10.0), of(2, 1, 20.0), of(3, 1, 30.0))
    ground.merge()
    ground.store(of(1, 2, gone=True), of(2, 2, 22.0), of(4, 1, 40.0))
    name, _, at = kill.partition(" ")
    done, called = getattr(KeyedTable, name), iter(range(1, 9))

    def crash(*args: Any) -> Any:
        result = done(*args)
        if next(called) == int(at or 1):
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(KeyedTable, name, crash)
        with pytest.raises(KeyboardInterrupt):
            ground.merge()
    ground.store(of(1, 1, 99.0), window=WINDOWS[1])
    ground.merge()
    assert ground.balances() == {2: 22.0, 3: 30.0, 4: 40.0}
