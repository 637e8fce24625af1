"""Parents: messages whose children waited for batches end in tasks, in forks where those are tried again."""

import os
from typing import Any

import pytest

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import divide
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.message import Message
from pipeline_platform.tasks.batch import parents
from pipeline_platform.tasks.batch.batch_plan import CutBatches, plan_table
from pipeline_platform.tasks.batch.handle_batches import HandleBatches
from pipeline_platform.tasks.batch.parents import EndParents
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.tasks.record.fan_out import ends_table, parents_table
from pipeline_platform.tasks.record.staging import staged_table
from tests.fixtures.families import Families
from tests.fixtures.small_lake import (
    DRIVEN_AGAIN,
    Memory,
    done,
    numbered,
    outcomes,
    ranges,
    received,
    returned,
    rows_of,
)


class Fragile(Families):
    """Its `handle_failed` ends its process, where the payload says so."""

    name = "fragile"

    def transform(self, event: Message) -> Message:
        return event.put_data(event.data or b"left=nothing")

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        if any(b"fatal" in message.data for message in messages):
            os._exit(3)
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
        if staged := ranges(written, name, staged_table("r1", batcher)):
            cut = CutBatches(**shared, batcher=batcher, options=Fragile.batchers[batcher], staged=staged)
            plan = ranges(returned(cut(0)), name, plan_table("r1", batcher))
            written += done(HandleBatches(**shared, batcher=batcher, staged=staged, plan=plan))
    files = {table: ranges(written, name, table("r1")) for table in (parents_table, ends_table)}
    end = EndParents(**shared, parts=whole, plan=files[parents_table], ends=files[ends_table], tasks=tasks)
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


def test_where_handle_failed_ends_the_worker_every_parent_ends_all_the_same(lake):
    manifest = ended(lake, b"left=a", b"right=fail left=fatal", b"right=fail", b"left=lose", careful=True)
    assert outcomes(lake, "fragile", manifest) == {"m0": "handled", "m1": "failed", "m2": "failed", "m3": "failed"}
    kinds = {row["message_id"]: row["kind"] for row in rows_of(lake, "fragile", manifest, "failed")}
    assert kinds == {"m1": "worker killed", "m2": "failed", "m3": "not returned"}


def test_a_failure_that_is_driven_again_and_handled_is_closed_with_its_parent(lake):
    manifest = ended(lake, b"left=a right=b", b"left=lose", careful=False, ack_policy=DRIVEN_AGAIN)
    states = {row["message_id"]: row["state"] for row in rows_of(lake, "fragile", manifest, "failed")}
    assert states == {"m0": "closed", "m1": "open"}


@pytest.mark.parametrize("tasks", [1, 3])
def test_parents_are_shared_out_over_tasks_each_once(lake, tasks):
    manifest = ended(lake, *(b"left=a right=b" for _ in range(10)), careful=False, tasks=tasks)
    ids = [row["message_id"] for row in rows_of(lake, "fragile", manifest, "outcomes")]
    assert sorted(ids) == sorted(f"m{number}" for number in range(10))


def test_of_what_children_say_a_task_holds_what_counts_however_many_they_are(lake, monkeypatch):
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
