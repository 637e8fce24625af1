"""Daemon that forks Spark's Python workers, with the libraries of all tasks imported before the fork.

With Spark's default daemon, each worker imports them, and Spark ends workers after a minute without work. This module
is outside the package, because a worker must import the package from the shipped code.

A forked child lacks the idle threads of these libraries; Arrow and NumPy work without them. Do not add libraries that
start busy threads on import, or that are not fork-safe, such as Polars.
"""

import gc
import importlib
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path

LIBRARIES = (
    "pyspark.worker",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pandas",  # PyArrow imports it when it makes an array
    "pydantic.main",  # `pydantic` itself loads late
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.dialects.sqlite",
)


def preload() -> None:
    """Import the libraries; workers import missing libraries themselves."""
    # Arrow's allocator keeps freed memory for the next block, instead of returning it to the system. Arrow reads this
    # on import. The memory is freed when the worker ends, after a minute without work.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    # Spark puts PySpark first on the path as a zip of sources, which each process would compile.
    sys.path.sort(key=lambda entry: entry.endswith("/pyspark.zip"))
    for name in LIBRARIES:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a worker would copy the memory shared with this process


if __name__ == "__main__":
    # Spark inside the process of a run passes on the environment of the run.
    runpy.run_path(str(Path(__file__).parent.with_name("environment.py")))["restrict"]()
    preload()
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
