"""The wheel in a `dg` project: the pipeline that its command writes runs."""

import json
import os
import subprocess
from datetime import UTC, datetime

import dagster as dg
import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue

COMPONENT = "pipeline_platform.orchestration.PipelineComponent"
FILES = {
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
    for name, text in FILES.items():
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
