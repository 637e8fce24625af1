"""The process that Spark forks its Python workers from, with the libraries of every task loaded before the fork.

A worker of Spark's own daemon imports them itself, and Spark ends workers after a minute without work. This module is
outside the package: a worker must import the package from the shipped code.

A child starts without the threads of these libraries, which are idle; Arrow and NumPy work in it. No library belongs
here that starts busy threads on import, or that warns against forks as Polars does.
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
    """Import what can be imported. What is missing, or is another PySpark's, each worker imports for itself."""
    # Arrow's allocator keeps what a block has freed for the next one, or the system would map and clear it anew. Read
    # as Arrow is loaded. A worker gives all back when it ends, after a minute without work.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    # Spark puts PySpark first on the path, as a zip of sources that each process would compile.
    sys.path.sort(key=lambda entry: entry.endswith("/pyspark.zip"))
    for name in LIBRARIES:
        with suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a worker's garbage collection would copy the memory that it shares with this process


if __name__ == "__main__":
    # Spark in a run's own process hands down the environment of the run.
    runpy.run_path(str(Path(__file__).parent.with_name("environment.py")))["restrict"]()
    preload()
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)
