"""Failures retried from the command line, by a real Dagster instance with `workspace.yaml`, `-m` or `dg`."""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.orchestration.asset_windows import window_now
from pipelines.flights import Flights
from tests.fixtures.failures import event, record
from tests.fixtures.small_lake import put

ROOT = Path(__file__).parents[2]
QUEUE = "run_coordinator: {module: dagster._core.run_coordinator, class: QueuedRunCoordinator}"

Cli = Callable[..., str]


@pytest.fixture
def cli(tmp_path):
    """The command line on this repository's deployment, whose runs stay queued."""
    (tmp_path / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{QUEUE}")
    variables = {"DAGSTER_HOME": str(tmp_path), "PIPELINE_PLATFORM_HOME": str(tmp_path)}

    def call(*arguments: str, cwd: Path = ROOT) -> str:
        command = [sys.executable, "-m", "pipeline_platform.cli.main", *arguments]
        done = subprocess.run(
            command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=180, check=False
        )
        assert not done.returncode, done.stderr
        return done.stdout

    return call


def test_failures_are_driven_by_a_run_in_the_queue_of_the_instance(cli, tmp_path):
    window, lake = window_now(Flights, datetime.now(UTC)), Lake(root=str(tmp_path / "lake"))
    record(lake, "r1", event("a", kind="KeyError"), event("b"), window=window, pipeline="flights")
    said = cli("failures", "retry", "flights", "--kind", "KeyError")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        (run,) = instance.get_runs()
    assert said.splitlines() == [f"run {run.run_id} retries 1 failure of {window}", "1 failure in 1 run."]
    assert (run.job_name, run.status) == ("flights_retry", dg.DagsterRunStatus.QUEUED)
    receive = run.run_config["ops"]["flights"]["ops"]["receive_messages"]["config"]
    assert receive == {"origin": "failed", "failures": {"kind": "KeyError"}}
    assert run.tags["dagster/partition"] == window
    assert run.tags["flights/origin"] == "failed"


def test_a_replay_is_a_run_in_the_queue_of_the_instance(cli, tmp_path):
    window, lake = window_now(Flights, datetime.now(UTC)), Lake(root=str(tmp_path / "lake"))
    outcomes = Tables(lake, Flights)["outcomes"]
    outcomes.ensure()
    message = {"source": "s", "message_id": "a", "attempt": 1, "receive_id": "r1", "outcome": "handled"}
    put(outcomes, "r1", message, window=window)

    said = cli("replay", "flights", "--since", "1s", "--ignore-pause")

    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        (run,) = instance.get_runs()
    assert said.splitlines() == [f"run {run.run_id} replays 1 message of {window}", "1 message in 1 run."]
    assert (run.job_name, run.status) == ("flights_replay", dg.DagsterRunStatus.QUEUED)
    receive = run.run_config["ops"]["flights"]["ops"]["receive_messages"]["config"]
    assert receive == {"origin": "messages", "ignore_pause": True}
    assert run.tags["pipeline_platform/replay"] == "flights"


DG = """
[tool.dg.project]
root_module = "ours"
code_location_target_module = "definitions"
"""


def test_in_a_project_of_dg_the_daemon_finds_the_run_by_the_name_of_dg(cli, tmp_path, monkeypatch):
    (project := tmp_path / "shop").mkdir()
    (project / "pyproject.toml").write_text(DG)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    record(
        Lake(root=str(tmp_path / "lake")),
        "r1",
        event("a"),
        window=window_now(Flights, datetime.now(UTC)),
        pipeline="flights",
    )

    cli("failures", "retry", "flights", "--all", cwd=project)

    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        (run,) = instance.get_runs()
    assert run.remote_job_origin.location_name == "shop"
