"""Spark forks its workers from a process that has loaded their libraries."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa

from pipeline_platform.spark import engine

TOLD = pa.schema([("told", pa.string())])


def one(spark, task):
    """What a task tells."""
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
    """With another, run this file and `python -m benchmarks.small_runs`, then write its version here."""
    assert version("pyspark") == "4.3.0"


def test_with_a_pyspark_that_lacks_what_is_preloaded_the_daemon_is_sparks_own(tmp_path):
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
