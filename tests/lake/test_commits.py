"""Errors of commits: permanent errors name the table, and concurrent commits are conflicts."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline_platform.lake.decisions.decision import decide, fence, publish
from pipeline_platform.lake.maintenance.maintenance import MaintenanceError, maintain
from pipeline_platform.lake.tables import CommitError, Table, Tables
from pipeline_platform.model.options import Retention
from tests.fixtures.small_lake import Memory, Run, numbered, visible

pytestmark = pytest.mark.timeout(20)  # no commit is repeated forever


def forbid(table: Table) -> None:
    """Enable a table feature that delta-rs does not support."""
    log = Path(table.uri, "_delta_log")
    protocol = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["rowTracking", "domainMetadata"]}
    (log / f"{table.open().version() + 1:020d}.json").write_text(json.dumps({"protocol": protocol}) + "\n")


def append_only(table: Table) -> None:
    table.open().alter.set_table_properties({"delta.appendOnly": "true"})


def worked(tables: Tables, receive_id: str = "r1") -> Run:
    return Run(tables, Memory(deliveries_=numbered(b"a", b"b", b"fail")), receive_id).work()


COMMITS: dict[str, tuple[str, Callable[[Tables, Run], object]]] = {
    "decide": ("outcomes", lambda tables, run: decide(tables, run.ledger, run.receive)),
    "fence": ("outcomes", lambda tables, run: fence(tables, run.receive)),
    "publish": ("kept", lambda tables, run: publish(tables, run.receive, run.ledger.manifest(run.receive))),
    "widen": (
        "kept",
        lambda tables, run: Table(
            tables.lake, "keeping", "kept", pa.schema([*tables["kept"].schema, ("more", pa.int64())])
        ).ensure(),
    ),
    "maintain": ("kept", lambda tables, run: maintain(tables, Retention())),
}


@pytest.mark.parametrize("what", COMMITS)
def test_unsupported_table_features_raise_an_error_that_names_the_table(tables, what):
    name, commit = COMMITS[what]
    for receive_id in ("r8", "r9"):
        worked(tables, receive_id).decide().publish()
    run = worked(tables)
    forbid(tables[name])
    with pytest.raises(
        (CommitError, MaintenanceError),
        match=rf"keeping/{name} rejects commits.*Unsupported table features required.*RowTracking",
    ):
        commit(tables, run)


def test_a_replay_into_a_table_that_only_appends_is_refused_by_name(tables):
    worked(tables).decide().publish()
    append_only(tables["kept"])
    replay = Run(tables, Memory(deliveries_=numbered(b"a")), "r2", origin="messages", replaces=("r1",)).work().decide()
    with pytest.raises(CommitError, match=r"keeping/kept rejects commits.*append-only.*Remove the table property"):
        replay.publish()
    assert len(visible(tables, "kept")) == 2


def test_windows_of_a_table_that_only_appends_are_kept_with_an_error_that_names_it(tables):
    for window in ("2026-01-01T0000", "2026-01-02T0000"):
        Run(tables, Memory(deliveries_=numbered(b"a")), window, windows=(window,)).finish()
    append_only(tables["messages"])
    with pytest.raises(MaintenanceError, match="keeping/messages rejects commits"):
        maintain(tables, Retention())


def test_a_concurrent_commit_is_a_conflict(tables):
    """Another receive commits right before each of two attempts."""
    run, tries = worked(tables), iter(["r2", "r3"])
    looked = Table.added_since

    def crowded(table: Table, *args: object) -> list[str]:
        added = looked(table, *args)  # type: ignore[arg-type]
        if other := next(tries, None):
            table.swap(table.open(), other, [])
        return added

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "added_since", crowded)
        assert decide(tables, run.ledger, run.receive).tries == 3
