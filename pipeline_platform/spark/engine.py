"""Execution of tasks by Spark, one task per share.

It uses the DataFrame API only, which works in-process, over Spark Connect and on any cluster. Importing this file does
not require Spark.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Stage = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Function that transforms the batches of a DataFrame's partition."""

Task = Callable[[int], Iterator[pa.RecordBatch]]
"""Function of a Spark task, which yields rows for the index of its share."""

TASK_FAILURES = 4
"""Number of failures of a task after which its stage fails. Plain `local[N]` does not retry."""

FOREIGN = ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS")
"""Environment variables that configure another Spark, or that a client in this process sets."""

_TRACEBACK = "Traceback (most recent call last):"
_CANCELED = "[OPERATION_CANCELED]"
_CRASH = "Python worker exited unexpectedly (crashed)"
_JAVA_FRAME = re.compile(r"^(\s+at [\w.$/<>]+\(.*\)|\s*\.\.\. \d+ more|Caused by: .*|JVM stacktrace:.*)$")
_SQL_STATE = re.compile(r"\s*SQLSTATE: \w{5}\s*$")


class TaskError(RuntimeError):
    """A task failed in all attempts. The message contains its Python traceback."""

    @property
    def is_of_a_stage(self) -> bool:
        """Whether a function passed to `run` or `map_batches` raised it, not a Python function in a query.

        A stage is called by a closure of this file, which keeps the file's path on the driver. Other paths are not
        reliable, because shipped code is in the home folder of the deployment.
        """
        return f'File "{map_batches.__code__.co_filename}"' in str(self)


class WorkerDiedError(TaskError):
    """The Python worker of a task crashed in all attempts."""


def run(spark: SparkSession, task: Task, shares: int, schema: pa.Schema) -> pa.Table:
    """Run a task for each share, and return the rows of all shares in order.

    Each share is a Spark task; more shares than cores run in waves. A failed task is retried (on `local[N,M]` and
    clusters), so its side effects must be safe to repeat.

    Args:
        spark: Session to run in.
        task: Called on a worker with the index of a share, 0 to `shares` - 1. It must be picklable, by reference
            to a shipped module or by value. Its rows should be small: manifests, not messages.
        shares: Number of tasks; 0 starts no Spark job.
        schema: Schema of the batches. Batches with another order of fields, or with types that can be cast without
            loss, are converted.

    Raises:
        TaskError: A task failed in all attempts. The message contains its Python traceback.
    """
    return gather(frame(spark, task, shares, schema), schema) if shares else schema.empty_table()


