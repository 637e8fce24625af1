"""Order that waits: after a failure, later messages of its partition are held until it is resolved."""

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from pipeline_platform import (
    Batcher,
    BatchInfo,
    Message,
    Pipeline,
    Processors,
    Producer,
    RateLimiting,
    Retry,
    TableBatcher,
)
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.failures.closing import close
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.lake.failures.held import waits_for
from pipeline_platform.run.flow import Flow
from pipeline_platform.testing import test_batch
from tests.fixtures.flow import kinds, rows, run
from tests.fixtures.flow_pipelines import Place, Word


def account(message: Message) -> int:
    payload = message.data
    return int((payload.word if isinstance(payload, Word) else payload).split()[0])


class Held(Pipeline):
    """A pipeline that holds partitions. A payload contains its partition, its number there, and a fault."""

    name = "held"
    producer = Producer(source="queue")
    processors = Processors(concurrency=3, on_failure="hold")
    partition_by = account
    retry = Retry(max_attempts=3, backoff=timedelta(seconds=1))
    batchers: ClassVar[Any] = {"words": TableBatcher(schema=Word)}

    def handle_message(self, message: Message, context: Any) -> Message:
        payload = message.data.decode()
        if payload.endswith("fail") and message.attempt == 1:
            raise ValueError("as told")
        if payload.endswith("always"):
            raise ValueError("as told")
        return message.put(Word(word=payload if not payload.endswith("column") else 1), batcher="words")


