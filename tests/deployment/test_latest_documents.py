"""`docs/build/latest.md` in whole runs, and `docs/examples/customers_from_debezium.py` over a real Kafka."""

import json
from types import ModuleType
from typing import Any

import dagster as dg
import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import IO_MANAGER, LakeResource, SparkResource
from pipeline_platform.orchestration.resources.lake_resources import LakeIOManager
from pipeline_platform.run.flow import Flow
from tests.fixtures.documents import DOCS, blocks, imported
from tests.fixtures.flow import flow_of, rows, run
from tests.fixtures.kafka_source import until
from tests.fixtures.source_of_truth import Customers, Record, send


def merge(flow: Flow, latest: dg.AssetsDefinition, *columns: str) -> list[tuple[Any, ...]]:
    """Materialise the asset, and return columns of its table, sorted."""
    lake = LakeResource(root=flow.lake.root)
    resources = {"lake": lake, IO_MANAGER: LakeIOManager(lake=lake, spark=SparkResource())}
    assert dg.materialize([latest], resources=resources).success
    return sorted(pl.read_delta(flow.lake.uri(*latest.key.path)).select(columns).rows())


def test_the_latest_version_of_each_order_is_in_the_table(tmp_path, tasks_here):
    page = imported("of_the_page", "\n\n".join(blocks(DOCS / "build" / "latest.md")), tmp_path)
    queue = TableQueue(name="orders_queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    flow = flow_of(tmp_path, page.Orders, queue)

    def pull(*versions: tuple[int, int, str]) -> list[tuple[Any, ...]]:
        names = ("number", "version", "status", "is_deleted")
        orders = [dict(zip(names, (*version, version[2] == "cancelled"), strict=True)) for version in versions]
        queue.enqueue(json.dumps(order).encode() for order in orders)
        run(flow)
        return merge(flow, page.orders_latest, "number", "status")

    assert pull((1, 1, "new"), (2, 1, "new"), (3, 1, "new")) == [(1, "new"), (2, "new"), (3, "new")]
    assert pull((1, 3, "sent"), (2, 2, "cancelled")) == [(1, "sent"), (3, "new")]
    assert pull((1, 2, "paid"), (2, 1, "new"), (4, 1, "new")) == [(1, "sent"), (3, "new"), (4, "new")]
    every_ten_minutes = merge(flow, page.orders_every_ten_minutes, "number", "status")
    assert every_ten_minutes == [(1, "sent"), (3, "new"), (4, "new")]


@pytest.fixture
def example(tmp_path) -> ModuleType:
    text = (DOCS / "examples" / "customers_from_debezium.py").read_text()
    return imported("customers_of_debezium", text, tmp_path)


@pytest.fixture
def flow(example, kafka, kafka_topic, tmp_path, tasks_here) -> Flow:
    return flow_of(tmp_path, example.Customers, kafka(kafka_topic(3), name="customers_topic"))


def test_the_latest_rows_are_those_of_the_database(flow, example):
    """Inserts, updates, deletes, a snapshot, redeliveries and replays; merged after each, and in the end at once."""
    database, sent, source = Customers(seed=7), list[Record](), flow.source

    def pull(records: list[Record]) -> None:
        send(source.bootstrap_servers, source.topics[0], records)  # type: ignore[attr-defined]
        until(lambda: (source.backlog().messages or 0) >= len(records))
        while source.backlog().messages:
            run(flow)

    def assert_equal() -> None:
        there = sorted((row["id"], row["name"], row["city"]) for row in database.rows.values())
        assert merge(flow, example.customers_latest, "id", "name", "city") == there

    for count in (40, 1, 60):
        sent += (records := database.changes(count))
        pull(records)
        assert_equal()
    pull(sent[:50])  # Debezium restarts from an old position, and sends changes again
    assert_equal()
    run(flow, "messages")
    assert_equal()
    flow.lake.remove("customers/changes_latest")
    assert_equal()
    assert rows(flow, "failed").height == 0
    assert rows(flow, "changes").height == sum(record.value is not None for record in [*sent, *sent[:50]])
