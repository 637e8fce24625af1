"""Plots of one line: bars of a share, of numbers over time, and of a run's work over time."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from pipeline_platform.cli.dashboard.picture import RunLine

_LEVELS = "▁▂▃▄▅▆▇█"
_IDLE, _UNKNOWN = "·", " "


def gauge(share: float, width: int = 10) -> str:
    """Return a bar of a share from 0 to 1, which is not empty unless the share is 0."""
    filled = max(round(share * width), 1 if share > 0 else 0)
    return "█" * min(filled, width) + "░" * (width - filled)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a bar per value, or per group of values if there are more than `width`; a gap for an unknown value."""
    step = -(-len(values) // width) if values else 1
    groups = [[value for value in values[at : at + step] if value is not None] for at in range(0, len(values), step)]
    highest = [max(group) if group else None for group in groups]
    most = max((value for value in highest if value is not None), default=0.0)
    return "".join(_UNKNOWN if value is None else _level(value / most if most else 0.0) for value in highest)


def time_line(run: RunLine, start: datetime, end: datetime, width: int) -> str:
    """Return the work of a run: a bar shows the share of its time in which it had a receive, and a dot no receive."""
    cell = (end - start) / width
    began, ended = run.began or end, run.ended or end
    cells = []
    for number in range(width):
        left = start + number * cell
        is_alive = began < left + cell and ended >= left and run.state != "queued"
        share = _covered(((work.began, work.ended) for work in run.work), left, cell)
        cells.append(_level(share) if share > 0 else _IDLE if is_alive else _UNKNOWN)
    return "".join(cells)


def _covered(spans: Iterable[tuple[datetime, datetime]], left: datetime, cell: timedelta) -> float:
    right, none = left + cell, timedelta(0)
    return min(1.0, sum((max(none, min(end, right) - max(begin, left)) for begin, end in spans), none) / cell)


def _level(share: float) -> str:
    return _LEVELS[min(len(_LEVELS) - 1, round(share * (len(_LEVELS) - 1)))]
