"""The code location of a daemon's test, in the folder that the environment names; its leases are short."""

import os

from pipeline_platform.deployment import platform_definitions
from pipeline_platform.run import flow
from tests.jobs_under_test import resources_at
from tests.pipelines_under_test import Told

flow.LEASE_S = 4.0
defs = platform_definitions(
    [Told], resources_at(os.environ["PIPELINES_UNDER_TEST"], os.environ["SPARK_UNDER_TEST"], lease_s=4.0)
)
