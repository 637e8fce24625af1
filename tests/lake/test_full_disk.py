"""A full disk: each step fails with the path, leaves no partial results, and succeeds once there is space."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.full_disk_run import MESSAGES, ROOMS

ALONE = (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"])
"""Commands that run a process in a private mount namespace, as root and as another user."""


@pytest.fixture
def on_a_small_disk(tmp_path):
    """Run a step of `full_disk_run`, and return its report."""
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    disk.mkdir()
    elsewhere.mkdir()
    alone = next((way for way in ALONE if mounts(way, disk)), None)
    if alone is None:
        lack = "a disk of a test's own cannot be mounted: no right to, or no unshare"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(lack)

    def run(what: str) -> dict[str, Any]:
        command = [*alone, sys.executable, "-m", "tests.fixtures.full_disk_run", what, str(disk), str(elsewhere)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told | {"printed": done.stderr}

    return run


def mounts(alone: list[str], folder: Path) -> bool:
    command = [*alone, "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_steps_stopped_by_a_full_disk_leave_no_partial_results_and_succeed_later(on_a_small_disk, tmp_path):
    told = on_a_small_disk("lake")

    stopped: dict[str, set[str]] = {step: set() for step in ROOMS}
    for failure in told["failures"]:
        assert "No space left on device" in failure["error"]
        assert "\x1b" not in failure["error"], "colours are for terminals"
        (where,) = [
            name
            for name in ("_windows", "_receives", "messages", "outcomes", "failed", "kept")
            if f"{tmp_path}/disk/lake/keeping/{name}" in failure["error"]
        ]
        stopped[failure["step"]].add(where)
        assert set(failure["rows"].values()) <= {0, MESSAGES, 2 * MESSAGES}, "each table has all of a receive or none"
        assert failure["queued"] == MESSAGES
    assert stopped["begin"] >= {"_windows", "_receives"}
    assert stopped["begin"] & {"messages", "outcomes", "failed", "kept"}, "which are made side by side"
    assert stopped["work"] >= {"messages", "kept"}, "receiving and handling"
    assert stopped["decide"] == {"outcomes"}
    assert stopped["publish"] & {"messages", "kept"}
    receiving = [
        failure
        for failure in told["failures"]
        if failure["step"] == "work" and failure["error"].endswith("keeping/messages'")
    ]
    assert {failure["taken"] for failure in receiving} == {0}, "a task that is stopped takes no room"
    assert told["each once"]
    assert told["queued"] == 0
    assert "Exception ignored" not in told["printed"]


def test_a_control_store_on_a_full_disk_is_readable_and_reports_the_full_disk(on_a_small_disk, tmp_path):
    told = on_a_small_disk("control")
    lack = f"the control store sqlite:///{tmp_path}/disk/control.sqlite cannot be used: database or disk is full"
    assert told["new"] == told["full"] == f"{lack}. Free space on the disk of the database."
    assert told["held"] > 0
    assert told["next"] == 1
    assert told["after"] == told["held"] + 1
