"""Pipeline of `benchmarks.failures`, and its retries: runs in this process, with the local worker instead of Spark."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.events import EventStruct
from pipeline_platform import Message, Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.run.work.spark_work import SparkWork

if TYPE_CHECKING:
    import dagster as dg

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
PER_RUN = 100_000
"""Most failures in a receive: two tasks with the default `max_demand`."""


class Orders(Pipeline):
    """A pipeline whose messages failed, and whose cause is fixed."""

    name = "orders"
    producer = Producer(source="queue")
    processors = Processors(concurrency=2, max_demand=PER_RUN // 2)
    batchers = {"orders": TableBatcher(schema=EventStruct), "refunds": TableBatcher(schema=EventStruct)}
    first_window = BEGAN

    def handle_message(self, message: Message, context: Any) -> Message:
        """Store an order."""
        return message.put(message.json(EventStruct), batcher="orders")


def prepare(root: str) -> None:
    """Create the queue and Dagster's storage, which takes longer than a run."""
    home = Path(root, "dagster")
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    TableQueue.model_validate(_queue(root)).create()
    _instance(root).dispose()


def _queue(root: str) -> dict[str, str]:
    return {"name": "queue", "url": f"sqlite:///{root}/queue.sqlite"}


def _instance(root: str) -> dg.DagsterInstance:
    import dagster as dg  # the commands on failures are measured without it

    return dg.DagsterInstance.from_config(f"{root}/dagster")


def retry(root: str, windows: Sequence[str], messages: int | None, began: datetime) -> None:
    """Execute a run that retries failures of consecutive windows from before a time, as `failures retry` requests it.

    Args:
        root: Folder of the lake, the control store, and what `prepare` created.
        windows: The windows.
        messages: Most failures to retry; None for all.
        began: Failures of this time and later are not retried.
    """
    from pipeline_platform.orchestration.deployment import platform_definitions
    from pipeline_platform.orchestration.jobs import run_request
    from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
    from pipeline_platform.orchestration.resources.source_resources import source_resource
    from pipeline_platform.orchestration.resources.spark_resource import SparkResource

    resources = {
        "lake": LakeResource(root=root),
        "control": ControlResource(url=f"sqlite:///{root}/control.sqlite"),
        "spark": SparkResource(packages=["benchmarks"]),
        "queue": source_resource(TableQueue)(**_queue(root)),
    }
    job = platform_definitions([Orders], resources).resolve_job_def(f"{Orders.name}_retry")
    selection = Selection() if messages is None else Selection(failed_before=began)
    request = run_request(BoundProducer(Orders), "failed", windows, messages or 0, messages, selection=selection)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # the log of the run
    with mock.patch.object(SparkWork, "run", _in_worker), _instance(root) as instance:
        job.execute_in_process(request.run_config, instance, request.partition_key, tags=request.tags)


def _in_worker(work: SparkWork, task: Any, shares: int, _messages: int | None = None) -> Manifest:
    if work.worker is None or shares > 256:  # the worker accepts no more
        return work.run_here(task, shares)
    return work.worker.run(task, shares) if shares else Manifest()
