"""Options that a source does not support, with which definitions do not load."""

from typing import Any

import dagster as dg
import pytest

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.options import Batcher, Processors, Producer
from pipeline_platform.model.pipeline import PipelineError
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.resources.source_resources import source_resource
from tests.fixtures.early import Early
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.memory_sources import MemoryChannel, MemoryLog, MemoryQueue
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.small_lake import Keeping, Memory
from tests.tasks.test_batch import Obedient

FIFO, STANDARD = (f"https://sqs.eu-west-1.amazonaws.com/1/orders{kind}" for kind in (".fifo", ""))
LOG = {"bootstrap_servers": "localhost:9092", "group_id": "g", "topics": ["t"]}
RABBITMQ: dict[str, Any] = {"url": "amqp://localhost", "queue": "q"}


def loaded(kind: type[Any], resources: dict[str, Any], **attributes: Any) -> dg.Definitions:
    """Return the definitions of a pipeline with these attributes, in a module that workers can import."""
    globals()["Pulling"] = pipeline = type("Pulling", (kind,), {"name": "pulling", **attributes})
    return platform_definitions([pipeline], resources)


def pulling(kind: type[Any], key: str, source: Any, options: dict[str, Any], **attributes: Any) -> dg.Definitions:
    """Return the definitions of a pipeline with these attributes and a source with these options."""
    resources = {**resources_at("nowhere", "nowhere"), key: source_resource(source)(name=key, **options)}
    return loaded(kind, resources, **attributes)


def ordered(source: Any, options: dict[str, Any], **attributes: Any) -> dg.Definitions:
    return pulling(Keeping, "memory", source, options, **(attributes or {"partition_by": "source"}))


def early(source: Any) -> dg.Definitions:
    return pulling(Early, "queue", source, {"queue": "q"})


def dead_letters_to(key: str) -> dg.Definitions:
    """Return the definitions of a pipeline with dead letters, with sources of all kinds."""
    resources = {
        **resources_at("nowhere", "nowhere"),
        "told_dead": source_resource(TableQueue)(name="dead", url="sqlite:////nowhere/dead.sqlite"),
        "mute": source_resource(Memory)(name="mute"),
        "memory": source_resource(MemoryQueue)(name="memory", queue="q"),
        "alias": resources_at("nowhere", "nowhere")["queue"],
    }
    return loaded(Told, resources, dead_letters=key)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (TableQueue, {"url": "sqlite:///q", "partition_column": "customer"}),
        (TableQueue, {"url": "sqlite:///q", "partition_column": dg.EnvVar("COLUMN")}),
        (SqsSource, {"queue_url": FIFO}),
        (SqsSource, {"queue_url": dg.EnvVar("QUEUE_URL")}),
        (KafkaSource, LOG),
    ],
)
def test_a_source_that_may_name_partitions_is_taken(source, options):
    assert ordered(source, options).resolve_job_def("pulling_pull")


def test_a_function_needs_no_partitions_of_the_source():
    assert ordered(RabbitmqSource, RABBITMQ, partition_by=len).resolve_job_def("pulling_pull")


@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        (RabbitmqSource, RABBITMQ, "RabbitmqSource, whose queues have no partitions: leave it out"),
        (TableQueue, {"url": "sqlite:///q"}, "TableQueue, which has no partition_column: name one"),
        (
            SqsSource,
            {"queue_url": STANDARD},
            "SqsSource, on a standard queue, which has no groups: pull from a FIFO queue",
        ),
    ],
)
def test_a_source_that_never_names_partitions_is_refused(source, options, why):
    with pytest.raises(PipelineError) as refused:
        ordered(source, options)
    where = "Pulling.partition_by is 'source': producer.source 'memory' is a"
    assert str(refused.value) == f"{where} {why}, or partition by a function of the message"


BATCH = {"batchers": {"b": Batcher(partition_by="source")}, "handle_batch": Obedient.handle_batch}


def filtered(key: str) -> dg.Definitions:
    """Return the definitions of two producers, one of which has `only` and a source of this key."""
    names = {"memory": "memory", key: "renamed"}
    sources = {key: source_resource(MemoryQueue)(name=name, queue=name) for key, name in names.items()}
    two = {"one": Producer(source="memory"), "two": Producer(source=key, only=bool)}
    resources = {**resources_at("nowhere", "nowhere"), **sources}
    return loaded(Keeping, resources, producer=None, producers=two)


def test_a_source_with_a_filter_has_the_name_of_its_key():
    assert filtered("renamed").resolve_job_def("pulling_pull")


@pytest.mark.parametrize(
    ("load", "refusal"),
    [
        (
            lambda: ordered(RabbitmqSource, RABBITMQ, processors=Processors(partition_by="source")),
            "processors.partition_by is 'source': .*RabbitmqSource",
        ),
        (
            lambda: ordered(RabbitmqSource, RABBITMQ, **BATCH),
            r"batchers\['b'\].partition_by is 'source': .*RabbitmqSource",
        ),
        (
            lambda: early(MemoryLog),
            "acks_immediately is True: producer.source 'queue' is a MemoryLog, which acknowledges whole receives only",
        ),
        (
            lambda: early(MemoryChannel),
            "acks_immediately is True: .* is a MemoryChannel, which only the run's own process can acknowledge",
        ),
        (
            lambda: dead_letters_to("told_daed"),
            r"dead_letters is 'told_daed': no resource has this key. Did you mean 'told_dead'\?",
        ),
        (
            lambda: filtered("west"),
            r"producers\['two'\].only: needs a source with the name of its key, got the source 'west' with the name",
        ),
        (lambda: dead_letters_to("lake"), "dead_letters is 'lake': that resource is not a source"),
        (lambda: dead_letters_to("mute"), r"dead_letters is 'mute': Memory has no send\(\)"),
        (lambda: dead_letters_to("queue"), "dead_letters is 'queue': the pipeline pulls from it"),
        (lambda: dead_letters_to("alias"), "dead_letters is 'alias': the pipeline pulls from it"),
    ],
)
def test_an_option_that_the_source_does_not_support_is_refused(load, refusal):
    with pytest.raises(PipelineError, match=rf"^Pulling\.{refusal}"):
        load()


def test_a_source_that_leases_messages_is_acknowledged_early():
    assert early(MemoryQueue).resolve_job_def("pulling_pull")


@pytest.mark.parametrize("key", ["told_dead", "memory"])
def test_every_step_has_the_source_that_dead_letters_go_to(key):
    job = dead_letters_to(key).resolve_job_def("pulling_pull")
    assert all(key in op.definition.required_resource_keys for op in job.graph.nodes[0].definition.nodes)


def test_a_class_that_workers_cannot_import_is_refused():
    hidden = type("Lab", (Told,), {"name": "lab"})
    with pytest.raises(PipelineError) as refused:
        platform_definitions([hidden], resources_at("nowhere", "nowhere"))
    assert str(refused.value) == (
        f"Spark's workers cannot import Lab: the module {__name__} has no Lab. Define it at the top level of a module."
    )
