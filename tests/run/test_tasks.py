"""Calls of the source, number of tasks per step, and batches of each batcher, without Spark."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors, Producer, Share, Splitter
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.run import steps
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.work.spark_work import SparkWork
from tests.fixtures.flow import begun, finish, flow_of, handled
from tests.fixtures.small_lake import Memory, numbered
from tests.fixtures.telemetry import run_tasks_here

SEEN: list[tuple[str, str, int]] = []


class Plain(Pipeline):
    """A pipeline without numbers of tasks; its data are numbers."""

    name = "plain"
    producer = Producer(source="queue")
    batchers = {"all": Batcher(batch_size=10)}

    def handle_message(self, message: Message, context: Any) -> Message:
        """Put the message to the first batcher, or to the batcher that the payload names."""
        batcher, _, number = message.data.decode().rpartition(" ")
        return message.put(int(number), batcher=batcher or "all")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        SEEN.append((batcher, batch_info.trigger, len(messages)))
        return messages


class Told(Plain):
    """A pipeline that sets every number of tasks."""

    name = "told"
    producer = Producer(source="queue", concurrency=3)
    processors = Processors(concurrency=4)
    batchers = {"all": Batcher(batch_size=10, concurrency=5)}


def up_to_nine(message: Message, weight: int) -> tuple[str, int]:
    """End a batch at a weight of nine."""
    weight += message.data
    return ("emit" if weight >= 9 else "cont"), weight


class Apart(Plain):
    """A pipeline with three batchers that cut batches differently."""

    name = "apart"
    batchers = {
        "pairs": Batcher(batch_size=2),
        "threes": Batcher(batch_size=3),
        "nines": Batcher(batch_size=Splitter(initial=0, step=up_to_nine)),
    }


class Noting(Memory):
    """A source that records its calls, and makes a share per task."""

    @property
    def asked(self) -> list[tuple[Any, ...]]:
        """Recorded calls of `plan` and `read`."""
        return self._told

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        self._told.append(("plan", demand, concurrency, receive_id))  # type: ignore[arg-type]
        return [Share(messages=demand // concurrency, at={"task": task}) for task in range(concurrency)]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        self._told.append(("read", share.messages, receive_id))  # type: ignore[arg-type]
        ids, data = zip(*self.deliveries_, strict=True)
        if share.at["task"] == 0:
            yield self.deliveries(message_id=ids, data=data, ack_id=ids, ack_ref="q", redelivered=False)


Tasks = list[tuple[str, int]]


@pytest.fixture
def tasks(monkeypatch):
    """Run tasks in this process, and record their kinds and numbers."""
    asked: Tasks = []

    def run(self: SparkWork, task: Any, shares: int, messages: int | None = None) -> Manifest:
        asked.append((self.name, shares))
        return run_tasks_here(self, task, shares)

    monkeypatch.setattr(SparkWork, "run", run)
    SEEN.clear()
    return asked


def plain_flow(folder: Path, pipeline: type[Pipeline], *payloads: str) -> Flow:
    source = Noting(name="queue", deliveries_=numbered(*(payload.encode() for payload in payloads)))
    spark: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: default))
    return flow_of(folder, pipeline, source, session=lambda: spark)


def batched(flow: Flow, demand: int = 600) -> str:
    """Receive, handle and batch; return the tasks."""
    receive = handled(flow, demand=demand)
    steps.batch_messages(flow, receive)
    return receive.receive_id


@pytest.mark.parametrize(("pipeline", "reading", "handling", "batching"), [(Plain, 2, 2, 1), (Told, 3, 4, 5)])
def test_two_tasks_read_two_handle_and_one_batches_unless_told(tmp_path, tasks, pipeline, reading, handling, batching):
    batched(plain_flow(tmp_path, pipeline, *map(str, range(200))))
    name = pipeline.name
    assert tasks == [(f"{name}/receive", reading), (f"{name}/handle", handling), (f"{name}/batch-all", batching)]


def test_a_source_is_told_the_demand_how_many_read_it_and_the_receive_and_no_more(tmp_path, tasks):
    flow = plain_flow(tmp_path, Plain, "1")
    receive_id = batched(flow)
    assert isinstance(flow.source, Noting)
    assert flow.source.asked == [("plan", 600, 2, receive_id), *[("read", 300, receive_id)] * 2]


def test_each_batcher_has_batches_of_its_own_size_or_splitter_and_what_is_left_is_delivered(tmp_path, tasks):
    texts = [f"{batcher} {number}" for number in range(2, 7) for batcher in Apart.batchers]
    batched(plain_flow(tmp_path, Apart, *texts))
    seen = {name: [what for batcher, *what in SEEN if batcher == name] for name in Apart.batchers}
    assert seen == {
        "pairs": [["size", 2], ["size", 2], ["timeout", 1]],
        "threes": [["size", 3], ["timeout", 2]],
        "nines": [["size", 3], ["size", 2]],
    }


@pytest.mark.parametrize("stops", ["its pipeline", "itself"])
def test_a_run_that_is_asked_to_stop_before_it_receives_leases_nothing(tmp_path, tasks, stops):
    flow = plain_flow(tmp_path, Plain, "1")
    receive = begun(flow, demand=600)
    if stops == "itself":
        flow.control.stop(receive.receive_id, timedelta(seconds=30))
    else:
        flow.control.drain("plain", "moves", timedelta(seconds=30))

    steps.receive_messages(flow, receive)

    assert isinstance(flow.source, Noting)
    assert flow.source.asked == []
    steps.handle_messages(flow, receive)
    finish(flow, receive)
    assert (flow.control.in_flight("plain"), flow.ledger.unfinished()) == ([], [])
