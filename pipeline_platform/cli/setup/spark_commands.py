"""`pipeline-platform spark`: start and stop a warm Spark server on this machine."""

import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from pipeline_platform.cli import loading
from pipeline_platform.cli.options import Json
from pipeline_platform.cli.output import Output, Time, print_json
from pipeline_platform.cli.terminal import say
from pipeline_platform.home import home
from pipeline_platform.spark import server as spark_server

app = typer.Typer(
    help="Start and stop a warm Spark server on this machine, so that runs start faster.", no_args_is_help=True
)

_SLOW = ("pipeline_platform.orchestration.deployment", "dagster_pyspark", "pyspark.sql.connect.session")
"""Modules that take seconds to import and are needed once the server answers."""
_STATE = "State folder. Default: PIPELINE_PLATFORM_HOME, or pipeline_platform in DAGSTER_HOME."
_TIMEOUT = "Seconds until the start of Spark times out. A start without progress ends earlier."
StateFolder = Annotated[Path, typer.Option(default_factory=home, show_default=False, resolve_path=True, help=_STATE)]


class SparkStatusOutput(Output):
    """Output of `spark status`. All fields except `is_running` are null if no server is running."""

    is_running: bool = Field(description="Whether the warm server is running.")
    address: str | None = Field(None, description="Address of the server, without its token.")
    pid: int | None = Field(None, description="Id of its process.")
    cores: int | None = Field(None, description="Number of parallel tasks.")
    started_at: Time | None = Field(None, description="Start of the server.")
    java: str | None = Field(None, description="Its Java home.")


@app.command()
def start(
    state: StateFolder,
    cores: Annotated[int | None, typer.Option(min=1, help="Number of parallel tasks. Default: all cores.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of the JVM. Python workers need more in addition.")] = "1g",
    warm_up: Annotated[bool, typer.Option(help="Also start the session of the deployment's runs.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help=_TIMEOUT)] = spark_server.START_WITHIN_S,
) -> None:
    """Start the warm server, or print the address of the running server."""

    def log(line: str) -> None:
        say(line, err=True)

    began = time.monotonic()
    with ThreadPoolExecutor(1) as meanwhile:
        if warm_up:
            meanwhile.submit(lambda: [importlib.import_module(module) for module in _SLOW])
        server = spark_server.start(state, cores=cores, memory=memory, timeout_s=timeout, log=log)
    if warm_up:
        _warm_up(server, state, log)
    say(f"{_described(server)}; ready after {time.monotonic() - began:.1f} s")


def _warm_up(server: spark_server.SparkServer, state: Path, log: Callable[[str], None]) -> None:
    from pipeline_platform.orchestration.deployment import Built
    from pipeline_platform.orchestration.resources.spark_resource import WARM, SparkResource

    try:
        built = loading.load()
    except Exception as error:
        log(f"Could not load the deployment, so the first run will start more slowly: {error}")
        built = Built((), {"spark": SparkResource()})
    built.warm_up(remote=WARM, cores=server.cores, state_folder=str(state))


@app.command()
def stop(state: StateFolder) -> None:
    """Stop the warm server."""
    stopped = spark_server.stop(state)
    say("Stopped the Spark server." if stopped else "No Spark server was running.")


@app.command()
def status(state: StateFolder, as_json: Json = False) -> None:
    """Print whether the warm server is running. Exit with status 1 if it is not."""
    server = spark_server.status(state)
    if as_json:
        print_json(_status(server))
    else:
        say(_described(server) if server else f"No Spark server is running (state folder: {state}).")
    if server is None:
        raise typer.Exit(1)


def _status(server: spark_server.SparkServer | None) -> SparkStatusOutput:
    if server is None:
        return SparkStatusOutput(is_running=False)
    return SparkStatusOutput(
        is_running=True,
        address=server.address,
        pid=server.pid,
        cores=server.cores,
        started_at=datetime.fromisoformat(server.started_at),
        java=server.java,
    )


def _described(server: spark_server.SparkServer) -> str:
    return (
        f"Spark server at {server.address}, process {server.pid}, {loading.counted(server.cores, 'core')}, "
        f"started {server.started_at}, Java in {server.java}"
    )
