"""`pipeline-platform pause`, `resume` and `limit`: what a pipeline may do, changed while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline_platform.cli import deployment
from pipeline_platform.model.options import RateLimiting

if TYPE_CHECKING:
    from pipeline_platform.control.store import ControlStore
    from pipeline_platform.model.pipeline import Pipeline

_SHORTEST_S, _LONGEST_S = 0.001, 366 * 86_400

Name = Annotated[str, typer.Argument(help="Name of the pipeline.")]


@contextmanager
def _of(name: str) -> Iterator[tuple[ControlStore, type[Pipeline]]]:
    with deployment.opened() as opened:
        pipeline = opened.pipeline(name)
        typer.echo(f"Control store: {opened.control}")
        yield opened.control, pipeline


def pause(
    pipeline: Name,
    reason: Annotated[str, typer.Option(help="What people will read meanwhile.")] = "paused on the command line",
) -> None:
    """Ask for no more runs; those under way finish."""
    with _of(pipeline) as (control, _):
        control.pause(pipeline, reason)
        in_flight = control.in_flight(pipeline)
    messages = sum(claim.messages for claim in in_flight)
    typer.echo(f"{pipeline} is paused: {reason}. {messages:,} messages in {len(in_flight)} runs are finished still.")


def resume(pipeline: Name) -> None:
    """Ask for runs again."""
    with _of(pipeline) as (control, _):
        before = control.paused(pipeline)
        control.resume(pipeline)
    typer.echo(f"{pipeline} asks for runs again." if before else f"{pipeline} was not paused.")


def limit(
    pipeline: Name,
    allowed: Annotated[int | None, typer.Option(min=1, max=10**12, help="Messages handled in an interval.")] = None,
    interval: Annotated[float | None, typer.Option(help="Length of an interval, seconds.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Back to the pipeline's own option.")] = False,
) -> None:
    """Change the rate limit, from the next permits on; without options, say which one holds."""
    if reset and (allowed is not None or interval is not None):
        raise typer.BadParameter("--reset goes back to the pipeline's own limit; give it alone")
    if interval is not None and not _SHORTEST_S <= interval <= _LONGEST_S:
        raise typer.BadParameter(f"--interval is {interval}; give seconds, from {_SHORTEST_S} to {_LONGEST_S}")
    span = None if interval is None else timedelta(seconds=interval)
    with _of(pipeline) as (control, chosen):
        own = chosen.producer.rate_limiting
        if reset:
            control.set_rate_limiting(pipeline, None)
        elif allowed is not None and span is not None:
            control.set_rate_limiting(pipeline, RateLimiting(allowed_messages=allowed, interval=span))
        elif allowed is not None or span is not None:
            try:
                control.update_rate_limiting(pipeline, own, allowed_messages=allowed, interval=span)
            except ValueError:
                raise typer.BadParameter(
                    f"{pipeline} has no rate limit to change a part of; give both --allowed and --interval"
                ) from None
        holds = control.rate_limiting(pipeline, own)
    if holds is None:
        typer.echo(f"{pipeline} has no rate limit.")
    else:
        typer.echo(f"{pipeline} handles at most {holds.allowed_messages:,} messages in {holds.interval}.")
