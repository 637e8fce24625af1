"""A million messages in PostgreSQL, four runs at a time: each once in the lake, and none left."""

from contextlib import closing
from typing import Any

import polars as pl
import pytest

from pipeline_platform import Message, Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.run.flow import Flow
from tests.fixtures.flow import run as run_through
from tests.fixtures.numbers_under_fault import Number
from tests.fixtures.processes import PROCESSES

MESSAGES = 1_000_000


class Million(Pipeline):
    """Fifty thousand messages per run."""

    name = "million"
    producer = Producer(source="queue", max_runs=4)
    processors = Processors(concurrency=2, max_demand=25_000)
    batchers = {"numbers": TableBatcher(schema=Number)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(Number(n=int(message.data)), batcher="numbers")


def run_until_empty(folder: str, spark_folder: str, url: str) -> None:
    spark = SparkResource(remote=WARM, state_folder=spark_folder, packages=["tests"])
    queue, control = TableQueue(name="queue", url=url), ControlStore(url)
    with closing(spark):
        flow = Flow(BoundProducer(Million), queue, Lake(root=folder), control, lambda: spark.spark_session)
        while queue.backlog().messages:
            run_through(flow)


@pytest.mark.soak
def test_a_million_messages_by_four_runs_at_a_time(tmp_path, warm_spark, postgres_url):
    queue = TableQueue(name="queue", url=postgres_url)
    queue.create()
    queue.send(b"%d" % number for number in range(MESSAGES))

    told = (str(tmp_path), str(warm_spark.folder), postgres_url)
    runs = [PROCESSES.Process(target=run_until_empty, args=told) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(3_000)

    assert [run.exitcode for run in runs] == [0] * 4
    assert queue.backlog().messages == 0
    assert queue.held() == []
    numbers = pl.read_delta(f"{tmp_path}/million/numbers")["n"]
    assert (numbers.len(), numbers.n_unique(), numbers.min(), numbers.max()) == (MESSAGES, MESSAGES, 0, MESSAGES - 1)
