"""Iceberg tables: values by several readers, snapshots, partitions, catalogs and warehouses."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock

import duckdb
import polars as pl
import pytest
from botocore.exceptions import ClientError
from pyiceberg.catalog import glue, load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from pipeline_platform.sinks.contract import SinkAwayError, SinkError
from pipeline_platform.sinks.iceberg import RECEIVE, IcebergSink
from pipeline_platform.testing.sinks.sink_trial import COLUMNS
from tests.fixtures.flow import run
from tests.fixtures.sinks import iceberg, iceberg_table
from tests.sinks.test_postgres import VALUES, Typed


@pytest.fixture
def warehouse(tmp_path) -> Iterator[IcebergSink]:
    new, _ = iceberg(tmp_path)
    with closing(new()) as sink:
        yield sink


def test_every_reader_finds_each_value_unchanged(filled, warehouse):
    flow = filled(Typed, [b"all", b"empty", b"null", b"batch"])
    receive = run(replace(flow, sinks=dict.fromkeys(flow.pipeline.batchers, warehouse)))
    expected = {
        **VALUES.model_dump(exclude={"clock", "took"}, mode="python"),
        "id": str(VALUES.id),
        "colour": "red",
        "receive_id": receive.receive_id,
        "message_id": "1",
        "window": receive.window,
    }
    table = iceberg_table(warehouse, "typed", "values")
    by_polars = pl.scan_iceberg(table).sort("message_id").collect()
    first, empty, null = by_polars.to_dicts()
    assert {name: first[name] for name in expected} == expected
    assert (empty["text"], null["text"]) == ("", None)
    with duckdb.connect() as connection:
        connection.register("stored", table.scan().to_arrow())
        found = connection.execute("SELECT text, number, price, tags, part FROM stored ORDER BY message_id").fetchall()
    assert found[0] == (VALUES.text, VALUES.number, VALUES.price, ["a", ""], {"size": 3})
    assert iceberg_table(warehouse, "typed", "batched").scan().to_arrow()["data"].to_pylist() == ['{"said":"batch"}']
    assert [snapshot.summary[RECEIVE] for snapshot in table.metadata.snapshots] == [receive.receive_id]
    assert {str(file.file.partition[0]) for file in table.scan().plan_files()} == {receive.window}


@pytest.mark.parametrize("type_", ["sql", "rest"])
def test_a_table_that_another_run_creates_first_is_used(tmp_path, request, monkeypatch, type_):
    rest = {"type": "rest", "uri": request.getfixturevalue("iceberg_rest_server")} if type_ == "rest" else {}
    new, _ = iceberg(tmp_path, **rest)
    with closing(new()) as sink, closing(sink.model_copy()) as other:
        load, missing = IcebergSink._load, [NoSuchTableError()]

        def load_after_it_was_missing(sink: IcebergSink, pipeline: str, table: str) -> Table:
            if missing:
                error = missing.pop()
                other.ensure(pipeline, table, COLUMNS)
                raise error
            return load(sink, pipeline, table)

        monkeypatch.setattr(IcebergSink, "_load", load_after_it_was_missing)
        sink.ensure("orders", "lake", COLUMNS)
        assert missing == []
        assert iceberg_table(sink, "orders", "lake").scan().to_arrow().num_rows == 0


def test_a_table_with_other_partitions_is_refused(warehouse):
    with closing(load_catalog("default", **warehouse.properties)) as catalog:
        catalog.create_namespace(warehouse.namespace)
        catalog.create_table(f"{warehouse.namespace}.orders_lake", COLUMNS)
    with pytest.raises(SinkError, match=r"orders_lake must be partitioned by window, got \[\]"):
        warehouse.ensure("orders", "lake", COLUMNS)


def test_an_unavailable_glue_is_waited_for(monkeypatch):
    monkeypatch.setattr(glue, "MAX_RETRIES", 0)  # ten take 17 s; of a property, botocore wants a number
    properties = {"type": "glue", "glue.endpoint": "http://127.0.0.1:1", "glue.region": "eu-west-1"}
    with pytest.raises(SinkAwayError, match="warehouse"):
        IcebergSink(name="warehouse", namespace="a", properties=properties).ensure("orders", "lake", COLUMNS)


@pytest.mark.parametrize("properties", [{"type": "nonsense"}, {}])
def test_a_wrong_catalog_is_refused(properties):
    properties = {**properties, "token": "secret-token"}
    with pytest.raises(SinkError, match="warehouse") as raised:
        IcebergSink(name="warehouse", namespace="a", properties=properties).ensure("orders", "lake", COLUMNS)
    assert raised.type is SinkError, "a run does not wait for it"
    assert "secret-token" not in str(raised.value)


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("ThrottlingException", 400, SinkAwayError),
        ("SlowDown", 503, SinkAwayError),
        ("InternalServiceException", 500, SinkAwayError),
        ("AccessDeniedException", 400, SinkError),
    ],
)
def test_a_busy_service_of_aws_is_waited_for(warehouse, monkeypatch, code, status, error):
    answer = ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetTable")
    monkeypatch.setattr(type(warehouse._catalog), "load_table", Mock(side_effect=answer))
    with pytest.raises((SinkError, SinkAwayError), match=code) as raised:
        warehouse.ensure("orders", "lake", COLUMNS)
    assert raised.type is error
