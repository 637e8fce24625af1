"""The command line in this process, with a test deployment."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipeline_platform.cli.loading import Deployment
from pipeline_platform.cli.main import app
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
