"""The process that Spark forks its Python workers from, with what every task imports loaded before the fork.

A worker of Spark's own daemon imports all of it by itself, which takes most of a second, and Spark ends workers after a
minute without work. This module stands alone, outside the package: workers must import the package from the code that
was shipped to them.

A child begins without the threads that these libraries have by then (jemalloc's and OpenBLAS's, both idle), and Arrow
and NumPy work in it. No library belongs here whose threads work from its import on, or which warns against forks as
Polars does. What callbacks import, each worker loads for itself.
"""

import gc
import importlib
import importlib.util
import os
import sys
from contextlib import suppress

_ENVIRONMENT = {"MIMALLOC_PURGE_DELAY": "-1"}
"""Arrow's allocator keeps what is freed: a task asks for the same again with each block, and to have the system map and
clear those pages anew took a twentieth of its time. A worker ends after a minute without work, and gives all back.
"""

_IMPORTED_BY_TASKS = (
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pandas",  # PyArrow imports it as soon as it makes an array
    "pydantic.main",  # `pydantic` itself loads late
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.dialects.sqlite",
)


def _pass_over_the_zip() -> None:
    """Spark puts PySpark first on the path once more, as a zip of sources to compile in each process."""
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if not entry.endswith("/pyspark.zip")]
    if importlib.util.find_spec("pyspark") is None:
        sys.path[:] = before


def main() -> None:
    """Load, then serve until Spark ends."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read as Arrow is loaded
    _pass_over_the_zip()
    for name in _IMPORTED_BY_TASKS:
        with suppress(ImportError):  # the task that needs it says so better
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # workers look for garbage after each task: not here, where it takes long and copies shared memory
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
