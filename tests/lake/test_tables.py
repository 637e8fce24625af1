"""Tables: created, widened and committed to, also concurrently."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pytest
from pydantic import BaseModel

from pipeline_platform.lake.decision import decide, publish, state_of
from pipeline_platform.lake.schema_changes import SchemaChangeError
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import (
    DECIDED,
    OUTCOMES,
    CommitConflictError,
    LogExpiredError,
    Table,
    Tables,
    columns_of,
)
from pipeline_platform.model.options import Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from tests.fixtures.small_lake import Keeping, Memory, Run, numbered, put, visible


def with_columns(lake: Lake, **columns: pa.DataType) -> Table:
    return Table(lake, "p", "t", pa.schema([*columns.items(), ("window", pa.string())]))


@pytest.fixture
def table(lake):
    made = with_columns(lake, n=pa.int64())
    made.ensure()
    return made


def read(table: Table) -> list[dict[str, object]]:
    return pl.scan_delta(table.uri).collect().to_dicts()


def test_a_table_is_made_empty_and_partitioned_by_window(lake):
    table = with_columns(lake, n=pa.int64())
    assert not table.exists()

    table.ensure()

    assert table.exists()
    assert table.open().metadata().partition_columns == ["window"]
    assert (table.files(table.open()), read(table)) == ([], [])


def test_ensuring_an_existing_table_commits_nothing(table):
    table.ensure()

    assert table.open().version() == 0


def test_a_new_field_is_a_column_before_anything_is_committed(lake):
    narrow = with_columns(lake, n=pa.int64())
    narrow.ensure()
    put(narrow, "r1", {"n": 1})

    wide = with_columns(lake, n=pa.int64(), text=pa.string())
    wide.ensure()
    put(wide, "r2", {"n": 2, "text": "b"})

    assert sorted((row["n"], row["text"]) for row in read(wide)) == [(1, None), (2, "b")]


def test_a_field_that_is_gone_leaves_its_column_and_nulls(lake):
    wide = with_columns(lake, n=pa.int64(), text=pa.string())
    wide.ensure()
    put(wide, "r1", {"n": 1, "text": "a"})

    narrow = with_columns(lake, n=pa.int64())
    narrow.ensure()
    put(narrow, "r2", {"n": 2})

    assert sorted((row["n"], row["text"]) for row in read(wide)) == [(1, "a"), (2, None)]


def test_a_changed_type_is_refused_by_name_with_the_way_out(lake):
    with_columns(lake, late=pa.int64()).ensure()

    with pytest.raises(
        SchemaChangeError, match=r"^p/t: late: integer in the table, text in the model. Rename the field"
    ):
        with_columns(lake, late=pa.string()).ensure()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (pa.list_(pa.int64()), pa.list_(pa.string()), "a: list of integer in the table, list of text in the model"),
        (pa.struct({"b": pa.int64()}), pa.struct({"b": pa.string()}), "a.b: integer in the table, text in the model"),
        (
            pa.struct({"b": pa.int64()}),
            pa.struct({"c": pa.int64()}),
            "a.c: not in the table, integer in the model; a.b",
        ),
        (pa.map_(pa.string(), pa.bool_()), pa.binary(), "a: dict of yes or no in the table, bytes in the model"),
        (
            pa.decimal128(38, 9),
            pa.struct({"b": pa.date32()}),
            "a: decimal in the table, model of b (date) in the model",
        ),
    ],
)
def test_a_changed_type_is_said_in_the_words_of_fields(lake, old, new, said):
    with_columns(lake, a=old).ensure()

    with pytest.raises(SchemaChangeError) as refused:
        with_columns(lake, a=new).ensure()

    assert str(refused.value).startswith(f"p/t: {said}")


def test_many_may_make_and_widen_a_table_at_once(lake):
    def make(n: int) -> None:
        with_columns(lake, n=pa.int64(), **{f"c{i}": pa.string() for i in range(n)}).ensure()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, [0, 3, 1, 2, 0, 3, 1, 2]))

    table = with_columns(lake, n=pa.int64())
    assert {field.name for field in table.open().schema().fields} == {"n", "c0", "c1", "c2", "window"}


def test_a_swap_fails_where_anything_was_committed_since_the_look(table):
    looked = table.open()
    put(table, "r1", {"n": 1})

    with pytest.raises(CommitConflictError, match="p/t changed since version 0"):
        table.swap(looked, "r2", [])

    assert len(read(table)) == 1


def test_a_swap_fails_where_the_table_was_compacted_since_the_look(table):
    put(table, "r1", {"n": 1})
    put(table, "r2", {"n": 2})
    looked = table.open()
    stored = table.files(looked)
    assert table.open().optimize.compact()["numFilesRemoved"] == 2

    with pytest.raises(CommitConflictError):
        table.swap(looked, "r3", [], removed=stored)

    assert sorted(row["n"] for row in read(table)) == [1, 2]


def test_added_files_exclude_compaction(table):
    put(table, "r1", {"n": 1})
    looked = table.open().version()
    put(table, "r2", {"n": 2})
    table.open().optimize.compact()

    (added,) = table.added_since(table.open(), looked)

    assert "/r2-" in added


def test_a_log_that_is_gone_is_never_taken_for_one_without_news(table, tmp_path):
    put(table, "r1", {"n": 1})
    put(table, "r2", {"n": 2})
    handle = table.open()
    (tmp_path / "p/t/_delta_log/00000000000000000001.json").unlink()

    with pytest.raises(LogExpiredError, match="commit 1 is no longer in the log"):
        table.added_since(handle, 0)


# Transactions


def aged(run: Run, days: int) -> Run:
    """Return the receive with an earlier start."""
    run.receive = run.receive.model_copy(update={"started_at": datetime.now(UTC) - timedelta(days=days)})
    return run


@pytest.fixture
def forgetful(monkeypatch):
    """Tables whose transactions have all expired."""

    def forget() -> None:
        monkeypatch.setattr("deltalake.DeltaTable.transaction_version", lambda self, app_id: None)

    return forget


def test_when_its_transaction_is_forgotten_a_receives_rows_tell_that_it_decided(lake, forgetful):
    tables = Tables(lake, Keeping)
    run = aged(Run(tables, Memory(deliveries_=numbered(b"a", b"b")), "r1").work().decide().publish(), days=31)
    stalled = aged(Run(tables, Memory(deliveries_=(("x", b"c"),)), "r2").work(), days=31)
    forgetful()

    outcomes = tables["outcomes"]
    assert state_of(outcomes, "r1", run.receive) == DECIDED
    assert state_of(outcomes, "r2", stalled.receive) != DECIDED


def test_deciding_and_publishing_after_the_transaction_expired_changes_nothing(lake, forgetful):
    tables = Tables(lake, Keeping)
    run = aged(Run(tables, Memory(deliveries_=numbered(b"a", b"b")), "r1").work().decide().publish(), days=31)
    Run(tables, Memory(deliveries_=(("c", b"c"),)), "r2").finish()
    for name in ("outcomes", "kept"):
        tables[name].open().optimize.compact()  # a file that is added again would duplicate its rows
    forgetful()

    decide(tables, run.ledger, run.receive)
    publish(tables, run.receive, run.ledger.manifest(run.receive))

    assert len(visible(tables, "outcomes")) == len(visible(tables, "kept")) == 3


def test_a_receive_that_is_still_remembered_is_never_looked_for_in_files(lake, monkeypatch):
    tables = Tables(lake, Keeping)
    run = Run(tables, Memory(deliveries_=numbered(b"a")), "r1").work().decide()
    monkeypatch.setattr("pipeline_platform.lake.decision.receive_ids", lambda *_: pytest.fail("read files"))

    assert state_of(tables["outcomes"], "r1", run.receive) == DECIDED


# All tables of a pipeline


class Flight(BaseModel):
    late: int


def test_a_pipeline_has_a_table_for_each_batcher_beside_its_own(lake):
    class Flights(Pipeline):
        name = "flights"
        producer = Producer(source="s")
        batchers = {"lake": TableBatcher(schema=Flight)}

        def handle_message(self, message, context):
            return message

    tables = Tables(lake, Flights)
    tables.ensure()

    assert tables.names == ("messages", "outcomes", "failed", "lake")
    assert all(tables[name].exists() for name in tables.names)
    assert columns_of(Flights, "lake").names[:2] == ["late", "source"]
    assert columns_of(Flights, "outcomes") == OUTCOMES


def test_a_relative_folder_is_the_same_one_for_tasks_that_run_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lake = pickle.dumps(Lake(root="lake"))
    monkeypatch.chdir("/")

    assert pickle.loads(lake).uri("a") == f"{tmp_path}/lake/a"
