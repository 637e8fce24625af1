"""The chart at the end of a demo: messages over time by stage, runs, and delays by carrier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

    from demo.services import Run

_STAGES = {
    "receive_messages": ("received", "#9ecae1"),
    "handle_messages": ("handled", "#4292c6"),
    "commit": ("published", "#08519c"),
    "acknowledge": ("acknowledged", "#31a354"),
}
"""Label and colour of each op that is a stage of the chart."""
_COLOURS = {op: colour for op, (_, colour) in _STAGES.items()} | {
    "handle_batches": "#6baed6",
    "handle_failed": "#fdae6b",
}


def through(runs: Sequence[Run], op: str, zero: float) -> list[tuple[float, float]]:
    """Return points in time, in seconds after `zero`, with the number of messages that an op had completed.

    Messages are assumed to flow evenly within a step.
    """
    changes: list[tuple[float, float]] = []  # time, change of the rate
    for run in runs:
        started, ended = run.steps.get(op, (None, None))
        if started and ended:
            rate = run.demand / max(ended - started, 1e-3)
            changes += [(started - zero, rate), (started - zero + run.demand / rate, -rate)]
    points, rate, done, last = [(0.0, 0.0)], 0.0, 0.0, 0.0
    for at, change in sorted(changes):
        done, rate, last = done + rate * (at - last), rate + change, at
        points.append((at, done))
    return points


def draw(path: Path, runs: Sequence[Run], delays: pl.DataFrame, title: str) -> None:
    """Write a PNG file of all runs, newest first, and of the table `flights/delays_per_carrier`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    pulls = [run for run in reversed(runs) if run.origin == "source" and run.status == "SUCCESS" and run.demand]
    zero = min((run.times[0] or 0 for run in pulls), default=0)
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(13, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2), height_ratios=(3, 1.3))
    flow = figure.add_subplot(grid[0, 0])
    _flow(flow, pulls, zero)
    _runs(figure.add_subplot(grid[1, 0], sharex=flow), pulls, zero)
    _carriers(figure.add_subplot(grid[:, 1]), delays.sort("mean_delay"))
    figure.suptitle(title, fontsize=13, x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _flow(axes: Axes, runs: Sequence[Run], zero: float) -> None:
    end = max((run.times[1] or zero for run in runs), default=zero) - zero
    for op, (name, colour) in _STAGES.items():
        points = through(runs, op, zero)
        seconds, messages = zip(*points, (end, points[-1][1]), strict=True)
        axes.plot(seconds, messages, label=name, color=colour, lw=2.2)
    axes.set_title("Messages through each stage", loc="left")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    axes.tick_params(labelbottom=False)


def _runs(axes: Axes, runs: Sequence[Run], zero: float) -> None:
    for row, run in enumerate(runs):
        for name, (started, ended) in run.steps.items():
            if started and ended:
                took = ended - started
                bar = axes.barh(row, took, left=started - zero, color=_COLOURS.get(name, "#bdbdbd"))
                if row == 0 and took > 1.2:  # the name does not fit into a shorter bar
                    axes.bar_label(bar, [name.replace("_", "\n")], label_type="center", fontsize=8, color="white")
    axes.set_yticks(range(len(runs)), [f"{run.demand:,}" for run in runs])
    axes.invert_yaxis()
    axes.set_title("Runs, by step and messages", loc="left")
    axes.set_xlabel("seconds after the start of the first run")


def _carriers(axes: Axes, delays: pl.DataFrame) -> None:
    drawn = axes.barh(delays["carrier"].to_list(), delays["mean_delay"].fill_null(0).to_list(), color="#fd8d3c")
    axes.bar_label(drawn, [f" {count:,}" for count in delays["flights"]], color="#636363", fontsize=9)
    axes.set_title("Mean departure delay by carrier, minutes\n(with the number of flights in flights/lake)", loc="left")
    axes.margins(x=0.14)
