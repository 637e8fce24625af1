"""The Spark server that runs tasks: this machine's warm server, unless the environment names another."""

import os

from pipeline_platform.orchestration import SparkResource
from resources.environment import secret

spark = SparkResource(
    remote=os.environ.get("PIPELINE_PLATFORM_SPARK", "warm"),
    token=secret("PIPELINE_PLATFORM_SPARK_TOKEN"),
    ui=os.environ.get("PIPELINE_PLATFORM_SPARK_UI", ""),
)
