"""The command line, `pipeline-platform`. Each group of commands is a file of its own, registered here."""

from __future__ import annotations

import typer

from pipeline_platform import cli_limits, cli_spark, cli_status

app = typer.Typer(help="Pull messages, handle and batch them on Spark, acknowledge what is safe.", no_args_is_help=True)
app.add_typer(cli_spark.app, name="spark")
app.command()(cli_status.status)
app.command()(cli_limits.pause)
app.command()(cli_limits.resume)
app.command()(cli_limits.limit)


if __name__ == "__main__":
    app()
