"""The commands of `make demo` and `make dev`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pipelines.demo.place import ALL_FLIGHTS, PROJECT, Kind, Place

app = typer.Typer(help="A year of departures through a queue, Dagster and Spark.", no_args_is_help=True)

Home = Annotated[Path, typer.Option(help="Where the demo keeps all it makes.")]


def _count(flights: str | None, source: Kind) -> int:
    if flights is None or not flights.strip():
        return ALL_FLIGHTS // 10 if source == "sqs" else ALL_FLIGHTS
    if flights.strip().lower() == "all":
        return ALL_FLIGHTS
    if not flights.strip().isdecimal() or not 1 <= int(flights) <= ALL_FLIGHTS:
        raise typer.BadParameter(f"FLIGHTS is {flights!r}; give a number from 1 to {ALL_FLIGHTS}, or 'all'")
    return int(flights)


@app.command()
def run(
    source: Annotated[Kind, typer.Option(envvar="SOURCE", help="The queue.")] = "table",
    flights: Annotated[str | None, typer.Option(envvar="FLIGHTS", help="How many: a number or 'all'.")] = None,
    home: Home = PROJECT / ".demo",
) -> None:
    """Run the demo, or go on with one that was interrupted; exits with 0 only if the figures add up."""
    from pipelines.demo.show import show

    raise typer.Exit(show(Place(home.resolve()), source, _count(flights, source), Console()))


@app.command()
def dev(
    home: Home = PROJECT / ".demo",
    port: Annotated[int, typer.Option(envvar="PORT", min=0, max=65535, help="Of the UI; 0 for a free one.")] = 3000,
) -> None:
    """Open the UI on the demo's runs, assets, failures and backfill, until Ctrl-C."""
    from pipelines.demo.dev import serve

    raise typer.Exit(serve(Place(home.resolve()), port, Console()))


if __name__ == "__main__":
    app()
