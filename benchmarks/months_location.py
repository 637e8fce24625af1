"""Pipeline of `benchmarks.months`, and a run of it in Dagster."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
from pydantic import BaseModel

from pipeline_platform import Message, Pipeline, Producer, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.orchestration.asset_windows import window_now
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.run.work.spark_work import SparkWork

MESSAGES = 20
"""Messages of a round; one fails."""


class Row(BaseModel):
    """Columns of the table."""

    text: str


class Busy(Pipeline):
    """Stores texts, and fails for one of them."""

    name = "busy"
    producer = Producer(source="queue")
    batchers = {"kept": TableBatcher(schema=Row)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Store a text; `fail` fails."""
        text = message.data.decode()
        if text.startswith("fail"):
            raise ValueError(text)
        return message.put(Row(text=text), batcher="kept")


def one_run(folder: Path, dagster: dg.DagsterInstance) -> tuple[str, str]:
    """Execute a run of the pipeline with its own lake in a folder; return its id and its window."""
    folder.mkdir()
    queue = {"name": "queue", "url": f"sqlite:///{folder}/queue.sqlite"}
    (own := TableQueue.model_validate(queue)).create()
    own.enqueue([b"fail", *(str(number).encode() for number in range(1, MESSAGES))])
    resources = {
        "lake": LakeResource(root=f"{folder}/lake"),
        "control": ControlResource(url=f"sqlite:///{folder}/control.sqlite"),
        "spark": SparkResource(packages=["benchmarks"]),
        "queue": source_resource(TableQueue)(**queue),
    }
    job, window = platform_definitions([Busy], resources).resolve_job_def("busy_pull"), window_now(Busy)
    with mock.patch.object(SparkWork, "run", run_here):
        return job.execute_in_process(instance=dagster, partition_key=window).run_id, window


def run_here(work: SparkWork, task: Any, shares: int, _messages: int | None = None) -> Manifest:
    """Run tasks in this process, instead of `SparkWork.run`."""
    return work.run_here(task, shares)
