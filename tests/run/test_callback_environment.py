"""Environment of callbacks: variables of the system and the platform, and variables that the run names."""

import os
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime

import dagster as dg
import polars as pl
import pytest
from pydantic import BaseModel, ValidationError

from pipeline_platform import Pipeline, PipelineError, Producer, TableBatcher
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration import (
    ControlResource,
    LakeResource,
    SparkResource,
    platform_definitions,
    source_resource,
)
from pipeline_platform.orchestration.jobs import receive_config
from pipeline_platform.run.work.local_worker import LocalWorker
from pipeline_platform.spark import environment
from tests.fixtures.flow import no_spark, rows, run
from tests.fixtures.small_lake import WINDOW

FIRST, SECOND, CONTROL = "canary-of-monday", "canary-of-tuesday", "postgresql://bob:canary-of-control@host/db"


class Seen(BaseModel):
    """Return the environment that a callback sees."""

    names: list[str]
    token: str
    process: int


class Looking(Pipeline):
    """A pipeline that records its environment."""

    name = "looking"
    producer = Producer(source="queue")
    batchers = {"seen": TableBatcher(schema=Seen)}
    first_window = datetime(2026, 1, 1, tzinfo=UTC)

    def handle_message(self, message, context):
        token = os.environ.get("BANK_TOKEN", "")[-7:]  # not the whole of it, which no file may contain
        seen = Seen(names=sorted(os.environ), token=token, process=os.getppid())
        return message.put(seen, batcher="seen")


@pytest.fixture
def variables(monkeypatch):
    """A run's environment with secrets."""
    monkeypatch.setenv("BANK_TOKEN", FIRST)
    monkeypatch.setenv("PIPELINE_PLATFORM_CONTROL", CONTROL)
    monkeypatch.setenv("AWS_REGION", "eu-north-1")


@pytest.fixture
def local_worker(variables):
    """A worker that starts in the environment of the run."""
    with closing(LocalWorker(2)) as worker:
        yield worker


def naming(flow):
    return replace(flow, variables=SparkResource(environment=["BANK_TOKEN"]).variables)


@pytest.mark.parametrize("place", ["filled_locally", "filled_on_spark"])
def test_a_callback_gets_what_its_run_names_and_no_other_secret(variables, monkeypatch, request, place, tmp_path):
    flow = request.getfixturevalue(place)(Looking, [b"x"] * 3)

    run(naming(flow))
    monkeypatch.setenv("BANK_TOKEN", SECOND)
    flow.source.enqueue([b"x"] * 3)
    run(naming(flow))
    flow.source.enqueue([b"x"] * 3)
    run(flow)

    seen = rows(flow, "seen")
    assert sorted(seen["token"]) == [*[""] * 3, *["-monday"] * 3, *["tuesday"] * 3]
    names = {name for each in seen["names"] for name in each}
    assert {"PATH", "BANK_TOKEN"} < names
    assert "PIPELINE_PLATFORM_CONTROL" not in names
    assert environment.allowed(dict.fromkeys(names, "")).keys() == names - {"BANK_TOKEN"}
    assert os.environ["PIPELINE_PLATFORM_CONTROL"] == CONTROL, "the run's own environment stays"
    assert os.getpid() not in set(seen["process"]), "a worker forks them"
    places = [tmp_path, *([request.getfixturevalue("warm_spark").folder] if place == "filled_on_spark" else [])]
    files = [path for folder in places for path in folder.rglob("*") if path.is_file() and "scratch" not in path.parts]
    assert {path.name for path in files} >= {"control.sqlite", *(["spark.log"] if len(places) > 1 else [])}
    assert [path for path in files if FIRST.encode() in path.read_bytes()] == []
    assert FIRST not in repr(naming(flow))


def test_a_dagster_run_of_a_handful_reads_the_variables_that_its_spark_names_and_starts_no_spark(
    variables, monkeypatch, tmp_path
):
    monkeypatch.setattr(SparkResource, "spark_session", property(no_spark))
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    queue.enqueue([b"x"] * 3)
    definitions = platform_definitions(
        [Looking],
        {
            "lake": LakeResource(root=f"{tmp_path}/lake"),
            "control": ControlResource(url=f"sqlite:///{tmp_path}/control.sqlite"),
            "spark": SparkResource(remote="warm", state_folder=str(tmp_path), environment=["BANK_TOKEN"]),
            "queue": source_resource(TableQueue)(name="queue", url=queue.url),
        },
    )
    with dg.DagsterInstance.ephemeral() as instance:
        ended = definitions.resolve_job_def("looking_pull").execute_in_process(
            partition_key=WINDOW, run_config=receive_config(BoundProducer(Looking), "source"), instance=instance
        )
        assert ended.success
        told = "".join(map(str, instance.all_logs(ended.run_id)))

    assert set(pl.read_delta(f"{tmp_path}/lake/looking/seen")["token"]) == {"-monday"}
    assert FIRST not in told


def test_a_variable_that_the_run_lacks_is_named():
    with pytest.raises(PipelineError, match=r"SparkResource\.environment: NOT_SET_HERE"):
        SparkResource(environment=["NOT_SET_HERE"]).variables  # noqa: B018


def test_a_value_in_place_of_a_name_is_refused_unquoted():
    with pytest.raises(ValidationError, match=r"environment\[1\] is not a valid name of a variable") as refusal:
        SparkResource(environment=["A", f"BANK_TOKEN={FIRST}"])

    assert FIRST not in str(refusal.value)


def test_what_the_platform_and_its_clients_need_is_handed_down_and_what_only_runs_need_is_not():
    needed = ["PATH", "HOME", "LANG", "LC_ALL", "TZ", "AWS_SECRET_ACCESS_KEY", "OTEL_SERVICE_NAME"]
    others = [
        *("DAGSTER_POSTGRES_URL", "PIPELINE_PLATFORM_CONTROL", "PIPELINE_PLATFORM_SPARK_TOKEN"),
        *("RABBITMQ_URL", "PATHS"),
    ]
    assert [*environment.allowed(dict.fromkeys([*needed, *others], "x"))] == needed
