"""Batches of a batcher with `partition_by`: one partition per batch, and one task per partition, in order."""

from typing import Any

import pytest

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline, Processors
from pipeline_platform.lake.storage import Lake
from tests.fixtures.small_lake import Keeping, Memory, batching, done, handled, numbered, outcomes, rows_of
from tests.tasks.test_in_order import Keyed

SEEN: list[tuple[BatchInfo, list[str]]] = []


def number(message: Message) -> int:
    """Return the partition of handled data; raises if it is not a number."""
    return int(message.data["partition"])


class Batched(Keeping):
    """Payloads contain key, partition and text."""

    name = "batched"
    processors = Processors(partition_by=lambda _: 0)
    batchers = {"plain": Batcher(batch_size=2, concurrency=2, partition_by=number)}

    def handle_message(self, message: Message, context: Any) -> Message:
        key, partition, *_ = message.data.decode().split()
        return message.put({"partition": partition, "text": message.data.decode()}, batcher="plain", batch_key=key)

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        SEEN.append((batch_info, [message.data["text"] for message in messages]))
        return messages


class BySource(Batched):
    """Uses the partition of the source."""

    name = "by_source"
    processors = Processors()
    partition_by = "source"
    batchers = {"plain": Batcher(batch_size=2)}

    def handle_message(self, message: Message, context: Any) -> Message:
        return message.put({"text": message.data.decode()}, batcher="plain")


def through(
    lake: Lake, pipeline: type[Pipeline], source: Memory, batch_size: int = 2, tasks: int = 2
) -> list[list[tuple[BatchInfo, list[str]]]]:
    """Return the messages that each task passes to `handle_batch`."""
    manifest, told = handled(lake, pipeline, source=source), []
    task = batching(lake, pipeline, manifest, "plain", Batcher(batch_size=batch_size), tasks=tasks)
    for index in range(tasks):
        SEEN.clear()
        done(task, index)
        told.append(list(SEEN))
    return told


def of(*payloads: str) -> Memory:
    return Memory(deliveries_=numbered(*(payload.encode() for payload in payloads)))


def test_all_batches_of_a_partition_are_one_task_s_in_order_and_partitions_are_dealt_evenly(lake):
    payloads = [f"{'kl'[place % 3 > 1]} {place % 5} {place:02}" for place in range(50)]
    told = through(lake, Batched, of(*payloads))
    partitions = [{info.partition for info, _ in task} for task in told]
    assert partitions[0].isdisjoint(partitions[1])
    assert sorted(map(len, partitions)) == [2, 3]
    for task in told:
        for partition in {info.partition for info, _ in task}:
            firsts = [texts[0].split()[-1] for info, texts in task if info.partition == partition]
            assert firsts == sorted(firsts)


def test_a_message_without_a_partition_fails_alone(lake):
    manifest = handled(lake, Batched, b"k 1 a", b"k -1 b", b"k one c", b"k 1 d")
    assert outcomes(lake, "batched", manifest) == {"m1": "failed", "m2": "failed"}
    failed = rows_of(lake, "batched", manifest, "failed")
    assert [(row["kind"], row["stage"], row["data"]) for row in failed] == [
        ("ValueError", "partition_by", b"k -1 b"),
        ("ValueError", "partition_by", b"k one c"),
    ]
    assert manifest.totals.staged["plain"] == 2


@pytest.mark.parametrize(
    ("payloads", "batches"),
    [
        ("a4 b2 a2 b1 a3 a1", [[("a", ["a1", "a2"]), ("a", ["a3", "a4"])], [("b", ["b1", "b2"])]]),
        ("01 a2 03 a4 05", [[("a", ["a2", "a4"]), (None, ["05"])], [(None, ["01", "03"])]]),
    ],
    ids=["in the source's own order", "rows without a partition go to the least loaded task"],
)
def test_batches_hold_messages_of_the_source_s_partition(lake, payloads, batches):
    told = through(lake, BySource, Keyed(deliveries_=numbered(*payloads.encode().split())))
    assert [[(info.partition, texts) for info, texts in task] for task in told] == batches
