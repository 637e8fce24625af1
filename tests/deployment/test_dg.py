"""Dagster's newer command line, `dg`, which finds the deployment in the checkout by `[tool.dg]` of pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from pipelines.flights import Flights
from tests.fixtures.keeper import PROJECT

WINDOW = f"{Flights.first_window:%Y-%m-%dT%H%M}"


@pytest.fixture
def at_home(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIPELINE_", "FLIGHTS_"))}
    return {**kept, "DAGSTER_HOME": str(tmp_path), "VIRTUAL_ENV": sys.prefix, "PYTHONWARNINGS": "ignore"}


@pytest.fixture
def typed(at_home):
    def of(command, *arguments):
        return subprocess.run(
            [script(command), *arguments],
            cwd=PROJECT,
            env=at_home,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return of


def script(command):
    return str(Path(sys.executable).with_name(command))


@pytest.mark.faults  # each command loads the deployment and all of dg: half a minute together
def test_the_checkout_is_a_project_of_dg_as_well(typed):
    checked, listed = typed("dg", "check", "defs"), typed("dg", "list", "defs", "--json")

    assert "All definitions loaded successfully." in checked.stdout + checked.stderr
    assert all(f'"flights/{table}"' in listed.stdout for table in ("messages", "lake", "failed"))


@pytest.mark.faults
def test_failed_is_materialised_alone_on_the_command_line(typed, tmp_path):
    done = typed("dg", "launch", "--assets", "flights/failed", "--partition", WINDOW)

    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        (run,) = instance.get_runs()
        assert run.status == dg.DagsterRunStatus.SUCCESS
        assert run.tags["flights/origin"] == "failed"
        assert instance.get_materialized_partitions(dg.AssetKey(["flights", "failed"])) == {WINDOW}
