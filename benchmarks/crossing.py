"""Cost of transferring data from handling to batching by its fields, compared with the model's own JSON.

Run it as `python -m benchmarks.crossing [--messages N] [--rounds N]`. Handling and batching of the same messages run in
this process. Only the way in which data is written and read differs, and the order alternates between rounds. The
model's own JSON would run its validators a second time and apply its serializers. The median of the ratios is printed,
with minimum and maximum.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pyarrow as pa

from benchmarks.events import Event, payloads
from benchmarks.options import options, spread
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange, divide
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.columns import crossing
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher, Producer
from pipeline_platform.model.pipeline import BatchInfo, Pipeline
from pipeline_platform.tasks.batch.batch_plan import CutBatches, plan_table
from pipeline_platform.tasks.batch.handle_batches import HandleBatches
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.tasks.receive.read_shares import ReadShares
from pipeline_platform.tasks.record import staging
from pipeline_platform.tasks.record.step import receive_table

WINDOW = "2026-11-21T0000"


class Batched(Pipeline):
    """Events that a callback gets in batches."""

    name = "batched"
    producer = Producer(source="queue")
    batchers = {"default": Batcher(schema=Event, batch_size=1_000)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Decode the message."""
        return message.put(Event.model_validate_json(message.data))

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        """Return the messages unchanged."""
        return messages


def own_encode(data: Any, model: Any) -> tuple[bytes, str]:
    """Encode data as the model's own JSON."""
    return data.model_dump_json(round_trip=True).encode(), "json"


def own_decode(value: bytes, encoding: str, model: Any) -> Any:
    """Decode the model's own JSON."""
    return model.model_validate_json(value)


@contextmanager
def crossing_by(encode: Callable[..., Any], decode: Callable[..., Any]) -> Iterator[None]:
    """Replace the functions that transfer data."""
    with mock.patch.multiple(staging, encode=encode, decode=decode):
        yield


def ran(task: Callable[[int], Iterator[pa.RecordBatch]]) -> Manifest:
    """Return the result of the only task."""
    return Manifest.of(pa.Table.from_batches(list(task(0))))


def steps(lake: Lake, queue: TableQueue, received: list[RowRange], turn: str) -> dict[str, float]:
    """Return the seconds of processor time of handling and batching."""
    common: Any = {"pipeline": Batched, "context": None, "ack_policy": queue.ack_policy, "lake": lake}
    started = time.process_time()
    handled = ran(Handle(**common, receive_id=turn, parts=[received]))
    middle = time.process_time()
    options = Batched.batchers["default"]
    assert isinstance(options, Batcher)
    (staged,) = divide(handled.of_table(receive_table(turn, "default")), "batched", 1)
    planned = ran(CutBatches(**common, receive_id=turn, batcher="default", options=options, staged=staged))
    (plan,) = divide(planned.of_table(plan_table(turn, "default")), "batched", 1)
    cut = time.process_time()
    ran(HandleBatches(**common, receive_id=turn, batcher="default", staged=staged, plan=plan))
    return {"handling": middle - started, "batching": time.process_time() - cut}


def main() -> None:
    """Run the benchmark and print the result."""
    given = options(__doc__, messages=50_000, rounds=5)
    chance = random.Random(given.messages)
    ways = {"fields": (crossing.encode, crossing.decode), "own JSON": (own_encode, own_decode)}
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        lake, queue = Lake(root=f"{folder}/lake"), TableQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite")
        queue.create()
        queue.enqueue(payloads(given.messages))
        shares = queue.plan(given.messages, 1, "r")
        (received,) = divide(ran(ReadShares(queue, shares, lake, "batched", "r", WINDOW)).files, "batched", 1)
        for turn in range(given.rounds + 1):
            for way in chance.sample(sorted(ways), len(ways)):
                with crossing_by(*ways[way]):
                    took = steps(lake, queue, received, f"{way[:3]}{turn}")
                print(way, *(f"{step} {seconds:.2f} s" for step, seconds in took.items()), flush=True)
                for step, seconds in took.items() if turn else ():
                    times.setdefault((step, way), []).append(seconds)
    for step in ("handling", "batching"):
        ratios = [mine / other for mine, other in zip(times[step, "fields"], times[step, "own JSON"], strict=True)]
        print(f"{step}, fields / own JSON: {spread(ratios)}")


if __name__ == "__main__":
    main()
