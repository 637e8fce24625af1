"""The command line, `pipeline-platform`. Each group of commands is a file of its own, registered here."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pipeline_platform.cli import deployment
from pipeline_platform.cli import limits as cli_limits
from pipeline_platform.cli import spark as cli_spark
from pipeline_platform.cli import status as cli_status
from pipeline_platform.control.store import ControlStoreError

app = typer.Typer(
    pretty_exceptions_enable=False,
    help="Pull messages, handle and batch them on Spark, acknowledge what is safe.",
    no_args_is_help=True,
)


@app.callback()
def options(
    module: Annotated[
        str | None,
        typer.Option("-m", "--module", help="Module of the deployment; by default what workspace.yaml names."),
    ] = None,
) -> None:
    """Pull messages, handle and batch them on Spark, acknowledge what is safe."""
    del module  # `deployment.opened` looks it up


app.add_typer(cli_spark.app, name="spark")
app.command()(cli_status.status)
app.command()(cli_limits.pause)
app.command()(cli_limits.resume)
app.command()(cli_limits.limit)


def main() -> None:
    """Run a command; what can go wrong with a deployment is told in words."""
    try:
        app()
    except (deployment.SetUpError, ControlStoreError) as error:
        typer.echo(str(error), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
