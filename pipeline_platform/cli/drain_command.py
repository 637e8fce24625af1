"""`pipeline-platform drain`: bring a pipeline to rest, and see it come there."""

from typing import Annotated

import typer

from pipeline_platform.cli.limit_commands import Name, Of, chosen
from pipeline_platform.control.drain import drain as drain_and_wait

_REASON = "Shown while the pipeline is paused."


def drain(
    pipeline: Name,
    reason: Annotated[str, typer.Option(help=_REASON)] = "drained on the command line",
    producer: Of = "",
) -> None:
    """Pause a pipeline, stop its runs after the messages that they have begun, and wait for them.

    Runs begin messages for the pipeline's `shutdown` more. What was handled by then is delivered, published and
    acknowledged. The pipeline stays paused until `resume`.
    """
    with chosen(pipeline, producer) as (opened, of):
        typer.echo(drain_and_wait(opened.control, of, reason, producer, log=typer.echo))
