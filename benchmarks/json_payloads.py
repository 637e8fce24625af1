"""Decoding payloads of 250 bytes: `message.json()` compared with `json.loads`, and with the model itself.

Run it as `python -m benchmarks.json_payloads [--messages N] [--rounds N]`. Peers take turns in alternating order. The
median of the ratios of processor time is printed, with minimum and maximum.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from benchmarks.events import Event, payloads
from benchmarks.handling import ratio
from benchmarks.options import options
from pipeline_platform.model.message import MESSAGES, Message

WAYS: dict[str, Callable[[Message], Any]] = {
    "message.json()": lambda message: message.json(),
    "json.loads": lambda message: json.loads(message.data),
    "message.json(Model)": lambda message: message.json(Event),
    "model_validate_json": lambda message: Event.model_validate_json(message.data),
}


def received(count: int) -> list[Message]:
    """Return messages as handling gets them."""
    rows = [{"data": data, "received_at": datetime.now(UTC)} for data in payloads(count)]
    return list(Message.each(pa.RecordBatch.from_pylist(rows, MESSAGES)))


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, messages=50_000, rounds=9)
    messages, chance = received(given.messages), random.Random(given.messages)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(given.rounds):
        for name in chance.sample(sorted(WAYS), len(WAYS)):
            started = time.process_time()
            for message in messages:
                WAYS[name](message)
            times[name].append(time.process_time() - started)
    for name, took in times.items():
        print(f"{name}: {min(took) / given.messages * 1e6:.2f} us per message in the best round")
    print(f"message.json() / json.loads: {ratio(times, 'message.json()', 'json.loads')} (at most 0.5)")
    print(f"with a model: {ratio(times, 'message.json(Model)', 'model_validate_json')} (at most 1.1)")


if __name__ == "__main__":
    main()
