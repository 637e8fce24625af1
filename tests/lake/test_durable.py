"""Durability of a local lake: files are synced before their commit, and a commit before the next one."""

import os
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from pipeline_platform.lake.decisions.decision import fence
from pipeline_platform.lake.maintenance.maintenance import maintain
from pipeline_platform.lake.storage import Lake, _sync_entry
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.options import Retention
from tests.fixtures.small_lake import Keeping, Memory, Run, numbered

FOR_EVER = Retention(messages=None, batchers=None, failed=None)


class Disk:
    """Record the order of `os.fsync` calls of this process; delta-rs makes none."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        self.commits: list[tuple[str, int, list[str], set[str]]] = []
        """Record of each commit: table folder, previous version, added files, and files synced by then."""
        fsync, commit = os.fsync, DeltaTable.create_write_transaction

        def syncing(descriptor: int) -> None:
            fsync(descriptor)
            self.synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

        def committing(handle: DeltaTable, actions: list[Any], *args: Any, **options: Any) -> None:
            folder = handle.table_uri.removeprefix("file://").rstrip("/")
            adds = [action.path for action in actions if hasattr(action, "stats")]
            self.commits.append((folder, handle.version(), adds, set(self.synced)))
            commit(handle, actions, *args, **options)

        patch.setattr(os, "fsync", syncing)
        patch.setattr(DeltaTable, "create_write_transaction", committing)


@pytest.fixture
def disk(monkeypatch):
    _sync_entry.cache_clear()  # as in a new process
    return Disk(monkeypatch)


@pytest.fixture
def tables(tmp_path):
    return Tables(Lake(root=str(tmp_path / "new" / "lake")), Keeping)


def receive(tables: Tables, receive_id: str = "r1", *payloads: bytes) -> Run:
    return Run(tables, Memory(deliveries_=numbered(*(payloads or (b"a", b"b", b"fail")))), receive_id)


def leading_to(path: str, root: str) -> set[str]:
    """Return the folders from the lake's root to a path."""
    return {str(folder) for folder in Path(path).parents if str(folder).startswith(root)}


def test_files_and_the_folders_that_lead_to_them_are_on_disk_before_a_commit_names_them(tables, disk):
    receive(tables).finish()
    root = tables.lake.root
    assert {Path(folder).name for folder, *_ in disk.commits} == {"outcomes", "messages", "failed", "kept"}
    for folder, _, adds, on_disk in disk.commits:
        assert adds
        for path in (f"{folder}/{add}" for add in adds):
            assert on_disk >= {path, *leading_to(path, root), str(Path(root).parent)}


def test_manifests_are_on_disk_before_the_decision(tables, disk):
    run = receive(tables).work()
    folder = tables.lake.uri(run.ledger.folder("r1"))
    run.decide()
    ((*_, on_disk),) = disk.commits
    assert {folder, str(Path(folder).parent)} <= on_disk
    assert sorted(os.listdir(folder)) == ["handle.parquet", "receive.json", "receive.parquet"]
    halves = {Path(path).name.partition(".half")[0] for path in on_disk if path.startswith(f"{folder}/")}
    assert {name.rpartition(".")[0] for name in halves} == set(os.listdir(folder))


def test_a_commit_is_on_disk_before_another_builds_on_it_and_before_anything_is_acknowledged(tables, disk):
    receive(tables).finish()
    # As after a concurrent commit.
    tables["outcomes"].open().alter.set_table_properties({"delta.logRetentionDuration": "interval 40 days"})
    run = receive(tables, "r2", b"c").work()
    fence(tables, run.receive)
    assert len(disk.commits) == 5
    for folder, version, _, on_disk in disk.commits:
        assert on_disk >= {f"{folder}/_delta_log/{version:020d}.json", f"{folder}/_delta_log"}
    for name in tables.names:
        log = Path(tables[name].uri, "_delta_log")
        assert {str(path) for path in log.glob("*.json")} <= set(disk.synced)


def test_compacted_files_and_checkpoints_are_on_disk(tables, disk):
    for number in range(3):
        receive(tables, f"r{number}", b"a").finish()
    maintain(tables, FOR_EVER)
    for name in ("outcomes", "messages", "kept"):
        log = Path(tables[name].uri, "_delta_log")
        (compacted,) = tables[name].open().file_uris()
        assert {compacted, str(log / "_last_checkpoint"), *map(str, log.glob("*.parquet"))} <= set(disk.synced)


def test_a_checkpoint_that_another_is_about_to_name_is_no_error(tables):
    receive(tables).finish()
    outcomes = tables["outcomes"]
    outcomes.open().create_checkpoint()
    Path(outcomes.uri, "_delta_log", "_last_checkpoint").unlink()
    receive(tables, "r2").finish()
    assert outcomes.open().version() == 2


def test_few_syncs_are_needed(tables, disk):
    """A file once, a commit twice (again by the next), and a folder for each new file."""
    receive(tables).finish()
    disk.synced.clear()
    receive(tables, "r2").finish()
    data = [path for path in disk.synced if "/window=" in path and path.endswith(".parquet")]
    assert len(data) == len(set(data)) == 4
    assert len(disk.synced) <= 40


def test_an_object_store_is_told_nothing(disk):
    Lake(root="s3://bucket/lake").sync("p/t/file")
    assert disk.synced == []