def frame(spark: SparkSession, task: Task, shares: int, schema: pa.Schema) -> DataFrame:
    """Return a lazy DataFrame with the rows of each share, at least one share."""

    # A closure is pickled by value, so workers do not need this module for it.
    def each_share(indexes: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        before = gc.get_threshold()
        # Messages live until the end of their block, so earlier garbage collections would find nothing.
        gc.set_threshold(100_000, 50, 100)
        try:
            for batch in indexes:
                for index in batch.column(0).to_pylist():
                    for rows in task(index):
                        yield rows if rows.schema.equals(schema) else rows.select(schema.names).cast(schema)
        finally:
            gc.set_threshold(*before)

    return map_batches(spark.range(0, shares, 1, shares), each_share, schema)


def map_batches(rows: DataFrame, stage: Stage, schema: pa.Schema) -> DataFrame:
    """Return a lazy DataFrame with the result of a stage, of `schema`, for every partition of a DataFrame."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        from pyspark.sql.pandas.types import from_arrow_schema

    def each_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from stage(batches)  # Spark accepts plain functions only

    return rows.mapInArrow(each_partition, from_arrow_schema(schema))


def gather(rows: DataFrame, schema: pa.Schema) -> pa.Table:
    """Evaluate a DataFrame, and return its rows; they should be manifests, not messages.

    Raises:
        TaskError: A task failed in all attempts. The message contains its Python traceback.
    """
    with readable_errors():
        # Spark returns all fields as nullable, and times in the session's zone.
        return rows.toArrow().cast(schema)


def slots(spark: SparkSession) -> int | None:
    """Return the number of parallel tasks of a Spark on one machine; None for a cluster, which may grow."""
    master = re.match(r"local\[(\d+)", spark.conf.get("spark.master", "") or "")
    return int(master[1]) if master else None


def warm_up(spark: SparkSession, workers: int, modules: Iterable[str] = ()) -> None:
    """Start Python workers and load Java classes, so that the next stage does not wait for them.

    Errors of imports are ignored here, and reported by the run.
    """
    names = tuple(modules)

    def load(_: int) -> Iterator[pa.RecordBatch]:
        for name in names:
            with suppress(Exception):
                importlib.import_module(name)
        return iter(())

    run(spark, load, workers, pa.schema([("nothing", pa.int64())]))


@contextmanager
def readable_errors() -> Iterator[None]:
    """Replace Spark's error for a failed Python task by the task's traceback.

    Raises:
        TaskError: Instead of Spark's error, if it contains a Python traceback or a cancellation.
        WorkerDiedError: Instead of Spark's error for a crashed Python worker.
    """
    try:
        yield
    except Exception as error:
        message = str(error)
        if (start := message.find(_TRACEBACK)) >= 0:
            traceback = _SQL_STATE.sub("", _above_java(message[start:]))
            raise TaskError(f"A Spark task failed:\n{traceback}") from None
        if _CANCELED in message:
            raise TaskError(
                "Spark cancelled the tasks: the run was terminated, or another run took over its receive"
            ) from None
        if _CRASH in message:
            raise WorkerDiedError(
                "A Spark task failed: its Python worker was killed or crashed in all attempts (out of "
                f"memory, os._exit, a native library).\n{_above_java(message.partition(_CRASH)[2].lstrip(': '))}"
            ) from None
        raise


def _above_java(message: str) -> str:
    return "\n".join(takewhile(lambda line: not _JAVA_FRAME.match(line), message.splitlines())).strip()


def local_settings(cores: int, memory: str) -> dict[str, str]:
    """Return Spark's settings, by name, for a session or server on this machine only.

    Args:
        cores: Number of parallel tasks.
        memory: Memory of the JVM, in its notation (`1g`), without Python workers.
    """
    return {
        "spark.master": f"local[{cores},{TASK_FAILURES}]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": memory,
        # Other users of this machine can reach these ports, and unauthenticated calls run code. On a local master,
        # Spark generates a secret that stays inside the JVM.
        "spark.authenticate": "true",
        # A server that is out of memory should end, because the next run starts another.
        "spark.driver.defaultJavaOptions": "-XX:+ExitOnOutOfMemoryError",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        # The default of 200 partitions, mostly empty, would take longer than the work itself.
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.python.daemon.module": "preloading_daemon",
        # A worker that crashes on a message prints its traceback.
        "spark.python.worker.faulthandler.enabled": "true",
        "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    }


def interpreters() -> dict[str, str]:
    """Return environment variables that make Spark use this Python and this PySpark, even if others are installed.

    Raises:
        RuntimeError: Spark is not installed.
    """
    spec = importlib.util.find_spec("pyspark")  # without an import, which takes a second
    if spec is None or spec.origin is None:
        raise RuntimeError("Spark is not installed. Install `pyspark[connect]`.")
    python = str(Path(__file__).parent / "python")  # the folder of the daemon's module
    return {
        "SPARK_HOME": str(Path(spec.origin).parent),
        "PYTHONPATH": os.pathsep.join(filter(None, [python, os.environ.get("PYTHONPATH")])),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # Otherwise workers would search their working directory before the shipped code.
        "PYTHONSAFEPATH": "1",
        # Otherwise Spark resolves this machine's address, and warns if it is a loopback address.
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
