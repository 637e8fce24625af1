"""What makes Spark start sooner: classes that Java maps, and workers forked with their libraries loaded."""

import os
import shlex
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from pipeline_platform.cli.spark import app
from pipeline_platform.spark import engine, jvm

TOLD = pa.schema([("told", pa.string())])


def one(spark, task):
    """What a task tells."""
    (row,) = engine.run(spark.spark_session, task, 1, TOLD).to_pylist()
    return row["told"]


@pytest.fixture
def class_archive():
    """The environment's archive, which `make` has made."""
    if not jvm.CLASS_ARCHIVE.is_file():
        lack = f"{jvm.CLASS_ARCHIVE} is missing: `pipeline-platform spark archive` makes it"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(lack)
    return jvm.CLASS_ARCHIVE


def test_a_spark_server_maps_the_archived_classes(class_archive, warm_spark):
    assert str(class_archive) in Path(f"/proc/{warm_spark.server.pid}/maps").read_text()


def test_a_file_that_is_no_archive_of_this_java_is_left_alone(tmp_path, monkeypatch):
    rubbish = tmp_path / "with a space.jsa"
    rubbish.write_bytes(os.urandom(100_000))
    monkeypatch.setattr(jvm, "CLASS_ARCHIVE", rubbish)
    java = jvm.ensure_java(tmp_path) / "bin" / "java"

    started = subprocess.run(
        [java, *shlex.split(jvm.class_archive_option()), "-version"], capture_output=True, text=True, check=False
    )

    assert started.returncode == 0
    assert started.stdout == "", "nor does it complain to whoever reads what Spark prints"


def test_without_an_archive_java_is_told_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(jvm, "CLASS_ARCHIVE", tmp_path / "none.jsa")

    assert jvm.class_archive_option() == ""


def test_making_an_archive_without_java_says_how_to_get_one(tmp_path, monkeypatch):
    archive = tmp_path / "spark-classes.jsa"
    archive.write_bytes(b"made when there was one")
    monkeypatch.setattr(jvm, "CLASS_ARCHIVE", archive)
    monkeypatch.setattr(jvm, "_bundled_java", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)

    made = CliRunner().invoke(app, ["archive"])

    assert made.exit_code == 1
    assert "Spark needs Java 17 or newer" in made.output
    assert archive.exists(), "for the Java that comes back"


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
