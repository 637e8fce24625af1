"""What Spark is asked to do: run a task once per share, on as many cores as there are.

Only the DataFrame API, so that the same call works in-process, over Spark Connect and on any cluster. This file
can be imported without Spark.
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
"""What each partition of a DataFrame goes through."""

Task = Callable[[int], Iterator[pa.RecordBatch]]
"""What one Spark task does: given the index of its share, it yields rows."""

TASK_FAILURES = 4
"""How often a task may fail before its stage does. Plain `local[N]` never tries again."""

FOREIGN = ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS")
"""Environment variables that configure another Spark, or that a client in this process leaves."""

_TRACEBACK = "Traceback (most recent call last):"
_CANCELED = "[OPERATION_CANCELED]"
_CRASH = "Python worker exited unexpectedly (crashed)"
_JAVA_FRAME = re.compile(r"^(\s+at [\w.$/<>]+\(.*\)|\s*\.\.\. \d+ more|Caused by: .*|JVM stacktrace:.*)$")
_SQL_STATE = re.compile(r"\s*SQLSTATE: \w{5}\s*$")


class TaskError(RuntimeError):
    """A task failed as often as it may. The message is its own Python traceback."""

    @property
    def is_of_a_stage(self) -> bool:
        """Whether what was given to `run` or `map_batches` raised it, and no Python function in a query.

        Folders tell nothing: shipped code lies in the home of the deployment, which may have any name. A stage is
        called by a closure of this file, which keeps the name that the file has on the driver.
        """
        return f'File "{map_batches.__code__.co_filename}"' in str(self)


class WorkerDiedError(TaskError):
    """A task ended its Python worker each time it was tried."""


def run(spark: SparkSession, task: Task, shares: int, schema: pa.Schema) -> pa.Table:
    """Run a task for each share and gather the rows of all of them, by share.

    Each share is one Spark task; with more shares than cores they run in waves. A task that fails is run again
    (on `local[N,M]` and clusters), so its side effects must bear that.

    Args:
        spark: Session to run in.
        task: Called on a worker with the index of a share, 0 to `shares` - 1. It must be picklable, by reference
            to a shipped module or by value. Its rows should be small: manifests, not messages.
        shares: Number of tasks; with 0 no Spark work is started.
        schema: Of every batch that a task yields. Batches of another order of fields or of types that can be cast
            without loss are cast.

    Raises:
        TaskError: A task failed for good; the message holds its Python traceback.
    """
    return gather(frame(spark, task, shares, schema), schema) if shares else schema.empty_table()


def frame(spark: SparkSession, task: Task, shares: int, schema: pa.Schema) -> DataFrame:
    """Make a DataFrame of the rows of each share, at least one: nothing runs yet."""

    # A closure is pickled by value: workers need not have this module for it.
    def each_share(indexes: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        before = gc.get_threshold()
        # Messages live for one block, and a collection of garbage within it finds nothing.
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
    """Put every partition of a DataFrame through a stage that yields batches of `schema`: nothing runs yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        from pyspark.sql.pandas.types import from_arrow_schema

    def each_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from stage(batches)  # Spark refuses what is no plain function

    return rows.mapInArrow(each_partition, from_arrow_schema(schema))


def gather(rows: DataFrame, schema: pa.Schema) -> pa.Table:
    """Evaluate a DataFrame and bring its rows here: manifests, not messages.

    Raises:
        TaskError: A task failed for good; the message holds its Python traceback.
    """
    with readable_errors():
        # Spark gives every field back as nullable and times in the session's zone.
        return rows.toArrow().cast(schema)


def slots(spark: SparkSession) -> int | None:
    """Tasks that run at a time on a Spark of one machine; None on a cluster, which may grow."""
    master = re.match(r"local\[(\d+)", spark.conf.get("spark.master", "") or "")
    return int(master[1]) if master else None


def warm_up(spark: SparkSession, workers: int, modules: Iterable[str] = ()) -> None:
    """Start Python workers and load what Java loads late, so that the next stage need not wait for them.

    Args:
        spark: Session to run in: workers are of one session.
        workers: How many.
        modules: What they import. A run says what is wrong with one that cannot be imported.
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
    """Turn Spark's error for a failed Python task into that task's own traceback.

    Raises:
        TaskError: Instead of Spark's error, if there is a Python traceback in it.
        WorkerDiedError: Instead of Spark's error for a Python worker that died.
    """
    try:
        yield
    except Exception as error:
        message = str(error)
        if (start := message.find(_TRACEBACK)) >= 0:
            traceback = _SQL_STATE.sub("", _above_java(message[start:]))
            raise TaskError(f"a Spark task failed:\n{traceback}") from None
        if _CANCELED in message:
            raise TaskError(
                "Spark canceled the work: the run was terminated, or another took its receive over"
            ) from None
        if _CRASH in message:
            raise WorkerDiedError(
                "a Spark task failed: its Python worker was killed or crashed each time it was tried (out of "
                f"memory, os._exit, a native library).\n{_above_java(message.partition(_CRASH)[2].lstrip(': '))}"
            ) from None
        raise


def _above_java(message: str) -> str:
    return "\n".join(takewhile(lambda line: not _JAVA_FRAME.match(line), message.splitlines())).strip()


def local_settings(cores: int, memory: str) -> dict[str, str]:
    """Return Spark's settings, by name, for a session or server on this machine alone.

    Args:
        cores: Tasks that run at a time.
        memory: Of the JVM, in its notation (`1g`). Python workers come on top of it.
    """
    return {
        "spark.master": f"local[{cores},{TASK_FAILURES}]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": memory,
        # Other users of this machine reach these ports, and unauthenticated calls run code. On a local master Spark
        # makes a secret of its own, which never leaves the JVM.
        "spark.authenticate": "true",
        # After a death there is another server; a JVM that goes on without memory is of no use.
        "spark.driver.defaultJavaOptions": "-XX:+ExitOnOutOfMemoryError",
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
    """Return the environment variables that make Spark use this Python and this PySpark, whatever else is installed.

    Raises:
        RuntimeError: Spark is not installed here.
    """
    spec = importlib.util.find_spec("pyspark")  # found, not imported: that takes a second
    if spec is None or spec.origin is None:
        raise RuntimeError("there is no Spark here: install `pyspark[connect]`.")
    python = str(Path(__file__).parent / "python")  # where the daemon's module is found
    return {
        "SPARK_HOME": str(Path(spec.origin).parent),
        "PYTHONPATH": os.pathsep.join(filter(None, [python, os.environ.get("PYTHONPATH")])),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        # Workers would look into their working directory before the shipped code.
        "PYTHONSAFEPATH": "1",
        # Else Spark asks the network for this machine's address, and warns when it is a local one.
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
