"""Files that an erasure removes or leaves: old, incomplete, of other writers, and after a crash."""

import json
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest
from deltalake.transaction import AddAction, CommitProperties

from pipeline_platform.lake.erasing.erasing import Erased, Erasing
from pipeline_platform.lake.maintenance.compaction import UnreadableFileError, compact
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Table, Tables
from pipeline_platform.lake.writer import write_rows
from tests.fixtures.erasing import (
    ANNA,
    BEN,
    Visits,
    choice,
    erase,
    filled,
    ids,
    local,
    outcomes,
    payload,
    places,
    receive,
    tables,
)
from tests.fixtures.small_lake import WINDOW, Keeping, visible

__all__ = ["local", "tables"]


def write_old(tables: Tables, prefix: str, email: str = ANNA) -> str:
    rows = pa.Table.from_pylist([row for row in visible(tables, "persons") if row["email"] == email])
    rows = rows.drop_columns(["window"])
    (file,) = write_rows(tables.lake, "visits", prefix, [("persons", WINDOW, rows)])
    return f"persons/{file.path}"


@pytest.mark.parametrize("prefix", ["compacted", "by-hand-4711", "r1-handle-0", "crashed-handle-0"])
def test_old_files_that_no_commit_can_add_are_removed(local, prefix):
    path = write_old(local, prefix)
    assert path in places(local, ANNA)
    erased = erase(local, containing=ANNA)
    assert (erased.is_complete, places(local, ANNA)) == (True, set())


@pytest.mark.parametrize("is_unfinished", [True, False])
def test_an_incomplete_file_is_removed_if_its_receive_has_ended(local, before_removal, is_unfinished):
    run = receive(local, "0" * 32, ("c", payload(ANNA)))
    run.ledger.remove("0" * 32)
    if is_unfinished:
        before_removal(lambda: run.ledger.begin(run.receive))
    path = f"visits/persons/window={WINDOW}/{'0' * 32}-handle-0-0123abcd-0.parquet"
    local.lake.write(path, ANNA.encode())
    assert Erasing(local, choice(local, containing=ANNA)).preview().old_files == 0
    assert erase(local, containing=ANNA).is_complete
    assert (local.lake.read(path) is not None) == is_unfinished


def test_old_files_of_other_persons_stay(local):
    path = write_old(local, "compacted", BEN)
    erase(local, containing=ANNA)
    assert path in places(local, BEN)


@pytest.mark.parametrize("name", ["repair-0123abcd-0.parquet", "part-00000-1b2c-c000.snappy.parquet"])
def test_an_old_file_that_a_commit_may_still_add_is_left_and_named(local, name):
    path = write_old(local, "compacted")
    other = f"persons/window={WINDOW}/{name}"
    local.lake.write(f"visits/{other}", local.lake.read(f"visits/{path}") or b"")

    erased = erase(local, containing=ANNA)

    assert erased.left == [f"visits/{other}"]
    assert places(local, ANNA) == {other}
    local.lake.remove_file(f"visits/{other}")
    assert erase(local, containing=ANNA).is_complete


def test_a_file_of_another_writer_is_removed_once_a_commit_has_removed_it(local):
    receive(local, "r3", ("anna-3", payload(ANNA, age=43))).finish()
    local["persons"].open().optimize.compact()
    assert [path for path in places(local, ANNA) if "/part-" in path]
    assert len(ids(local, "persons")) == 3
    assert erase(local, containing=ANNA).is_complete
    assert places(local, ANNA) == set()


def test_a_compaction_that_has_written_its_file_cannot_commit_it_afterwards(local, monkeypatch):
    receive(local, "r3", ("anna-3", payload(ANNA, age=43))).finish()
    persons, swap = local["persons"], Table.swap

    def erased_first(self: Table, *given: Any, **more: Any) -> None:
        monkeypatch.setattr(Table, "swap", swap)
        assert erase(local, containing=ANNA).is_complete
        swap(self, *given, **more)

    monkeypatch.setattr(Table, "swap", erased_first)
    compact(persons, errors := [])
    assert errors == []
    assert ids(local, "persons") == ["ben-1"]
    assert places(local, ANNA) == set()


