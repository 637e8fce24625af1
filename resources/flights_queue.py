"""The source of the pipeline `flights`: the embedded table queue, or a connector chosen by `FLIGHTS_SOURCE`.

A deployment needs only its own connector.
"""

import os
from typing import Any

import dagster as dg

from pipeline_platform.connectors.files import FileSource
from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.kinesis import KinesisSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.home import home
from pipeline_platform.orchestration import source_resource


def flights_queue() -> Any:
    """Return the source that the environment selects."""
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
        case "files":
            return source_resource(FileSource)(
                name=name, root=f"{home()}/incoming", catalog=f"sqlite:///{home()}/files.sqlite", row_bytes=50
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
        case "kinesis":
            return source_resource(KinesisSource)(
                name=name,
                stream=given("FLIGHTS_STREAM", "flights"),
                endpoint_url=given("AWS_ENDPOINT_URL"),
                region_name=given("AWS_REGION", "us-east-1"),
            )
        case "rabbitmq":
            queue = given("FLIGHTS_RABBITMQ_QUEUE", "flights")
            return source_resource(RabbitmqSource)(name=name, url=dg.EnvVar("RABBITMQ_URL"), queue=queue)
        case "pubsub":
            return source_resource(PubsubSource)(name=name, subscription=dg.EnvVar("FLIGHTS_SUBSCRIPTION"))
    url = f"sqlite:///{home()}/queue.sqlite"
    return source_resource(TableQueue)(name=name, url=url, created_column="created_at")
