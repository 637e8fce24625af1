"""Invalid deployments, refused in one line when the definitions are loaded, with argument and value."""

from typing import Any

import dagster as dg
import pytest

from pipeline_platform.connectors.kafka import KafkaSource
from pipeline_platform.connectors.pubsub import PubsubSource
from pipeline_platform.connectors.rabbitmq import RabbitmqSource
from pipeline_platform.connectors.sqs import SqsSource
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.resources.lake_resources import ControlResource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.obedient import Obedient
from tests.fixtures.pipelines_under_test import Told

SQS = "https://sqs.eu-west-1.amazonaws.com/1/orders"
KAFKA = {"bootstrap_servers": "a:9092,b:9092", "group_id": "g", "topics": ["t", "u"]}
POSTGRES = "postgresql://bob:pw@db/shop"


def pipeline(name: str, source: str = "mine", **attributes: Any) -> type[Pipeline]:
    """Return a pipeline with this name, in a module that workers can import."""
    attributes = {"name": name, "producer": Producer(source=source), **attributes}
    made = type(f"Named_{name}", (Obedient,), attributes)
    globals()[made.__name__] = made
    return made


def loaded(*pipelines: type[Pipeline], **resources: Any) -> dg.Definitions:
    return platform_definitions(pipelines, {**resources_at("nowhere", "nowhere"), **resources})


def source(kind: type[Any], name: str, **options: Any) -> Any:
    return source_resource(kind)(name=name, **options)


SAME: list[tuple[type[Any], dict[str, Any], dict[str, Any]]] = [
    (TableQueue, {"url": "sqlite:///q"}, {"url": "sqlite:///./x/../q", "table": "Messages"}),
    (TableQueue, {"url": POSTGRES}, {"url": "postgresql+psycopg://eve@DB:5432/shop?sslmode=require"}),
    (TableQueue, {"url": POSTGRES, "table": "public.messages"}, {"url": POSTGRES, "lease_s": 5.0}),
    (SqsSource, {"queue_url": SQS}, {"queue_url": f"{SQS}/", "visibility_timeout": 60}),
    (SqsSource, {"queue_url": SQS}, {"queue_url": "https://eu-west-1.queue.amazonaws.com/1/orders"}),
    (
        SqsSource,
        {"queue_url": SQS, "endpoint_url": "http://localhost:9324"},
        {"queue_url": "http://127.0.0.1:9324/1/orders"},
    ),
    (RabbitmqSource, {"url": "amqp://a:b@Host", "queue": "q"}, {"url": "amqps://c:d@host:5671/%2F", "queue": "q"}),
    (KafkaSource, KAFKA, {**KAFKA, "bootstrap_servers": "B:9092", "topics": ["u"]}),
    (PubsubSource, {"subscription": "s", "project": "p"}, {"subscription": "projects/p/subscriptions/s"}),
]
OTHER: list[tuple[type[Any], dict[str, Any], dict[str, Any]]] = [
    (TableQueue, {"url": "sqlite:///q"}, {"url": "sqlite:///q", "table": "others"}),
    (TableQueue, {"url": POSTGRES}, {"url": POSTGRES, "table": "eu.messages"}),
    (TableQueue, {"url": "sqlite:///q"}, {"url": dg.EnvVar("NOT_SET_ANYWHERE")}),
    (SqsSource, {"queue_url": SQS}, {"queue_url": SQS.replace("eu-", "us-")}),
    (RabbitmqSource, {"url": "amqp://host", "queue": "q"}, {"url": "amqp://host/b", "queue": "q"}),
    (RabbitmqSource, {"url": "amqp://host", "queue": "q"}, {"url": "amqp://host:5673", "queue": "q"}),
    (KafkaSource, KAFKA, {**KAFKA, "group_id": "h"}),
    (KafkaSource, KAFKA, {**KAFKA, "topics": ["v"]}),
    (PubsubSource, {"subscription": "s", "project": "p"}, {"subscription": "t", "project": "p"}),
]


