"""Repair: tables with unreadable files become readable again, and no message is lost."""

import os
from collections import Counter

import polars as pl
import pyarrow as pa
import pytest

from pipeline_platform.lake.maintenance.maintenance import MaintenanceError, maintain
from pipeline_platform.lake.maintenance.repair import repair, unreadable
from pipeline_platform.lake.reader import row_groups
from pipeline_platform.lake.tables import Table, Tables
from pipeline_platform.model.options import Retention
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Run, numbered, put

LATER = "2026-01-02T0000"


def damage(lake, table, window=WINDOW):
    """Truncate the only file of a window of a table."""
    folder = f"{lake.root}/keeping/{table}/window={window}"
    (name,) = os.listdir(folder)
    with open(f"{folder}/{name}", "r+b") as file:
        file.truncate(100)


def table(lake, name):
    return pl.read_delta(f"{lake.root}/keeping/{name}")


@pytest.fixture
def published(lake):
    tables = Tables(lake, Keeping)
    tables.ensure()
    source = Memory(deliveries_=numbered(b"1", b"fail", b"3"))
    Run(tables, source, "r1").finish()
    return tables


def test_tables_that_are_whole_are_left_alone(published):
    assert unreadable(published) == []
    assert repair(published) == 0


def test_without_a_table_of_rows_messages_keep_their_outcomes(lake, published):
    damage(lake, "kept")
    assert [file.table for file in unreadable(published)] == ["kept"]
    assert repair(published) == 0
    assert table(lake, "kept").is_empty()
    assert table(lake, "outcomes").height == 3


def test_lost_outcomes_are_known_by_rows_and_failures(lake, published):
    damage(lake, "outcomes")
    (broken,) = unreadable(published)
    with pytest.raises(pa.ArrowInvalid):
        list(row_groups(lake, published["outcomes"].path(broken.path)))

    assert repair(published) == 0

    told = table(lake, "outcomes")
    assert dict(zip(told["message_id"], told["outcome"], strict=True)) == {
        "m0": "handled",
        "m1": "failed",
        "m2": "handled",
    }
    assert unreadable(published) == []


def test_a_message_of_which_nothing_is_known_any_more_is_an_open_failure_with_its_payload(lake, published):
    damage(lake, "outcomes")
    damage(lake, "kept")
    assert repair(published) == 2
    failed = table(lake, "failed").filter(pl.col("kind") == "unknown").sort("message_id")
    assert failed.select("message_id", "state", "data").rows() == [("m0", "open", b"1"), ("m2", "open", b"3")]


def test_a_message_that_another_window_decided_is_a_duplicate_and_no_failure(lake, published):
    Run(published, Memory(deliveries_=(*numbered(b"1", b"fail"), ("new", b"4"))), "r2", windows=(LATER,)).finish()
    damage(lake, "outcomes", LATER)
    for name in ("kept", "failed"):  # the rows of a run that looks up redeliveries
        files = published[name].files(published[name].open(), [LATER])
        published[name].swap(published[name].open(), "test", [], removed=files)

    assert repair(published) == 1

    outcomes = table(lake, "outcomes").filter(window=LATER)
    assert dict(zip(outcomes["message_id"], outcomes["outcome"], strict=True)) == {
        "m0": "duplicate",
        "m1": "duplicate",
        "new": "failed",
    }
    assert table(lake, "failed").filter(kind="unknown")["message_id"].to_list() == ["new"]


def test_the_same_id_of_another_source_is_no_duplicate(lake, published):
    Run(published, Memory(name="another", deliveries_=numbered(b"1")), "r2", windows=(LATER,)).finish()
    damage(lake, "outcomes", LATER)
    damage(lake, "kept", LATER)

    assert repair(published) == 1


def test_files_that_are_lost_in_several_windows_are_repaired_at_once(lake, published):
    Run(published, Memory(deliveries_=numbered(b"1")), "r2", windows=(LATER,)).finish()
    for window in (WINDOW, LATER):
        damage(lake, "outcomes", window)
    damage(lake, "kept", LATER)

    assert repair(published) == 0
    outcomes = table(lake, "outcomes").filter(message_id="m0").sort("window")
    assert outcomes["outcome"].to_list() == ["handled", "duplicate"]


def test_maintenance_names_the_file_and_goes_on_with_other_windows_and_tables(lake, published):
    damage(lake, "kept")
    put(published["kept"], "same window", {"text": "x"})
    for number in range(2):
        put(published["kept"], f"later{number}", {"text": "x"}, window=LATER)
        put(published["messages"], f"later{number}", {"message_id": "x"}, window=LATER)

    with pytest.raises(
        MaintenanceError, match=r"^keeping/kept: window=\S+ cannot be read.*`pipeline-platform repair keep"
    ):
        maintain(published, Retention(messages=None, batchers=None, failed=None))

    def files(name):
        return Counter(file.window for file in published[name].files(published[name].open()))

    assert files("kept") == {WINDOW: 2, LATER: 1}
    assert files("messages") == {WINDOW: 1, LATER: 1}
    repair(published)
    maintain(published, Retention(messages=None, batchers=None, failed=None))
    assert files("kept") == {WINDOW: 1, LATER: 1}


def test_maintenance_of_one_table_that_fails_skips_no_other(lake, published, monkeypatch):
    for number in range(2):
        put(published["kept"], f"later{number}", {"text": "x"})
    shorten = Table.shorten_log

    def fails(table, handle, *, keeps_commits):
        if table.name == "messages":
            raise OSError("no space")
        shorten(table, handle, keeps_commits=keeps_commits)

    monkeypatch.setattr(Table, "shorten_log", fails)
    with pytest.raises(MaintenanceError, match="no space, table: keeping/messages"):
        maintain(published, Retention(messages=None, batchers=None, failed=None))
    assert len(published["kept"].files(published["kept"].open())) == 1
