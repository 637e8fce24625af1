"""Figures of a demo: approximate while it runs, and an exact account at its end."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import polars as pl
from deltalake import DeltaTable

from demo.flights import expected
from demo.place import Place
from demo.queues import Queue
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.storage import Lake
from pipelines.flights import Flights

_ID = ("source", "message_id")
_NAMED = (*_ID, "attempt", "outcome", "state", "batch_id")


def look(place: Place, queue: Queue, flights: int) -> dict[str, int]:
    """Count the flights in each state, from the queue, the control store and the logs of the tables."""
    with closing(place.control_store()) as control:
        in_flight = sum(claim.messages for claim in control.in_flight(Flights.name))
    lake, alerts = (_rows(place, name) for name in Flights.batchers)
    # If the server does not report a backlog, undecided messages count as not acknowledged.
    known = queue.left()
    left = max(0, flights - _rows(place, "outcomes")) if known is None else known
    return {
        "backlog": max(0, left - in_flight),
        "in flight": in_flight,
        "handled": lake + alerts,
        "open failures": sum(open_failures(place).values()),
        "acknowledged": flights - left,
    }


def open_failures(place: Place) -> dict[str, int]:
    """Count the open failures by window."""
    lake = Lake(root=str(place.lake))
    return FailedMessages(name=Flights.producer.source, lake=lake, pipeline=Flights.name).chosen_by_window()


def account(place: Place, queue: Queue, frame: pl.DataFrame) -> list[tuple[str, int, int]]:
    """Account for all departures once the queue is empty and no failure is open: label, expected, found."""
    first, final = pl.col("attempt") == 1, pl.col("outcome").is_in(["handled", "failed"])
    wanted, all_of_them = expected(frame), frame.height
    decided, failed = table(place, "outcomes").filter(final), table(place, "failed")
    lake, alerts = (table(place, name).select(*_ID, "attempt") for name in Flights.batchers)
    both, sent, left = pl.concat([lake, alerts]), sent_alerts(place), queue.drained()
    in_lake, in_alerts = lake.filter(first).height, alerts.filter(first).height
    return [
        ("received, each once", all_of_them, table(place, "messages").n_unique(_ID)),
        ("decided, each once", all_of_them, decided.filter(first).n_unique(_ID)),
        ("acknowledged", all_of_them, all_of_them - left),
        ("left in the queue", 0, left),
        ("handled, in batches", wanted["lake"] + wanted["alerts"], in_lake + in_alerts),
        ("  of these in flights/lake", wanted["lake"], in_lake),
        ("  of these in flights/alerts", wanted["alerts"], in_alerts),
        ("failed before the retry", wanted["cancelled"], decided.filter(first, outcome="failed").height),
        ("recovered by the retry", wanted["cancelled"], both.filter(~first).height),
        ("open failures", 0, sum(open_failures(place).values())),
        ("messages in the batchers' tables", all_of_them, both.height),
        ("messages stored twice", 0, both.height - both.n_unique(_ID)),
        ("events twice in flights/failed", 0, failed.height - failed.n_unique([*_ID, "attempt", "state"])),
        ("decisions twice in flights/outcomes", 0, decided.height - decided.n_unique([*_ID, "attempt"])),
        ("late flights in alerts that were sent", wanted["alerts"], int(sent.filter("published")["flights"].sum())),
        ("alerts of more than ten flights", 0, sent.filter(pl.col("flights") > 10).height),
    ]


def table(place: Place, name: str) -> pl.DataFrame:
    """Read a table of the pipeline without payloads; a missing table has no rows."""
    if not DeltaTable.is_deltatable(_uri(place, name)):
        return pl.DataFrame(schema=dict.fromkeys(_NAMED, pl.String) | {"attempt": pl.Int32})
    return pl.scan_delta(_uri(place, name)).drop("data", "metadata", "traceback", strict=False).collect()


def sent_alerts(place: Place) -> pl.DataFrame:
    """Read the sent alerts: the number of flights, and whether their batch was published."""
    published, rows = set(table(place, "alerts")["batch_id"]), []
    if place.alerts.exists():
        with closing(sqlite3.connect(f"file:{place.alerts}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT flights, batch_id FROM alerts").fetchall()
    sent = [(flights, batch_id in published) for flights, batch_id in rows]
    return pl.DataFrame(sent, schema={"flights": pl.Int64, "published": pl.Boolean}, orient="row")


def _rows(place: Place, name: str) -> int:
    uri = _uri(place, name)
    return DeltaTable(uri).count() if DeltaTable.is_deltatable(uri) else 0


def _uri(place: Place, name: str) -> str:
    return str(place.lake / Flights.name / name)
