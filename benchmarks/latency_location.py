"""Code location that `benchmarks.latency`, `trickle`, `kafka_trickle` and `overlap` deploy: a pipeline, an empty job.

Its folder is set by the environment.
"""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.events import Event
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource

FOLDER = Path(os.environ.get("LATENCY_BENCHMARK", "."))
CALLS = "calls"
"""File with the number of empty runs to request."""
PATIENCE = "LATENCY_PATIENCE"
"""Variable with the pipeline's patience in seconds; with 0 one message is worth a run."""
_PATIENCE_S = float(os.environ.get(PATIENCE, "0"))
IDLE_TIMEOUT = "LATENCY_IDLE_TIMEOUT"
"""Variable with the producer's `idle_timeout` in seconds; 0 for runs of one receive."""
_IDLE_TIMEOUT_S = float(os.environ.get(IDLE_TIMEOUT, "0"))
WINDOW_CRON = "LATENCY_WINDOW_CRON"
"""Variable with the pipeline's `window_cron`: a continuous run ends with its window."""
MAX_RUNS = "LATENCY_MAX_RUNS"
"""Variable with the number of parallel runs, for large runs."""
_MAX_RUNS = int(os.environ.get(MAX_RUNS, "0"))
KAFKA = "LATENCY_KAFKA"
"""Variable with the options of a Kafka source as JSON, which replaces the table queue."""
_KAFKA = json.loads(os.environ.get(KAFKA, "{}"))
IDLE_PIPELINES = "LATENCY_IDLE_PIPELINES"
"""Variable with the number of further pipelines, which get no messages."""
HUNG = "LATENCY_HUNG"
"""Variable with the URLs of queues for the first of these pipelines, separated by spaces."""
_HUNG = os.environ.get(HUNG, "").split()
_IDLE = [f"idle_{number}" for number in range(int(os.environ.get(IDLE_PIPELINES, "0")))]


def _producer(source: str) -> Producer:
    idle_timeout = timedelta(seconds=_IDLE_TIMEOUT_S) if _IDLE_TIMEOUT_S else None
    patience = timedelta(seconds=0.2 if idle_timeout else _PATIENCE_S or 30)
    max_runs = _MAX_RUNS or 1
    return Producer(source=source, concurrency=1, max_runs=max_runs, patience=patience, idle_timeout=idle_timeout)


class Single(Pipeline):
    """Events into a table, or into batches."""

    name = "single"
    window_cron = os.environ.get(WINDOW_CRON, "0 * * * *")
    producer = _producer("queue")
    processors = (
        Processors(concurrency=2, max_demand=50_000)
        if _MAX_RUNS
        else Processors(concurrency=1, max_demand=1_000, min_demand=500 if _PATIENCE_S else 999)
    )
    batchers = {"events": TableBatcher(schema=Event), "letters": Batcher(batch_size=10)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Decode and route the message."""
        return message.put(Event.model_validate_json(message.data), batcher="events")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: Any, context: Any) -> list[Message]:
        """Handle nothing, as in most runs of one message; the step runs nevertheless."""
        return messages


TAGS = RunTags.of(Single)


def queue_options(folder: Path, name: str = "queue") -> dict[str, str]:
    """Return the options of a source."""
    return {"name": name, "url": f"sqlite:///{folder}/{name}.sqlite", "created_column": "created_at"}


@dg.op
def nothing() -> None:
    """Do nothing."""


@dg.job(executor_def=dg.in_process_executor)  # the same executor as for pipelines
def empty() -> None:
    """Empty job, which shows the cost of Dagster alone."""
    nothing()


@dg.sensor(job=empty, minimum_interval_seconds=5, default_status=dg.DefaultSensorStatus.RUNNING)
def empty_asked() -> dg.RunRequest | dg.SkipReason:
    """Request an empty run for each requested call."""
    calls = FOLDER / CALLS
    return dg.RunRequest(run_key=calls.read_text()) if calls.exists() else dg.SkipReason("not called")


def resources(folder: Path) -> dict[str, Any]:
    """Return the resources of the pipeline."""
    queues = {name: source_resource(TableQueue)(**queue_options(folder, name)) for name in ("queue", *_IDLE)}
    queues |= {name: source_resource(TableQueue)(name=name, url=url) for name, url in zip(_IDLE, _HUNG, strict=False)}
    return {
        "lake": LakeResource(root=f"{folder}/lake"),
        "control": ControlResource(url=f"sqlite:///{folder}/control.sqlite"),
        "spark": SparkResource(remote="warm", state_folder=f"{folder}/spark", packages=["benchmarks"]),
        **queues,
        **({"queue": source_resource(KafkaSource)(**_KAFKA)} if _KAFKA else {}),
    }


idle = [type(name, (Single,), {"name": name, "producer": _producer(name), "__module__": __name__}) for name in _IDLE]
globals().update({each.__name__: each for each in idle})  # Spark's workers import them by name
defs = dg.Definitions.merge(
    platform_definitions([Single, *idle], resources(FOLDER)), dg.Definitions(jobs=[empty], sensors=[empty_asked])
)
