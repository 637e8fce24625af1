"""The front door: `import pipeline_platform` gives what a pipeline or a connector needs, and loads nothing heavy."""

import subprocess
import sys

LOADED = """
import sys, pipeline_platform
heavy = {"pyspark", "dagster", "pandas", "polars", "deltalake"}
print(*sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
missing = [name for name in pipeline_platform.__all__ if not hasattr(pipeline_platform, name)]
print(*missing)
"""


def test_it_loads_neither_spark_nor_dagster_and_has_every_name():
    said = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    assert said.split() == []
