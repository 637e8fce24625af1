"""The table of a removed batcher: maintained like other tables, and replaced by a replay."""

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pipeline_platform import TableBatcher
from pipeline_platform.lake.decisions.ledger import Ledger
from pipeline_platform.lake.latest.keyed_table import keyed_tables
from pipeline_platform.lake.maintenance.maintenance import maintain
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.options import Retention
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Row, Run, numbered, visible


class Renamed(Keeping):
    """The same pipeline with another name for its batcher."""

    batchers = {"stored": TableBatcher(schema=Row)}

    def handle_message(self, message: Any, context: Any) -> Any:
        return super().handle_message(message, context).put_batcher("stored")


@pytest.fixture
def tables(lake):
    """The tables of the renamed batcher, after a run of the class with the old name."""
    Run(before := Tables(lake, Keeping), Memory(deliveries_=numbered(b"1", b"2")), "r1").finish()
    assert removed_batchers(before) == []
    rows = pa.table({"text": ["x"], "window": [WINDOW]})
    write_deltalake(lake.uri("keeping", "an_asset"), rows, partition_by=["window"])
    (tables := Tables(lake, Renamed)).ensure()
    return tables


def test_its_old_windows_are_dropped_and_no_table_of_an_asset_is_touched(lake, tables):
    assert removed_batchers(tables) == ["kept"]
    Run(Tables(lake, Keeping), Memory(deliveries_=numbered(b"3")), "r2", windows=("2026-01-02T0000",)).finish()

    report = maintain(tables, Retention(messages=None, batchers=timedelta(days=1), failed=None))

    assert report["kept"]["dropped"] == 1
    assert [row["text"] for row in visible(tables, "kept")] == ["3"]
    assert "an_asset" not in report


def test_files_of_other_programs_are_no_tables_and_no_receives(lake, tables):
    for folder in ("keeping", "keeping/_receives"):
        lake.write(f"{folder}/.DS_Store", b"Bud1")
        lake.write(f"{folder}/note", b"Do not delete")

    assert (removed_batchers(tables), keyed_tables(lake, "keeping")) == (["kept"], [])
    assert Ledger(lake, "keeping").under_way() == ([], [])
    assert "kept" in maintain(tables, Retention(messages=None, batchers=None, failed=None))
