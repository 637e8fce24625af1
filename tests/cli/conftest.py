"""The command line in this process, with a test deployment."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipeline_platform.cli.loading import Deployment
from pipeline_platform.cli.main import app
from pipeline_platform.cli.runs import planned_runs
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from tests.fixtures.heartbeats import alive  # noqa: F401 - a fixture

Cli = Callable[..., Result]


@pytest.fixture
def control(tmp_path):
    return ControlStore(f"sqlite:///{tmp_path}/control.sqlite")


@pytest.fixture
def beside(tmp_path, control, monkeypatch):
    """Return the commands with these pipelines and sources."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)

    def deploy(*pipelines, sinks=None, **sources) -> Cli:
        lake = Lake(root=str(tmp_path / "lake"))
        deployment = Deployment(
            {pipeline.name: pipeline for pipeline in pipelines}, control, lake, sources, sinks=sinks or {}
        )
        monkeypatch.setattr("pipeline_platform.cli.loading.opened", lambda *_, **__: nullcontext(deployment))
        return lambda *arguments: CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)

    return deploy


@pytest.fixture
def launched(monkeypatch):
    """Job, receive config and tags of each launched run."""
    runs: list[tuple[str, Any, Any]] = []

    def launching(job, module):
        def launch_one(config, tags):
            (of_pipeline,) = config["ops"].values()
            runs.append((job, of_pipeline["ops"]["receive_messages"]["config"], tags))
            return f"run-{len(runs)}"

        return nullcontext(launch_one)

    monkeypatch.setattr(planned_runs, "launching", launching)
    return runs
