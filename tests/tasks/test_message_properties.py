"""Properties of messages: all are available in every callback, in all lanes and in the testing kit."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipeline_platform import Batcher, Message, Pipeline, Processors, Producer, Share, Splitter, TableBatcher
from pipeline_platform.run.work.spark_work import SparkWork
from pipeline_platform.testing import test_batch
from tests.fixtures.flow import flow_of, run, run_in_this_process
from tests.fixtures.small_lake import WINDOW, Memory, Row, numbered
from tests.fixtures.telemetry import run_tasks_here

PROPERTIES = [name for name, value in vars(Message).items() if isinstance(value, property)]


class Seeing(Pipeline, abstract=True):
    """Logs the properties of messages in each callback to the file named in their metadata.

    Payloads say where a message is to fail: `batch handle_batch` in its batch, `family` with its children.
    """

    name = "seeing"
    producer = Producer(source="memory")
    processors = Processors(chunk_size=1, max_message_bytes=100)

    def transform(self, event: Message) -> Message:
        return seen("transform", event)

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        return [seen("prepare_messages", message) for message in messages]

    def handle_message(self, message: Message, context: Any) -> Message | list[Message]:
        seen("handle_message", message)
        message = message.configure_ack(on_success="noop").put_batch_mode("flush").put_data(message.data.decode())
        if message.data.startswith("family"):
            return [message.put(f"batch {message.data}", batcher="batched", batch_key=key) for key in "ab"]
        if message.data == "table":
            return message.put(Row(text=message.data), batcher="table")
        return message.put_batcher("batched")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: Any, context: Any) -> list[Message]:
        return [
            seen("handle_batch" if message.child is None else "handle_batch of a child", message)
            for message in messages
        ]

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        for message in messages:
            assert message.failure is not None
            seen(f"handle_failed of {message.failure.stage}", message)
        return messages

    def acknowledge(self, ack_ref: str, successful: list[Message], failed: list[Message], context: Any) -> None:
        for message in successful:
            seen("acknowledge", message)
        for message in failed:
            seen("acknowledge of a failed one", message)


def splits(message: Message, acc: None) -> tuple[str, None]:
    seen("batch_size", message)
    return "emit", acc


def in_one(message: Message) -> int:
    seen("partition_by", message)
    return 1


class Free(Seeing):
    """Handles messages without an order."""

    batchers = {
        "table": TableBatcher(schema=Row),
        "batched": Batcher(batch_size=Splitter(initial=None, step=splits), partition_by=in_one),
    }


class InOrder(Free):
    """Handles messages in the order of partitions."""

    partition_by = staticmethod(in_one)


class Columns(Pipeline):
    """Handles messages in the Spark lane."""

    name = "seeing"
    producer = Producer(source="memory")
    processors = Processors(chunk_size=1, max_message_bytes=100)
    batchers = {"batched": Batcher(batch_size=Splitter(initial=None, step=splits))}
    handle_batch, handle_failed, acknowledge = Seeing.handle_batch, Seeing.handle_failed, Seeing.acknowledge

    def handle_messages(self, messages: Any, context: Any) -> Any:
        from pyspark.sql import functions as f

        fails = f.col("data").cast("string").endswith("handle_message")
        status = f.when(fails, "failed").otherwise("ok")
        return messages.withColumns({"batcher": f.lit("batched"), "status": status, "reason": f.lit("as told")})


def seen(callback: str, message: Message) -> Message:
    """Log the properties of a message, and raise if its payload names this callback."""
    told = {name: getattr(message, name) for name in (*PROPERTIES, "data", "batcher", "batch_key")}
    with Path(told["metadata"]["diary"]).open("a") as diary:
        diary.write(json.dumps([callback, told], default=str) + "\n")
    data = message.data if isinstance(message.data, str) else message.data.decode()
    if data.endswith(f" {callback}"):
        raise ValueError("as told")
    return message


class Telling(Memory):
    """Delivers more properties of each message."""

    diary: str

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        ids, payloads = zip(*self.deliveries_, strict=True)
        more: dict[str, Any] = {"metadata": [{"diary": self.diary}] * len(ids), "attempt": [2] * len(ids)}
        yield self.deliveries(message_id=ids, data=payloads, ack_id=ids, ack_ref="q", **more)


PAYLOADS = [
    *["table", "batch", "family", "x" * 101, "batch transform", "batch partition_by", "batch prepare_messages"],
    *["batch handle_message", "batch batch_size", "batch handle_batch", "family handle_batch of a child"],
]

Lane = Callable[[Path, Telling], object]


def in_a_run(pipeline: type[Pipeline]) -> Lane:
    spark: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: default))
    return lambda folder, source: run(flow_of(folder, pipeline, source, session=lambda: spark))


def in_the_kit(pipeline: type[Pipeline]) -> Lane:
    def run(folder: Path, source: Telling) -> None:
        test_batch(pipeline, PAYLOADS, metadata={"diary": source.diary}, attempt=2, source=source)

    return run


BATCHED = {"batch_size", "handle_batch", "acknowledge", "acknowledge of a failed one"}
FAILED = {f"handle_failed of {stage}" for stage in ("receive_messages", "batch_size", "handle_batch")}
HANDLED = {"transform", "partition_by", "prepare_messages", "handle_message"}
EVERY = {*BATCHED, *FAILED, *HANDLED, "handle_batch of a child", *(f"handle_failed of {stage}" for stage in HANDLED)}


@pytest.mark.parametrize(
    ("lane", "tasks"),
    [
        pytest.param(in_a_run(Free), run_tasks_here, id="tasks"),
        pytest.param(in_a_run(Free), run_in_this_process, id="forks"),
        pytest.param(in_a_run(InOrder), run_tasks_here, id="in-order"),
        pytest.param(in_the_kit(Free), None, id="kit"),
        pytest.param(in_the_kit(InOrder), None, id="kit-in-order"),
    ],
)
def test_every_property_is_known_in_every_callback(tmp_path, monkeypatch, lane, tasks):
    monkeypatch.setattr(SparkWork, "run", tasks)
    assert seen_by(tmp_path, lane) == EVERY


def test_every_property_is_known_in_the_callbacks_of_the_spark_lane(tmp_path, tasks_here, spark_session):
    lane: Lane = lambda folder, source: run(flow_of(folder, Columns, source, session=spark_session))  # noqa: E731
    assert seen_by(tmp_path, lane) == BATCHED | FAILED | {"handle_failed of handle_messages"}


def seen_by(tmp_path: Path, lane: Lane) -> set[str]:
    """Return the callbacks that saw messages with all properties."""
    diary = tmp_path / "diary"
    lane(tmp_path, Telling(deliveries_=numbered(*map(str.encode, PAYLOADS)), diary=str(diary)))
    told = [json.loads(line) for line in diary.read_text().splitlines()]
    known = {"metadata": {"diary": str(diary)}, "attempt": 2, "window": WINDOW}
    for callback, says in told:
        assert {name: says[name] for name in known} == known, callback
        assert datetime.fromisoformat(says["received_at"]) > datetime(2026, 1, 1, tzinfo=UTC), callback
    return {callback for callback, _ in told}
