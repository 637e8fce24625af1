"""A run of a pipeline from claim to acknowledgement on a warm Spark, and the processor time of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.run import steps
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.work.local_worker import LocalWorker
from pipeline_platform.source.contract import Source
from pipeline_platform.spark import server as spark_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WINDOW = "2026-11-21T0000"

_STEPS: dict[str, Callable[[Flow, Any], Any]] = {
    "receive": steps.receive_messages,
    "handle": steps.handle_messages,
    "decide": steps.decide,
    "publish": steps.publish,
    "acknowledge": steps.acknowledge,
}


@contextmanager
def warm_spark(folder: Path, memory: str = "2g") -> Iterator[SparkResource]:
    """Run a server in a folder until the block ends; yield a resource with a session on it."""
    spark_server.start(folder, memory=memory)
    try:
        with closing(SparkResource(remote=WARM, state_folder=str(folder), packages=["benchmarks"])) as spark:
            yield spark
    finally:
        spark_server.stop(folder)


def flow_at(
    folder: Path, pipeline: type[Pipeline], source: Source, session: SparkSession, worker: LocalWorker | None = None
) -> Flow:
    """Return a pipeline with its tables and claims in a folder, which is created if it is missing."""
    folder.mkdir(exist_ok=True)
    control = ControlStore(f"sqlite:///{folder}/control.sqlite")
    lake = Lake(root=f"{folder}/lake")
    return Flow(BoundProducer(pipeline), source, lake, control, lambda: session, worker=worker)


def whole_run(flow: Flow, messages: int, *, all_of_them: bool = True) -> dict[str, float]:
    """Execute one run, which must acknowledge its demand, or some of it; return the seconds of each step."""
    started, took = time.perf_counter(), dict[str, float]()
    receive, answer = begin(flow, origin="source", run_id="bench", windows=[WINDOW], demand=messages), None
    took["begin"] = time.perf_counter() - started
    for name, step in _STEPS.items():
        started = time.perf_counter()
        answer = step(flow, receive)
        took[name] = time.perf_counter() - started
    assert answer is not None
    assert answer.acknowledged == messages or (answer.acknowledged and not all_of_them)
    return took


def processor_s(*roots: psutil.Process) -> float:
    """Return the processor time of processes with their descendants, including the ones that have ended."""
    trees = [process for root in roots for process in (root, *root.children(recursive=True))]
    return float(sum(sum(process.cpu_times()[:4]) for process in trees))
