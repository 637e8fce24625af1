"""`pipeline-platform spark`: keep a warm Spark on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pipeline_platform.home import home
from pipeline_platform.spark import class_archive, jvm
from pipeline_platform.spark import server as spark_server

app = typer.Typer(help="Keep a warm Spark on this machine, so that a run need not start its own.", no_args_is_help=True)

Folder = Annotated[
    Path | None,
    typer.Option(help="State folder; by default PIPELINE_PLATFORM_HOME, or what DAGSTER_HOME says."),
]


@app.command()
def start(
    state: Folder = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Tasks at a time; all cores by default.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of the JVM; Python workers come on top.")] = "1g",
    warm_up: Annotated[bool, typer.Option(help="Start the Python workers as well.")] = True,
    timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds that Spark may take at most; one that stands still is given up before."),
    ] = spark_server.START_WITHIN_S,
) -> None:
    """Start the warm server, or say where the running one is."""
    began = time.monotonic()
    try:
        server = spark_server.start(state, cores=cores, memory=memory, timeout_s=timeout, log=_say)
    except (jvm.JavaNotFoundError, spark_server.SparkServerError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if warm_up:
        from resources.spark import WARM, SparkResource

        spark = SparkResource(remote=WARM, cores=server.cores, state_folder=str(state) if state else None)
        try:
            spark.warm_up()
        finally:
            spark.close()
    typer.echo(f"{_described(server)}; ready after {time.monotonic() - began:.1f} s")


@app.command()
def stop(state: Folder = None) -> None:
    """End the warm server."""
    typer.echo("Spark server stopped" if spark_server.stop(state) else "no Spark server was running")


@app.command()
def status(state: Folder = None) -> None:
    """Say whether the warm server runs; exits with 1 if not."""
    server = spark_server.status(state)
    if server is None:
        typer.echo(f"no Spark server according to {state or home()}")
        raise typer.Exit(1)
    typer.echo(_described(server))


@app.command()
def archive() -> None:
    """Keep Spark's classes in one file of this environment, so that Spark starts sooner.

    Made once, by `make` or in an image's build; anew after Spark or Java were replaced.
    """
    began = time.monotonic()
    try:
        path = class_archive.create()
    except (OSError, jvm.JavaNotFoundError, spark_server.SparkServerError, class_archive.ClassArchiveError) as error:
        typer.echo(f"no class archive; Spark starts without it, and takes longer: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{path}: {path.stat().st_size / 1e6:.0f} MB, made in {time.monotonic() - began:.0f} s")


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _described(server: spark_server.SparkServer) -> str:
    return (
        f"Spark server at {server.address}, process {server.pid}, {server.cores} cores, since {server.started_at}, "
        f"Java in {server.java}"
    )
