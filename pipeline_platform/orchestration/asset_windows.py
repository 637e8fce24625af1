"""The partitions of a pipeline's assets."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import Any

import dagster as dg

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.failure import reason_of
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import EARLIEST, WINDOW_FORMAT
from pipeline_platform.orchestration.resources.lake_resources import values_of

_FIRST: dict[type[Pipeline], datetime] = {}
"""The first windows of classes that leave it open, as the control store that their deployment has keeps them."""

_CHANGED = dg.AutomationCondition.data_version_changed() & ~dg.AutomationCondition.executed_with_root_target()
WHEN_NEW = (
    dg.AutomationCondition.any_deps_match(_CHANGED | dg.AutomationCondition.will_be_requested())
    .with_label("any_deps_changed")
    .since_last_handled()
    & ~dg.AutomationCondition.any_deps_in_progress()
    & ~dg.AutomationCondition.in_progress()
).with_label("when_new")
"""For assets downstream: whenever the rows of a window change, also by a retry of its failures or by a replay."""


class NoWindowError(Exception):
    """No window has begun yet."""


def find_first_windows(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> None:
    """Have the windows of pipelines that name no first one begin where the control store says.

    Each process makes the partitions when it loads the definitions, and all have to agree. The first that loads them
    keeps the window of that moment, or the oldest with data. One that cannot ask begins earlier, and misses none.
    """
    unsaid = [pipeline for pipeline in pipelines if pipeline.first_window is None]
    for pipeline in unsaid:
        _FIRST.pop(pipeline, None)
    if not unsaid:
        return
    try:
        lake = Lake(**values_of(resources["lake"]))
        with closing(ControlStore(**values_of(resources["control"]))) as control:
            for pipeline in unsaid:
                first = control.first_window(pipeline.name, partial(_first_of, pipeline, lake))
                _FIRST[pipeline] = datetime.strptime(first, WINDOW_FORMAT).replace(tzinfo=UTC)
    except Exception as error:  # of whatever lies behind
        names = ", ".join(pipeline.name for pipeline in unsaid if pipeline not in _FIRST)
        warnings.warn(
            f"{names}: windows begin with {EARLIEST:%Y-%m-%d} until the definitions are loaded again, for it cannot be "
            f"known when the first one began: {reason_of(error)}",
            stacklevel=3,
        )


def _first_of(pipeline: type[Pipeline], lake: Lake) -> str:
    return min({window_now(pipeline)} | Tables(lake, pipeline).windows_with_data())


def windows_of(pipeline: type[Pipeline]) -> dg.TimeWindowPartitionsDefinition:
    """A partition for each window, the one that is open now among them."""
    return dg.TimeWindowPartitionsDefinition(
        cron_schedule=pipeline.window_cron,
        start=_begin(pipeline).astimezone(UTC),  # Dagster would put its zone in place of another
        fmt=WINDOW_FORMAT,
        timezone="UTC",
        end_offset=1,
    )


def window_now(pipeline: type[Pipeline], now: datetime | None = None) -> str:
    """The key of the window that is open now; a `NoWindowError` if none has begun."""
    with dg.partition_loading_context(effective_dt=now or datetime.now(UTC)):
        key = windows_of(pipeline).get_last_partition_key()
    if key is None:
        raise NoWindowError(f"{pipeline.name}: no window has begun yet; first_window is {_begin(pipeline)}")
    return key


def _begin(pipeline: type[Pipeline]) -> datetime:
    return pipeline.first_window or _FIRST.get(pipeline, EARLIEST)


def contiguous(pipeline: type[Pipeline], windows: Collection[str]) -> list[list[str]]:
    """Divide windows into ranges of neighbours, in order: what one run can be about."""
    with dg.partition_loading_context(effective_dt=datetime.now(UTC)):
        keys = windows_of(pipeline).get_partition_keys()
    runs = groupby(keys, key=lambda window: window in windows)
    return [list(neighbours) for are_wanted, neighbours in runs if are_wanted]
