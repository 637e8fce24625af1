"""Hand-written consumer that `benchmarks.kafka_trickle` measures: it commits to a Delta table, then its offsets.

Run it as `python -m benchmarks.kafka_loop SERVERS TOPIC TABLE`. If it crashes between the two commits, it stores
messages twice. A message that is not JSON ends it, each time it is started. It keeps no payloads, and has no retries.
"""

from __future__ import annotations

import json
import sys

import pyarrow as pa
from confluent_kafka import Consumer
from deltalake import DeltaTable, Schema, write_deltalake

from benchmarks.kafka_run import SCHEMA

MOST, EVERY_S = 10_000, 1.0


def main() -> None:
    """Consume until the process is ended."""
    servers, topic, path = sys.argv[1:]
    settings = {"bootstrap.servers": servers, "group.id": topic, "enable.auto.commit": False}
    consumer = Consumer({**settings, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    table = DeltaTable.create(path, Schema.from_arrow(SCHEMA))
    print("started", flush=True)
    while True:
        messages = [message for message in consumer.consume(MOST, EVERY_S) if message.error() is None]
        if messages:
            events = [json.loads(message.value() or b"") for message in messages]
            write_deltalake(table, pa.Table.from_pylist(events, SCHEMA), mode="append")
            consumer.commit(asynchronous=False)


if __name__ == "__main__":
    main()
