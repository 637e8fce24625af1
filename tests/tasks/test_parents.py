"""Parents: recording messages whose children waited for batches, with and without crashes."""

from typing import Any

import pytest

from pipeline_platform import Batcher, Message, Processors, TableBatcher
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import divide
from pipeline_platform.lake.storage import Lake
from pipeline_platform.tasks.batch import parents
from pipeline_platform.tasks.batch.batch_plan import CutBatches, plan_table
from pipeline_platform.tasks.batch.handle_batches import HandleBatches
from pipeline_platform.tasks.batch.parents import EndParents
from pipeline_platform.tasks.callback_process.fork import Written
from pipeline_platform.tasks.handle import row_lane
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.tasks.record.fan_out import ENDS_TABLE, PARENTS_TABLE
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.step import receive_table
from tests.fixtures.families import Families
from tests.fixtures.faults import fault
from tests.fixtures.flow_pipelines import Word
from tests.fixtures.small_lake import (
    DRIVEN_AGAIN,
    Memory,
    done,
    handled,
    numbered,
    outcomes,
    ranges,
    received,
    returned,
    rows_of,
)
from tests.tasks.test_permits import Stopped


class Fragile(Families):
    """Kills its process in `handle_failed` if the payload says so."""

    name = "fragile"

    def transform(self, event: Message) -> Message:
        return event.put_data(event.data or b"left=nothing")

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        if any(b"fatal" in message.data for message in messages):
            fault("quit")
        return messages


def ended(lake: Lake, *payloads: bytes | None, careful: bool, tasks: int = 2, **options: Any) -> Manifest:
    source, name = Memory(deliveries_=numbered(*payloads)), Fragile.name
    shared: dict[str, Any] = {
        "pipeline": Fragile,
        "context": None,
        "ack_policy": source.ack_policy,
        "lake": lake,
        "receive_id": "r1",
        **options,
    }
    raw = received(lake, name, source)
    whole = divide(raw.of_table("messages"), name, 1)
    written = done(Handle(**shared, parts=whole))
    for batcher in ("left", "right"):
        if staged := ranges(written, name, receive_table("r1", batcher)):
            cut = CutBatches(**shared, batcher=batcher, options=Fragile.batchers[batcher], staged=staged)
            plan = ranges(returned(cut(0)), name, plan_table("r1", batcher))
            written += done(HandleBatches(**shared, batcher=batcher, staged=staged, plan=plan))
    plan, ends = (ranges(written, name, receive_table("r1", table)) for table in (PARENTS_TABLE, ENDS_TABLE))
    end = EndParents(**shared, parts=whole, plan=plan, ends=ends, tasks=tasks)
    return sum((done(end, index, careful=careful) for index in range(tasks)), Manifest())


@pytest.mark.parametrize("careful", [False, True])
def test_each_parent_has_one_outcome_and_each_that_failed_its_payload(lake, careful):
    payloads = [b"left=a right=b", b"right=fail left=c right=fail", b"left=lose", b"lake=d", b"right=e"]
    manifest = ended(lake, *payloads, careful=careful)
    assert outcomes(lake, "fragile", manifest) == {"m0": "handled", "m1": "failed", "m2": "failed", "m4": "handled"}
    assert manifest.rows("outcomes") == 4, "m3 ended in handling"
    failures = {row["message_id"]: row for row in rows_of(lake, "fragile", manifest, "failed")}
    assert {id_: (row["kind"], row["batcher"], row["data"]) for id_, row in failures.items()} == {
        "m1": ("failed", "right", payloads[1]),
        "m2": ("not returned", "left", payloads[2]),
    }


def test_a_parent_without_data_ends_like_any_other(lake):
    assert outcomes(lake, "fragile", ended(lake, None, b"left=a", careful=False)) == {"m0": "handled", "m1": "handled"}


def test_every_parent_ends_even_if_handle_failed_crashes(lake):
    manifest = ended(lake, b"left=a", b"right=fail left=fatal", b"right=fail", b"left=lose", careful=True)
    assert outcomes(lake, "fragile", manifest) == {"m0": "handled", "m1": "failed", "m2": "failed", "m3": "failed"}
    kinds = {row["message_id"]: row["kind"] for row in rows_of(lake, "fragile", manifest, "failed")}
    assert kinds == {"m1": "worker killed", "m2": "failed", "m3": "not returned"}


def test_a_retried_failure_is_closed_with_its_parent(lake):
    manifest = ended(lake, b"left=a right=b", b"left=lose", careful=False, ack_policy=DRIVEN_AGAIN)
    states = {row["message_id"]: row["state"] for row in rows_of(lake, "fragile", manifest, "failed")}
    assert states == {"m0": "closed", "m1": "open"}


