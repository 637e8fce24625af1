"""Deliveries that need no handling: decided before, or copies in the same receive."""

from datetime import timedelta

import pyarrow as pa
import pytest

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import whole
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import write_rows
from pipeline_platform.model.options import Processors
from pipeline_platform.tasks.handle import repeats
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.tasks.handle.record_unseen import RecordUnseen
from pipeline_platform.tasks.handle.repeats import IN_MEMORY, REPEATS, FindRepeats, Repeats
from pipeline_platform.tasks.record.step import receive_table
from tests.fixtures.faults import fault
from tests.fixtures.small_lake import (
    WINDOW,
    Keeping,
    Memory,
    done,
    numbered,
    ranges,
    received,
    returned,
    rows_of,
)


def known(lake: Lake, decided: int, copy: int):
    """Write repeats: the positions of a decided message and of a copy."""
    rows = [{"row": copy, "decided": False}, {"row": decided, "decided": True}]
    table = (receive_table("r1", "_repeats"), WINDOW, pa.Table.from_pylist(rows, schema=REPEATS))
    return whole(write_rows(lake, "keeping", "r1", [table]), "keeping")


def test_decided_messages_are_acknowledged_and_copies_are_left_to_their_lease(lake):
    """A copy must not be acknowledged: the handled delivery may still be returned to the source."""
    source = Memory(deliveries_=(("a", b"a"), ("b", b"fail"), ("b", b"fail"), ("c", b"c")), on_failure="nack")
    rows = ranges(received(lake, "keeping", source), "keeping")
    repeats = known(lake, decided=0, copy=2)

    task = Handle(
        pipeline=Keeping,
        context=None,
        ack_policy=source.ack_policy,
        lake=lake,
        receive_id="r1",
        parts=[rows],
        repeats=repeats,
    )
    manifest = done(task)

    told = sorted(
        (row["message_id"], row["outcome"], row["action"]) for row in rows_of(lake, "keeping", manifest, "outcomes")
    )
    assert told == [
        ("a", "duplicate", "ack"),
        ("b", "duplicate", "noop"),
        ("b", "returned", "nack"),
        ("c", "handled", "ack"),
    ]
    assert [row["message_id"] for row in rows_of(lake, "keeping", manifest, "kept")] == ["c"]
    assert manifest.totals.duplicates.total() == 2


def test_the_spark_lane_records_repeats_separately(lake):
    source = Memory(deliveries_=numbered(b"0", b"1", b"2"))
    rows = ranges(received(lake, "keeping", source), "keeping")
    task = RecordUnseen(Keeping, None, source.ack_policy, lake, "r1", [rows], known(lake, decided=0, copy=1))
    manifest = done(task)
    told = {row["message_id"]: row["action"] for row in rows_of(lake, "keeping", manifest, "outcomes")}
    assert told == {"m0": "ack", "m1": "noop"}
    assert manifest.totals.duplicates.total() == 2


class Fragile(Keeping):
    processors = Processors(chunk_size=1, max_message_bytes=10, message_timeout=timedelta(seconds=0.5))

    def handle_failed(self, messages, context):
        for message in messages:
            fault(message.data.decode().partition(",")[0])
        return [message.failed("seen") for message in messages]


def test_a_message_that_crashes_or_hangs_handle_failed_fails_alone(lake):
    payloads = [b"1", b"kill, too large", b"hang, too large", b"seen, too large"]
    source = Memory(deliveries_=numbered(*payloads))
    rows = ranges(received(lake, "keeping", source), "keeping")
    manifest = returned(RecordUnseen(Fragile, None, source.ack_policy, lake, "r1", [rows], ())(0))
    failed = {row["message_id"]: row["kind"] for row in rows_of(lake, "keeping", manifest, "failed")}
    assert failed == {"m1": "worker killed", "m2": "timeout", "m3": "too large"}
    assert manifest.totals.positions == 3


DECIDED, COPY = True, False


@pytest.fixture(params=[IN_MEMORY, 2], ids=["at once", "in portions"])
def looked_up(request, lake, monkeypatch):
    """Look up deliveries in outcomes; return the repeats as handling splits them."""
    monkeypatch.setattr(repeats, "IN_MEMORY", request.param)

    def look(received: list[tuple[str, str, bool]], outcomes: list[tuple[str, str, str]] | None) -> dict[int, bool]:
        deliveries = pa.Table.from_pylist(
            [dict(zip(("source", "message_id", "redelivered"), row, strict=True)) for row in received]
        )
        parts = [("messages", WINDOW, deliveries.slice(0, 2)), ("messages", "2026-01-01T0000", deliveries.slice(2))]
        files = whole(write_rows(lake, "keeping", "r1", parts), "keeping")
        known = [[]]
        for nth, decisions in enumerate([(outcomes or [])[:3], (outcomes or [])[3:]]):
            decided = [dict(zip(("source", "message_id", "outcome"), row, strict=True)) for row in decisions]
            earlier = [("outcomes", WINDOW, pa.Table.from_pylist(decided))] if decided else []
            known.insert(nth, whole(write_rows(lake, "keeping", "r0", earlier), "keeping"))
        find = FindRepeats(lake, "keeping", "r1", WINDOW, files, known)
        manifest = sum((returned(find(index)) for index in range(len(known))), Manifest())
        found = Repeats.read(lake, ranges(manifest, "keeping", receive_table("r1", "_repeats")))
        _, decided, copies = found.split(pa.RecordBatch.from_pydict({"position": range(len(received))}))
        return {
            row: is_decided
            for rows, is_decided in ((decided, DECIDED), (copies, COPY))
            for row in rows["position"].to_pylist()
        }

    return look


def test_a_lookup_finds_messages_decided_under_the_same_source(looked_up):
    received = [
        ("queue", "decided", True),
        ("queue", "failed", True),
        ("queue", "returned", True),
        ("queue", "undecided", True),
        ("queue", "of another", True),
        ("queue", "not marked", False),
        ("queue", "skipped", True),
    ]
    outcomes = [
        ("queue", "decided", "returned"),
        ("queue", "decided", "handled"),
        ("queue", "decided", "handled"),
        ("queue", "failed", "failed"),
        ("queue", "returned", "returned"),
        ("other", "of another", "handled"),
        ("queue", "not marked", "handled"),
        ("queue", "skipped", "skipped"),
    ]

    assert looked_up(received, outcomes) == {0: DECIDED, 1: DECIDED, 6: DECIDED}


@pytest.mark.parametrize("outcomes", [None, [("queue", "decided", "handled")]])
def test_a_lookup_drops_redeliveries_alone_and_keeps_one_delivery_of_each_message(looked_up, outcomes):
    received = [
        ("queue", "unrelated", True),
        ("queue", "shared", False),
        ("queue", "shared", False),
        ("queue", "first, then again", False),
        ("queue", "first, then again", True),
        ("queue", "again, then first", True),
        ("queue", "again, then first", False),
        ("queue", "again and again", True),
        ("queue", "again and again", True),
        ("other", "again and again", True),
        ("queue", "decided", False),
        ("queue", "decided", True),
    ]

    found = looked_up(received, outcomes)

    assert found == {4: COPY, 5: COPY, 8: COPY, 11: DECIDED if outcomes else COPY}
