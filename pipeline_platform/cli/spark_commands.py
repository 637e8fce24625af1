"""`pipeline-platform spark`: keep a warm Spark on this machine."""

import importlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pipeline_platform.cli import loading
from pipeline_platform.cli.terminal import say
from pipeline_platform.home import home
from pipeline_platform.spark import jvm
from pipeline_platform.spark import server as spark_server

app = typer.Typer(help="Keep a warm Spark on this machine, so that a run need not start its own.", no_args_is_help=True)

_SLOW = ("pipeline_platform.orchestration.deployment", "dagster_pyspark", "pyspark.sql.connect.session")
"""What takes seconds to import, and is needed once the server answers."""
_STATE = "State folder; by default PIPELINE_PLATFORM_HOME, else pipeline_platform in DAGSTER_HOME."
_TIMEOUT = "Seconds that Spark may take to start; a start without progress is given up earlier."
State = Annotated[Path, typer.Option(default_factory=home, show_default=False, resolve_path=True, help=_STATE)]


@app.command()
def start(
    state: State,
    cores: Annotated[int | None, typer.Option(min=1, help="Tasks at a time; all cores by default.")] = None,
    memory: Annotated[str, typer.Option(help="Memory of the JVM; Python workers come on top.")] = "1g",
    warm_up: Annotated[bool, typer.Option(help="Begin the session of the deployment's runs as well.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help=_TIMEOUT)] = spark_server.START_WITHIN_S,
) -> None:
    """Start the warm server, or say where the running one is."""

    def log(line: str) -> None:
        say(line, err=True)

    began = time.monotonic()
    with ThreadPoolExecutor(1) as meanwhile:
        if warm_up:
            meanwhile.submit(lambda: [importlib.import_module(module) for module in _SLOW])
        with _refusals():
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
        log(f"the first run will load its code: {error}")
        built = Built((), {"spark": SparkResource()})
    built.warm_up(remote=WARM, cores=server.cores, state_folder=str(state))


@app.command()
def stop(state: State) -> None:
    """End the warm server."""
    with _refusals():
        stopped = spark_server.stop(state)
    say("Spark server stopped" if stopped else "no Spark server was running")


@app.command()
def status(state: State, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say whether the warm server runs; exits with 1 if not."""
    with _refusals():
        server = spark_server.status(state)
    if as_json:
        known = ("address", "pid", "cores", "started_at", "java")
        typer.echo(json.dumps(server and {name: getattr(server, name) for name in known}, default=str))
    else:
        say(_described(server) if server else f"no Spark server according to {state}")
    if server is None:
        raise typer.Exit(1)


@contextmanager
def _refusals() -> Iterator[None]:
    """Print the reason for which no server runs, and exit with 1."""
    try:
        yield
    except (jvm.JavaNotFoundError, spark_server.SparkServerError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _described(server: spark_server.SparkServer) -> str:
    return (
        f"Spark server at {server.address}, process {server.pid}, {server.cores} cores, since {server.started_at}, "
        f"Java in {server.java}"
    )
