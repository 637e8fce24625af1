"""Code location that `benchmarks.endurance` deploys: a pipeline for each source in the environment."""

import json
import os
from typing import Any

from pydantic import BaseModel

from benchmarks.recovery_location import SOURCES
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.sinks.contract import Sink
from pipeline_platform.sinks.iceberg import IcebergSink
from pipeline_platform.sinks.postgres import PostgresSink

FAILS_EACH = 10_000
SINKS = {"kafka": "database", "files": "iceberg"}
"""Sinks of the even numbers, by pipeline."""


class Kept(BaseModel):
    """A source of the benchmark."""

    connector: str
    options: dict[str, Any]


class Asked(BaseModel):
    """Options of the benchmark for its location, in ENDURANCE_BENCHMARK as JSON."""

    folder: str = "."
    sources: dict[str, Kept] = {}
    warehouse: str = ""

    def sinks(self) -> dict[str, Sink]:
        """Return the sinks of the pipelines in `SINKS`: tables of the database `warehouse`, and of Iceberg."""
        catalog = {
            "type": "sql",
            "uri": self.warehouse.replace("postgresql:", "postgresql+psycopg:"),
            "warehouse": f"{self.folder}/warehouse",
        }
        return {
            "database": PostgresSink(name="database", url=self.warehouse),
            "iceberg": IcebergSink(name="iceberg", namespace="public", properties=catalog),
        }


ASKED = Asked.model_validate(json.loads(os.environ.get("ENDURANCE_BENCHMARK", "{}")))


class Number(BaseModel):
    """Columns of a message."""

    n: int


def batchers_with(sink: str) -> dict[str, Batcher | TableBatcher]:
    """Return the batchers with a sink for the even numbers."""
    return {"even": TableBatcher(schema=Number, sink=sink), "odd": TableBatcher(schema=Number)}


class Numbers(Pipeline, abstract=True):
    """Numbers by parity; one of ten thousand fails."""

    processors = Processors(concurrency=2, max_demand=25_000)
    batchers = {"even": TableBatcher(schema=Number), "odd": TableBatcher(schema=Number)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Store a number."""
        number = message.json()["n"]
        if number % FAILS_EACH == 0:
            raise ValueError(f"{number} is a multiple of 10,000")
        return message.put({"n": number}, batcher="odd" if number % 2 else "even")


class OverPostgres(Numbers):
    """Numbers from a table queue."""

    name = "postgres"
    producer = Producer(source="postgres")


class OverKafka(Numbers):
    """Numbers from a topic."""

    name = "kafka"
    producer = Producer(source="kafka")
    batchers = batchers_with(SINKS["kafka"])


class OverKinesis(Numbers):
    """Numbers from a stream."""

    name = "kinesis"
    producer = Producer(source="kinesis")


class OverRabbitmq(Numbers):
    """Numbers from a RabbitMQ queue."""

    name = "rabbitmq"
    producer = Producer(source="rabbitmq")


class OverSqs(Numbers):
    """Numbers from an SQS queue."""

    name = "sqs"
    producer = Producer(source="sqs")


class OverPubsub(Numbers):
    """Numbers from a subscription."""

    name = "pubsub"
    producer = Producer(source="pubsub")


class OverFiles(Numbers):
    """Numbers from lines of files."""

    name = "files"
    producer = Producer(source="files")
    batchers = batchers_with(SINKS["files"])


PIPELINES: tuple[type[Pipeline], ...] = (
    OverPostgres,
    OverKafka,
    OverKinesis,
    OverRabbitmq,
    OverSqs,
    OverPubsub,
    OverFiles,
)

resources: dict[str, Any] = {
    "lake": LakeResource(root=f"{ASKED.folder}/lake"),
    "control": ControlResource(url=f"sqlite:///{ASKED.folder}/control.sqlite"),
    "spark": SparkResource(remote="warm", state_folder=f"{ASKED.folder}/spark", packages=["benchmarks"]),
    **{name: source_resource(SOURCES[kept.connector])(**kept.options) for name, kept in ASKED.sources.items()},
}
defs = platform_definitions(
    [pipeline for pipeline in PIPELINES if pipeline.name in ASKED.sources],
    resources,
    sinks=ASKED.sinks() if ASKED.warehouse else None,
)
