"""`import pipeline_platform` exports the public API, and loads no heavy package."""

import subprocess
import sys

LOADED = """
import sys, pipeline_platform
heavy = {"pyspark", "dagster", "pandas", "polars", "deltalake"}
print(*sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
missing = [name for name in pipeline_platform.__all__ if not hasattr(pipeline_platform, name)]
print(*missing)
"""


def test_the_public_api_has_every_name_and_loads_neither_spark_nor_dagster():
    said = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    assert said.split() == []
