"""Pipelines whose windows are days: from midnight, and from half past six.

No Dagster here, which each of Spark's Python workers would import for them.
"""

from datetime import timedelta

from pipeline_platform.model.options import Retention
from tests.pipelines_under_test import Told


class Daily(Told):
    """A window a day."""

    name = "daily"
    window_cron = "0 0 * * *"
    retention = Retention(messages=timedelta(days=2), failed=timedelta(days=2))


class Early(Daily):
    """A window a day that begins with the early shift."""

    name = "early"
    window_cron = "30 6 * * *"
