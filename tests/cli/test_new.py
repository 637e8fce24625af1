"""`pipeline-platform new`: the new pipeline runs, is tested, and is in the deployment."""

import shutil
import subprocess
import sys
from typing import get_args

import pytest
from typer.testing import CliRunner

from pipeline_platform.cli.loading import SetUpError
from pipeline_platform.cli.main import app
from pipeline_platform.connectors.new_pipeline import SourceKind
from tests.fixtures.keeper import PROJECT

DEPLOYMENT = ("definitions.py", "pyproject.toml", "workspace.yaml", "pipelines", "resources", "assets", "sensors")
WITHOUT_PLUGINS = ("-p", "no:timeout", "-p", "no:xdist")
"""As with `pip install pytest` alone, which docs/start/new.md shows."""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in DEPLOYMENT:
        copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
        copy(PROJECT / name, tmp_path / name)
    for variable in ("PIPELINE_PLATFORM_HOME", "DAGSTER_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(checkout, *arguments):
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)


def new(*arguments):
    return CliRunner().invoke(app, ["new", *arguments])


def test_pipelines_of_all_sources_are_in_the_deployment_and_their_tests_pass(checkout):
    kinds = get_args(SourceKind)
    for kind in kinds:
        assert new(f"from_{kind}", "--source", kind).exit_code == 0
    listed = "from definitions import defs; print(*(key.to_user_string() for key in defs.resolve_all_asset_keys()))"

    loaded, tested = (
        python(checkout, "-c", listed),
        python(checkout, "-m", "pytest", "-q", *WITHOUT_PLUGINS, "pipelines"),
    )
    linted = python(checkout, "-m", "ruff", "check", "--config", str(PROJECT / "pyproject.toml"), "--ignore", "I", ".")
    formatted = python(checkout, "-m", "ruff", "format", "--config", str(PROJECT / "pyproject.toml"), "--check", ".")

    tables = ("messages", "lake", "failed")
    assert {f"from_{kind}/{table}" for kind in kinds for table in tables} <= set(loaded.stdout.split())
    assert f"{len(kinds)} passed" in tested.stdout
    assert (linted.returncode, formatted.returncode) == (0, 0), linted.stdout + formatted.stderr


@pytest.mark.parametrize("name", ["import", "none", "row", "message", "Orders", "a" * 64])
def test_a_name_that_its_code_cannot_have_is_refused_and_nothing_is_written(checkout, name):
    before = sorted(checkout.rglob("*.py"))

    assert new(name).exit_code == 2

    assert sorted(checkout.rglob("*.py")) == before


@pytest.mark.parametrize(
    ("shown", "other"), [("flights_queue(),\n}", "flights_queue()\n}"), ("[Flights]", "[Flights,  # the demo\n]")]
)
def test_a_deployment_that_cannot_be_extended_is_left_unchanged(checkout, shown, other):
    definitions = checkout / "definitions.py"
    before = definitions.read_text().replace(shown, other)
    assert other in before
    definitions.write_text(before)

    refused = new("orders")

    assert isinstance(refused.exception, SetUpError)
    assert "no file was written. Add these lines manually:" in str(refused.exception)
    assert (definitions.read_text(), (checkout / "pipelines/orders.py").exists()) == (before, False)


def test_a_name_that_is_taken_and_a_deployment_of_another_shape_are_refused_and_nothing_is_written(checkout):
    definitions = checkout / "definitions.py"
    taken = new("flights")
    assert isinstance(taken.exception, SetUpError)
    assert "pipelines/flights.py, resources/flights_queue.py already exist" in str(taken.exception)
    before = definitions.read_text().replace("RESOURCES = {", "RESOURCES = dict() or {")
    definitions.write_text(before)

    other = new("orders")

    assert isinstance(other.exception, SetUpError)
    assert "no file was written. Add these lines manually:" in str(other.exception)
    assert 'from resources.orders_queue import orders_queue\n"orders_queue": orders_queue' in str(other.exception)
    assert (definitions.read_text(), (checkout / "pipelines/orders.py").exists()) == (before, False)
