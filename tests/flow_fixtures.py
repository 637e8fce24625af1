"""Whole flows, step by step, on a real Spark and a real queue."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.receives import Origin, Receive
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.options import Batcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.flow import Flow
from resources.table_queue import TableQueue
from tests.spark_fixtures import WarmSpark

WINDOW = "2026-11-21T0000"
Filled = Callable[[type[Pipeline], Iterable[bytes]], Flow]


@pytest.fixture
def filled(tmp_path: Path, warm_spark: WarmSpark) -> Iterator[Filled]:
    """A pipeline over a queue of payloads."""
    with closing(warm_spark.resource()) as spark:

        def fill(pipeline: type[Pipeline], payloads: Iterable[bytes]) -> Flow:
            queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
            queue.create()
            queue.enqueue(payloads)
            control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
            return Flow(pipeline, queue, Lake(root=str(tmp_path / "lake")), control, lambda: spark.spark_session)

        yield fill


def run(flow: Flow, origin: Origin = "source") -> Receive:
    receive = flow.begin(origin=origin, run_id="test", windows=[WINDOW])
    flow.receive(receive)
    flow.handle(receive)
    for name, options in flow.pipeline.batchers.items():
        if isinstance(options, Batcher):
            flow.batch(receive, name)
    flow.decide(receive)
    flow.publish(receive)
    flow.acknowledge(receive)
    return receive


def rows(flow: Flow, table: str) -> pl.DataFrame:
    return pl.read_delta(flow.tables[table].uri)


def kinds(flow: Flow) -> dict[str, str]:
    failed = rows(flow, "failed")
    return dict(zip((data.decode() for data in failed["data"]), failed["kind"], strict=True))


def worked(flow: Flow, windows: Iterable[str] = (WINDOW,)) -> Receive:
    """A receive that has handled everything, and decided nothing."""
    receive = flow.begin(origin="source", run_id="test", windows=[*windows])
    flow.receive(receive)
    flow.handle(receive)
    flow.batch(receive, "batches")
    return receive
