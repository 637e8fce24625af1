"""The partitions of a pipeline's assets."""

from collections.abc import Collection
from datetime import UTC, datetime
from itertools import groupby

import dagster as dg

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import WINDOW_FORMAT

WHEN_NEW = dg.AutomationCondition.eager().without(~dg.AutomationCondition.any_deps_missing())
"""For assets downstream: as `eager()`, whenever a window is new, although windows without messages stay missing."""


class NoWindowError(Exception):
    """No window has begun yet."""


def windows_of(pipeline: type[Pipeline]) -> dg.TimeWindowPartitionsDefinition:
    """A partition for each window, the one that is open now among them."""
    return dg.TimeWindowPartitionsDefinition(
        cron_schedule=pipeline.window_cron,
        start=pipeline.first_window.astimezone(UTC),  # Dagster would put its zone in place of another
        fmt=WINDOW_FORMAT,
        timezone="UTC",
        end_offset=1,
    )


def window_now(pipeline: type[Pipeline], now: datetime | None = None) -> str:
    """The key of the window that is open now; a `NoWindowError` if none has begun."""
    with dg.partition_loading_context(effective_dt=now or datetime.now(UTC)):
        key = windows_of(pipeline).get_last_partition_key()
    if key is None:
        raise NoWindowError(f"{pipeline.name}: no window has begun yet; first_window is {pipeline.first_window}")
    return key


def contiguous(pipeline: type[Pipeline], windows: Collection[str]) -> list[list[str]]:
    """Divide windows into ranges of neighbours, in order: what one run can be about."""
    with dg.partition_loading_context(effective_dt=datetime.now(UTC)):
        keys = windows_of(pipeline).get_partition_keys()
    runs = groupby(keys, key=lambda window: window in windows)
    return [list(neighbours) for are_wanted, neighbours in runs if are_wanted]
