"""Iceberg tables: values by several readers, snapshots, partitions, catalogs and warehouses."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock

import duckdb
import polars as pl
import pytest
import requests
from botocore.exceptions import ClientError
from pyiceberg.catalog import glue, load_catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from pipeline_platform.sinks.contract import SinkAwayError, SinkError
from pipeline_platform.sinks.iceberg import RECEIVE, IcebergSink
from pipeline_platform.testing.sinks.sink_trial import COLUMNS
from tests.fixtures.flow import run
from tests.fixtures.sinks import glue_and_s3, iceberg, iceberg_table
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
    assert found[0] == (VALUES.text, VALUES.number, VALUES.price, ["a", ""], {"size": 3, "raw": b"\xff\x00"})
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


@pytest.mark.parametrize("is_view", [False, True], ids=["a table of Glue", "a view of a REST catalog"])
def test_something_else_with_the_name_of_the_table_is_refused(tmp_path, request, is_view):
    fixtures = ["iceberg_rest_server"] if is_view else ["glue_server", "s3"]
    servers = [request.getfixturevalue(name) for name in fixtures]
    new, _ = iceberg(tmp_path, **({"type": "rest", "uri": servers[0]} if is_view else glue_and_s3(*servers, tmp_path)))
    with closing(new()) as sink:
        sink.ensure("orders", "others", COLUMNS)
        (create_view if is_view else create_glue_table)(sink, "orders_lake")
        with pytest.raises(SinkError, match=r"orders_lake exists, but is not an Iceberg table"):
            sink.ensure("orders", "lake", COLUMNS)


def create_glue_table(sink: IcebergSink, name: str) -> None:
    catalog = sink._catalog
    assert isinstance(catalog, glue.GlueCatalog)
    catalog.glue.create_table(
        DatabaseName=sink.namespace, TableInput={"Name": name, "Parameters": {"table_type": "delta"}}
    )


def create_view(sink: IcebergSink, name: str) -> None:
    representation = {"type": "sql", "sql": "SELECT 1 AS number", "dialect": "spark"}
    version = {"version-id": 1, "timestamp-ms": 1, "schema-id": 0, "summary": {}, "representations": [representation]}
    fields = [{"id": 1, "name": "number", "type": "int", "required": False}]
    view = {"name": name, "schema": {"type": "struct", "schema-id": 0, "fields": fields}, "properties": {}}
    view["view-version"] = {**version, "default-namespace": [sink.namespace]}
    requests.post(f"{sink.properties['uri']}/v1/namespaces/{sink.namespace}/views", json=view).raise_for_status()


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
