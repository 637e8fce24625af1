"""This deployment: its pipelines, its resources, and assets of one's own. The one file to edit beside pipelines."""

from __future__ import annotations

import os
from typing import Any

import dagster as dg

from assets.delays_per_carrier import delays_per_carrier
from pipeline_platform.deployment import platform_definitions
from pipeline_platform.home import home
from pipelines.flights import Flights
from resources.kafka import KafkaSource
from resources.lake import ControlResource, LakeResource
from resources.pubsub import PubsubSource
from resources.rabbitmq import RabbitmqSource
from resources.source import source_resource
from resources.spark import SparkResource
from resources.sqs import SqsSource
from resources.table_queue import TableQueue


def _flights_queue() -> Any:
    """The demo's queue: the embedded table queue, or what FLIGHTS_SOURCE names. Yours needs one of these alone."""
    name, given = "flights_queue", os.environ.get
    match given("FLIGHTS_SOURCE"):
        case "postgres":
            return source_resource(TableQueue)(
                name=name,
                url=dg.EnvVar("FLIGHTS_POSTGRES_URL"),
                table=given("FLIGHTS_TABLE", "messages"),
                created_column="created_at",
            )
        case "sqs":
            return source_resource(SqsSource)(
                name=name,
                queue_url=dg.EnvVar("FLIGHTS_SQS_URL"),
                visibility_timeout=int(given("FLIGHTS_SQS_VISIBILITY", "900")),
                endpoint_url=given("AWS_ENDPOINT_URL"),
                region_name=given("AWS_REGION", "us-east-1"),
            )
        case "kafka":
            topic, servers = given("FLIGHTS_TOPIC", "flights"), given("KAFKA_BOOTSTRAP_SERVERS", "localhost:9092")
            return source_resource(KafkaSource)(
                name=name,
                bootstrap_servers=servers,
                group_id=topic,
                topics=[topic],
                offset_reset_policy="earliest",
            )
        case "rabbitmq":
            queue = given("FLIGHTS_RABBITMQ_QUEUE", "flights")
            return source_resource(RabbitmqSource)(name=name, url=dg.EnvVar("RABBITMQ_URL"), queue=queue)
        case "pubsub":
            return source_resource(PubsubSource)(name=name, subscription=dg.EnvVar("FLIGHTS_SUBSCRIPTION"))
    url = f"sqlite:///{home()}/queue.sqlite"
    return source_resource(TableQueue)(name=name, url=url, created_column="created_at")


def _secret(variable: str, default: str | None) -> Any:
    """A value of the environment, by its name where it is set: Dagster shows all that is in its configuration."""
    return dg.EnvVar(variable) if os.environ.get(variable) else default


def _resources() -> dict[str, Any]:
    return {
        "lake": LakeResource(root=os.environ.get("PIPELINE_PLATFORM_LAKE", str(home() / "lake"))),
        "control": ControlResource(url=_secret("PIPELINE_PLATFORM_CONTROL", f"sqlite:///{home()}/control.sqlite")),
        "spark": SparkResource(
            remote=os.environ.get("PIPELINE_PLATFORM_SPARK", "warm"),
            token=_secret("PIPELINE_PLATFORM_SPARK_TOKEN", None),
        ),
        "flights_queue": _flights_queue(),
    }


PIPELINES = (Flights,)
RESOURCES = _resources()

defs = platform_definitions(PIPELINES, RESOURCES, assets=[delays_per_carrier])
