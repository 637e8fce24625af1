"""Code location that `benchmarks.recovery` deploys: one pipeline, with the source in the environment."""

import json
import os
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline_platform.connectors.files import FileSource
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.source.contract import Source

NAME, TABLE = "recovery", "lines"
SOURCES: dict[str, type[Source]] = {
    connector.__name__: connector
    for connector in (TableQueue, FileSource, SqsSource, KafkaSource, KinesisSource, RabbitmqSource, PubsubSource)
}


class Asked(BaseModel):
    """Options of the benchmark for its location, in RECOVERY_BENCHMARK as JSON."""

    folder: str = "."
    source: str = "TableQueue"
    options: dict[str, Any] = {"name": "queue", "url": "sqlite://"}
    max_runs: int = Producer(source="queue").max_runs


ASKED = Asked.model_validate(json.loads(os.environ.get("RECOVERY_BENCHMARK", "{}")))


class Line(BaseModel):
    """Columns of a message."""

    text: str


class Recovery(Pipeline):
    """Waits in each message for its trial's gate, and writes a mark: the time, the process and the message's number."""

    name = NAME
    producer = Producer(source="queue", max_runs=ASKED.max_runs)
    processors = Processors(concurrency=2, max_demand=500)
    batchers = {TABLE: TableBatcher(schema=Line)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Write a mark in the folder that the payload names, wait, and store the message."""
        text = message.data.decode()
        number, folder = text.split(" ", 1)
        trial = Path(folder)
        with (trial / "marks").open("a") as marks:
            marks.write(f"{time.time()} {os.getpid()} {number}\n")
        while not (trial / "gate").exists():
            time.sleep(0.05)
        return message.put(Line(text=text), batcher=TABLE)


def resources(asked: Asked) -> dict[str, Any]:
    """Return the resources of the pipeline."""
    return {
        "lake": LakeResource(root=f"{asked.folder}/lake"),
        "control": ControlResource(url=f"sqlite:///{asked.folder}/control.sqlite"),
        "spark": SparkResource(remote="warm", state_folder=f"{asked.folder}/spark", packages=["benchmarks"]),
        "queue": source_resource(SOURCES[asked.source])(**asked.options),
    }


defs = platform_definitions([Recovery], resources(ASKED))
