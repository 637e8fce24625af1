"""The partitions of a pipeline's assets."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import groupby
from typing import Any

import dagster as dg

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.failure import reason_of
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import EARLIEST, WINDOW_FORMAT
from pipeline_platform.orchestration.resources.lake_resources import resource_options

_FIRST: dict[type[Pipeline], datetime] = {}
"""First windows, from the control store, of classes without `first_window`. Assets, jobs and the ticks of sensors need
them, and have only the class."""

_CHANGED = dg.AutomationCondition.data_version_changed() & ~dg.AutomationCondition.executed_with_root_target()
_NEW = dg.AutomationCondition.any_deps_match(_CHANGED | dg.AutomationCondition.will_be_requested())
# Not since the last materialisation, as `since_last_handled` is: its run may have read before the rows changed.
_ASKED = dg.AutomationCondition.newly_requested() & ~_NEW
WHEN_NEW = (
    _NEW.with_label("any_deps_changed").since(_ASKED | dg.AutomationCondition.initial_evaluation())
    & ~dg.AutomationCondition.in_progress()
).with_label("when_new")
"""Condition for downstream assets: materialise a window when its rows change, including by a retry or a replay.

It does not wait for the end of active runs: a run of many rounds lasts as long as its window, and reports its rows once
a minute.
"""


class NoWindowError(Exception):
    """The first window has not started yet."""


def find_first_windows(pipelines: Sequence[type[Pipeline]], resources: Mapping[str, Any]) -> None:
    """Look up the first window of each pipeline without `first_window` in the control store.

    Every process builds the partitions when it loads the definitions, and all processes must agree. The first process
    stores the current window, or the oldest window with data if that is earlier. A process that cannot read the store
    warns and uses an earlier first window, so that no window is missing.
    """
    unset = [pipeline for pipeline in pipelines if pipeline.first_window is None]
    for pipeline in unset:
        _FIRST.pop(pipeline, None)
    if not unset:
        return
    try:
        lake = Lake(**resource_options(resources["lake"]))
        with closing(ControlStore(**resource_options(resources["control"]))) as control:
            for pipeline in unset:
                first = control.first_window(pipeline.name, partial(_first_of, pipeline, lake))
                _FIRST[pipeline] = _time_of(first)
    except Exception as error:  # any error of the database or the storage
        names = ", ".join(pipeline.name for pipeline in unset if pipeline not in _FIRST)
        warnings.warn(
            f"{names}: cannot look up the first window, so windows start at {EARLIEST:%Y-%m-%d} until the definitions "
            f"are reloaded: {reason_of(error)}",
            stacklevel=3,
        )


def _first_of(pipeline: type[Pipeline], lake: Lake) -> str:
    return min({window_now(pipeline)} | Tables(lake, pipeline).windows_with_data())


def windows_of(pipeline: type[Pipeline]) -> dg.TimeWindowPartitionsDefinition:
    """Return the windows as partitions, including the current window."""
    return _windows(pipeline.window_cron, _begin(pipeline))


def window_now(pipeline: type[Pipeline], now: datetime | None = None) -> str:
    """Return the key of the current window.

    Raises:
        NoWindowError: The first window has not started yet.
    """
    now = now or datetime.now(UTC)
    with dg.partition_loading_context(effective_dt=now):
        key = windows_of(pipeline).get_last_partition_key()
    if key is None or _time_of(key) > now:
        raise NoWindowError(f"{pipeline.name}: no window has started yet; first_window is {_begin(pipeline)}")
    return key


def _begin(pipeline: type[Pipeline]) -> datetime:
    first = pipeline.first_window or _FIRST.get(pipeline)
    return EARLIEST if first is None else _start_of_window(pipeline.window_cron, first)


@cache
def _start_of_window(cron: str, time: datetime) -> datetime:
    """Return the start of the window that contains a time; the time itself if windows are longer than a year."""
    windows = _windows(cron, time - timedelta(days=366))
    with dg.partition_loading_context(effective_dt=time):
        key = windows.get_last_partition_key()
    return time if key is None else _time_of(key)


def _windows(cron: str, start: datetime) -> dg.TimeWindowPartitionsDefinition:
    return dg.TimeWindowPartitionsDefinition(
        cron_schedule=cron,
        start=start.astimezone(UTC),  # Dagster would replace another time zone, not convert it
        fmt=WINDOW_FORMAT,
        timezone="UTC",
        end_offset=1,
    )


def _time_of(key: str) -> datetime:
    return datetime.strptime(key, WINDOW_FORMAT).replace(tzinfo=UTC)


def contiguous(pipeline: type[Pipeline], windows: Collection[str]) -> list[list[str]]:
    """Divide windows into contiguous ranges, in order. A run handles one range."""
    with dg.partition_loading_context(effective_dt=datetime.now(UTC)):
        keys = windows_of(pipeline).get_partition_keys()
    runs = groupby(keys, key=lambda window: window in windows)
    return [list(neighbours) for are_wanted, neighbours in runs if are_wanted]