def named(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else ""


@pytest.mark.parametrize(("kind", "mine", "theirs"), SAME, ids=named)
def test_two_sources_that_read_one_queue_are_refused_whatever_their_names_are(kind, mine, theirs):
    sources = {"mine": source(kind, "mine", **mine), "theirs": source(kind, "theirs", **theirs)}
    with pytest.raises(PipelineError) as refused:
        loaded(pipeline("one"), pipeline("two", "theirs"), **sources)
    said = str(refused.value)
    assert said.startswith("Named_two.producer.source is 'theirs': it reads ")
    assert "and so does 'mine', the source of Named_one. Each would get a part of the messages." in said
    assert "pw" not in said

    with pytest.raises(PipelineError, match=r"Named_one.dead_letters is 'theirs': it writes to"):
        loaded(pipeline("one", dead_letters="theirs"), **sources)


@pytest.mark.parametrize(("kind", "mine", "theirs"), OTHER, ids=named)
def test_sources_of_different_queues_are_taken(kind, mine, theirs):
    sources = {"mine": source(kind, "mine", **mine), "theirs": source(kind, "theirs", **theirs)}
    assert loaded(pipeline("one"), pipeline("two", "theirs"), **sources).resolve_job_def("two_pull")


def test_variables_that_name_one_queue_are_resolved(monkeypatch):
    for name in ("ONE", "TWO"):
        monkeypatch.setenv(name, SQS)
    sources = {key: source(SqsSource, key, queue_url=dg.EnvVar(name)) for key, name in (("mine", "ONE"), ("b", "TWO"))}
    with pytest.raises(PipelineError, match=r"source is .b.: it reads queue .1.orders. at eu-west-1"):
        loaded(pipeline("one"), pipeline("two", "b"), **sources)


@pytest.mark.parametrize("name", ["told_pull", "told_retry", "told_replay", "told_maintenance", "told_limits"])
def test_a_name_that_dagster_has_for_a_job_of_another_pipeline_is_refused(name):
    for pair in ((Told, pipeline(name, "letters")), (pipeline(name, "letters"), Told)):
        with pytest.raises(PipelineError, match=rf"^Named_{name}.name is '{name}': Told \('told'\) has a job or an op"):
            loaded(*pair)


def test_a_name_of_an_op_of_another_pipeline_is_refused():
    with pytest.raises(PipelineError, match=r"Named_told__commit.name is 'told__commit': Told"):
        loaded(Told, pipeline("told__commit", "letters"))


def test_a_name_that_begins_with_that_of_another_pipeline_is_taken():
    dg.Definitions.validate_loadable(loaded(Told, pipeline("told_more", "letters", dead_letters=None)))


@pytest.mark.parametrize(
    ("pipelines", "resources", "said"),
    [
        (Told, {}, "pipelines must be a list of pipeline classes, got <class '.*Told'>. Use .Orders."),
        ("told", {}, "pipelines must be a list of pipeline classes, got 'told'"),
        ([Told], ["lake"], "resources must be a dict of resources by key, got a list"),
        ([Told], {"lake": None}, r"resources\['lake'\] is missing. Add LakeResource\(...\)"),
        ([Told], {"control": None}, r"resources\['control'\] is missing. Add ControlResource\(...\)"),
        ([Told], {"spark": None}, r"resources\['spark'\] is missing. Add SparkResource\(...\)"),
        ([Told], {"lake": "lake"}, r"resources\['lake'\] must be LakeResource\(...\), got a value of type str"),
        ([Told], {"acknowledger": 3}, r"resources\['acknowledger'\] must be AcknowledgerResource\(...\), got .* int"),
        (
            [Told],
            {"lake": ControlResource(url="sqlite:///c")},
            r"resources\['lake'\] must be LakeResource\(...\), got a value of type ControlResource",
        ),
        (
            [Told],
            {"queue": ControlResource(url="sqlite:///c")},
            "Told.producer.source is 'queue': that resource is a ControlResource, not a source",
        ),
        ([Told], {"queue": "queue"}, "Told.producer.source is 'queue': that resource is a str, not a source"),
    ],
)
def test_a_missing_or_wrong_resource_is_refused_by_name(pipelines, resources, said):
    given = resources
    if isinstance(resources, dict):
        given = {k: v for k, v in {**resources_at("nowhere", "nowhere"), **resources}.items() if v is not None}
    with pytest.raises(PipelineError, match=f"^{said}"):
        platform_definitions(pipelines, given)


def test_a_producer_that_names_the_control_store_is_refused():
    with pytest.raises(PipelineError, match=r"producer.source is 'control': that resource is a ControlResource"):
        loaded(pipeline("one", "control"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lease_s": True}, "lease_s\n.*must be a number, got True"),
        ({"lease_s": float("inf")}, "lease_s\n.*finite number"),
        ({"lease_s": float("nan")}, "lease_s\n.*finite number"),
        ({"lease_s": 1e12}, "lease_s\n.*less than or equal to 31622400"),
        ({"name": " "}, "name\n.*surrounding spaces, got ' '"),
        ({"name": ""}, "name\n.*got ''"),
        ({"name": "a\x1bb"}, r"name\n.*got 'a\\x1bb'"),
    ],
)
def test_options_of_a_source_are_strict(options, said):
    with pytest.raises(ValueError, match=said):
        TableQueue(**{"name": "q", "url": "sqlite:///q", **options})


def test_whole_numbers_are_strict_in_every_connector():
    with pytest.raises(ValueError, match=r"visibility_timeout\n.*must be a number, got True"):
        SqsSource(name="q", queue_url=SQS, visibility_timeout=True)
