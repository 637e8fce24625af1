"""`partition_by = "source"` needs a source that names partitions."""

from typing import Any

import dagster as dg
import pytest

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.options import Batcher, Processors
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.source_resources import source_resource
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.small_lake import Keeping
from tests.tasks.test_batch import Obedient

SQS = "https://sqs.eu-west-1.amazonaws.com/1/orders"
RABBITMQ: tuple[Any, dict[str, Any]] = (RabbitmqSource, {"url": "amqp://localhost", "queue": "q"})


def ordered(source: Any, options: dict[str, Any], **attributes: Any) -> Any:
    kind = type("Ordered", (Keeping,), {"name": "ordered", **(attributes or {"partition_by": "source"})})
    resources = resources_at("nowhere", "nowhere")
    return platform_definitions([kind], {**resources, "memory": source_resource(source)(name="memory", **options)})


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (TableQueue, {"url": "sqlite:///q", "partition_column": "customer"}),
        (TableQueue, {"url": "sqlite:///q", "partition_column": dg.EnvVar("COLUMN")}),
        (SqsSource, {"queue_url": f"{SQS}.fifo"}),
        (SqsSource, {"queue_url": dg.EnvVar("QUEUE_URL")}),
        (KafkaSource, {"bootstrap_servers": "localhost:9092", "group_id": "g", "topics": ["t"]}),
    ],
)
def test_a_source_that_may_name_partitions_is_taken(source: Any, options: dict[str, Any]) -> None:
    assert ordered(source, options).resolve_job_def("ordered_pull")


@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        (*RABBITMQ, "RabbitmqSource, whose queues have no partitions: leave it out"),
        (TableQueue, {"url": "sqlite:///q"}, "TableQueue, which has no partition_column: name one"),
        (
            SqsSource,
            {"queue_url": SQS},
            "SqsSource, on a standard queue, which has no groups: pull from a FIFO queue",
        ),
    ],
)
def test_a_source_that_never_does_is_refused_when_definitions_load(
    source: Any, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(PipelineError) as refused:
        ordered(source, options)

    where = "Ordered.partition_by is 'source': producer.source 'memory' is a"
    assert str(refused.value) == f"{where} {why}, or partition by a function of the message"


@pytest.mark.parametrize(
    ("attributes", "option"),
    [
        ({"processors": Processors(partition_by="source")}, "processors.partition_by"),
        (
            {"batchers": {"b": Batcher(partition_by="source")}, "handle_batch": Obedient.handle_batch},
            "batchers['b'].partition_by",
        ),
    ],
)
def test_the_option_that_says_so_is_named(attributes: dict[str, Any], option: str) -> None:
    with pytest.raises(PipelineError, match=r"RabbitmqSource") as refused:
        ordered(*RABBITMQ, **attributes)

    assert str(refused.value).startswith(f"Ordered.{option} is 'source': ")


def test_a_function_needs_no_partitions_of_the_source() -> None:
    assert ordered(*RABBITMQ, partition_by=len).resolve_job_def("ordered_pull")
