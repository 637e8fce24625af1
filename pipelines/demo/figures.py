"""The figures of a demo: a quick look while it runs, and the strict account at its end."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any, NamedTuple

import polars as pl

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.failed import FailedMessages
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipelines.demo.departures import Expected
from pipelines.demo.place import Place, Progress
from pipelines.demo.queues import at_the_queue
from pipelines.flights import Flights

_ID = ("source", "message_id")


class Figures(NamedTuple):
    """What a look finds; rows of tables by their logs, without reading a row.

    Attributes:
        waiting: In the queue, leased to nobody.
        at_the_queue: In the queue at all: neither handled nor recorded as failed and acknowledged.
        in_flight: Leased by runs that live, or died less than a lease ago.
        handled: Rows of the batchers' tables.
        failed: Events of the failed-message table.
    """

    waiting: int
    at_the_queue: int
    in_flight: int
    handled: int
    failed: int


def look(place: Place, progress: Progress) -> Figures:
    """Look at the queue, the control store and the tables."""
    tables = Tables(Lake(root=str(place.lake)), Flights)
    control = ControlStore(f"sqlite:///{place.control}")
    try:
        claims = control.in_flight(Flights.name)
    finally:
        control.close()
    waiting, there = at_the_queue(place, progress)
    return Figures(
        waiting,
        there,
        sum(claim.messages for claim in claims),
        sum(_rows(tables, name) for name in Flights.batchers),
        _rows(tables, "failed"),
    )


def open_failures(place: Place) -> dict[str, int]:
    """The failures that wait to be driven again, by window."""
    return FailedMessages(
        name=Flights.producer.source, lake=Lake(root=str(place.lake)), pipeline=Flights.name
    ).open_by_window()


class Line(NamedTuple):
    """A line of the account."""

    what: str
    wanted: int
    found: int

    @property
    def holds(self) -> bool:
        """Whether it is as it must be."""
        return self.wanted == self.found


def account_before(place: Place, progress: Progress, wanted: Expected) -> list[Line]:
    """What must hold once the queue is empty, before failures are driven again; it holds afterwards, too."""
    first = pl.col("attempt") == 1
    messages, outcomes = _table(place, "messages", "attempt"), _table(place, "outcomes", "attempt", "outcome")
    decided = outcomes.filter(first & pl.col("outcome").is_in(["handled", "failed"]))
    lake, alerts = (_table(place, name, "attempt").filter(first).height for name in ("lake", "alerts"))
    failed = decided.filter(pl.col("outcome") == "failed").height
    left = at_the_queue(place, progress)[1]
    return [
        Line("received, each once", wanted.flights, messages.select(_ID).n_unique()),
        Line("decided, each once", wanted.flights, decided.select(_ID).n_unique()),
        Line("acknowledged", wanted.flights, progress.flights - left),
        Line("left in the queue", 0, left),
        Line("handled, in batches", wanted.lake + wanted.alerts, lake + alerts),
        Line("  of these in flights/lake", wanted.lake, lake),
        Line("  of these in flights/alerts", wanted.alerts, alerts),
        Line("failed before the backfill", wanted.cancelled, failed),
    ]


def account_after(place: Place, wanted: Expected) -> list[Line]:
    """What must hold once the failures are brought home."""
    lake, alerts = (_table(place, name, "attempt") for name in ("lake", "alerts"))
    both = pl.concat([lake.select(_ID), alerts.select(_ID)])
    again = lake.filter(pl.col("attempt") > 1).height + alerts.filter(pl.col("attempt") > 1).height
    failed = _table(place, "failed", "attempt", "state")
    decided = _table(place, "outcomes", "attempt", "outcome").filter(pl.col("outcome").is_in(["handled", "failed"]))
    written = _alerts(place)
    return [
        Line("brought home by the backfill", wanted.cancelled, again),
        Line("open failures", 0, sum(open_failures(place).values())),
        Line("messages in the batchers' tables", wanted.flights, both.height),
        Line("messages twice in flights/lake or alerts", 0, both.height - both.n_unique()),
        Line("events twice in flights/failed", 0, failed.height - failed.n_unique()),
        Line("decisions twice in flights/outcomes", 0, _twice(decided)),
        Line("late flights in alerts that were sent", wanted.alerts, written.flights),
        Line("alerts of more than ten flights", 0, written.too_large),
    ]


class Alerts(NamedTuple):
    """What the alerts' own database holds.

    Attributes:
        flights: In alerts of batches that were published.
        too_large: Alerts of more than ten flights.
        unpublished: Alerts of batches whose run died before its decision: a callback runs at least once.
    """

    flights: int
    too_large: int
    unpublished: int


def _alerts(place: Place) -> Alerts:
    published = set(_table(place, "alerts", "batch_id")["batch_id"].unique())
    if not place.alerts.exists():
        return Alerts(0, 0, 0)
    with closing(sqlite3.connect(f"file:{place.alerts}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT batch_id, flights FROM alerts").fetchall()
    ours = [flights for batch_id, flights in rows if batch_id in published]
    return Alerts(sum(ours), sum(flights > 10 for _, flights in rows), len(rows) - len(ours))


def alerts_of_dead_runs(place: Place) -> int:
    """Alerts that runs sent and died before they could publish their batch; another run sent those flights again."""
    return _alerts(place).unpublished


def delays(place: Place) -> pl.DataFrame:
    """The table `flights/delays_per_carrier`."""
    return pl.read_delta(str(place.lake / Flights.name / "delays_per_carrier"))


def _rows(tables: Tables, name: str) -> int:
    table = tables[name]
    return sum(file.rows for file in table.files(table.open())) if table.exists() else 0


def _table(place: Place, name: str, *columns: str) -> pl.DataFrame:
    table = Tables(Lake(root=str(place.lake)), Flights)[name]
    if not table.exists():
        empty: dict[str, Any] = dict.fromkeys(_ID, pl.String)
        return pl.DataFrame(schema=empty | {name: pl.Int32 if name == "attempt" else pl.String for name in columns})
    return pl.scan_delta(table.uri).select(*_ID, *columns).collect()


def _twice(decided: pl.DataFrame) -> int:
    return decided.height - decided.select(*_ID, "attempt").n_unique()
