"""Messages and pipelines of the benchmarks: clicks and views of 250 bytes of JSON for two typed tables, and waits."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import polars as pl
from msgspec import defstruct
from pydantic import BaseModel

from pipeline_platform.model.blocks import columns
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import BatchInfo, Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Event(BaseModel):
    """A click or a view."""

    id: int
    user: str
    kind: str
    page: str
    country: str
    price: float
    quantity: int
    agent: str


def payloads(count: int) -> Iterator[bytes]:
    """Yield events of about 250 bytes."""
    for n in range(count):
        event = {
            "id": n,
            "user": f"user-{n % 9973:05d}",
            "kind": "click" if n % 3 else "view",
            "page": f"/shop/category-{n % 97}/product-{n % 7919}",
            "country": ("de", "fr", "us", "jp")[n % 4],
            "price": round((n % 1000) * 1.1, 2),
            "quantity": n % 5,
            "agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko)",
        }
        yield json.dumps(event).encode()


class Events(Pipeline):
    """Stores each event in the table of its kind, decoded with `json.loads`."""

    name = "events"
    producer = Producer(source="events_queue", deduplicate_for=timedelta(days=1))
    processors = Processors(concurrency=2, max_demand=500_000)
    batchers = {"clicks": TableBatcher(schema=Event), "views": TableBatcher(schema=Event)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Decode and route the message."""
        event = json.loads(message.data)
        batcher = "clicks" if event["kind"] == "click" else "views"
        return message.put(event, batcher=batcher, batch_key=event["country"])


EventStruct: Any = defstruct("EventStruct", [(name, field.annotation) for name, field in Event.model_fields.items()])
"""The fields of `Event` as a struct."""


class ByJson(Events):
    """The same pipeline with `message.json()`."""

    name = "by_json"

    def handle_message(self, message: Message, context: Any) -> Message:
        """Decode and route the message."""
        event = message.json()
        return message.put(event, batcher=f"{event['kind']}s", batch_key=event["country"])


class ByModel(Events):
    """The same pipeline with `message.json(Event)`."""

    name = "by_model"

    def handle_message(self, message: Message, context: Any) -> Message:
        """Decode and route the message."""
        event = message.json(Event)
        return message.put(event, batcher=f"{event.kind}s", batch_key=event.country)


class ByStruct(Events):
    """The same pipeline with `message.json(EventStruct)`."""

    name = "by_struct"
    batchers = {"clicks": TableBatcher(schema=EventStruct), "views": TableBatcher(schema=EventStruct)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Decode and route the message."""
        event = message.json(EventStruct)
        return message.put(event, batcher=f"{event.kind}s", batch_key=event.country)


class ByBlocks(Pipeline):
    """The same pipeline with blocks."""

    name = "by_blocks"
    producer = Events.producer
    processors = Events.processors
    batchers = Events.batchers

    def handle_messages(self, messages: pl.DataFrame, context: Any) -> pl.DataFrame:
        """Decode and route a block."""
        events: pl.DataFrame = columns(messages, Event)
        return events.with_columns(batcher=pl.col("kind") + "s", batch_key="country")


IDIOMS: dict[str, type[Pipeline]] = {
    "json.loads": Events,
    "message.json()": ByJson,
    "message.json(Model)": ByModel,
    "message.json(Struct)": ByStruct,
    "blocks": ByBlocks,
}
"""Equivalent pipelines by their way to decode."""

POISON = b"kill"


class Clean(Events):
    """Would crash at one message, which the queue does not contain."""

    name = "clean"

    def handle_message(self, message: Message, context: Any) -> Message:
        """Crash at the message."""
        if message.data == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().handle_message(message, context)


class Poisoned(Clean):
    """The same pipeline, for a queue with one such message."""

    name = "poisoned"


class Hundred(Clean):
    """The same pipeline, for a queue with a hundred such messages."""

    name = "hundred"


class Timed(Clean):
    """The same pipeline as `Clean`, with a limit for each call."""

    name = "timed"
    processors = Events.processors.model_copy(update={"message_timeout": timedelta(seconds=10)})


class LongKnown(Events):
    """The same pipeline, which recognises redeliveries for four days."""

    name = "long_known"
    producer = Producer(source="queue", deduplicate_for=timedelta(days=4))


class Worker(BaseModel):
    """Process and thread that handled a message."""

    process: int
    thread: int


class Waiting(Pipeline):
    """Waits for each message and stores its worker: ten at once, in two tasks."""

    name = "waiting"
    producer = Producer(source="queue")
    processors = Processors(concurrency=2, threads=5, max_demand=5)
    batchers = {"workers": TableBatcher(schema=Worker)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Wait."""
        time.sleep(0.03)
        return message.put(Worker(process=os.getpid(), thread=threading.get_native_id()), batcher="workers")


class Batched(Events):
    """Events in batches of a hundred for a callback."""

    name = "batched"
    batchers = {"clicks": Batcher(batch_size=100), "views": Batcher(batch_size=100)}

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Return the messages unchanged."""
        return messages


class EventColumns(Pipeline):
    """The same pipeline in the Spark lane."""

    name = "event_columns"
    producer = Events.producer
    processors = Events.processors
    batchers = Events.batchers

    def handle_messages(self, messages: DataFrame, context: Any) -> DataFrame:
        """Decode and route all messages."""
        from pyspark.sql import functions as f

        return parsed(messages).withColumns(
            {
                "batcher": f.when(f.col("kind") == "click", "clicks").otherwise("views"),
                "batch_key": f.col("country"),
            }
        )


SCHEMA = "id bigint, user string, kind string, page string, country string, price double, quantity bigint, agent string"


def parsed(messages: DataFrame) -> DataFrame:
    """Add the fields of each event as columns."""
    from pyspark.sql import functions as f

    return messages.withColumn("event", f.from_json(f.col("data").cast("string"), SCHEMA)).select("*", "event.*")
