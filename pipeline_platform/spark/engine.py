"""What Spark is asked to do: run a task once per share, on as many cores as there are.

Only the DataFrame API, so that the same call works in-process, over Spark Connect and on any cluster. This file
can be imported without Spark.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline_platform.spark import jvm

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Task = Callable[[int], Iterator[pa.RecordBatch]]
"""What one Spark task does: given the index of its share, the rows that come of it."""

Stage = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What each partition of a DataFrame goes through."""

TASK_FAILURES = 4
"""How often a task may fail before its stage does. Plain `local[N]` never tries again."""

_SPARK_PYTHON = Path(__file__).parent / "python"
"""On the path of Spark's Python processes, for the one module in it: `spark.python.daemon.module` names it."""

_TRACEBACK = "Traceback (most recent call last):"
_CRASH = "Python worker exited unexpectedly (crashed)"
_JAVA_FRAME = re.compile(r"^(\s+at [\w.$/<>]+\(.*\)|\s*\.\.\. \d+ more|Caused by: .*|JVM stacktrace:.*)$")
_SQL_STATE = re.compile(r"\s*SQLSTATE: \w{5}\s*$")


class TaskError(RuntimeError):
    """A task failed as often as it may. The message is its own Python traceback."""


class WorkerDiedError(TaskError):
    """A task ended its Python worker each time it was tried."""


class TaskInterruptedError(RuntimeError):
    """Somebody interrupted the operation by its tag."""


def run(spark: SparkSession, task: Task, shares: int, schema: pa.Schema) -> pa.Table:
    """Run a task for each share and gather what the tasks give.

    Each share is one Spark task; with more shares than cores they run in waves. A task that fails is run again
    (on `local[N,M]` and clusters), so its side effects must bear that.

    Args:
        spark: Session to run in.
        task: Called on a worker with the index of a share, 0 to `shares` - 1. It must be picklable, by reference
            to a shipped module or by value. What it gives should be small: manifests, not messages.
        shares: Number of tasks; with 0 no Spark work is started.
        schema: Of every batch that a task gives. Batches of another order of fields or of types that can be cast
            without loss are cast.

    Returns:
        The rows of all shares, by share, in the order given.

    Raises:
        TaskError: A task failed for good; the message holds its Python traceback.
        TaskInterruptedError: The operation was interrupted by its tag.
    """
    if shares == 0:
        return schema.empty_table()
    return gather(frame(spark, task, shares, schema), schema)


def frame(spark: SparkSession, task: Task, shares: int, schema: pa.Schema) -> DataFrame:
    """What a task gives for each share, as a DataFrame to go on from: nothing runs yet.

    Args:
        spark: Session to run in.
        task: As for `run`.
        shares: Number of tasks, 1 or more.
        schema: Of every batch that a task gives.

    Returns:
        A DataFrame with the columns of `schema`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        from pyspark.sql.pandas.types import from_arrow_schema

        return spark.range(0, shares, 1, shares).mapInArrow(_each_share(task, schema), from_arrow_schema(schema))


def map_batches(rows: DataFrame, stage: Stage, schema: pa.Schema) -> DataFrame:
    """Put every partition of a DataFrame through a stage that gives batches of `schema`: nothing runs yet."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def each_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from stage(batches)

    return rows.mapInArrow(each_partition, from_arrow_schema(schema))


def gather(rows: DataFrame, schema: pa.Schema) -> pa.Table:
    """Run what a DataFrame stands for and bring its rows here: manifests, not messages.

    Raises:
        TaskError: A task failed for good; the message holds its Python traceback.
        TaskInterruptedError: The operation was interrupted by its tag.
    """
    with readable_errors():
        # Spark gives every field back as nullable and times in the session's zone.
        return rows.toArrow().cast(schema)


def _each_share(task: Task, schema: pa.Schema) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    # A closure is pickled by value: workers need not have this module for it.
    def each_share(indexes: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in indexes:
            for index in batch.column(0).to_pylist():
                for rows in task(index):
                    yield rows if rows.schema.equals(schema) else rows.select(schema.names).cast(schema)

    return each_share


def warm_up(spark: SparkSession, workers: int) -> None:
    """Start Python workers and load what Java loads late, so that the next stage need not wait for them.

    Args:
        spark: Session to warm up.
        workers: How many Python workers to start.
    """
    run(spark, _nothing, workers, pa.schema([("nothing", pa.int64())]))


def _nothing(index: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG001
    return iter(())


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn what Spark raises for a failed Python task into that task's own traceback.

    Raises:
        TaskError: Instead of Spark's error, if there is a Python traceback in it.
        WorkerDiedError: Instead of Spark's error for a Python worker that died.
        TaskInterruptedError: Instead of Spark's error for an interrupted operation.
    """
    try:
        yield
    except Exception as error:
        message = str(error)
        if python := _python_traceback(message):
            raise TaskError(f"a Spark task failed:\n{python}") from None
        if _CRASH in message:
            raise WorkerDiedError(
                "a Spark task failed: its Python worker was killed or crashed each time it was tried (out of "
                f"memory, os._exit, a native library).\n{_above_java(message.partition(_CRASH)[2].lstrip(': '))}"
            ) from None
        if "OPERATION_CANCELED" in message or "cancelled job tag" in message or "JOB_CANCELLED" in message:
            raise TaskInterruptedError("the operation was interrupted by its tag") from None
        raise


def _python_traceback(message: str) -> str | None:
    """The Python traceback inside an error of Spark's, without the Java frames around it."""
    start = message.find(_TRACEBACK)
    return None if start < 0 else _SQL_STATE.sub("", _above_java(message[start:]))


def _above_java(message: str) -> str:
    return "\n".join(takewhile(lambda line: not _JAVA_FRAME.match(line), message.splitlines())).strip()


def local_settings(cores: int, memory: str) -> dict[str, str]:
    """Spark settings of a session or server on this machine alone.

    Args:
        cores: Tasks that run at a time.
        memory: Of the JVM, in its notation (`1g`). Python workers come on top of it.

    Returns:
        Settings by name.
    """
    return {
        "spark.master": f"local[{cores},{TASK_FAILURES}]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": memory,
        # Out of memory is a death, after which there is another: a JVM that goes on is of no use to anybody.
        "spark.driver.defaultJavaOptions": f"-XX:+ExitOnOutOfMemoryError {jvm.class_archive_option()}".rstrip(),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        # Stages here are few and large; two hundred empty partitions would cost more than the work.
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.python.daemon.module": "preloading_daemon",
        # A worker that is killed by a bad message says where it was.
        "spark.python.worker.faulthandler.enabled": "true",
        "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    }


def interpreters() -> dict[str, str]:
    """Variables that make a Spark started with them use this Python and this Spark, whatever else is installed.

    Returns:
        Values by name of environment variable.

    Raises:
        RuntimeError: Spark is not installed here.
    """
    spec = importlib.util.find_spec("pyspark")  # found, not imported: that takes a second
    if spec is None or spec.origin is None:
        raise RuntimeError("there is no Spark here: install `pyspark[connect]`.")
    return {
        "SPARK_HOME": str(Path(spec.origin).parent),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_SPARK_PYTHON), os.environ.get("PYTHONPATH")])),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # Workers would look into their working directory before the shipped code.
        "PYTHONSAFEPATH": "1",
        # Else Spark asks the network for this machine's address, and warns when it is a local one.
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
