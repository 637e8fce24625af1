"""Whatever dies or stalls, wherever it is hit: each message once in every table, and nothing lost."""

import os
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import fault_run
from tests.fixtures.fault_ground import Ground, assert_each_message_once, filled_table, join
from tests.fixtures.fault_run import LEASE_S, POINTS
from tests.fixtures.processes import wait_until_stopped
from tests.fixtures.spark import WarmSpark

COUNT = 200


def mostly_left(points: Sequence[str], *kept: str) -> list[Any]:
    """Points of which few are hit by `make test`, the others by `make faults`."""
    return [point if point in kept else pytest.param(point, marks=pytest.mark.faults) for point in points]


@pytest.fixture
def table(tmp_path: Path, warm_spark: WarmSpark) -> Ground:
    return filled_table(tmp_path, warm_spark, COUNT)


@pytest.mark.parametrize("point", mostly_left(POINTS, "handling", "decided", "half acknowledged"))
def test_what_a_killed_run_left_is_completed_by_the_next(table: Ground, point: str) -> None:
    killed = table.start(point)
    join(killed)

    fault_run.run_to_end(table.place, table.left)

    assert killed.exitcode == -signal.SIGKILL, "the run was not hit: the point is gone"
    assert_each_message_once(table, COUNT)


@pytest.mark.faults
@pytest.mark.parametrize("point", ["receiving", "received", "half acknowledged", "acknowledging", "acknowledged"])
def test_what_a_killed_run_left_in_postgresql_is_completed_by_the_next(
    tmp_path: Path, warm_spark: WarmSpark, postgres_url: str, point: str
) -> None:
    ground = filled_table(tmp_path, warm_spark, COUNT, postgres_url)
    killed = ground.start(point)
    join(killed)

    fault_run.run_to_end(ground.place, ground.left)

    assert killed.exitcode == -signal.SIGKILL, "the run was not hit: the point is gone"
    assert_each_message_once(ground, COUNT)


@pytest.mark.faults
@pytest.mark.parametrize("point", ["received", "handled", "decided", "one table published"])
def test_a_killed_backfill_drives_nothing_twice(table: Ground, point: str) -> None:
    fault_run.run_to_end(table.place, table.left)
    killed = table.start(point, origin="failed")
    join(killed)

    fault_run.drive_failures(table.place)
    fault_run.run_to_end(table.place, table.left)

    assert killed.exitcode == -signal.SIGKILL, "the run was not hit: the point is gone"
    assert_each_message_once(table, COUNT, tenths_fail=False)


@pytest.mark.parametrize("point", mostly_left(POINTS[:-1], "deciding"))
def test_a_run_that_stalls_past_its_lease_does_no_harm_when_it_wakes(table: Ground, point: str) -> None:
    """Not once it has acknowledged: then it does nothing more."""
    stalled = table.start(point, signal.SIGSTOP)
    try:
        wait_until_stopped(stalled)
        stop_without_a_lock(stalled, Path(table.place.root))
        time.sleep(LEASE_S * 1.2)
        fault_run.run_to_end(table.place, table.left)

        os.kill(stalled.pid or 0, signal.SIGCONT)
        join(stalled)
    finally:
        stalled.kill()  # stopped for good, if the test failed before it woke
    fault_run.run_to_end(table.place, table.left)

    assert_each_message_once(table, COUNT)


@pytest.mark.faults
@pytest.mark.parametrize("point", ["handling", "handled", "batched", "deciding"])
def test_a_stalled_run_that_is_executed_again_meanwhile_ends_red_when_it_wakes(table: Ground, point: str) -> None:
    stalled = table.start(point, signal.SIGSTOP)
    try:
        wait_until_stopped(stalled)
        stop_without_a_lock(stalled, Path(table.place.root))
        fault_run.execute_again(table.place)

        os.kill(stalled.pid or 0, signal.SIGCONT)
        join(stalled)
    finally:
        stalled.kill()  # stopped for good, if the test failed before it woke
    fault_run.run_to_end(table.place, table.left)

    (ending,) = table.endings()
    # In mid-handling it may find files gone that its tasks are about to read.
    assert ending["ended"].startswith(
        ("FencedError", "TaskError", "FileNotFoundError") if point == "handling" else "FencedError"
    )
    assert_each_message_once(table, COUNT)


def stop_without_a_lock(process: BaseProcess, folder: Path) -> None:
    """Let a stopped run go on a little where it holds SQLite's lock: others would see the lock, and not the stall."""
    for _ in range(200):
        if all(may_be_written(folder / name) for name in ("queue.sqlite", "control.sqlite")):
            return
        os.kill(process.pid or 0, signal.SIGCONT)
        time.sleep(0.02)
        os.kill(process.pid or 0, signal.SIGSTOP)
        wait_until_stopped(process)
    raise AssertionError("the run holds a lock wherever it is stopped")


def may_be_written(database: Path) -> bool:
    with closing(sqlite3.connect(database, timeout=0.2, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True
