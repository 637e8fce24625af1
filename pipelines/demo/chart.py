"""The picture at the end of a demo: messages over time by stage, the runs that carried them, delays by carrier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

    from pipelines.demo.dagster_api import Run, Step

STAGES = {
    "receive_messages": ("received", "#9ecae1"),
    "handle_messages": ("handled", "#4292c6"),
    "commit": ("published", "#08519c"),
    "acknowledge": ("acknowledged", "#31a354"),
}
"""Ops of the graph that a message is counted at, with what is said of it then, and a colour."""
_OTHER = {"batch_alerts": "#6baed6", "handle_failed": "#fdae6b"}


class Point(NamedTuple):
    """So many messages so many seconds after the first run began."""

    seconds: float
    messages: float


def through(runs: Sequence[Run], op: str, zero: float) -> list[Point]:
    """How many messages were through an op at what time; within a step they are taken to flow evenly."""
    changes: list[tuple[float, float]] = []  # time, change of the rate
    for run in runs:
        for step in run.steps:
            if step.name == op and step.started and step.ended:
                rate = run.demand / max(step.ended - step.started, 1e-3)
                changes += [(step.started - zero, rate), (step.started - zero + run.demand / rate, -rate)]
    points, rate, done, last = [Point(0, 0)], 0.0, 0.0, 0.0
    for at, change in sorted(changes):
        done, rate, last = done + rate * (at - last), rate + change, at
        points.append(Point(at, done))
    return points


def draw(path: Path, runs: Sequence[Run], delays: pl.DataFrame, title: str) -> None:
    """Write the picture.

    Args:
        path: A PNG file.
        runs: All runs of the demo.
        delays: The table `flights/delays_per_carrier`.
        title: What the demo did, in a line.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    pulls = sorted(
        (run for run in runs if run.origin == "source" and run.status == "SUCCESS" and run.demand and run.started),
        key=lambda run: run.started or 0,
    )
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(13, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2), height_ratios=(3, 1.3))
    flow, bars = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    carriers = figure.add_subplot(grid[:, 1])
    zero = min((run.started or 0 for run in pulls), default=0.0)
    _flow(flow, pulls, zero)
    _runs(bars, pulls, zero)
    bars.sharex(flow)
    _carriers(carriers, delays)
    figure.suptitle(title, fontsize=13, x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _flow(axes: Axes, runs: Sequence[Run], zero: float) -> None:
    end = max((run.ended or zero for run in runs), default=zero) - zero
    for op, (name, colour) in STAGES.items():
        points = through(runs, op, zero)
        points.append(Point(max(end, points[-1].seconds), points[-1].messages))
        axes.plot([p.seconds for p in points], [p.messages for p in points], label=name, color=colour, lw=2.2)
    axes.set_title("Messages through each stage", loc="left")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    axes.tick_params(labelbottom=False)


def _runs(axes: Axes, runs: Sequence[Run], zero: float) -> None:
    colours = {op: colour for op, (_, colour) in STAGES.items()} | _OTHER
    for row, run in enumerate(runs):
        for step in run.steps:
            _step(axes, row, step, zero, colours)
    axes.set_yticks(range(len(runs)), [f"{run.demand:,}" for run in runs])
    axes.invert_yaxis()
    axes.set_title("Runs, by step and messages", loc="left")
    axes.set_xlabel("seconds after the first run began")


def _step(axes: Axes, row: int, step: Step, zero: float, colours: dict[str, str]) -> None:
    if step.started and step.ended:
        took = step.ended - step.started
        axes.barh(row, took, left=step.started - zero, color=colours.get(step.name, "#bdbdbd"))
        if row == 0:
            text = axes.text(
                step.started - zero + took / 2, row, step.name.replace("_", "\n"), va="center", ha="center"
            )
            text.set(fontsize=8, color="white", clip_on=True)
            text.set_visible(took > 1.2)  # a shorter one has no room for its name


def _carriers(axes: Axes, delays: pl.DataFrame) -> None:
    ordered = delays.sort("mean_delay")
    names, means, flights = (ordered[column].to_list() for column in ("carrier", "mean_delay", "flights"))
    drawn = axes.barh(names, [mean or 0 for mean in means], color="#fd8d3c")
    axes.bar_label(drawn, [f" {count:,}" for count in flights], color="#636363", fontsize=9)
    axes.set_title("Mean departure delay by carrier, minutes\n(beside it the flights in flights/lake)", loc="left")
    axes.margins(x=0.14)
