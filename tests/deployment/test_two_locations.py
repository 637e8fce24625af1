"""Two code locations of one Dagster instance, with one control store, one lake and one warm Spark."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from tests.deployment.test_daemon import Deployed, deployment, done, run_at_work
from tests.fixtures.location import lines, write_location

EAST, WEST = ("east", "said"), ("east_late", "heard")
"""Names and columns. One name is a prefix of the other, and files, classes, sources and tables have equal names."""


@pytest.fixture
def deployed(tmp_path, warm_spark):
    """Yield a daemon with both locations and empty queues."""
    files = []
    for name, column in (EAST, WEST):
        handling = lines(name, 'source="queue", max_runs=1', column)
        (source := queue(tmp_path, name)).create()
        files.append(write_location(tmp_path, name, warm_spark.folder, handling, "Lines", source))
    with deployment(tmp_path, warm_spark.folder, files=files) as started:
        yield started


def queue(folder: Path, name: str) -> TableQueue:
    return TableQueue(name="queue", url=f"sqlite:///{folder}/{name}.sqlite", lease_s=4.0)


def rows(deployed: Deployed, name: str) -> list[str]:
    """Return the values in the table of a location."""
    (column,) = (column for location, column in (EAST, WEST) if location == name)
    return sorted(pl.read_delta(str(deployed.folder / "lake" / name / "lake"))[column])


def call(deployed: Deployed, name: str, *command: str) -> str:
    """Return the output of a command for a location."""
    program = [sys.executable, "-m", "pipeline_platform.cli.main", "-m", name, *command]
    place: dict[str, Any] = {"cwd": deployed.folder, "env": deployed.environment}
    shown = subprocess.run(program, **place, capture_output=True, text=True, timeout=120, check=False)
    assert shown.returncode in ({0, 1} if command[0] == "status" else {0}), shown.stderr[-3_000:]
    return shown.stdout


def status(deployed: Deployed, name: str) -> dict[str, Any]:
    """Return the `status` of the pipelines of a location."""
    said: dict[str, Any] = json.loads(call(deployed, name, "status", "--json"))["pipelines"]
    return said


def active(shown: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Return the messages in flight and the runs in Dagster from the `status` of a pipeline."""
    return shown["producers"][""]["in_flight"]["messages"], shown["runs"]["by_state"]


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_locations_that_share_all_leave_each_others_runs_claims_and_receives_alone(deployed):
    control = ControlStore(f"sqlite:///{deployed.folder}/control.sqlite")
    gate, mended = deployed.folder / "gate", deployed.folder / "mended"
    sent = {"east": [f"wait for {gate}", *(f"line {n}" for n in range(149))], "east_late": [f"fail until {mended}"]}
    queue(deployed.folder, "east_late").enqueue(text.encode() for text in sent["east_late"])
    queue(deployed.folder, "east").enqueue(text.encode() for text in sent["east"])

    run_id, pid = run_at_work(deployed, "east", messages=150)

    def west_takes(beginning: str) -> None:
        more = [f"{beginning} {n}" for n in range(150)]
        sent["east_late"] += more
        queue(deployed.folder, "east_late").enqueue(text.encode() for text in more)
        deployed.until("the other's are done", lambda: queue(deployed.folder, "east_late").backlog().messages == 0)
        deployed.until("its run has ended", lambda: active(status(deployed, "east_late")["east_late"]) == (0, {}))

    west_takes("line")
    west, east = status(deployed, "east_late"), status(deployed, "east")
    assert (list(west), list(east)) == (["east_late"], ["east"])
    assert active(east["east"]) == (150, {"started": 1})

    control.pause("east", "so that none but the other location's run could clear up")
    os.kill(pid, signal.SIGKILL)
    deployed.until("its lease is over", lambda: control.over("east"))
    west_takes("later")
    assert [claim.run_id for claim in control.over("east")] == [run_id]
    control.resume("east")
    gate.touch()
    mended.touch()
    call(deployed, "east_late", "failures", "retry", "east_late", "--all")
    deployed.until("all is done", lambda: queue(deployed.folder, "east").backlog().messages == 0)
    deployed.until("the runs have ended", lambda: done(deployed.instance))

    for name, texts in sent.items():
        assert rows(deployed, name) == sorted(texts)
    ended = {run.run_id: run.status for run in deployed.instance.get_runs()}
    assert ended.pop(run_id) == dg.DagsterRunStatus.FAILURE
    assert set(ended.values()) == {dg.DagsterRunStatus.SUCCESS}
