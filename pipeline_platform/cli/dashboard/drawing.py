"""Drawing of a picture as text, for a terminal of 80 columns or more, or for a page."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline_platform.cli.dashboard.bars import sparkline
from pipeline_platform.cli.dashboard.figures import count, oldest, rate, state_of, waiting
from pipeline_platform.cli.dashboard.picture import Look, Picture, PipelinePicture
from pipeline_platform.cli.dashboard.pipeline_drawing import draw_pipeline
from pipeline_platform.cli.status.status_data import Health
from pipeline_platform.cli.terminal import duration, plain

_SILENT_S = 120
"""Dagster's daemon writes a heartbeat every 30 s."""


def page(picture: Picture, width: int, height: int | None = None) -> RenderableType:
    """Return the picture.

    Args:
        picture: The picture.
        width: Columns.
        height: Lines of a screen that cannot be scrolled: pipelines that do not fit are in the overview only, and
            those in a worse state come first. None: all pipelines.
    """
    parts: list[RenderableType] = [_header(picture)]
    left = height - 1 if height is not None else None
    pipelines = list(picture.pipelines)
    if left is not None:
        pipelines.sort(key=lambda each: _rank(each.look), reverse=True)
    if len(pipelines) > 1:
        shown = pipelines if left is None else pipelines[: max(1, left - 3)]
        parts += [_overview(shown, width), Text("")]
        left = None if left is None else left - len(shown) - 3
    for pipeline in pipelines:
        drawn = draw_pipeline(pipeline, picture, width)
        if left is not None and len(pipelines) > 1:
            left -= _height(drawn)
            if left < 0:
                break
        parts += drawn
    if not pipelines:
        parts.append(Text("This deployment has no pipelines."))
    return Group(*parts)


def _height(parts: Iterable[RenderableType]) -> int:
    def lines(part: RenderableType) -> int:
        if isinstance(part, Text):
            return part.plain.count("\n") + 1
        if isinstance(part, Table):
            cells = [max((lines(cell) for cell in column.cells), default=0) for column in part.columns]
            return max(part.row_count + bool(part.show_header), *cells) if cells else 0
        return sum(map(lines, part.renderables)) if isinstance(part, Group) else 1

    return sum(map(lines, parts))


def _rank(look: Look) -> int:
    return -1 if look.status is None else list(Health).index(look.status.state)


def _header(picture: Picture) -> Text:
    text = Text.assemble((f"{picture.at:%Y-%m-%d %H:%M:%S} UTC", "bold"), "  ")
    if picture.daemon_unknown:
        text.append(f"? daemon unknown: {plain(picture.daemon_unknown)}", "yellow")
    elif picture.daemon_seen is None:
        text.append("✗ the daemon has never run", "bold red")
    elif (seen_s := (picture.at - picture.daemon_seen).total_seconds()) > _SILENT_S:
        text.append(f"✗ daemon silent for {seen_s:,.0f} s", "bold red")
    else:
        text.append(f"✓ daemon seen {seen_s:.0f} s ago", "green")
    text.append(f"  {picture.queued:,} queued" if picture.queued else "")
    return text


def _overview(pipelines: Iterable[PipelinePicture], width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", expand=False)
    for name in ("pipeline", "state"):
        table.add_column(name, no_wrap=True, max_width=20, overflow="ellipsis")
    for name in ("rate", "waiting", "oldest", "p95", "failures", "dead"):
        table.add_column(name, justify="right", no_wrap=True)
    if width >= 100:
        table.add_column("messages, last hour", no_wrap=True)
    for each in pipelines:
        status = each.look.status
        producers = list(status.producers.values()) if status else []
        failures = status.failures if status else None
        row: list[RenderableType] = [
            Text(plain(each.name), "bold"),
            state_of(each),
            rate(sum(producer.messages_per_s for producer in producers)) if status else "",
            waiting(producers),
            oldest(producers, each.look.at),
            duration(each.latency[1]) if each.latency else "",
            count(failures.open) if failures else "",
            count(failures.dead) if failures else "",
        ]
        if width >= 100:
            row.append(Text(sparkline([minute.messages for minute in each.minutes], 30), "cyan"))
        table.add_row(*row)
    return table