def test_a_task_keeps_a_bounded_number_of_ends_of_children(lake, monkeypatch):
    held: list[int] = []
    real = parents.that_count

    def counting(ends: Any) -> Any:
        held.append(ends.num_rows)
        return real(ends)

    monkeypatch.setattr(parents, "that_count", counting)
    monkeypatch.setattr(parents, "_READ_ROWS", 50)
    monkeypatch.setattr(parents, "_HELD_ROWS", 20)
    failing = b" ".join([b"left=ack", *[b"right=fail"] * 200])

    manifest = ended(lake, b"left=a", failing, b"left=b left=ack", failing, careful=False, tasks=1)

    assert outcomes(lake, "fragile", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled", "m3": "failed"}
    assert max(held) <= 100
    actions = {row["message_id"]: row["action"] for row in rows_of(lake, "fragile", manifest, "outcomes")}
    assert actions == {"m0": "ack", "m1": "ack", "m2": "noop", "m3": "ack"}


class Litters(Families):
    """Makes as many children as the payload says; `fat` children have 8 KiB each, `huge` ones half a GiB."""

    name = "litters"
    processors = Processors(chunk_size=20)
    batchers = {"lake": TableBatcher(schema=Word), "plain": Batcher()}

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        PREPARED.extend(message.message_id for message in messages)
        return messages

    def handle_message(self, message: Message, context: Any) -> Any:
        CALLED.append(message.message_id)
        count, _, kind = message.data.decode().partition(" ")
        if kind:
            return [message.put(SIZED[kind], batcher="plain")] * int(count)
        return [message.put({"word": "a"}, batcher="lake")] * int(count)


SIZED = {"fat": bytes(2**13), "huge": bytes(2**29)}
CALLED: list[str] = []
PREPARED: list[str] = []


@pytest.fixture(autouse=True)
def small_portions(monkeypatch):
    """End portions at 128 children without data: a child counts for a KiB."""
    monkeypatch.setattr(row_lane, "HELD_BYTES", 2**17)


@pytest.fixture
def held(monkeypatch):
    """Numbers of children in memory at each time that a task recorded messages."""
    counts: list[int] = []
    real = row_lane.record_messages

    def counting(recording: Recording, rows: Any, window: str, messages: list[Message]) -> None:
        counts.append(sum(len(message._state.children or ()) for message in messages))
        real(recording, rows, window, messages)

    monkeypatch.setattr(row_lane, "record_messages", counting)
    CALLED.clear()
    PREPARED.clear()
    return counts


@pytest.mark.parametrize("threads", [1, 3])
def test_children_are_recorded_in_portions_and_each_callback_is_called_once(lake, held, threads):
    kind = type("Threaded", (Litters,), {"name": "litters", "processors": Processors(chunk_size=20, threads=threads)})
    manifest = handled(lake, kind, *[b"40"] * 24, b"0", b"1")
    assert max(held) <= 128 + threads * 40
    assert manifest.rows("lake") == sum(held) == 24 * 40 + 1
    ids = [f"m{number}" for number in range(26)]
    assert (sorted(CALLED), PREPARED) == (sorted(ids), ids)
    assert outcomes(lake, "litters", manifest) == dict.fromkeys(ids, "handled")


def test_messages_without_children_are_recorded_together(lake, held):
    handled(lake, Litters, *[b"1"] * 100)
    assert held == [100]


def test_a_fork_returns_its_children_before_the_next_try(lake, monkeypatch):
    rows: list[int] = []
    real = Written.load

    def counting(file: Any) -> Written:
        written = real(file)
        rows.append(sum(batch.num_rows for table, _, batch in written.batches if table == "lake"))
        return written

    monkeypatch.setattr(Written, "load", counting)

    manifest = handled(lake, Litters, *[b"40"] * 12, careful=True)

    assert max(rows) <= 128 + 40
    assert manifest.rows("lake") == sum(rows) == 12 * 40
    assert outcomes(lake, "litters", manifest) == {f"m{number}": "handled" for number in range(12)}


def test_large_children_are_recorded_in_smaller_portions(lake, held):
    handled(lake, Litters, *[b"5 fat"] * 9)
    assert max(held) <= 20


def test_a_message_with_too_large_children_fails_alone(lake):
    manifest = handled(lake, Litters, b"1", b"3 huge", b"1")
    assert outcomes(lake, "litters", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, "litters", manifest, "failed")
    assert (failure["kind"], failure["stage"]) == ("ValueError", "handle_message")
    assert "got 1,610,612,736 bytes in 3 messages" in failure["reason"]


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize("begun", [0, 4])
def test_messages_that_may_not_start_are_returned(lake, careful, begun):
    manifest = handled(lake, Litters, *[b"40"] * 12, careful=careful, pace=Stopped(begun))
    ends = outcomes(lake, "litters", manifest)
    handled_ = [name for name, end in ends.items() if end == "handled"]
    assert set(handled_) <= {f"m{number}" for number in range(begun)}
    assert len(ends) == manifest.rows("outcomes") == 12
    assert manifest.rows("lake") == 40 * len(handled_)
    assert careful or len(handled_) == begun, "permits taken for many children are lost"


def test_forks_with_many_children_request_few_permits(lake):
    permits = Stopped(10_000)
    handled(lake, Litters, *[b"40"] * 60, careful=True, pace=permits)
    assert 10_000 - permits.left <= 20 + 2 * 60
