"""Sinks in a deployment: the option of a batcher, the resource, and a run."""

from typing import Any, ClassVar

import dagster as dg
import psycopg
import pytest
from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, PipelineError, Producer, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import platform_definitions, sink_resource
from pipeline_platform.sinks.iceberg import IcebergSink
from pipeline_platform.sinks.postgres import PostgresSink


class Order(BaseModel):
    number: int


class Orders(Pipeline):
    """A pipeline whose rows are also in a warehouse."""

    name = "orders"
    producer = Producer(source="queue", idle_timeout=None)
    batchers: ClassVar[Any] = {"lake": TableBatcher(schema=Order, sink="warehouse")}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(message.json(Order), batcher="lake")


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_PLATFORM_HOME", str(tmp_path / "home"))
    for name in ("LAKE", "CONTROL", "SPARK"):
        monkeypatch.delenv(f"PIPELINE_PLATFORM_{name}", raising=False)
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    return queue


def test_a_run_stores_rows_in_the_sink_of_a_deployment(queue, postgres_url):
    queue.send([b'{"number": 1}', b"bad"])
    sinks = {"warehouse": PostgresSink(name="warehouse", url=postgres_url)}
    job = platform_definitions([Orders], sources={"queue": queue}, sinks=sinks).resolve_job_def("orders_pull")
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(partition_key=job.partitions_def.get_last_partition_key(), instance=instance)
    assert done.success
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT number, message_id FROM orders_lake").fetchall() == [(1, "1")]


def test_a_url_may_come_from_the_environment(postgres_url, monkeypatch):
    monkeypatch.setenv("WAREHOUSE_URL", postgres_url)
    resource = sink_resource(PostgresSink)(name="warehouse", url=dg.EnvVar("WAREHOUSE_URL"))
    with dg.build_resources({"warehouse": resource}) as resources:
        assert resources.warehouse == PostgresSink(name="warehouse", url=postgres_url)


def test_properties_and_keys_of_sinks_are_config(monkeypatch):
    monkeypatch.setenv("CATALOG_TOKEN", "secret-token")
    properties = {"type": "rest", "uri": "http://127.0.0.1:1", "token": dg.EnvVar("CATALOG_TOKEN")}
    resources = {
        "lakehouse": sink_resource(IcebergSink)(name="lakehouse", namespace="shop", properties=properties),
        "by_number": sink_resource(PostgresSink)(
            name="by_number", url="postgresql://h/d", key=["number"], order="version"
        ),
    }
    with dg.build_resources(resources) as made:
        assert made.lakehouse.properties == {**properties, "token": "secret-token"}
        assert made.by_number.key == ("number",)


def test_wrong_sinks_are_refused(queue):
    sources = {"queue": queue}
    with pytest.raises(PipelineError, match=r"Orders.batchers\['lake'\].sink: no resource has the key 'warehouse'"):
        platform_definitions([Orders], sources=sources)
    with pytest.raises(PipelineError, match=r"Orders.batchers\['lake'\].sink: must be the key of a sink"):
        platform_definitions([Orders], sources={"queue": queue, "warehouse": TableQueue(name="w", url="sqlite:///w")})
    with pytest.raises(PipelineError, match=r"sinks\['warehouse'\] must be a sink; got a TableQueue"):
        platform_definitions([Orders], sources=sources, sinks={"warehouse": queue})


class EuBig(Orders):
    """A pipeline with the table `orders_eu_big`."""

    name = "orders"
    batchers: ClassVar[Any] = {"eu_big": TableBatcher(schema=Order, sink="warehouse")}


class Big(Orders):
    """Another pipeline with the table `orders_eu_big`."""

    name = "orders_eu"
    producer = Producer(source="eu_queue")
    batchers: ClassVar[Any] = {"big": TableBatcher(schema=Order, sink="warehouse")}


class BigElsewhere(Big):
    """A pipeline with this table in another sink."""

    name = "orders_eu"
    batchers: ClassVar[Any] = {"big": TableBatcher(schema=Order, sink="lakehouse")}


def test_two_batchers_with_one_table_in_a_sink_are_refused(queue, tmp_path):
    sources = {"queue": queue, "eu_queue": TableQueue(name="eu_queue", url=f"sqlite:///{tmp_path}/eu.sqlite")}
    sinks = {key: PostgresSink(name=key, url=f"postgresql://h/{key}") for key in ("warehouse", "lakehouse")}
    with pytest.raises(PipelineError, match=r"Big.batchers\['big'\].sink: .*EuBig.batchers\['eu_big'\]"):
        platform_definitions([EuBig, Big], sources=sources, sinks=sinks)
    assert platform_definitions([EuBig, BigElsewhere], sources=sources, sinks=sinks)
