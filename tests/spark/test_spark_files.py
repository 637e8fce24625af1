"""A server of its own: its start and stop, data with the umask of its starter, and a log of bounded size."""

import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline_platform.lake.storage import Lake
from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource
from pipeline_platform.spark import engine
from pipeline_platform.spark import server as spark_server
from tests.spark.test_spark_server import ask_version, spark_processes

SCHEMA = pa.schema([("n", pa.int64())])
LOG_BYTES = 500_000


@dataclass(frozen=True)
class Started:
    """A server started with a umask of 027, and a session on it."""

    folder: Path
    resource: SparkResource

    def run(self, task: engine.Task) -> None:
        engine.run(self.resource.spark_session, task, 1, SCHEMA)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "state"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spark_server, "_LOG_BYTES", LOG_BYTES, raising=False)
        before = os.umask(0o027)
        try:
            with ThreadPoolExecutor(2) as both:
                first, second = both.map(lambda _: spark_server.start(folder, cores=1), range(2))
        finally:
            os.umask(before)
    assert first == second, "two starts at the same time start one server"
    try:
        with closing(SparkResource(remote=WARM, state_folder=str(folder), packages=["pipeline_platform"])) as resource:
            yield Started(folder, resource)
    finally:
        spark_server.stop(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_data_follows_the_umask_of_who_started_it_and_its_own_files_are_private(started, tmp_path):
    lake = Lake(root=str(tmp_path / "lake"))

    def task(index: int) -> Iterator[pa.RecordBatch]:
        with lake.open_output("table/rows") as file:
            file.write(b"rows")
        yield pa.record_batch({"n": [index]}, SCHEMA)

    started.run(task)

    assert mode(tmp_path / "lake" / "table" / "rows") == 0o640
    assert mode(tmp_path / "lake" / "table") == 0o750
    for_all = {".gitignore", "java"}  # from a package, if the machine has no Java
    private = {path.name: mode(path) & 0o077 for path in started.folder.iterdir() if path.name not in for_all}
    assert {"spark.json", "spark.log", "scratch"} <= private.keys()
    assert set(private.values()) == {0}, private


def test_the_projects_code_lies_in_the_servers_folder_alone_where_its_next_start_removes_it(
    started, monkeypatch, tmp_path
):
    started.resource.close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert started.resource.spark_session

    assert list((started.folder / "scratch").glob("artifacts-*/**/code-*.zip"))
    assert not list(tmp_path.iterdir())


def test_a_log_of_much_that_tasks_print_is_bounded_and_ends_with_the_last_of_it(started):
    def task(index: int) -> Iterator[pa.RecordBatch]:
        for n in range(60_000):
            sys.stdout.write(f"{n} {40 * 'x'}\n")
        sys.stdout.write("the last word\n")
        sys.stdout.flush()
        yield pa.record_batch({"n": [index]}, SCHEMA)

    started.run(task)

    log, before = started.folder / "spark.log", started.folder / "spark.log.1"
    until = time.monotonic() + 30
    while "the last word" not in spark_server.log_tail(started.folder) and time.monotonic() < until:
        time.sleep(0.05)
    assert "the last word" in spark_server.log_tail(started.folder)
    assert log.stat().st_size + before.stat().st_size < 2 * LOG_BYTES + 200_000
    assert mode(log) == mode(before) == 0o600


def test_a_stop_leaves_nothing(started):
    """The last test of the file."""
    server = spark_server.status(started.folder)
    assert server
    assert spark_processes(started.folder) == [server.pid]
    assert ask_version(server, server.token)

    assert spark_server.stop(started.folder)

    assert spark_processes(started.folder) == []
    assert spark_server.status(started.folder) is None
    assert not spark_server.stop(started.folder)
    left = {path.name for path in started.folder.iterdir()} - {"java"}  # from a package, if the machine has no Java
    assert left == {".gitignore", "spark.lock", "spark.log", "spark.log.1"}
