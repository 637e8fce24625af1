"""The code location of a pipeline whose runs may be red, in the folder that the environment names."""

import os

from pipeline_platform.deployment import platform_definitions
from tests.jobs_under_test import resources_at
from tests.pipelines_under_test import Judged

defs = platform_definitions([Judged], resources_at(os.environ["PIPELINES_UNDER_TEST"], os.environ["SPARK_UNDER_TEST"]))
