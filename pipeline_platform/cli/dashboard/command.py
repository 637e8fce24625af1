"""`pipeline-platform dashboard`: a live picture of pipelines, a print of it, or a page."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.terminal_theme import TerminalTheme

from pipeline_platform.cli import loading
from pipeline_platform.cli.dagster_instance import dagster_instance, known
from pipeline_platform.cli.dashboard.drawing import page
from pipeline_platform.cli.options import OptionalName
from pipeline_platform.cli.terminal import say

if TYPE_CHECKING:
    from pipeline_platform.cli.dashboard.gathering import Gatherer
    from pipeline_platform.cli.dashboard.picture import Picture

_FIRST_WITHIN_S, _WITHIN_S = 10.0, 1.0
"""Seconds to wait for slow sources: for a single picture, and for a picture that is followed by others."""
_PAGE_WIDTH = 160
_THEME = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [
        (36, 41, 47),
        (190, 30, 45),
        (22, 120, 60),
        (145, 95, 0),
        (9, 85, 180),
        (130, 60, 170),
        (0, 115, 130),
        (90, 98, 106),
    ],
)
"""Colours of a page with a contrast of at least 4.5 on white."""
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>Pipelines</title>
<style>
body {{ color: {foreground}; background: {background}; margin: 1.5em; }}
pre {{ font: 13px/1.3 "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
{stylesheet}
</style></head>
<body><pre><code>{code}</code></pre></body>
</html>
"""


def dashboard(
    pipeline: OptionalName = None,
    once: Annotated[bool, typer.Option("--once", help="Print the picture once, and end.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the picture to this file, as a page that needs no other file, and end.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.5, max=3_600, help="Seconds between two pictures.")] = 5.0,
) -> None:
    """Show pipelines live: each stage with its rate, fill and seconds, the backlog, latency, failures and runs.

    `fill` is the share of the capacity that is in use: messages in flight for a source, working time of the tasks for
    other stages. Without a terminal, the picture is printed once. Ctrl-C ends the command.
    """
    from pipeline_platform.cli.dashboard.gathering import Gatherer

    with dagster_instance() as instance, loading.opened(None, known(instance)) as opened:
        chosen = [opened.pipeline(pipeline)] if pipeline else list(opened.pipelines.values())
        gatherer, console = Gatherer(opened, instance, chosen), Console()
        if html is not None:
            html.write_text(to_html(gatherer.picture(_FIRST_WITHIN_S)), encoding="utf-8")
            say(f"Wrote {html}.", err=True)
        elif once or not sys.stdout.isatty():
            console.print(page(gatherer.picture(_FIRST_WITHIN_S), console.width))
        else:
            follow(gatherer, console, every)


def follow(gatherer: Gatherer, console: Console, every_s: float) -> None:
    """Show pictures until the user ends the command."""
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                began = time.monotonic()
                live.update(page(gatherer.picture(_WITHIN_S), console.width, console.height), refresh=True)
                time.sleep(max(0.0, every_s - (time.monotonic() - began)))
        except KeyboardInterrupt:
            return


def to_html(picture: Picture) -> str:
    """Return the picture as a page that needs no other file and no network."""
    console = Console(record=True, width=_PAGE_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(page(picture, _PAGE_WIDTH))
    return console.export_html(theme=_THEME, code_format=_PAGE)
