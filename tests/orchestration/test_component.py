"""`PipelineComponent`: pipelines of a `dg` project, each in a folder with a `defs.yaml`."""

import re
import sys
import traceback

import click
import dagster as dg
import pytest
import yaml

from pipeline_platform.cli import loading
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.orchestration import deployment
from pipeline_platform.orchestration.component import NewComponent, PipelineScaffolder
from pipeline_platform.orchestration.resources.source_resources import places_of
from tests.fixtures.keeper import PROJECT

TYPE = "pipeline_platform.orchestration.PipelineComponent"

LATE = """
from pathlib import Path

import dagster as dg


@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""

IN_PYTHON = """
import dagster as dg

from pipeline_platform.orchestration import PipelineComponent
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.orchestration import source_resource
from shop.defs.orders.orders import Orders


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> PipelineComponent:
    queue = source_resource(TableQueue)(name="orders_queue", url="sqlite:////tmp/queue.sqlite")
    return PipelineComponent(pipeline=Orders, sources={"orders_queue": queue})
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder `defs` of a new project of `dg`."""
    monkeypatch.setenv("PIPELINE_PLATFORM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(deployment, "BUILT", [])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "pyproject.toml").write_text(
        '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "shop"\n'
    )
    defs = tmp_path / "shop" / "defs"
    defs.mkdir(parents=True)
    for folder in (defs, defs.parent):
        (folder / "__init__.py").touch()
    yield defs
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def scaffold(defs, name, source="table", **changes):
    (defs / name).mkdir()
    request = dg.ScaffoldRequest(
        type_name=TYPE,
        target_path=defs / name,
        scaffold_format=changes.pop("scaffold_format", "yaml"),
        project_root=defs.parents[1],
        params=NewComponent(source=source),
    )
    PipelineScaffolder().scaffold(request)
    written = yaml.safe_load((defs / name / "defs.yaml").read_text())
    (defs / name / "defs.yaml").write_text(yaml.dump({**written, "attributes": {**written["attributes"], **changes}}))


def load(defs):
    return dg.load_from_defs_folder(path_within_project=defs)


def refusal(defs):
    with pytest.raises(Exception) as refused:  # noqa: PT011 - what Dagster makes of it
        load(defs)
    return "".join(traceback.format_exception(refused.value))


def test_pipelines_of_a_project_share_what_one_component_says(project, tmp_path):
    scaffold(project, "orders")
    scaffold(project, "payments", lake={"root": str(tmp_path / "lake")})
    scaffold(project, "returns", "kafka", lake={"root": str(tmp_path / "lake")})

    defs = load(project)

    names = ("orders", "payments", "returns")
    assert {f"{name}_pull" for name in names} <= {job.name for job in defs.jobs}
    assert {f"{name}_queue" for name in names} | {"lake", "control", "spark"} <= set(defs.resources)
    assert defs.resources["lake"].root == str(tmp_path / "lake")
    assert defs.resources["spark"].packages == ["shop"]
    assert {pipeline.name for pipeline in deployment.BUILT[-1].pipelines} == set(names), "the command line has them all"


def test_the_command_line_loads_a_project_whose_definitions_are_late(project):
    scaffold(project, "orders")
    (project.parent / "definitions.py").write_text(LATE)

    assert [pipeline.name for pipeline in loading.load("shop.definitions").pipelines] == ["orders"]


def test_the_command_line_has_a_refusal_without_the_tree_that_dagster_draws_around_it(project):
    scaffold(project, "orders", lake={"root": "/one"})
    scaffold(project, "payments", lake={"root": "/two"})
    (project.parent / "definitions.py").write_text(LATE)

    with pytest.raises(PipelineError, match=r"^the components of Orders and Payments give the resource 'lake'"):
        loading.load("shop.definitions")


def test_the_command_line_names_the_source_whose_variable_is_not_set(project, monkeypatch):
    scaffold(project, "orders", "rabbitmq")
    (project.parent / "definitions.py").write_text(LATE)
    monkeypatch.delenv("ORDERS_RABBITMQ", raising=False)

    named = pytest.raises(loading.SetUpError, match=r"cannot be set up: orders_queue.url: .*ORDERS_RABBITMQ")
    with named, loading.opened("shop.definitions"):
        pass


def test_the_document_shows_what_is_written(project):
    scaffold(project, "orders", "sqs")
    page = (PROJECT / "docs" / "start" / "your-project.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.S)

    assert yaml.safe_load(shown) == yaml.safe_load((project / "orders" / "defs.yaml").read_text())


def test_a_variable_is_handed_on_by_its_name(project, monkeypatch):
    scaffold(project, "orders", "rabbitmq", control={"url": {"env": "SHOP_CONTROL"}})
    monkeypatch.setenv("ORDERS_RABBITMQ", "amqp://user:a-secret@localhost")
    monkeypatch.setenv("SHOP_CONTROL", "postgresql://user:a-secret@localhost/control")

    resources = load(project).resources

    assert (resources["orders_queue"].url, resources["control"].url) == ("ORDERS_RABBITMQ", "SHOP_CONTROL")
    assert "a-secret" not in repr(resources)
    with dg.build_resources({"control": resources["control"]}) as made:
        assert made.control.url.password == "a-secret"


def test_a_variable_within_an_option_is_handed_on_by_its_name(project, tmp_path, monkeypatch):
    monkeypatch.setenv("SHOP_KEY", "a-secret")
    monkeypatch.setenv("SHOP_TOPIC", "orders")
    storage = {"aws_secret_access_key": {"env": "SHOP_KEY"}, "aws_region": "eu-west-1"}
    topics = {"bootstrap_servers": "a:9092", "group_id": "shop", "topics": [{"env": "SHOP_TOPIC"}, "others"]}
    kafka = {"connector": "pipeline_platform.connectors.kafka.KafkaSource", "options": topics}
    lake = {"root": str(tmp_path / "lake"), "storage_options": storage}
    scaffold(project, "orders", sources={"orders_queue": kafka}, lake=lake)

    resources = load(project).resources

    assert resources["lake"].storage_options == {"aws_secret_access_key": "SHOP_KEY", "aws_region": "eu-west-1"}
    with dg.build_resources({key: resources[key] for key in ("lake", "orders_queue")}) as made:
        assert made.lake.storage_options == {"aws_secret_access_key": "a-secret", "aws_region": "eu-west-1"}
        assert made.orders_queue.topics == ("orders", "others")
        assert places_of(resources["orders_queue"]) == made.orders_queue.places


SINK = {
    "sink": "pipeline_platform.sinks.postgres.PostgresSink",
    "options": {"url": {"env": "SHOP_WAREHOUSE"}, "key": ["number"], "order": "number"},
}


def test_a_component_has_the_sinks_of_its_pipeline(project, monkeypatch):
    scaffold(project, "orders", sinks={"warehouse": SINK})
    pipeline = project / "orders" / "orders.py"
    pipeline.write_text(pipeline.read_text().replace("schema=Row", 'schema=Row, sink="warehouse"'))
    scaffold(project, "payments", sinks={"warehouse": SINK})
    monkeypatch.setenv("SHOP_WAREHOUSE", "postgresql://user:a-secret@localhost/warehouse")

    resources = load(project).resources

    assert "a-secret" not in repr(resources)
    with dg.build_resources({"warehouse": resources["warehouse"]}) as made:
        assert (made.warehouse.name, made.warehouse.key) == ("warehouse", ("number",))


@pytest.mark.parametrize(
    "changes", [{"sinks": {"warehouse": {**SINK, "sink": "json.loads"}}}, {"sinks": {"orders_queue": SINK}}]
)
def test_a_wrong_sink_is_refused(project, changes):
    scaffold(project, "orders", **changes)

    assert "PipelineError" in refusal(project)


def test_where_spark_is_comes_from_the_environment_if_no_component_says_it(project, monkeypatch):
    scaffold(project, "orders")
    monkeypatch.setenv("PIPELINE_PLATFORM_SPARK", "sc://a-host:15002")
    monkeypatch.setenv("PIPELINE_PLATFORM_SPARK_UI", "http://a-host:4040")

    spark = load(project).resources["spark"]

    assert (spark.remote, spark.ui) == ("sc://a-host:15002", "http://a-host:4040")


@pytest.mark.parametrize("path", [".orders.Row", "json.loads"])
def test_a_path_of_no_pipeline_is_refused(project, path):
    scaffold(project, "orders", pipeline=path)

    assert f"PipelineError: {path!r} is not a Pipeline" in refusal(project)


def test_a_component_in_python_takes_the_class_and_its_resources(project):
    scaffold(project, "orders")
    (project / "orders" / "defs.yaml").unlink()
    (project / "orders" / "component.py").write_text(IN_PYTHON)

    assert "orders_pull" in {job.name for job in load(project).jobs}


@pytest.mark.parametrize(
    ("name", "form"), [("Orders", "yaml"), ("orders-2", "yaml"), ("import", "yaml"), ("orders", "python")]
)
def test_what_cannot_be_scaffolded_is_refused_and_leaves_no_file(project, name, form):
    with pytest.raises(click.UsageError):
        scaffold(project, name, scaffold_format=form)

    assert not (project / name).exists()
