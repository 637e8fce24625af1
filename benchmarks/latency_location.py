"""The code location that `benchmarks.latency` deploys: one pipeline that asks for a run per message, and an empty job.

It lies in the folder that the environment names.
"""

import os
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.events import Event
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.source_resources import source_resource
from pipeline_platform.orchestration.spark_resource import SparkResource

FOLDER = Path(os.environ.get("LATENCY_BENCHMARK", "."))
CALLS = "calls"
"""A file with the number of empty runs that are wanted."""


class Single(Pipeline):
    """Events into a table, or by the batch; one message is worth a run."""

    name = "single"
    producer = Producer(source="queue", concurrency=1)
    processors = Processors(concurrency=1, max_demand=1_000, min_demand=999)
    batchers = {"events": TableBatcher(schema=Event), "letters": Batcher(batch_size=10)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Parse and keep."""
        return message.put(Event.model_validate_json(message.data), batcher="events")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: Any, context: Any) -> list[Message]:
        """Called for nothing here, as it is in most runs of one message; its step runs all the same."""
        return messages


@dg.op
def nothing() -> None:
    """Do nothing."""


@dg.job
def empty() -> None:
    """What a run costs in Dagster before it does anything."""
    nothing()


@dg.sensor(job=empty, minimum_interval_seconds=5, default_status=dg.DefaultSensorStatus.RUNNING)
def empty_asked() -> dg.RunRequest | dg.SkipReason:
    """Ask for an empty run for each call that has none yet."""
    calls = FOLDER / CALLS
    return dg.RunRequest(run_key=calls.read_text()) if calls.exists() else dg.SkipReason("not called")


def resources(folder: Path) -> dict[str, Any]:
    """What the pipeline runs on."""
    return {
        "lake": LakeResource(root=f"{folder}/lake"),
        "control": ControlResource(url=f"sqlite:///{folder}/control.sqlite"),
        "spark": SparkResource(remote="warm", state_folder=f"{folder}/spark", packages=["benchmarks"]),
        "queue": source_resource(TableQueue)(
            name="queue", url=f"sqlite:///{folder}/queue.sqlite", created_column="created_at"
        ),
    }


defs = dg.Definitions.merge(
    platform_definitions([Single], resources(FOLDER)), dg.Definitions(jobs=[empty], sensors=[empty_asked])
)