class HeldBatches(Pipeline):
    """The same, with a failure in a batch."""

    name = "held_batches"
    producer = Producer(source="queue")
    processors = Processors(on_failure="hold")
    partition_by = account
    retry = Retry(max_attempts=3)
    batchers: ClassVar[Any] = {"words": Batcher(schema=Word, batch_size=2)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put(Word(word=message.data.decode()), batcher="words")

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        return [m.failed("as told") if m.data.word.endswith("fail") and m.attempt == 1 else m for m in messages]


def numbers(flow: Flow) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for word in rows(flow, "words")["word"]:
        partition, number, *_ = word.split()
        found[partition].append(int(number))
    return {partition: sorted(some) for partition, some in found.items()}


def payloads(count: int, **faults: str) -> list[bytes]:
    return [f"{n % 3} {n} {faults.get(f'at_{n}', '')}".strip().encode() for n in range(count)]


def due(flow: Flow, after_s: float = 3600) -> Selection:
    return Selection(state="due", due_by=datetime.now(UTC) + timedelta(seconds=after_s))


def failures(flow: Flow, selection: Selection) -> int:
    failed = FailedMessages(name="held", lake=flow.lake, pipeline=flow.pipeline.name, selection=selection, holds=True)
    return sum(failed.chosen_by_window().values())


@pytest.mark.parametrize("fault", ["fail", "column"])
def test_later_messages_of_the_partition_are_held_and_other_partitions_go_on(filled, fault):
    flow = filled(Held, payloads(30, at_10=fault))
    run(flow)
    assert numbers(flow) == {"0": [*range(0, 30, 3)], "1": [1, 4, 7], "2": [*range(2, 30, 3)]}
    assert sorted(kinds(flow).values()).count("held") == 6
    assert flow.source.backlog().messages == 0


def test_a_partition_is_held_until_a_retry_handles_it_in_order(filled):
    flow = filled(Held, payloads(12, at_4="fail"))
    run(flow)
    assert failures(flow, due(flow, after_s=-60)) == 0
    assert failures(flow, due(flow)) == 3, "held messages are due with the failure that holds them"
    run(flow, "failed", selection=Selection(kind="held"))
    assert numbers(flow)["1"] == [1], "a held message cannot be retried before"

    flow.source.send([b"1 13", b"2 14", b"1 16"])
    run(flow)
    assert numbers(flow) == {"0": [0, 3, 6, 9], "1": [1], "2": [2, 5, 8, 11, 14]}
    run(flow, "failed")
    assert numbers(flow)["1"] == [1, 4, 7, 10, 13, 16]
    assert not failures(flow, Selection())


def test_a_failure_that_fails_again_or_is_dead_holds_its_partition(filled):
    flow = filled(Held, payloads(12, at_4="always"))
    run(flow)
    events = len(rows(flow, "failed"))
    run(flow, "failed")
    assert numbers(flow)["1"] == [1]
    assert len(rows(flow, "failed")) == events + 1, "the held messages are as they were"
    run(flow, "failed", demand=1)  # begins with the failure that holds the others
    assert failures(flow, Selection(state="dead")) == 1
    assert failures(flow, due(flow)) == 0


def test_held_messages_are_due_once_the_failure_that_holds_them_is_closed(filled):
    flow = filled(Held, payloads(12, at_4="always"))
    run(flow)
    head = Selection(kind="ValueError")
    close(flow.tables, FailedMessages(name="held", lake=flow.lake, pipeline="held", selection=head), "me", "cancelled")
    assert failures(flow, due(flow, after_s=-60)) == 2
    run(flow, "failed", selection=due(flow, after_s=-60))
    assert numbers(flow)["1"] == [1, 7, 10]


def test_batches_behind_a_failure_are_held(filled):
    flow = filled(HeldBatches, payloads(24, at_4="fail"))
    run(flow)
    assert numbers(flow)["1"] == [1]
    run(flow, "failed")
    assert numbers(flow)["1"] == [*range(1, 24, 3)]


class Limited(Held):
    """With a rate limit, by which a receive is handled in portions."""

    name = "limited"
    producer = Producer(source="queue", rate_limiting=RateLimiting(allowed_messages=4, interval=timedelta(seconds=0.2)))


def test_a_rate_limit_does_not_end_a_hold(filled):
    flow = filled(Limited, payloads(24, at_4="fail"))
    run(flow)
    assert numbers(flow) == {"0": [*range(0, 24, 3)], "1": [1], "2": [*range(2, 24, 3)]}


class Stopping(Limited):
    """A pipeline whose runs are stopped while they handle the payload that fails."""

    name = "stopping"
    processors = Processors(concurrency=1, on_failure="hold")
    producer = Producer(source="queue", rate_limiting=RateLimiting(allowed_messages=4, interval=timedelta(seconds=1)))
    context = Place()

    def handle_message(self, message: Message, context: Place) -> Message:
        if message.data.endswith(b"fail"):
            ControlStore(f"sqlite:///{context.folder}/control.sqlite").drain(self.name, "moves", timedelta(0))
        return super().handle_message(message, context)


def test_a_stopped_run_releases_what_waits_for_a_failure_behind_released_messages(filled, tmp_path):
    flow = filled(Stopping, [f"{n % 2} {n}".encode() + b" fail" * (n == 0) for n in range(8)])

    run(flow, context={"folder": str(tmp_path)})

    assert kinds(flow) == {"0 0 fail": "ValueError"}
    assert flow.source.backlog().messages == 7


class HeldFamilies(HeldBatches):
    """Each message has two children; a batch has the children of one message."""

    name = "held_families"

    def handle_message(self, message: Message, context: Any) -> list[Message]:  # type: ignore[override]
        word = Word(word=message.data.decode())
        return [message.put(word, batcher="words"), message.put(word, batcher="words")]


def test_a_child_that_fails_holds_the_later_batches_of_its_partition(filled):
    flow = filled(HeldFamilies, payloads(12, at_4="fail"))
    run(flow)
    assert numbers(flow)["1"] == [1, 1]
    run(flow, "failed")
    assert numbers(flow)["1"] == [1, 1, 4, 4, 7, 7, 10, 10]


FAILURES = {
    "window": "w",
    "kind": "ValueError",
    "partition": None,
    "sequence": None,
    "at": datetime(2026, 1, 1, tzinfo=UTC),
}


def waits(message: dict[str, Any], *open_failures: dict[str, Any]) -> str | None:
    new = {"source": "s", "message_id": "new", "own": "1", "window": "w", "partition": None, "sequence": None}
    failed = [{"source": "s", "own_partition": "1", **FAILURES, **failure} for failure in open_failures]
    schema = pa.schema([(name, pa.string()) for name in ("source", "message_id", "own", "partition", "window")])
    messages = pa.Table.from_pylist([new | message], schema.append(pa.field("sequence", pa.int64())))
    found: str | None = waits_for(messages, pa.Table.from_pylist(failed))[0].as_py()
    return found


@pytest.mark.parametrize(
    ("message", "failure", "expected"),
    [
        ({}, {"message_id": "old"}, "old"),
        ({}, {"message_id": "old", "own_partition": "2"}, None),
        ({"partition": "t:0", "sequence": 7}, {"message_id": "old", "partition": "t:0", "sequence": 6}, "old"),
        ({"partition": "t:0", "sequence": 7}, {"message_id": "old", "partition": "t:0", "sequence": 8}, None),
        ({"partition": "t:1", "sequence": 7}, {"message_id": "old", "partition": "t:0", "sequence": 8}, "old"),
        (
            {"partition": "t:0", "sequence": 7, "window": "x"},
            {"message_id": "old", "partition": "t:0", "sequence": 8},
            "old",
        ),
        ({"window": "a"}, {"message_id": "old"}, None),
        ({"sequence": 7}, {"message_id": "old", "sequence": 6}, "old"),
        ({"sequence": 7}, {"message_id": "old", "sequence": 8}, None),
        ({}, {"message_id": "old", "sequence": 8}, "old"),
    ],
)
def test_a_message_waits_for_the_failures_before_it(message, failure, expected):
    assert waits(message, failure) == expected


def test_two_failures_at_the_same_time_do_not_wait_for_each_other():
    a, b = {"message_id": "a"}, {"message_id": "b"}
    assert [waits(a, a, b), waits(b, a, b)] == [None, "a"]


def test_the_testing_kit_holds_partitions():
    done = test_batch(Held, payloads(9, at_4="fail"))
    assert [message.data.word for message in done.successful] == ["0 0", "1 1", "2 2", "0 3", "2 5", "0 6", "2 8"]
    assert [message.failure.kind for message in done.failed] == ["ValueError", "held"]


def test_the_testing_kit_holds_batches():
    done = test_batch(HeldBatches, payloads(24, at_4="fail"))
    assert {message.data.word for message in done.failed if message.failure.kind == "failed"} == {"1 4 fail"}
    assert len([message for message in done.failed if message.failure.kind == "held"]) == 6
