"""A deployment of pipelines and sources only: lake, control store and Spark are the default resources."""

import dagster as dg
import pytest
from pydantic import BaseModel

from pipeline_platform import Pipeline, PipelineError, Producer, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import platform_definitions


class Order(BaseModel):
    number: int


class Orders(Pipeline):
    """A pipeline that stores orders."""

    name = "orders"
    producer = Producer(source="queue")
    batchers = {"lake": TableBatcher(schema=Order)}

    def handle_message(self, message, context):
        return message.put(message.json(Order), batcher="lake")


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINE_PLATFORM_HOME", str(tmp_path / "home"))
    for name in ("LAKE", "CONTROL", "SPARK"):
        monkeypatch.delenv(f"PIPELINE_PLATFORM_{name}", raising=False)
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite", table="orders")
    queue.create()
    return queue


def test_a_pull_stores_rows_in_the_default_lake(queue, tmp_path):
    queue.send([b'{"number": 1}'])
    defs = platform_definitions([Orders], sources={"queue": queue})

    job = defs.resolve_job_def("orders_pull")
    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(partition_key=job.partitions_def.get_last_partition_key(), instance=instance)

    assert done.success
    assert (tmp_path / "home" / "lake" / "orders" / "lake" / "_delta_log").is_dir()
    assert queue.backlog().messages == 0


def test_runs_of_a_short_deployment_use_one_process_and_a_project_keeps_its_executor(queue):
    short = platform_definitions([Orders], sources={"queue": queue})
    resources = {key: short.resources[key] for key in ("lake", "control", "spark")}

    assert short.executor is dg.in_process_executor
    assert platform_definitions([Orders], resources, sources={"queue": queue}).executor is None


def test_wrong_sources_are_refused_by_key(queue):
    with pytest.raises(PipelineError, match=r"sources\['queue'\] must be a connector, .*got a TableQueue"):
        platform_definitions([Orders], sources={"queue": TableQueue})  # type: ignore[dict-item]
    with pytest.raises(PipelineError, match=r"sources\['lake'\] is also a key"):
        platform_definitions([Orders], {"lake": 1}, sources={"lake": queue})
