"""Departures: every flight to the lake, long delays to a batcher with a callback, cancelled ones to the failures."""

from datetime import timedelta

from pydantic import BaseModel

from pipeline_platform import Batcher, Pipeline, Processors, Producer, RateLimiting, TableBatcher


class Flight(BaseModel):
    carrier: str
    flight: int
    dep_time: int | None
    dep_delay: float | None


class Departures(Pipeline):
    """Departures from New York: every flight to the lake, long delays to the alerts."""

    name = "departures"
    producer = Producer(
        source="flights_queue",
        rate_limiting=RateLimiting(allowed_messages=100_000, interval=timedelta(seconds=1)),
    )
    processors = Processors(concurrency=2, max_demand=50_000)
    batchers = {"lake": TableBatcher(schema=Flight), "alerts": Batcher(schema=Flight, batch_size=10)}

    def handle_message(self, message, context):
        flight = message.json(Flight)
        if flight.dep_time is None:
            return message.failed("cancelled: no departure time")
        if (flight.dep_delay or 0) > 180:
            return message.put(flight, batcher="alerts")
        return message.put(flight, batcher="lake", batch_key=flight.carrier)

    def handle_batch(self, batcher, messages, batch_info, context):
        print(f"{batch_info.size} late flights in batch {batch_info.batch_id}")
        return messages
