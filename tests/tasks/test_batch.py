"""Batching: assembling batches and enforcing the contract of `handle_batch`."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pydantic import BaseModel

from pipeline_platform import Batcher, BatchInfo, Message, Pipeline
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.columns.crossing import encode
from pipeline_platform.tasks.batch import cutting, handle_batches
from pipeline_platform.tasks.batch.batch_plan import plan_table
from pipeline_platform.tasks.batch.handle_batches import HandleBatches
from pipeline_platform.tasks.record.staging import STAGED
from pipeline_platform.tasks.record.step import receive_table
from tests.fixtures.faults import fault
from tests.fixtures.obedient import ODD
from tests.fixtures.small_lake import (
    WINDOW,
    Keeping,
    Memory,
    batch_of,
    batching,
    done,
    handled,
    outcomes,
    ranges,
    rows_of,
)


class Stop(BaseModel):
    name: str


INFOS: list[BatchInfo] = []
OTHERS = {"m1": "handled", "m2": "handled"}


class Obedient(Keeping):
    """Treats a batch as its first message says."""

    name = "obedient"
    batchers = {"plain": Batcher(batch_size=3), "typed": Batcher(schema=Stop)}

    def handle_message(self, message, context):
        return message

    def handle_batch(self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any) -> Any:
        INFOS.append(batch_info)
        fault(messages[0].data)
        match messages[0].data:
            case "none":
                return None
            case "nonsense":
                return [*messages[1:], "done"]
            case "few":
                return messages[1:]
            case "twice":
                return [*messages, messages[0]]
            case "others":
                return list(Message.each(batch_of(b"1", b"2", b"3")))
            case "nothing":
                return []
            case "reorder":
                return messages[::-1]
            case "fail one":
                return [messages[0].failed("as told"), *messages[1:]]
            case "misfit":
                return [messages[0].put_data(object()), *messages[1:]]
            case "bytes":
                return [messages[0].put_data(b"\xff"), *messages[1:]]
        return messages


class Staged(NamedTuple):
    """A batch after handling and cutting."""

    rows: pa.RecordBatch
    key: str
    number: int
    full: bool


def staged(*data: Any, key: str = "k", batch: int = 0, full: bool = False) -> Staged:
    rows = batch_of(*(b"original" for _ in data))
    encoded = [encode(value) for value in data]
    columns = {name: rows.column(name) for name in rows.schema.names if name in STAGED.names}
    columns |= {
        "value": pa.array([value for value, _ in encoded], pa.binary()),
        "encoding": pa.array([encoding for _, encoding in encoded], pa.string()),
        "batch_key": pa.repeat(key, len(data)),
        "batch_mode": pa.repeat("bulk", len(data)),
        "on_success": pa.nulls(len(data), pa.string()),
        "on_failure": pa.nulls(len(data), pa.string()),
        "size": pa.repeat(pa.scalar(1, pa.int64()), len(data)),
        "own": pa.nulls(len(data), pa.string()),
        "child": pa.nulls(len(data), pa.int32()),
    }
    return Staged(pa.RecordBatch.from_pydict(columns, schema=STAGED), key, batch, full)


def batched(
    lake: Lake,
    *batches: Staged,
    pipeline: type[Pipeline] | None = None,
    batcher: str = "plain",
    receive_id: str = "r1",
    careful: bool = False,
    **options: Any,
) -> Manifest:
    INFOS.clear()
    pipeline = pipeline or Obedient
    with Writer(lake, pipeline.name, "staged") as writer:
        first, planned = 0, []
        for batch in batches:
            writer.write(receive_table(receive_id, batcher), WINDOW, batch.rows)
            rows = list(range(first, first := first + batch.rows.num_rows))
            trigger = "size" if batch.full else "flush"
            told = {"window": WINDOW, "batch_key": batch.key, "number": batch.number, "trigger": trigger}
            planned.append({**told, "size": len(rows), "rows": rows})
        writer.write(
            plan_table(receive_id, batcher), WINDOW, pa.RecordBatch.from_pylist(planned, schema=cutting.BATCHES)
        )
        written = writer.close()
    files = [ranges(written, pipeline.name, table(receive_id, batcher)) for table in (receive_table, plan_table)]
    task = HandleBatches(pipeline, None, Memory().ack_policy, lake, receive_id, batcher, *files, **options)
    return done(task, careful=careful)


# Cutting, and reading back what was cut


class Keyed(Keeping):
    """Uses the first word as the batch key."""

    name = "keyed"
    batchers = {"plain": Batcher(batch_size=3)}

    def handle_message(self, message, context):
        return message.put_batcher("plain").put_batch_key(message.data.decode().split()[0])

    def handle_batch(self, batcher, messages, batch_info, context):
        SEEN.append([message.data.decode() for message in messages])
        return messages


SEEN: list[list[str]] = []


def through(lake: Lake, *payloads: str, batch_size: int = 3, tasks: int = 1) -> list[list[list[str]]]:
    """Return the messages that each task passes to `handle_batch`."""
    manifest = handled(lake, Keyed, *(payload.encode() for payload in payloads))
    task = batching(lake, Keyed, manifest, "plain", Batcher(batch_size=batch_size), tasks=tasks)
    told = []
    for index in range(tasks):
        SEEN.clear()
        done(task, index)
        told.append([*SEEN])
    return told


def test_batches_are_dealt_in_turn_and_a_task_reads_only_its_own(lake, monkeypatch):
    made, each = [], cutting.each
    monkeypatch.setattr(cutting, "each", lambda batches: made.append(batches.num_rows) or each(batches))
    first, second = through(lake, *(f"k {number}" for number in range(12)), tasks=2)
    assert [messages[0] for messages in first] == ["k 0", "k 6"]
    assert [messages[0] for messages in second] == ["k 3", "k 9"]
    assert made == [2, 2]


@pytest.mark.parametrize("at_once", [1, 100, 10**9])
def test_batches_do_not_depend_on_the_size_of_reads(lake, monkeypatch, at_once):
    monkeypatch.setattr(handle_batches, "GROUP_BYTES", at_once)
    payloads = [f"{number % 7} {number}" for number in range(100)]
    (told,) = through(lake, *payloads, batch_size=4)
    assert sorted(message for messages in told for message in messages) == sorted(payloads)
    for messages in told:
        assert len({message.split()[0] for message in messages}) == 1
        assert [int(message.split()[1]) for message in messages] == sorted(
            int(message.split()[1]) for message in messages
        )


# The contract of handle_batch


def test_a_fault_of_handle_batch_fails_its_batch_and_no_other(lake):
    faults = ["raise", "exit", "none", "nonsense", "others", "nothing", "few"]
    manifest = batched(lake, *(staged(fault, "2", key=fault) for fault in faults), staged("3", "4", key="other"))
    told = [row["outcome"] for row in rows_of(lake, "obedient", manifest, "outcomes")]
    assert Counter(told) == {"failed": 2 * 6 + 1, "handled": 1 + 2}
    failures = rows_of(lake, "obedient", manifest, "failed")
    assert {(row["stage"], row["batcher"]) for row in failures} == {("handle_batch", "plain")}
    assert {row["data"] for row in failures} == {b"original"}, "the delivered payload, not the handled data"
    assert Counter(row["batch_key"] for row in failures) == {**dict.fromkeys(faults, 2), "few": 1}
    assert [row["message_id"] for row in failures if row["batch_key"] == "few"] == ["m0"]
    reasons = {row["batch_key"]: row["reason"] for row in failures}
    assert reasons["others"] == "handle_batch must return the messages of its batch, got other messages"
    assert reasons["nothing"] == reasons["few"] == "handle_batch did not return it"


@pytest.mark.parametrize(
    ("says", "kind", "reason"),
    [
        ("reorder", None, ""),
        ("twice", "returned twice", "handle_batch returned it 2 times"),
        ("fail one", "failed", "as told"),
        ("misfit", "PydanticSerializationError", ""),
    ],
)
def test_a_fault_of_one_message_in_handle_batch_fails_no_other(lake, says, kind, reason):
    manifest = batched(lake, staged(says, "2", "3"))
    assert outcomes(lake, "obedient", manifest) == {"m0": "failed" if kind else "handled", **OTHERS}
    for failure in rows_of(lake, "obedient", manifest, "failed"):
        assert (failure["kind"], reason in failure["reason"]) == (kind, True)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize(("attribute", "value", "reason"), ODD)
def test_an_odd_value_that_handle_batch_sets_fails_its_message_alone(
    lake, monkeypatch, raises, attribute, value, reason
):
    def handle_batch(self, batcher, messages, batch_info, context):
        setattr(messages[0], attribute, value)
        if raises:
            raise ValueError("as told")
        return messages

    monkeypatch.setattr(Obedient, "handle_batch", handle_batch)

    manifest = batched(lake, staged("1", "2"))

    assert outcomes(lake, "obedient", manifest) == {"m0": "failed", "m1": "failed" if raises else "handled"}
    told = rows_of(lake, "obedient", manifest, "failed")[0]
    assert told["stage"] == "handle_batch"
    assert ("as told" if raises else reason) in told["reason"]


def test_the_table_of_a_batcher_contains_what_handle_batch_returned(lake):
    manifest = batched(lake, staged("bytes", {"a": 1}, b"text", [1.5], {"n": math.nan}, {"n": math.inf}))
    rows = rows_of(lake, "obedient", manifest, "plain")
    assert [row["data"] for row in rows] == [
        '{"base64": "/w=="}', '{"a":1}', '"text"', "[1.5]", '{"n":null}', '{"n":null}'
    ], "valid JSON"  # fmt: skip
    assert {row["batch_key"] for row in rows} == {"k"}
    assert {row["batch_id"] for row in rows} == {INFOS[0].batch_id}


# What a batch is told


def test_the_id_of_a_batch_is_stable_over_retries_and_unique(lake):
    batched(lake, staged("1"), staged("2", batch=1), staged("3", key="other"))
    first = [info.batch_id for info in INFOS]
    batched(lake, staged("1"), staged("2", batch=1), staged("3", key="other"))
    again = [info.batch_id for info in INFOS]
    batched(lake, staged("1"), receive_id="r2")
    (elsewhere,) = [info.batch_id for info in INFOS]
    assert first == again
    assert len({*first, elsewhere}) == 4


# What crosses from handling to batching


@pytest.mark.parametrize("wrong", [{"title": "x"}, {"name": 5}, {"name": None}, "text"])
def test_data_that_does_not_fit_the_batchers_model_fails_alone(lake, wrong):
    manifest = batched(lake, staged(Stop(name="a"), wrong, Stop(name="c")), batcher="typed")
    assert outcomes(lake, "obedient", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    assert [row["name"] for row in rows_of(lake, "obedient", manifest, "typed")] == ["a", "c"]
    assert INFOS[0].size == 2, "handle_batch gets only decoded messages"


def test_a_batch_without_a_decodable_message_is_not_handled(lake):
    manifest = batched(lake, staged("wrong"), batcher="typed")
    assert outcomes(lake, "obedient", manifest) == {"m0": "failed"}
    assert INFOS == []


def test_messages_keep_what_they_told_of_their_acknowledgement(lake):
    batch = staged("1", "2")
    place = STAGED.get_field_index("on_success")
    rows = batch.rows.set_column(place, "on_success", pa.array(["noop", None]))
    manifest = batched(lake, batch._replace(rows=rows))
    assert [row["action"] for row in rows_of(lake, "obedient", manifest, "outcomes")] == ["noop", "ack"]


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[Message], Message]) -> None:
    """Make `handle_batch` change the first message of each batch."""

    def handle_batch(self, batcher, messages, batch_info, context):
        return [change(messages[0]), *messages[1:]]

    monkeypatch.setattr(Obedient, "handle_batch", handle_batch)


def test_handle_batch_may_change_data_and_how_a_message_is_acknowledged(lake, monkeypatch):
    changing(monkeypatch, lambda message: message.put_data({"new": 1}).configure_ack(on_success="noop"))
    manifest = batched(lake, staged("1", "2"))
    assert [row["data"] for row in rows_of(lake, "obedient", manifest, "plain")] == ['{"new":1}', '"2"']
    assert [row["action"] for row in rows_of(lake, "obedient", manifest, "outcomes")] == ["noop", "ack"]


def test_handle_batch_may_set_the_ack_action_of_a_failed_message(lake, monkeypatch):
    changing(monkeypatch, lambda message: message.failed("no").configure_ack(on_failure="nack:30"))
    manifest = batched(lake, staged("1", "2"))
    told = [(row["outcome"], row["action"]) for row in rows_of(lake, "obedient", manifest, "outcomes")]
    assert sorted(told) == [("handled", "ack"), ("returned", "nack:30")]


def set_in_place(name: str, value: str) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        setattr(message, name, value)
        return message

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda message: message.put_batcher("typed"), "its batcher from 'plain' to 'typed'"),
        (lambda message: message.put_batch_key("x"), "its batch_key from 'k' to 'x'"),
        (set_in_place("batcher", "typed"), "its batcher from 'plain' to 'typed'"),
        (set_in_place("batch_key", "x"), "its batch_key from 'k' to 'x'"),
    ],
)
def test_a_message_that_handle_batch_moves_fails_alone(lake, monkeypatch, change, reason):
    changing(monkeypatch, change)
    manifest = batched(lake, staged("1", "2"))
    assert outcomes(lake, "obedient", manifest) == {"m0": "failed", "m1": "handled"}
    (failure,) = rows_of(lake, "obedient", manifest, "failed")
    assert failure["reason"].startswith(f"handle_batch changed {reason}")
    assert (failure["kind"], failure["batcher"], failure["batch_key"]) == ("moved", "plain", "k")


def test_handle_failed_is_shown_what_failed_of_a_batch_and_all_of_one_that_raised(lake, monkeypatch):
    shown = []

    def handle_failed(self, messages, context):
        shown.append([message.data for message in messages])
        return messages

    monkeypatch.setattr(Obedient, "handle_failed", handle_failed)

    batched(lake, staged("fail one", "2"), staged("raise", "4", key="other"), staged("5", key="good"))

    assert shown == [["fail one"], ["raise", "4"]]
