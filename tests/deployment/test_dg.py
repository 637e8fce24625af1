"""Dagster's newer command line, `dg`, which finds the deployment in the checkout by `[tool.dg]` of pyproject.toml."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import dagster as dg
import pytest

from pipelines.flights import Flights
from servers.server import free_ports
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
@pytest.mark.parametrize(
    "command",
    [
        ["dg", "launch", "--assets", "flights/failed", "--partition", WINDOW],
        ["dagster", "asset", "materialize", "-m", "definitions", "--select", "flights/failed", "--partition", WINDOW],
    ],
)
def test_failed_is_materialised_alone_on_the_command_line(typed, tmp_path, command):
    done = typed(*command)

    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        (run,) = instance.get_runs()
        assert run.status == dg.DagsterRunStatus.SUCCESS
        assert run.tags["flights/origin"] == "failed"
        assert instance.get_materialized_partitions(dg.AssetKey(["flights", "failed"])) == {WINDOW}


@pytest.mark.faults
def test_dg_dev_serves_the_deployment(at_home, tmp_path):
    (port,) = free_ports(1)
    command = [script("dg"), "dev", "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=at_home, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            until, served = time.monotonic() + 150, []
            while not served and process.poll() is None and time.monotonic() < until:
                time.sleep(0.5)
                served = assets_at(f"http://127.0.0.1:{port}/graphql")
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    said = (tmp_path / "log").read_text()[-3_000:]
    assert {"flights/messages", "flights/lake", "flights/failed"} <= set(served), said


def assets_at(url):
    """Return the assets of a web server; none while it is not ready."""
    asked = json.dumps({"query": "{ assetNodes { assetKey { path } } }"}).encode()
    request = urllib.request.Request(url, asked, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return ["/".join(node["assetKey"]["path"]) for node in json.load(answer)["data"]["assetNodes"]]
    except OSError:
        return []
