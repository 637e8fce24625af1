"""Deliveries that need no handling: decided before, or another copy in the same receive."""

import os
import signal
import time
from datetime import timedelta

import pyarrow as pa
import pytest

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.options import Processors
from pipeline_platform.tasks.handle import repeats
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.tasks.handle.record_unseen import RecordUnseen
from pipeline_platform.tasks.handle.repeats import KNOWN, REPEATS, WriteRepeats
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


def known(lake: Lake, **keep: int):
    """Write what a lookup found: the position of the copy to handle, by id."""
    rows = [{"source": "memory", "message_id": name, "keep": at} for name, at in keep.items()]
    stage = WriteRepeats(lake, "keeping", "r1", WINDOW)
    manifest = returned(stage(iter([pa.RecordBatch.from_pylist(rows, schema=REPEATS)])))
    return ranges(manifest, "keeping", stage.table)


def test_what_is_decided_is_acknowledged_and_another_copy_is_left_to_its_lease(lake):
    """A copy must not be acknowledged: the one that is handled may yet be given back to the source."""
    source = Memory(deliveries_=(("a", b"a"), ("b", b"fail"), ("b", b"fail"), ("c", b"c")), on_failure="nack")
    rows = ranges(received(lake, "keeping", source), "keeping")
    repeats = known(lake, a=KNOWN, b=1)

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
    assert manifest.total("duplicates") == 2


def test_the_fast_lane_acknowledges_them_apart(lake):
    source = Memory(deliveries_=numbered(b"0", b"1", b"2"))
    rows = ranges(received(lake, "keeping", source), "keeping")
    task = RecordUnseen(Keeping, None, source.ack_policy, lake, "r1", [rows], known(lake, m0=KNOWN, m1=5))
    manifest = done(task)
    told = {row["message_id"]: row["action"] for row in rows_of(lake, "keeping", manifest, "outcomes")}
    assert told == {"m0": "ack", "m1": "noop"}
    assert manifest.total("duplicates") == 2


class Fragile(Keeping):
    processors = Processors(chunk_size=1, max_message_bytes=10, message_timeout=timedelta(seconds=0.5))

    def handle_failed(self, messages, context):
        for message in messages:
            if message.data.startswith(b"kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if message.data.startswith(b"hang"):
                time.sleep(10**6)
        return [message.failed("seen") for message in messages]


def test_one_that_ends_or_holds_the_worker_that_shows_it_to_handle_failed_fails_alone(lake):
    payloads = [b"1", b"kill, too large", b"hang, too large", b"seen, too large"]
    source = Memory(deliveries_=numbered(*payloads))
    rows = ranges(received(lake, "keeping", source), "keeping")
    manifest = returned(RecordUnseen(Fragile, None, source.ack_policy, lake, "r1", [rows], ())(0))
    failed = {row["message_id"]: row["kind"] for row in rows_of(lake, "keeping", manifest, "failed")}
    assert failed == {"m1": "worker killed", "m2": "timeout", "m3": "failed"}
    assert manifest.total("aside") == 3


@pytest.fixture
def looked_up(spark):
    """Look some deliveries up in some outcomes, in Spark."""
    session = spark.spark_session

    def look(received: list[tuple[str, str, int, bool]], outcomes: list[tuple[str, str, str]] | None):
        key = "source string, message_id string"
        rows = session.createDataFrame(received, f"{key}, position bigint, redelivered boolean")
        known = None
        if outcomes is not None:
            known = session.createDataFrame(outcomes, f"{key}, outcome string")
        return {(row["source"], row["message_id"]): row["keep"] for row in repeats.find_repeats(rows, known).collect()}

    return look


def test_a_lookup_finds_what_is_decided_under_the_same_source(looked_up):
    received = [
        ("queue", "decided", 0, True),
        ("queue", "failed", 1, True),
        ("queue", "returned", 2, True),
        ("queue", "undecided", 3, True),
        ("queue", "of another", 4, True),
        ("queue", "not marked", 5, False),
    ]
    outcomes = [
        ("queue", "decided", "returned"),
        ("queue", "decided", "handled"),
        ("queue", "failed", "failed"),
        ("queue", "returned", "returned"),
        ("other", "of another", "handled"),
        ("queue", "not marked", "handled"),
    ]

    assert looked_up(received, outcomes) == {("queue", "decided"): KNOWN, ("queue", "failed"): KNOWN}


@pytest.mark.parametrize("outcomes", [None, [], [("queue", "known", "handled")]])
def test_a_lookup_keeps_one_of_several_copies_whether_they_are_marked_or_not(looked_up, outcomes):
    received = [
        ("queue", "twice", 7, True),
        ("queue", "twice", 3, False),
        ("other", "twice", 5, True),
        ("queue", "known", 1, False),
        ("queue", "known", 2, True),
    ]
    kept = KNOWN if outcomes else 1
    assert looked_up(received, outcomes) == {("queue", "twice"): 3, ("queue", "known"): kept}
