"""Handling in order: assignment of messages to tasks, isolated failures, and order after crashes."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform import Message, Pipeline, Processors, Producer, Share
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import divide
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.tasks.callback_process.fork import Death
from pipeline_platform.tasks.handle.in_order import DealPartitions, FindPartitions, HandleInOrder
from pipeline_platform.tasks.handle.repeats import REPEATS
from pipeline_platform.tasks.record.step import receive_table
from tests.fixtures.faults import fault
from tests.fixtures.small_lake import WINDOW, Memory, done, numbered, outcomes, ranges, received, returned, rows_of
from tests.tasks.test_isolation import isolated


class Colour(IntEnum):
    """An int whose `str` is not its number."""

    RED = 3

    def __repr__(self) -> str:
        return "red"


def by_payload(message: Message) -> int:
    """Return the first word; some words are invalid partitions."""
    word = message.data.split()[0].decode()
    odd: dict[str, Any] = {
        "negative": -1,
        "true": True,
        "none": None,
        "float": 1.0,
        "text": "1",
        "numpy": np.int64(1),
        "endless": 10**5_000,
        "huge": 10**4_000,
        "colour": Colour.RED,
    }
    fault(word)
    return odd[word] if word in odd else int(word)  # type: ignore[no-any-return]


class Ordered(Pipeline):
    """Logs its messages; a message with `dies` kills the process."""

    name = "ordered"
    producer = Producer(source="memory")
    processors = Processors(concurrency=3, partition_by=by_payload, chunk_size=4)
    diary: Path

    def transform(self, event: Message) -> Message:
        return event.put_data(event.data.removeprefix(b"transformed "))

    def handle_message(self, message: Message, context: Any) -> Message:
        with self.diary.open("ab") as diary:
            diary.write(message.data + b"\n")
        if message.data.endswith(b"dies"):
            fault("kill")
        return message.failed("as told") if message.data.endswith(b"fails") else message


class BySource(Ordered):
    """Uses the partition of the source."""

    name = "by_source"
    processors = Processors(concurrency=2, chunk_bytes=1)
    partition_by = "source"


class Keyed(Memory):
    """Uses the first letter as the partition of a message, and the number as its sequence."""

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        (batch,) = super().read(share, receive_id)
        payloads = [data.decode() for data in batch.column("data").to_pylist()]
        told = {
            "partition": [payload[0] if payload[0].isalpha() else None for payload in payloads],
            "sequence": [int(payload[1:]) for payload in payloads],
        }
        columns = {name: told.get(name, batch.column(name)) for name in batch.schema.names}
        yield pa.RecordBatch.from_pydict(columns, schema=batch.schema)


class Handled(NamedTuple):
    """Messages of each task, in order, and the manifest."""

    by_task: list[list[str]]
    manifest: Manifest

    @property
    def all(self) -> list[str]:
        return [line for lines in self.by_task for line in lines]


@pytest.fixture
def lake(tmp_path, monkeypatch):
    monkeypatch.setattr(Ordered, "diary", tmp_path / "diary", raising=False)
    return Lake(root=str(tmp_path / "lake"))


def handle(
    lake: Lake,
    pipeline: type[Ordered],
    source: Memory,
    repeats: tuple[Any, ...] = (),
    portions: Sequence[tuple[int, int] | None] = (None,),
    careful: bool = False,
    **options: Any,
) -> Handled:
    """Run all steps of handling in order, in this process and its forks."""
    step: dict[str, Any] = {
        "pipeline": pipeline,
        "context": None,
        "ack_policy": source.ack_policy,
        "lake": lake,
        "receive_id": "r1",
    }
    rows = ranges(received(lake, pipeline.name, source), pipeline.name)
    found = done(FindPartitions(**step, parts=[rows], repeats=repeats, **options), careful=careful)
    tasks, written, by_task = pipeline.processors.concurrency, Manifest(), []
    if files := found.of_table(receive_table("r1", "_found")):
        deal = DealPartitions(lake, pipeline.name, "r1", divide(files, pipeline.name, 1)[0], tasks)
        plan = ranges(returned(deal(0)), pipeline.name, receive_table("r1", "_dealt"))
        for index in range(tasks):
            pipeline.diary.write_bytes(b"")
            for turns in portions:
                task = HandleInOrder(**step, parts=[rows], plan=plan, turns=turns, **options)
                written += done(task, index, careful=careful)
            by_task.append(pipeline.diary.read_text().splitlines())
    return Handled(by_task, found + written)


def memory(*payloads: str) -> Memory:
    return Memory(deliveries_=numbered(*(payload.encode() for payload in payloads)))


def reasons(lake: Lake, handled: Handled, pipeline: type[Pipeline] = Ordered) -> dict[str, tuple[str, str]]:
    rows = rows_of(lake, pipeline.name, handled.manifest, "failed")
    return {row["data"].decode(): (row["kind"], row["stage"]) for row in rows}


def test_the_messages_of_a_partition_are_handled_by_one_task_in_order(lake):
    payloads = [f"{place % 7} {place}" for place in range(70)]
    handled = handle(lake, Ordered, memory(*payloads))
    assert sorted(handled.all) == sorted(payloads)
    for lines in handled.by_task:
        assert 20 <= len(lines) <= 30, "partitions are dealt evenly"
        assert lines == sorted(lines, key=lambda line: int(line.split()[1]))
    partitions = [{line.split()[0] for line in lines} for lines in handled.by_task]
    assert sum(map(len, partitions)) == 7, "none is in two tasks"
    assert set(outcomes(lake, "ordered", handled.manifest).values()) == {"handled"}


def test_portions_of_a_plan_are_complete_and_in_the_order_of_the_source(lake):
    payloads = [f"{place % 7} {place}" for place in range(70)]
    whole = handle(lake, Ordered, memory(*payloads))
    handled = handle(lake, Ordered, memory(*payloads), portions=[(0, 10), (10, 11), (11, 70)])
    first = handle(lake, Ordered, memory(*payloads), portions=[(0, 10)])
    assert handled.by_task == whole.by_task
    assert sorted(first.all) == sorted(payloads[:10])


def test_a_message_that_gets_no_partition_fails_alone_and_is_not_handled(lake):
    kinds = dict.fromkeys(["true", "none", "float", "text", "numpy"], "TypeError")
    kinds |= {"raise": "ValueError", "exit": "SystemExit", "negative": "ValueError", "endless": "ValueError"}
    handled = handle(lake, Ordered, memory("1 first", *kinds, "1 last"))
    assert handled.all == ["1 first", "1 last"]
    assert reasons(lake, handled) == {fault: (kind, "partition_by") for fault, kind in kinds.items()}
    ends = ["handled", *["failed"] * len(kinds), "handled"]
    assert outcomes(lake, "ordered", handled.manifest) == {f"m{place}": end for place, end in enumerate(ends)}


def test_where_no_message_gets_a_partition_there_is_nothing_to_handle(lake):
    handled = handle(lake, Ordered, memory("raise", "none"))
    assert handled.by_task == []
    assert outcomes(lake, "ordered", handled.manifest) == {"m0": "failed", "m1": "failed"}


def test_partition_by_gets_transformed_messages_and_may_return_any_int(lake):
    by_task, _ = handle(lake, Ordered, memory("transformed 5", "huge", "colour", "0", "5 again"))
    assert by_task == [["5", "5 again"], ["huge", "0"], ["colour"]]


class Empty(BySource):
    """Handles messages without data."""

    name = "empty"

    def transform(self, event: Message) -> Message:
        return event.put_data(event.data or b"nothing")


@pytest.mark.parametrize("partition_by", ["source", lambda message: 1 if message.data == b"nothing" else 2])
def test_a_message_without_data_is_handled_like_any_other(lake, partition_by):
    pipeline = type("Empty", (Empty,), {"partition_by": partition_by})
    by_task, manifest = handle(lake, pipeline, Memory(deliveries_=numbered(b"a1", None, b"a2")))
    assert sorted(line for lines in by_task for line in lines) == ["a1", "a2", "nothing"]
    assert set(outcomes(lake, "empty", manifest).values()) == {"handled"}


@pytest.mark.parametrize(
    ("arrive", "tasks"),
    [("a3 b2 a1 b1 a2 c1", ["a1 a2 a3", "b1 b2 c1"]), ("a1 a2 a3 07 08 09", ["a1 a2 a3", "07 08 09"])],
    ids=["whatever the order of arrival", "rows without a partition go to the least loaded task"],
)
def test_a_source_s_partition_keeps_its_sequence(lake, arrive, tasks):
    by_task, _ = handle(lake, BySource, Keyed(deliveries_=numbered(*arrive.encode().split())))
    assert [" ".join(lines) for lines in by_task] == tasks


def test_repeats_have_no_partition_and_are_recorded_once(lake):
    with Writer(lake, "ordered", "repeats") as writer:
        told = {"row": [0, 2], "decided": [True, False]}
        writer.write("_receives/r1/_repeats", WINDOW, pa.RecordBatch.from_pydict(told, schema=REPEATS))
        repeats = ranges(writer.close(), "ordered", "_receives/r1/_repeats")
    handled = handle(lake, Ordered, memory("raise", "1 one", "1 two"), tuple(repeats))
    assert handled.all == ["1 one"]
    assert outcomes(lake, "ordered", handled.manifest) == {"m0": "duplicate", "m1": "handled", "m2": "duplicate"}


def test_a_partition_by_that_crashes_fails_only_its_message(lake):
    handled = handle(lake, Ordered, memory("1 first", "kill", "1 last"), careful=True)
    assert handled.all == ["1 first", "1 last"]
    assert reasons(lake, handled) == {"kill": ("worker killed", "partition_by")}


def test_a_partition_by_that_hangs_fails_only_its_message(lake):
    class Timed(Ordered):
        name = "timed"
        processors = Processors(partition_by=by_payload, message_timeout=timedelta(seconds=2))

    handled = handle(lake, Timed, memory("1 first", "hang", "1 last"))

    assert handled.all == ["1 first", "1 last"]
    assert reasons(lake, handled, Timed) == {"hang": ("timeout", "partition_by")}


def test_a_partition_keeps_its_order_around_a_crash(lake):
    told = {3: "dies", 5: "fails", 11: "dies", 12: "fails"}
    payloads = [f"1 {place:02} {told.get(place, 'works')}" for place in range(16)]
    handled = handle(lake, Ordered, memory(*payloads), careful=True)
    (lines, *others) = handled.by_task
    assert not any(others)
    assert sorted(set(lines)) == payloads
    last = [max(place for place, line in enumerate(lines) if line == payload) for payload in payloads]
    assert last == sorted(last), "the outcome of a message is that of its last call"
    kinds = {payload.split()[1]: kind for payload, (kind, _) in reasons(lake, handled).items()}
    assert kinds == {"03": "worker killed", "05": "failed", "11": "worker killed", "12": "failed"}


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(1, 31))
def test_rows_are_processed_in_order_around_all_crashes(killers, culprits, most):
    done: list[int] = []

    def attempt(rows: Sequence[int]) -> Death | None:
        some = rows[:most]
        if killers.isdisjoint(some):
            done.extend(some)
            return None
        had = [place for place, row in enumerate(some) if row in culprits | killers]
        return Death("signal 9", "handle_failed", had, tried=len(some))

    isolated(range(31), attempt, done, most, in_order=True)

    assert done == list(range(31))


def test_a_failure_keeps_its_partition_and_sequence_for_a_retry(lake):
    source = Keyed(deliveries_=numbered(b"a3", b"b2"))

    class Failing(BySource):
        name = "failing"

        def handle_message(self, message: Message, context: Any) -> Message:
            return message.failed("as told")

    handled = handle(lake, Failing, source)

    rows = rows_of(lake, "failing", handled.manifest, "failed")
    assert sorted((row["partition"], row["sequence"]) for row in rows) == [("a", 3), ("b", 2)]
