"""Crashes and stalls at every point: each message once in every table, and no message lost."""

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.fixtures import fault_run
from tests.fixtures.fault_ground import FILLED, Ground, assert_each_message_once, filled_table, join
from tests.fixtures.fault_run import LEASE_S
from tests.fixtures.processes import wait_until_stopped

pytestmark = pytest.mark.faults

COUNT = 200


@pytest.fixture
def server():
    return "table"


@pytest.fixture
def ground(request, tmp_path, warm_spark, server):
    """A filled queue: a table queue in SQLite, or the session's server."""
    if server in FILLED:
        return FILLED[server](tmp_path, warm_spark, request.getfixturevalue(f"{server}_server"), COUNT)
    url = request.getfixturevalue("postgres_url") if server == "postgres" else ""
    return filled_table(tmp_path, warm_spark, COUNT, url)


def kill_and_go_on(ground: Ground, point: str, origin: str = "source") -> None:
    killed = ground.start(point, origin=origin)
    join(killed)
    if origin == "failed":
        fault_run.drive_failures(ground.place)
    fault_run.run_to_end(ground.place, ground.left)
    assert killed.exitcode == -signal.SIGKILL, "the run was not hit: the point is gone"


@pytest.mark.parametrize("point", ["handling", "decided", "half acknowledged"])
def test_what_a_killed_run_left_is_completed_by_the_next(ground, point):
    """A run ends by an exception at every point in `test_whole_run_properties.py`."""
    kill_and_go_on(ground, point)
    assert_each_message_once(ground, COUNT)


@pytest.mark.parametrize(
    ("server", "point"),
    [
        *(("postgres", point) for point in ("receiving", "half acknowledged")),
        *(("kafka", point) for point in ("received", "half acknowledged", "acknowledging")),
        *(("kinesis", point) for point in ("received", "half acknowledged")),
        *(("rabbitmq", point) for point in ("received", "acknowledging")),
        *(pytest.param("pubsub", point, marks=pytest.mark.soak) for point in ("received", "half acknowledged")),
    ],
)
def test_what_a_killed_run_left_at_a_server_is_completed_by_the_next(ground, point):
    kill_and_go_on(ground, point)
    assert_each_message_once(ground, COUNT)


def test_a_killed_backfill_drives_nothing_twice(ground):
    fault_run.run_to_end(ground.place, ground.left)
    kill_and_go_on(ground, "one table published", "failed")
    assert_each_message_once(ground, COUNT, tenths_fail=False)


@contextmanager
def stalled_at(ground: Ground, point: str) -> Iterator[BaseProcess]:
    """A run that stops at a point until the end of the block, and then continues."""
    run = ground.start(point, signal.SIGSTOP)
    try:
        wait_until_stopped(run)
        yield run
        os.kill(run.pid or 0, signal.SIGCONT)
        join(run, within_s=240)
    finally:
        run.kill()  # stopped for good, if the test failed before it woke
    fault_run.run_to_end(ground.place, ground.left)


@pytest.mark.parametrize("point", ["receiving", "handling", "deciding", "one table published", "half acknowledged"])
def test_a_run_that_stalls_past_its_lease_does_no_harm_when_it_wakes(ground, point):
    with stalled_at(ground, point) as stalled:
        stop_without_a_lock(stalled, Path(ground.place.root))
        time.sleep(LEASE_S * 1.2)
        fault_run.run_to_end(ground.place, ground.left)
    assert_each_message_once(ground, COUNT)


@pytest.mark.parametrize("point", ["handling", "deciding"])
def test_a_stalled_run_that_is_executed_again_meanwhile_ends_red_when_it_wakes(ground, point):
    with stalled_at(ground, point) as stalled:
        stop_without_a_lock(stalled, Path(ground.place.root))
        fault_run.execute_again(ground.place)
    (ending,) = ground.endings()
    assert ending["ended"].startswith("FencedError"), "not that its files are gone"
    assert_each_message_once(ground, COUNT)


def stop_without_a_lock(process: BaseProcess, folder: Path) -> None:
    """Let a stopped run continue briefly if it holds SQLite's lock: others would see the lock, not the stall."""
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
