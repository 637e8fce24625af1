"""What a demo shows while it works: on a terminal a live view, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.demo.dagster_api import Run
from pipelines.demo.figures import Figures, Line

_LINE_EVERY_S = 3
_STATUS = {
    "SUCCESS": "green",
    "STARTED": "cyan",
    "STARTING": "cyan",
    "QUEUED": "yellow",
    "FAILURE": "red",
    "CANCELED": "red",
}


class Screen:
    """The view.

    Args:
        console: Where to.
        flights: How many are on their way.
        url: Of the Dagster UI.
    """

    def __init__(self, console: Console, flights: int, url: str) -> None:
        self._console, self._flights, self._url = console, flights, url
        self._live: Live | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=20)
        self._said_at = 0.0

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it until the block ends."""
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=4, transient=True) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def show(self, title: str, figures: Figures, runs: Sequence[Run], said: str) -> None:
        """Show the state of things."""
        done = self._flights - figures.at_the_queue
        self._recent.append((time.monotonic(), done))
        if self._live is None:
            self._line(title, figures, runs, done, said)
            return
        figure_table = Table.grid(padding=(0, 3))
        for name, value in self._named(figures, done):
            figure_table.add_row(Text(name, style="dim"), Text(f"{value:>9,}", style="bold"))
        bar = ProgressBar(total=self._flights, completed=done, width=60)
        sensor = Text(f"sensor: {said}", style="dim")
        parts: list[RenderableType] = [bar, Text(), figure_table, Text(), sensor, Text(), run_table(runs)]
        self._live.update(Panel(Group(*parts), title=title, subtitle=self._url, border_style="blue"))

    def _line(self, title: str, figures: Figures, runs: Sequence[Run], done: int, said: str) -> None:
        if time.monotonic() - self._said_at < _LINE_EVERY_S:
            return
        self._said_at = time.monotonic()
        told = ", ".join(f"{name} {value:,}" for name, value in self._named(figures, done))
        under_way = sum(run.under_way for run in runs)
        self._console.print(f"{title}: {told}; {under_way} runs under way; sensor: {said}", highlight=False)

    def _named(self, figures: Figures, done: int) -> list[tuple[str, int]]:
        return [
            ("backlog", figures.waiting),
            ("in flight", figures.in_flight),
            ("handled", figures.handled),
            ("failed", figures.failed),
            ("acknowledged", done),
            ("messages/s", self._rate()),
        ]

    def _rate(self) -> int:
        """Acknowledged in a second, over the last looks."""
        (since, before), (now, done) = self._recent[0], self._recent[-1]
        return round((done - before) / (now - since)) if now > since else 0


def run_table(runs: Sequence[Run]) -> Table:
    """The newest runs."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("run", "of", "messages", "status", "step", "seconds"):
        table.add_column(heading, justify="right" if heading in ("messages", "seconds") else "left")
    for run in runs[:8]:
        begun = [step for step in run.steps if step.started]
        step = begun[-1].name if run.under_way and begun else ""
        ended = run.ended or datetime.now().timestamp()
        table.add_row(
            run.run_id[:8],
            run.origin or run.job,
            f"{run.demand:,}" if run.demand else "",
            Text(run.status.lower(), style=_STATUS.get(run.status, "")),
            step,
            f"{ended - run.started:.1f}" if run.started else "",
        )
    return table


def account_table(lines: Sequence[Line]) -> Table:
    """The account: what must be, and what is."""
    table = Table(title="The account", title_justify="left", title_style="bold", box=None, header_style="dim")
    table.add_column("")
    table.add_column("expected", justify="right")
    table.add_column("found", justify="right")
    table.add_column("")
    for line in lines:
        mark = Text("ok", style="green") if line.holds else Text("WRONG", style="bold red")
        table.add_row(line.what, f"{line.wanted:,}", f"{line.found:,}", mark)
    return table
