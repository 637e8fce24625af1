"""A request to a server for each message, ten at once, retried with a growing pause while it is unavailable."""

from datetime import timedelta

from pydantic import BaseModel

from pipeline_platform import Backoff, Pipeline, Processors, Producer, Retry, TableBatcher
from pipeline_platform.testing import test_batch


class Parcel(BaseModel):
    number: int
    place: str


class Parcels(Pipeline):
    """Location of each parcel, by its carrier."""

    name = "parcels"
    producer = Producer(source="parcels_queue")
    processors = Processors(concurrency=2, threads=5, message_timeout=timedelta(seconds=30))
    batchers = {"places": TableBatcher(schema=Parcel)}
    retry = Retry(max_attempts=5, backoff=Backoff(first=timedelta(minutes=1), factor=3))

    def __init__(self):
        self.ask = lambda number: "Gdynia"  # a client of the carrier, which threads may share

    def handle_message(self, message, context):
        number = int(message.data)
        if number < 0:
            return message.failed("no such parcel", retry=False)  # dead at once: no retry can help
        return message.put(Parcel(number=number, place=self.ask(number)), batcher="places")


def test_a_carrier_that_is_away_fails_its_parcels_alone():
    def unavailable(number):
        if number == 2:
            raise ConnectionError("the carrier is unavailable")
        return "Gdynia"

    parcels = Parcels()
    parcels.ask = unavailable

    done = test_batch(parcels, ["1", "2", "3", "-4"])

    assert [message.data.number for message in done.successful] == [1, 3]
    assert [message.failure.kind for message in done.failed] == ["ConnectionError", "failed"]
