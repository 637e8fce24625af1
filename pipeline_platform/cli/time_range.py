"""The options `--since` and `--until`: a range of time, and the windows of a pipeline that overlap it."""

import re
from bisect import bisect_left, bisect_right
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import WINDOW_FORMAT

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
FORM = "a duration such as 90m, 2h or 3d, or a time such as 2026-11-20T10:00 (UTC unless it has a zone)"

_PANEL = "Selection"
Since = Annotated[
    str | None, typer.Option(help=f"Windows that overlap the time since then: {FORM}.", rich_help_panel=_PANEL)
]
Until = Annotated[
    str | None,
    typer.Option(
        help="End of the range of --since, in the same form. Default: the present time.", rich_help_panel=_PANEL
    ),
]


def windows_between(
    pipeline: type[Pipeline], since: str | None, until: str | None, now: datetime | None = None
) -> list[str] | None:
    """Return the keys of the windows that overlap a range of time, oldest first; None without a range.

    Raises:
        typer.BadParameter: A time is not valid, `since` is missing or not before `until`, or no window overlaps.
    """
    if since is None:
        if until is not None:
            raise typer.BadParameter("--until needs --since.", param_hint="--until")
        return None
    now = now or datetime.now(UTC)
    begin, end = time_of(since, "--since", now), now if until is None else time_of(until, "--until", now)
    if begin >= end:
        raise typer.BadParameter(
            f"must be before the end of the range, {end:%Y-%m-%d %H:%M} UTC; got {since}.", param_hint="--since"
        )
    windows = _overlapping(pipeline, begin, end, now)
    if not windows:
        raise typer.BadParameter(
            f"no window of {pipeline.name} overlaps {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC. Choose a range "
            "after the pipeline's first window.",
            param_hint="--since",
        )
    return windows


def time_of(text: str, option: str, now: datetime) -> datetime:
    """Return the time that an option means."""
    try:
        if duration := re.fullmatch(r"(\d+)([smhdw])", text.strip()):
            return now - timedelta(**{_UNITS[duration[2]]: int(duration[1])})
        time = datetime.fromisoformat(text.strip())
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a valid time. Use {FORM}.", param_hint=option) from None


def _overlapping(pipeline: type[Pipeline], begin: datetime, end: datetime, now: datetime) -> list[str]:
    import dagster as dg

    from pipeline_platform.orchestration.asset_windows import windows_of

    with dg.partition_loading_context(effective_dt=now):
        partitions = windows_of(pipeline)
        keys = list(partitions.get_partition_keys())
        if not keys:
            return []
        last_end = partitions.time_window_for_partition_key(keys[-1]).end.astimezone(UTC)
    starts = [datetime.strptime(key, WINDOW_FORMAT).replace(tzinfo=UTC) for key in keys]
    ends = [*starts[1:], last_end]  # contiguous: a window ends where the next one starts
    return keys[bisect_right(ends, begin) : bisect_left(starts, end)]