@pytest.fixture
def before_removal(monkeypatch):
    """Return a function that sets what others do after the search and before the removal of old files."""

    def act(meanwhile: Any) -> None:
        remove_old = Erasing._remove_old

        def later(self: Erasing, erased: Erased) -> None:
            monkeypatch.setattr(Erasing, "_remove_old", remove_old)
            meanwhile()
            remove_old(self, erased)

        monkeypatch.setattr(Erasing, "_remove_old", later)

    return act


def test_files_of_a_receive_that_began_meanwhile_are_left(local, before_removal):
    run = receive(local, "r9", ("anna-1", payload(ANNA, age=41)))
    run.ledger.remove("r9")  # it begins later

    def begin() -> None:
        run.ledger.begin(run.receive)
        run.work()

    before_removal(begin)
    erased = erase(local, message_ids=["anna-1"])
    assert {path.split("/window")[0] for path in erased.left} == {"visits/messages", "visits/persons", "visits/visits"}
    run.decide().publish()
    assert ids(local, "persons") == ["anna-1", "ben-1"], "every file of the receive exists"


def test_a_compaction_of_rows_that_a_receive_wrote_meanwhile_keeps_its_file(local, before_removal):
    paths = list[str]()

    def meanwhile() -> None:
        receive(local, "r9", ("anna-1", payload(ANNA, age=41))).finish()
        paths.append(write_old(local, "compacted"))

    before_removal(meanwhile)
    erased = erase(local, message_ids=["anna-1"])
    assert f"visits/{paths[0]}" in erased.left
    assert "visits/persons: rows that a receive wrote meanwhile (1)" in erased.left
    assert erase(local, message_ids=["anna-1"]).is_complete
    assert places(local, ANNA) == {path for path in places(local, ANNA) if path.startswith(("messages/", "failed/"))}


# Bounds in the log


def test_bounds_of_other_writers_are_removed_from_the_log(tables):
    persons = tables["persons"]
    for _ in range(2):  # a checkpoint with the bounds, and commits before and after it
        with persons.look() as handle:
            (file,) = persons.files(handle, [WINDOW])
            bounds = {"numRecords": 2, "minValues": {"email": ANNA}, "maxValues": {"email": BEN}, "nullCount": {}}
            add = AddAction(file.path, file.bytes, {"window": WINDOW}, 1, data_change=False, stats=json.dumps(bounds))
            handle.create_write_transaction(
                [add], "append", handle.schema(), ["window"], commit_properties=CommitProperties(max_commit_retries=0)
            )
            handle.update_incremental()
            handle.create_checkpoint()
    assert {path.rpartition(".")[2] for path in places(tables, ANNA) if "_delta_log" in path} == {"json", "parquet"}

    assert erase(tables, where=[f"email={ANNA}"]).is_complete

    assert [path for path in places(tables, ANNA) if "_delta_log" in path] == []
    assert [row["email"] for row in Tables(tables.lake, Visits)["persons"].open().to_pyarrow_table().to_pylist()] == [
        BEN
    ]


# Crashes


def test_after_a_kill_at_any_point_the_same_command_completes_it(tmp_path):
    template, folder = tmp_path / "template", tmp_path / "lakes"
    write_old(filled(Tables(Lake(root=str(template)), Visits)), "compacted")
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "tests.fixtures.erasing_killed", folder, template], check=True)
    roots = sorted(folder.glob("killed-*"))
    assert len(roots) > 12
    for root in roots:
        tables = Tables(Lake(root=str(root)), Visits)
        assert erase(tables, where=[f"email={ANNA}"]).is_complete
        assert {path.partition("/")[0] for path in places(tables, "anna-1")} == {"outcomes"}
        assert (ids(tables, "persons"), outcomes(tables)["anna-1"]) == (["ben-1"], "erased")


def test_a_damaged_file_ends_the_erasure_with_the_command_that_repairs_it(local):
    (path,) = [path for path in local.lake.files("visits/persons") if path.startswith("window")]
    local.lake.write(f"visits/persons/{path}", b"damaged")
    with pytest.raises(UnreadableFileError, match=r"visits/persons: window.* cannot be read: .*repair visits"):
        erase(local, message_ids=["anna-1"])


def test_a_pipeline_without_tables_has_nothing_to_erase(lake):
    assert erase(Tables(lake, Keeping), where=["text=a"]).ids == []
