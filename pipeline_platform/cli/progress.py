"""Progress of a long command: a bar on a terminal, otherwise a line every two seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipeline_platform.cli.terminal import plain, say

_EVERY_S = 2.0
Show = Callable[[int, str], None]
"""Shows how much is done, and a text."""


@contextmanager
def progress(total: int | None, *, lines: bool = True) -> Iterator[Show]:
    """Yield a function that shows progress on standard error; the bar disappears at the end of the block.

    Args:
        total: Number at the end; None if it is unknown.
        lines: Whether to print lines without a terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines() if lines else lambda *_: None
        return
    columns = SpinnerColumn(), BarColumn(20), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    # Printed lines move above the bar, unless they go to a file.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=plain(text))


def _lines() -> Show:
    last = time.monotonic()

    def show(_: int, text: str) -> None:
        nonlocal last
        if (now := time.monotonic()) >= last + _EVERY_S:
            last = now
            say(text, err=True)

    return show
