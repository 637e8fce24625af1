"""Start of Spark's workers from a process with loaded libraries, and of slow servers."""

import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline_platform.spark import engine, jvm
from pipeline_platform.spark import server as spark_server

TOLD = pa.schema([("told", pa.string())])


def one(spark, task):
    """Columns of the tasks' rows."""
    (row,) = engine.run(spark.spark_session, task, 1, TOLD).to_pylist()
    return row["told"]


def test_workers_are_forked_with_their_libraries_loaded(spark):
    def libraries(index):
        import os
        from pathlib import Path

        yield pa.RecordBatch.from_pylist([{"told": Path(f"/proc/{os.getppid()}/maps").read_text()}], TOLD)

    loaded = one(spark, libraries)

    for library in ("libarrow", "pandas", "sqlalchemy", "pydantic_core"):
        assert library in loaded


def test_workers_take_the_platform_from_the_shipped_code_alone(spark):
    def origin(index):
        import sys

        import pyspark

        import pipeline_platform

        found = [
            pipeline_platform.__file__,
            pyspark.__file__,
            *(name for name in sys.modules if name == "preloading_daemon"),
        ]
        yield pa.RecordBatch.from_pylist([{"told": " ".join(found)}], TOLD)

    platform, pyspark, *more = one(spark, origin).split(" ")

    assert ".zip/pipeline_platform/" in platform
    assert "pyspark.zip" not in pyspark, "there it would be compiled again in each process"
    assert not more


def test_the_daemon_was_tried_with_this_pyspark():
    """For another version, run this file and `python -m benchmarks.small_runs`, then update the version here."""
    assert version("pyspark") == "4.3.0"


def test_a_pyspark_without_the_preloaded_modules_uses_its_own_daemon(tmp_path):
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "daemon.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    path = os.pathsep.join([str(tmp_path), str(Path(engine.__file__).parent / "python")])
    daemon = subprocess.run(
        [sys.executable, "-m", "preloading_daemon", "pyspark.worker"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert daemon.stdout == "__main__ ['pyspark.worker']\n"
    assert daemon.stderr == ""


SLOW_JAVA = """#!/bin/sh
case "$*" in *SparkConnectServer*--properties-file*|*org.apache.spark.deploy.SparkSubmit*)
    end=$(($(date +%s) + {seconds}))
    while [ "$(date +%s)" -lt "$end" ]; do :; done ;;
esac
exec {java}/bin/java "$@"
"""


@pytest.fixture
def slow_java(tmp_path, monkeypatch):
    """A Java that is busy for six seconds, without output, before it starts Spark."""
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text(SLOW_JAVA.format(seconds=6, java=jvm.ensure_java(tmp_path)))
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))
    return home


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "state"
    spark_server.stop(tmp_path / "state")


@pytest.mark.soak
def test_a_slow_start_that_gets_on_is_waited_for_and_says_so(folder, slow_java, monkeypatch):
    monkeypatch.setattr(spark_server, "_STALLED_S", 3.0)
    monkeypatch.setattr(spark_server, "_LOG_EACH_S", 2.0)
    said: list[str] = []
    server = spark_server.start(folder, cores=1, log=said.append)
    assert server.java == str(slow_java)
    assert len(said) >= 2
    assert all(f"process {server.pid}" in line and str(folder) in line for line in said)


def test_a_start_that_stands_still_is_ended(folder, monkeypatch):
    monkeypatch.setattr(spark_server, "_STALLED_S", 2.0)
    monkeypatch.setattr(spark_server, "_STOP_S", 0.5)  # it does not react to signals

    def stand_still() -> None:
        while (server := spark_server._known(folder / "spark.starting.json")) is None:
            time.sleep(0.01)
        os.killpg(os.getpgid(server.pid), signal.SIGSTOP)

    stopper = threading.Thread(target=stand_still)
    stopper.start()
    with pytest.raises(spark_server.SparkServerError, match=r"has stalled for 2 s"):
        spark_server.start(folder, cores=1)
    stopper.join()

    assert not (folder / "spark.starting.json").exists()
