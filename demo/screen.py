"""Progress of a demo on the screen: a live view on a terminal, and otherwise a line every three seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from demo.services import Run

_LINE_EVERY_S = 3
_STATUS = {"SUCCESS": "green", "STARTED": "cyan", "STARTING": "cyan", "QUEUED": "yellow"}


class Screen:
    """View of the progress of `flights` messages; `url` is the address of the Dagster UI."""

    def __init__(self, console: Console, flights: int, url: str) -> None:
        self._console, self._flights, self._url = console, flights, url
        self._live: Live | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=20)
        self._said_at = 0.0

    def shown(self) -> AbstractContextManager[object]:
        """Show the view until the block ends."""
        if not self._console.is_terminal:
            return nullcontext()
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        return self._live

    def show(self, title: str, figures: Mapping[str, int], runs: Sequence[Run], said: str) -> None:
        """Update the view: the current stage, its figures, the runs (newest first), and the last tick of the sensor."""
        now, done = time.monotonic(), figures["acknowledged"]
        self._recent.append((now, done))
        since, before = self._recent[0]
        named = {**figures, "messages/s": round((done - before) / (now - since)) if now > since else 0}
        if self._live is not None:
            numbers = Table.grid(padding=(0, 3))
            for name, value in named.items():
                numbers.add_row(f"[dim]{name}", f"[bold]{value:>9,}")
            bar = ProgressBar(total=self._flights, completed=done, width=60)
            view = Group(bar, Text(), numbers, Text(f"\nsensor: {said}\n", style="dim"), run_table(runs))
            self._live.update(Panel(view, title=title, subtitle=self._url, border_style="blue"))
        elif now - self._said_at >= _LINE_EVERY_S:
            self._said_at = now
            numbers_now = ", ".join(f"{name} {value:,}" for name, value in named.items())
            self._console.print(f"{title}: {numbers_now}; {sum(run.under_way for run in runs)} runs; sensor: {said}")


def run_table(runs: Sequence[Run]) -> Table:
    """Return a table of the newest runs."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("run", "of", "messages", "status", "step", "seconds"):
        table.add_column(heading, justify="right" if heading in ("messages", "seconds") else "left")
    for run in runs[:8]:
        begun, (started, ended) = [name for name, (start, _) in run.steps.items() if start], run.times
        table.add_row(
            run.run_id[:8],
            run.origin,
            f"{run.demand:,}" if run.demand else "",
            Text(run.status.lower(), style=_STATUS.get(run.status, "red")),
            begun[-1] if run.under_way and begun else "",
            f"{(ended or time.time()) - started:.1f}" if started else "",
        )
    return table


def account_table(lines: Sequence[tuple[str, int, int]]) -> Table:
    """Return a table of the account: expected and found."""
    table = Table(title="The account", title_justify="left", title_style="bold", box=None, header_style="dim")
    for heading in ("", "expected", "found", " "):
        table.add_column(heading, justify="right" if heading.strip() else "left")
    for what, wanted, found in lines:
        table.add_row(what, f"{wanted:,}", f"{found:,}", "[green]ok" if wanted == found else "[bold red]WRONG")
    return table
