"""A crash of the warm server: runs detect it immediately, and the next run has another server."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline_platform.lake.storage import Lake
from pipeline_platform.orchestration.resources import spark_sessions
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.run.work.spark_work import SparkWork
from pipeline_platform.spark import engine
from pipeline_platform.spark import server as spark_server
from servers.server import free_ports
from tests.spark.test_spark_server import spark_processes

TOLD = pa.schema([("pid", pa.int64())])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """State folder of a server that may crash; remaining processes are stopped at the end."""
    made = tmp_path_factory.mktemp("mortal")
    yield made
    spark_server.stop(made)


@pytest.fixture
def mortal(folder):
    """A running server."""
    return spark_server.start(folder, cores=1, memory="512m")


@pytest.fixture
def resource(folder, mortal):
    with closing(SparkResource(remote=WARM, state_folder=str(folder), packages=["pipeline_platform"])) as made:
        yield made


def pids(resource: SparkResource) -> list[int]:
    """Yield from a task to show that it works."""

    def task(index: int) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"pid": [os.getpid()]}, TOLD)

    found: list[int] = engine.run(resource.spark_session, task, 1, TOLD)["pid"].to_pylist()
    return found


def kill(server: spark_server.SparkServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    while server.lives:
        time.sleep(0.01)


@pytest.mark.faults
def test_whoever_waits_for_a_server_that_is_killed_learns_so_at_once_and_then_has_another(resource, mortal, tmp_path):
    def task(index: int) -> Iterator[pa.RecordBatch]:
        (tmp_path / "begun").touch()
        time.sleep(300)
        yield pa.record_batch({"pid": [0]}, TOLD)

    def kill_in_the_middle() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.05)
        kill(mortal)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    with pytest.raises(spark_server.SparkServerDiedError, match=f"process {mortal.pid}.*crashed.*restarted"):
        engine.run(resource.spark_session, task, 1, TOLD)
    killer.join()

    folder, until = Path(resource.state_folder or ""), time.monotonic() + 120
    while spark_server.status(folder) is None:
        assert time.monotonic() < until, "another is started at once, before anybody asks for it"
        time.sleep(0.1)
    after = spark_server.status(folder)
    assert after is not None
    while not any(file.read_text() for file in Path(f"/proc/{after.pid}/task").glob("*/children")):
        assert time.monotonic() < until, "its Python workers begin before anybody asks for them"
        time.sleep(0.1)
    assert pids(resource), "the same resource goes on with another session"
    assert after.pid != mortal.pid
    assert (after.cores, after.memory) == (1, "512m"), "what the dead one was started with"


@pytest.mark.faults
def test_a_start_that_is_killed_leaves_no_second_server(tmp_path):
    starting = subprocess.Popen(
        [sys.executable, "-m", "pipeline_platform.cli.main", "spark", "start", "--state", tmp_path]
    )
    while not (tmp_path / "spark.starting.json").exists():
        time.sleep(0.01)
    starting.kill()
    starting.wait()
    half_started = spark_processes(tmp_path)

    server = spark_server.start(tmp_path, cores=1)
    living = spark_processes(tmp_path)
    spark_server.stop(tmp_path)

    assert half_started
    assert living == [server.pid]
    assert server.pid not in half_started


@pytest.mark.faults
def test_two_that_find_it_dead_start_one_and_all_who_share_its_session_let_go_of_it(folder, resource, mortal):
    with closing(SparkResource(remote=WARM, state_folder=str(folder), packages=["pipeline_platform"])) as other:
        dead = resource.spark_session
        assert other.spark_session is dead
        kill(mortal)
        with ThreadPoolExecutor(2) as both:
            started, again = (place.warm for place in both.map(lambda _: resource._place(), range(2)))
        assert started is not None
        assert started == again
        assert started.pid != mortal.pid
        assert started.lives
        assert resource.spark_session is not dead
        assert other.spark_session is resource.spark_session
        assert dead.client.is_closed
        assert pids(other)


@pytest.mark.soak
def test_a_server_that_runs_out_of_memory_dies_of_it_and_another_is_started(resource, mortal):
    too_much = resource.spark_session.sql("SELECT length(repeat('x', 1500000000)) AS n")
    with pytest.raises(spark_server.SparkServerDiedError):
        too_much.toArrow()
    assert not mortal.lives
    assert pids(resource)


def write_down_a_dead_server(folder: Path, **told: str) -> None:
    dead = spark_server.SparkServer(os.getpid(), "before", free_ports(1)[0], "", "before", str(folder), cores=1, **told)
    (folder / "spark.json").write_text(json.dumps(asdict(dead)))


def test_a_server_that_was_stopped_does_not_come_back(tmp_path):
    write_down_a_dead_server(tmp_path)
    spark_server.stop(tmp_path)
    assert spark_server.revive(tmp_path) is None


def test_a_dead_server_of_another_machine_is_not_started_here(tmp_path):
    """A state folder shared by machines names the server of one of them."""
    write_down_a_dead_server(tmp_path, host="elsewhere")
    assert spark_server.revive(tmp_path) is None


def test_a_server_at_an_address_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(spark_sessions, "_OUTAGE_S", 1.0)
    nobody = SparkResource(remote=f"sc://localhost:{free_ports(1)[0]}", packages=["pipeline_platform"])
    with closing(nobody), pytest.raises(Exception, match="refused"):
        _ = nobody.spark_session


@pytest.mark.faults
def test_a_server_at_an_address_that_dies_is_waited_for_once_and_not_by_each_call_again(
    folder, mortal, tmp_path, monkeypatch
):
    monkeypatch.setattr(spark_sessions, "_OUTAGE_S", 2.0)
    named = SparkResource(remote=mortal.address, token=mortal.token, packages=["pipeline_platform"])
    with closing(named):
        work = SparkWork("dead", Lake(root=str(tmp_path)), lambda: named.spark_session)
        work.interrupt()
        kill(mortal)
        tries = count_tries(named, monkeypatch)
        with pytest.raises(Exception, match="refused"):
            work.interrupt()
        first = len(tries)
        with pytest.raises(Exception, match="refused"):
            work.interrupt()

    assert first > 2
    assert len(tries) - first <= 2, "asked when the call failed, and not tried again"


def count_tries(resource: SparkResource, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Record calls of a session's retry policy."""
    asked: list[BaseException] = []
    (policy,) = resource.spark_session.client.get_retry_policies()
    decide = policy.can_retry
    monkeypatch.setattr(policy, "can_retry", lambda e: asked.append(e) or decide(e))
    return asked
