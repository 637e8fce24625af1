"""Tables: created, widened and committed to, also concurrently."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Annotated

import duckdb
import msgspec
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, Schema
from pydantic import BaseModel, Field

from pipeline_platform.lake.decisions.decision import decide, publish, state_of
from pipeline_platform.lake.maintenance.compaction import compact
from pipeline_platform.lake.schema_changes import SchemaChangeError
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.table_properties import LOG_RETENTION, RETENTION
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


@pytest.mark.parametrize(
    ("of_release", "now"),
    [
        ({RETENTION: "interval 30 days"}, {RETENTION: "interval 3 hours", LOG_RETENTION: "interval 48 hours"}),
        (
            {RETENTION: "interval 9 days", LOG_RETENTION: "interval 40 days"},
            {RETENTION: "interval 9 days", LOG_RETENTION: "interval 40 days"},
        ),
        ({}, {}),  # not created by a run
    ],
    ids=["of release 0.3.0", "changed by an operator", "of others"],
)
def test_tables_of_an_earlier_release_keep_commits_and_transactions_for_as_short_as_new_ones(lake, of_release, now):
    table = with_columns(lake, n=pa.int64())
    schema = Schema.from_arrow(table.schema)
    DeltaTable.create(table.uri, schema=schema, partition_by=["window"], configuration=of_release)

    for _ in range(2):
        table.ensure()

    assert (table.open().metadata().configuration, table.version()) == (now, int(now != of_release))


class Before(BaseModel):
    total: Annotated[int, Field(description="In cents")]
    note: str


class After(BaseModel):
    total: Annotated[int, Field(description="In cents, with taxes")]
    note: str = Field(description="By the customer")
    paid: bool = Field(description="Whether it is paid")


class Slim(msgspec.Struct):
    total: Annotated[int, msgspec.Meta(description="In euros")]


def test_descriptions_of_fields_are_comments_of_columns(lake):
    def comments(model: type) -> dict[str, str]:
        pipeline = type(
            "Orders",
            (Keeping,),
            {"name": "orders", "producer": Producer(source="q"), "batchers": {"lake": TableBatcher(schema=model)}},
        )
        table = Tables(lake, pipeline)["lake"]
        for _ in range(2):
            table.ensure()
        return {field.name: field.metadata["comment"] for field in table.open().schema().fields if field.metadata}

    assert comments(Before) == {"total": "In cents"}
    after = {"total": "In cents, with taxes", "note": "By the customer", "paid": "Whether it is paid"}
    assert comments(After) == after
    assert comments(Slim) == {**after, "total": "In euros"}


STREET, CITY, COUNT = {"street": pa.string()}, {"city": pa.string()}, {"count": pa.int64()}


@pytest.mark.parametrize("wrap", [pa.struct, lambda fields: pa.list_(pa.struct(fields))], ids=["model", "list"])
def test_a_nested_model_gains_and_loses_fields_while_old_and_new_code_write(lake, wrap):
    old, new, third = (with_columns(lake, to=wrap(fields)) for fields in (STREET, {**CITY, **STREET}, COUNT))

    def put_each(table: Table, receive_id: str, **values: object) -> None:
        table.ensure()
        put(table, receive_id, {"to": values if wrap is pa.struct else [values]})

    put_each(old, "r1", street="a")
    put_each(new, "r2", street="b", city="c")
    put_each(old, "r3", street="d")  # rolled back, or not yet deployed everywhere
    put_each(third, "r4", count=4)
    stored = [{"street": "a"}, {"street": "b", "city": "c"}, {"street": "d"}, {"count": 4}]
    found = [dict.fromkeys(("street", "city", "count")) | values for values in stored]

    def rows(values: list[dict[str, object]]) -> list[object]:
        inner = [value["to"] if wrap is pa.struct else value["to"][0] for value in values]
        return sorted(inner, key=str)

    def every_reader_finds_them() -> None:
        query = QueryBuilder().register("t", old.open()).execute("SELECT * FROM t")
        for reader in (
            read(old),
            old.open().to_pyarrow_dataset().to_table().to_pylist(),
            pa.table(query.read_all()).to_pylist(),
            duckdb.sql("SELECT * FROM dataset", connection=connected(old)).to_arrow_table().to_pylist(),
        ):
            assert rows(reader) == sorted(found, key=str)

    every_reader_finds_them()
    assert compact(new, errors := []) == 4
    assert not errors
    every_reader_finds_them()


def connected(table: Table) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.register("dataset", table.open().to_pyarrow_dataset())
    return connection


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (pa.int64(), pa.string(), "a: integer in the table, text in the model. Rename the field"),
        (pa.list_(pa.int64()), pa.list_(pa.string()), "a: list of integer in the table, list of text in the model"),
        (pa.struct({"b": pa.int64()}), pa.struct({"b": pa.string()}), "a.b: integer in the table, text in the model"),
        (
            pa.list_(pa.struct({"b": pa.int64()})),
            pa.list_(pa.struct({"b": pa.string(), "c": pa.string()})),
            "a[].b: integer in the table, text in the model",
        ),
        (
            pa.map_(pa.string(), pa.struct({"b": pa.int64()})),
            pa.map_(pa.string(), pa.struct({"b": pa.int64(), "c": pa.bool_()})),
            "a: dict of model of b (integer) in the table, dict of model of b (integer), c (yes or no) in the model",
        ),
        (
            pa.struct({"Total": pa.int64()}),
            pa.struct({"total": pa.int64()}),
            "a.total: a.Total in the table, which ignores case",
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


def test_a_field_that_is_renamed_in_case_only_is_refused(lake):
    with_columns(lake, Total=pa.int64()).ensure()

    with pytest.raises(SchemaChangeError, match=r"^p/t: total: Total in the table, which ignores case. Rename the"):
        with_columns(lake, total=pa.int64()).ensure()


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


def test_a_published_receive_that_stays_unfinished_is_not_published_again_after_a_replay(lake, forgetful):
    tables = Tables(lake, Keeping)
    run = aged(Run(tables, Memory(deliveries_=numbered(b"a", b"b")), "r1").work().decide().publish(), days=31)
    run.ledger.note_published(run.receive)
    with tables["kept"].look() as handle:  # a replay replaced its rows
        tables["kept"].swap(handle, "replay", [], removed=tables["kept"].files(handle))
    forgetful()

    publish(tables, run.receive, run.ledger.manifest(run.receive))

    assert visible(tables, "kept") == []


def test_a_receive_that_is_still_remembered_is_never_looked_for_in_files(lake, monkeypatch):
    tables = Tables(lake, Keeping)
    run = Run(tables, Memory(deliveries_=numbered(b"a")), "r1").work().decide()
    monkeypatch.setattr("pipeline_platform.lake.decisions.decision.receive_ids", lambda *_: pytest.fail("read files"))

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
