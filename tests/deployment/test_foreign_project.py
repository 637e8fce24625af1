"""The wheel in foreign projects: a project of Dagster, as `docs/start/your-project.md` shows, and a project of `dg`."""

import json
import os
import pickle
import re
import subprocess
import zipfile
from datetime import UTC, datetime

import dagster as dg
import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from tests.fixtures.keeper import PROJECT

DOCUMENT = (PROJECT / "docs" / "start" / "your-project.md").read_text()
FILES = re.findall(r"```python\n# (\S+)\n(.*?)```", DOCUMENT, re.S)
THEIRS = ("assets", "pipelines", "resources", "sensors")
"""Top-level packages of the project."""

CONNECTOR = """
class TableQueue(Shipped):
    pass
"""

WORK = """
import assets, dagster as dg, pipeline_platform, pipelines, resources, sensors
from our_project.definitions import defs
from pipeline_platform.orchestration.resources.source_resources import connector_of

assert {one.OWNER for one in (assets, pipelines, resources, sensors)} == {"theirs"}
assert pipeline_platform.__file__.startswith(%r), pipeline_platform.__file__
assert connector_of(defs.resources["orders_queue"]).__module__ == "our_project.connectors.table"
pulls, sensor = defs.resolve_job_def("orders_pull"), defs.resolve_sensor_def("orders_producer")
whole = defs.resolve_implicit_global_asset_job_def()
assert (pulls.executor_def, whole.executor_def) == (dg.in_process_executor, dg.multiprocess_executor)
with dg.DagsterInstance.get() as instance:
    looked_at = {key: defs.resources[key] for key in sensor.required_resource_keys}
    with dg.build_sensor_context(instance=instance, definitions=defs, resources=looked_at) as look:
        (asked,) = sensor.evaluate_tick(look).run_requests
    assert pulls.execute_in_process(asked.run_config, instance, asked.partition_key, tags=asked.tags).success
    assert whole.execute_in_process(instance=instance, asset_selection=[dg.AssetKey("turnover")]).success
"""


def test_the_wheel_holds_one_package(wheel):
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pipeline_platform"}


@pytest.mark.faults
def test_a_project_with_packages_of_the_same_names_runs_a_pipeline(environment, tmp_path):
    project, lake, queue_url = tmp_path / "project", tmp_path / "lake", f"sqlite:///{tmp_path}/queue.sqlite"
    for name, text in FILES:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    # A connector of the project, in a package without `__init__.py` like `our_project`.
    queues = project / "our_project" / "queues.py"
    shipped = "from pipeline_platform.connectors.table_queue import TableQueue"
    (project / "our_project" / "connectors").mkdir()
    (project / "our_project" / "connectors" / "table.py").write_text(f"{shipped} as Shipped\n{CONNECTOR}")
    queues.write_text(queues.read_text().replace(shipped, "from our_project.connectors.table import TableQueue"))
    for name in THEIRS:
        (project / name).mkdir()
        (project / name / "__init__.py").write_text('OWNER = "theirs"\n')
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}")
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "DAGSTER_HOME": str(home),
        "ORDERS_QUEUE": queue_url,
        "PLATFORM_LAKE": str(lake),
        "PLATFORM_CONTROL": f"sqlite:///{tmp_path}/control.sqlite",
    }

    def call(command: str, *arguments: str) -> None:
        program = [environment / command, *arguments]
        done = subprocess.run(
            program, cwd=project, env=variables, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-6_000:]

    call("pipeline-platform", "-m", "our_project.definitions", "table-queue", "create", "orders_queue")
    queue = TableQueue(name="orders_queue", url=queue_url)
    queue.send([json.dumps({"number": number, "total": 1.5}).encode() for number in range(6_000)] + [b"no order"])

    call("python", "-c", WORK % str(environment.parent))

    rows = pl.read_delta(str(lake / "orders" / "lake"))
    assert sorted(rows["number"]) == list(range(6_000))
    assert pl.read_delta(str(lake / "orders" / "failed"))["data"].to_list() == [b"no order"]
    assert queue.backlog().messages == 0
    assert pickle.loads((home / "storage" / "turnover").read_bytes()) == 9_000.0, "stored as that project stores"


COMPONENT = "pipeline_platform.orchestration.PipelineComponent"
DG_PROJECT = {
    "pyproject.toml": '[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "our_shop"\n',
    "our_shop/__init__.py": "",
    "our_shop/defs/__init__.py": "",
    "our_shop/definitions.py": """
from pathlib import Path

import dagster as dg


@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
""",
}


@pytest.fixture
def project(environment, tmp_path):
    """Return a function that runs commands of that environment in a new project."""
    for name, text in DG_PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "home").mkdir()
    (tmp_path / ".env").write_text(f"DAGSTER_HOME={tmp_path / 'home'}\n")
    kept = ("PYTHON", "PIPELINE_PLATFORM_", "DAGSTER_", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(kept)}
    variables |= {"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "ignore"}

    def call(*arguments: str) -> str:
        program = [environment / "python", *arguments]
        done = subprocess.run(
            program, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200, check=False
        )
        # `status` reports with its exit code that the daemon does not run.
        assert done.returncode in ({2} if "status" in arguments else {0}), done.stdout[-2_000:] + done.stderr[-6_000:]
        return done.stdout if "--json" in arguments else done.stdout + done.stderr

    return call


@pytest.mark.timeout(600)
@pytest.mark.faults  # a run, which starts Spark, and ten commands that load Dagster: a minute
def test_a_scaffolded_pipeline_is_in_the_deployment_and_runs(project, tmp_path):
    def dagster(*arguments: str) -> str:
        return project("-m", "dagster_dg_cli.cli", *arguments)

    def platform(*arguments: str) -> str:
        return project("-m", "pipeline_platform.cli.main", "-m", "our_shop.definitions", *arguments)

    offered = dagster("list", "components", "--json")
    for name in ("orders", "payments"):
        dagster("scaffold", "defs", COMPONENT, name)
    tested = project("-m", "pytest", "-q", "our_shop")
    checked, listed = dagster("check", "defs"), dagster("list", "defs", "--json")
    messages = tmp_path / "messages"
    messages.write_text('{"number": 1, "text": "one"}\n{"number": "one"}\n')
    platform("push", "orders", "--file", str(messages))
    status = platform("status", "--json")
    dagster("launch", "--job", "orders_pull", "--partition", f"{datetime.now(UTC):%Y-%m-%dT%H00}")

    assert COMPONENT in offered
    assert "2 passed" in tested
    assert "All definitions loaded successfully." in checked
    tables = ("messages", "lake", "failed")
    assert all(f'"{name}/{table}"' in listed for name in ("orders", "payments") for table in tables)
    found = json.loads(status)["pipelines"]
    waiting = {name: found[name]["producers"][""]["backlog"]["messages"] for name in ("orders", "payments")}
    assert waiting == {"orders": 2, "payments": 0}
    home = tmp_path / "home" / "pipeline_platform"
    assert pl.read_delta(str(home / "lake" / "orders" / "lake"))["number"].to_list() == [1]
    assert pl.read_delta(str(home / "lake" / "orders" / "failed"))["data"].to_list() == [b'{"number": "one"}']
    queue = TableQueue(name="orders_queue", url=f"sqlite:///{home}/orders_queue.sqlite", created_column="created_at")
    assert queue.backlog().messages == 0
    with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
        assert [run.status for run in instance.get_runs()] == [dg.DagsterRunStatus.SUCCESS]
