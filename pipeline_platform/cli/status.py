"""`pipeline-platform status`: what waits, what is in flight, what is left to do; Dagster need not run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline_platform.cli import deployment

if TYPE_CHECKING:
    from pipeline_platform.model.pipeline import Pipeline
    from pipeline_platform.source.contract import Source


def status(
    pipeline: Annotated[str | None, typer.Argument(help="Of this pipeline only.", show_default=False)] = None,
) -> None:
    """Show backlog, limits, runs, leases, receives to be finished, and open failures of pipelines.

    `in flight` are the runs that hold messages: claims in the control store, with their leases. `runs in Dagster` are
    those that its instance in DAGSTER_HOME has queued or started, whether they hold messages yet or not.
    """
    console = Console()
    with deployment.opened() as opened:
        try:
            wanted = opened.chosen(pipeline)
        except deployment.UnknownPipelineError as error:
            raise typer.BadParameter(str(error), param_hint="PIPELINE") from None
        typer.echo(f"Control store: {opened.control}\nLake: {opened.lake.root}")
        for chosen in wanted:
            console.print(_table(opened, chosen))


def _table(opened: deployment.Deployment, pipeline: type[Pipeline]) -> Table:
    table = Table(title=pipeline.name, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    sections = (
        _source(opened.source(pipeline), pipeline),
        _limits(opened, pipeline),
        _in_flight(opened, pipeline),
        _runs(opened, pipeline),
        _receives(opened, pipeline),
        _failures(opened, pipeline),
    )
    for rows in sections:
        for name, value in rows.items():
            table.add_row(name, value if isinstance(value, Text) else Text(value))
    return table


def _source(source: Source, pipeline: type[Pipeline]) -> dict[str, str | Text]:
    from pipeline_platform.source.contract import SourceError

    name = pipeline.producer.source
    try:
        waiting = source.backlog()
    except SourceError as error:
        return {"backlog": Text(f"{name} does not answer: {error}", style="red")}
    oldest: str | Text = "none waits" if waiting.messages == 0 else "the source cannot tell"
    if waiting.oldest is not None:
        age, allowed = datetime.now(UTC) - waiting.oldest, pipeline.producer.oldest_allowed
        oldest = f"{_seconds(age.total_seconds())} ago"
        if allowed is not None and age > allowed:
            oldest = Text(f"{oldest}, longer than the {_seconds(allowed.total_seconds())} allowed", style="yellow")
    backlog = "the source cannot tell" if waiting.messages is None else f"{waiting.messages:,} messages"
    return {"backlog": f"{backlog} in {name}", "oldest": oldest}


def _limits(opened: deployment.Deployment, pipeline: type[Pipeline]) -> dict[str, str | Text]:
    from datetime import timedelta

    paused = opened.control.paused(pipeline.name)
    state: str | Text = Text(f"paused: {paused}", style="yellow") if paused else "asks for runs"
    limit = opened.control.rate_limiting(pipeline.name, pipeline.producer.rate_limiting)
    if limit is None:
        return {"state": state, "rate limit": "none"}
    left = opened.control.spare(pipeline.name, limit, timedelta(0)) or 0
    every = _seconds(limit.interval.total_seconds())
    origin = "" if limit == pipeline.producer.rate_limiting else ", set at run time"
    return {
        "state": state,
        "rate limit": f"{limit.allowed_messages:,} every {every}{origin}",
        "permits": f"{left:,} left in the current interval",
    }


def _in_flight(opened: deployment.Deployment, pipeline: type[Pipeline]) -> dict[str, str | Text]:
    live, over = opened.control.in_flight(pipeline.name), opened.control.over(pipeline.name)
    now = datetime.now(UTC)
    rows: dict[str, str | Text] = {
        "in flight": f"{sum(claim.messages for claim in live):,} messages in {len(live)} runs"
    }
    for claim in live:
        began, ends = (now - claim.started_at).total_seconds(), (claim.expires_at - now).total_seconds()
        rows[f"  run {claim.run_id[:8]}"] = (
            f"{claim.messages:,} messages for {_seconds(began)}, lease for {_seconds(ends)} more"
        )
    for claim in over:
        since = (now - claim.expires_at).total_seconds()
        rows[f"  run {claim.run_id[:8]}"] = Text(
            f"{claim.messages:,} messages, dead or stalled: its lease ended {_seconds(since)} ago", style="yellow"
        )
    return rows


def _runs(opened: deployment.Deployment, pipeline: type[Pipeline]) -> dict[str, str | Text]:
    try:
        runs = opened.runs(pipeline)
    except deployment.DagsterError as error:
        return {"runs in Dagster": Text(f"cannot be asked for: {error}", style="yellow")}
    if runs is None:
        return {"runs in Dagster": "DAGSTER_HOME is not set"}
    return {"runs in Dagster": ", ".join(f"{count:,} {status}" for status, count in runs.items()) or "none under way"}


def _receives(opened: deployment.Deployment, pipeline: type[Pipeline]) -> dict[str, str | Text]:
    undecided, unfinished, unreadable = opened.receives(pipeline)
    broken: dict[str, str | Text] = {"unreadable receives": Text("\n".join(unreadable), style="red")}
    return {
        "undecided receives": _ids(undecided),
        "unfinished receives": f"{_ids(unfinished)} (decided; the next run publishes and acknowledges the rest)"
        if unfinished
        else "none",
        **(broken if unreadable else {}),
    }


def _failures(opened: deployment.Deployment, pipeline: type[Pipeline]) -> dict[str, str | Text]:
    waiting: Mapping[str, int] = opened.open_failures(pipeline)
    if not waiting:
        return {"open failures": "none"}
    rows: dict[str, Any] = {"open failures": Text(f"{sum(waiting.values()):,}", style="yellow")}
    return {**rows, **{f"  window {window}": f"{count:,}" for window, count in waiting.items()}}


def _ids(receive_ids: list[str]) -> str:
    return ", ".join(receive_id[:8] for receive_id in receive_ids) or "none"


def _seconds(seconds: float) -> str:
    """A span in its largest unit, with a digit after the point below ten."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.{1 if seconds < 10 * length else 0}f} {unit}"
    return f"{seconds:.{1 if seconds < 10 else 0}f} s"
