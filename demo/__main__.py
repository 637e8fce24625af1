"""The commands of `make demo` and `make dev`."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from demo.place import ALL_FLIGHTS, PROJECT, DemoError, Kind, Place
from servers.server import ServerError

app = typer.Typer(help="A year of departures through a queue, Dagster and Spark.", no_args_is_help=True)
console = Console(soft_wrap=True, highlight=False)
Home = Annotated[Path, typer.Option(help="Folder for the files of the demo.")]


def _count(flights: str, source: Kind) -> int:
    wanted = flights.strip().lower() or ("all" if source == "table" else str(ALL_FLIGHTS // 10))
    if wanted == "all":
        return ALL_FLIGHTS
    if not wanted.isdecimal() or not 1 <= int(wanted) <= ALL_FLIGHTS:
        raise typer.BadParameter(
            f"FLIGHTS: {flights!r} is not a valid number. Use a number from 1 to {ALL_FLIGHTS}, or 'all'"
        )
    return int(wanted)


@app.command()
def run(
    source: Annotated[Kind, typer.Option(envvar="SOURCE", help="The queue.")] = "table",
    flights: Annotated[str, typer.Option(envvar="FLIGHTS", help="Number of flights, or 'all'.")] = "",
    home: Home = PROJECT / ".demo",
) -> None:
    """Run the demo. The exit code is 0 only if the figures add up."""
    from demo.show import show

    raise typer.Exit(show(Place(home), source, _count(flights, source), console))


@app.command()
def dev(
    home: Home = PROJECT / ".demo",
    port: Annotated[
        int, typer.Option(envvar="PORT", min=0, max=65535, help="Port of the UI; 0 selects a free port.")
    ] = 3000,
) -> None:
    """Show the runs, assets and failures of the demo in the UI until Ctrl-C. The queue of a server is empty."""
    from demo.queues import opened
    from demo.services import Services, alone

    place = Place(home)
    with suppress(KeyboardInterrupt), alone(place), opened(place, place.begun.source) as queue:
        place.enter(queue.environment)
        services = Services(place, port)
        services.wait()
        console.print(f"The Dagster UI: {services.url}/asset-groups (Ctrl-C ends it)")
        console.print(f"Backlog, runs, failures: {place.status_command(queue.environment)}", markup=False)
        while True:
            services.watch()
            time.sleep(1)


if __name__ == "__main__":
    try:
        app()
    except (DemoError, ServerError) as error:
        raise SystemExit(str(error)) from None
