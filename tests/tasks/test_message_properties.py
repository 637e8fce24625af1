"""Properties of messages: all are available in every callback, in all lanes and in the testing kit."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline_platform import Batcher, Message, Pipeline, Processors, Producer, Share, Splitter, TableBatcher
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange, divide
from pipeline_platform.lake.storage import Lake
from pipeline_platform.tasks.batch.batch_plan import CutBatches, plan_table
from pipeline_platform.tasks.batch.handle_batches import HandleBatches
from pipeline_platform.tasks.batch.parents import EndParents
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.tasks.handle.in_order import (
    DealPartitions,
    FindPartitions,
    HandleInOrder,
    dealt_table,
    found_table,
)
from pipeline_platform.tasks.handle.record_unseen import RecordUnseen
from pipeline_platform.tasks.handle.spark_lane import WriteColumns
from pipeline_platform.tasks.notify_author import NotifyAuthor
from pipeline_platform.tasks.record.fan_out import ends_table, parents_table
from pipeline_platform.tasks.record.staging import staged_table
from pipeline_platform.testing import test_batch
from tests.fixtures.small_lake import WINDOW, Memory, Row, done, numbered, ranges, received, returned

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
        return messages


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

Lane = Callable[[Lake, Telling], object]


def in_tasks(pipeline: type[Pipeline], *, careful: bool = False) -> Lane:
    def run(lake: Lake, source: Telling) -> None:
        name, shared = pipeline.name, _shared(pipeline, lake, source)
        raw = received(lake, name, source)
        whole = divide(raw.of_table("messages"), name, 1)
        if pipeline.uses_columns():
            written = _by_columns(shared, whole, careful)
        elif pipeline.partitioning() is None:
            written = done(Handle(**shared, parts=whole), careful=careful)
        else:
            written = done(FindPartitions(**shared, parts=whole), careful=careful)
            deal = DealPartitions(lake, name, "r1", ranges(written, name, found_table("r1")), 1)
            plan = ranges(returned(deal(0)), name, dealt_table("r1"))
            written += done(HandleInOrder(**shared, parts=whole, plan=plan), careful=careful)
        staged = ranges(written, name, staged_table("r1", "batched"))
        options = pipeline.batchers["batched"]
        assert isinstance(options, Batcher)
        cut = CutBatches(**shared, batcher="batched", options=options, staged=staged)
        plan = ranges(done(cut, careful=careful), name, plan_table("r1", "batched"))
        batches = HandleBatches(**shared, batcher="batched", staged=staged, plan=plan)
        written += done(batches, careful=careful)
        parents, ends = (ranges(written, name, table("r1")) for table in (parents_table, ends_table))
        written += done(EndParents(**shared, parts=whole, plan=parents, ends=ends), careful=careful)
        ended = {"outcomes": ranges(written, name, "outcomes"), "failed": ranges(written, name, "failed")}
        done(NotifyAuthor(**shared, parts=whole, **ended), careful=careful)

    return run


def _shared(pipeline: type[Pipeline], lake: Lake, source: Telling) -> dict[str, Any]:
    told = {"context": None, "ack_policy": source.ack_policy}
    return {"pipeline": pipeline, "lake": lake, "receive_id": "r1", **told}


def _by_columns(shared: dict[str, Any], whole: list[list[RowRange]], careful: bool) -> Manifest:
    aside = done(RecordUnseen(**shared, parts=whole, repeats=()), careful=careful)
    places = [place for place, payload in enumerate(PAYLOADS) if len(payload) <= 100]
    failures = ["as told" if PAYLOADS[place].endswith("handle_message") else None for place in places]
    texts = [PAYLOADS[place].encode() for place in places]
    nothing = [None] * len(places)
    routed = {"batcher": ["batched"] * len(places), "batch_key": nothing, "_failure": failures, "_skip": nothing}
    columns = {"position": pa.array(places), "data": pa.array(texts)}
    columns |= {name: pa.array(values, pa.string()) for name, values in routed.items()}
    rows = pa.RecordBatch.from_pydict(columns)
    return aside + done(WriteColumns(**shared, received=whole[0]), [rows], careful=careful)


def in_the_kit(pipeline: type[Pipeline]) -> Lane:
    def run(lake: Lake, source: Telling) -> None:
        test_batch(pipeline, PAYLOADS, metadata={"diary": source.diary}, attempt=2, source=source)

    return run


BATCHED = {"batch_size", "handle_batch", "acknowledge", "acknowledge of a failed one"}
FAILED = {f"handle_failed of {stage}" for stage in ("receive_messages", "batch_size", "handle_batch")}
HANDLED = {"transform", "partition_by", "prepare_messages", "handle_message"}
EVERY = {*BATCHED, *FAILED, *HANDLED, "handle_batch of a child", *(f"handle_failed of {stage}" for stage in HANDLED)}


@pytest.mark.parametrize(
    ("lane", "callbacks"),
    [
        pytest.param(in_tasks(Free), EVERY, id="tasks"),
        pytest.param(in_tasks(Free, careful=True), EVERY, id="forks"),
        pytest.param(in_tasks(InOrder), EVERY, id="in-order"),
        pytest.param(in_tasks(Columns), BATCHED | FAILED | {"handle_failed of handle_messages"}, id="spark-lane"),
        pytest.param(in_the_kit(Free), EVERY, id="kit"),
        pytest.param(in_the_kit(InOrder), EVERY, id="kit-in-order"),
    ],
)
def test_every_property_is_known_in_every_callback(lake, tmp_path, lane, callbacks):
    diary = tmp_path / "diary"
    source = Telling(deliveries_=numbered(*map(str.encode, PAYLOADS)), diary=str(diary))
    lane(lake, source)
    told = [json.loads(line) for line in diary.read_text().splitlines()]
    assert {callback for callback, _ in told} == callbacks
    known = {"metadata": {"diary": str(diary)}, "attempt": 2, "window": WINDOW}
    for callback, says in told:
        assert {name: says[name] for name in known} == known, callback
        assert datetime.fromisoformat(says["received_at"]) > datetime(2026, 1, 1, tzinfo=UTC), callback
