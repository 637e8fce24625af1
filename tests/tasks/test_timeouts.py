"""Timeouts: a call that exceeds `message_timeout` fails its messages and no others."""

import os
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from pipeline_platform.control.pace import Pace
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.options import Batcher, Processors, RateLimiting, TableBatcher
from tests.fixtures.fragile import Fragile, Gathering, Worded
from tests.fixtures.small_lake import Row, handled, outcomes, rows_of
from tests.tasks.test_batch import batched, staged

SHORT = timedelta(seconds=0.5)


class Timed(Fragile):
    name = "timed"
    processors = Processors(chunk_size=10, message_timeout=SHORT)


class TimedBatches(Gathering):
    name = "timed_batches"
    batchers = {"plain": Batcher(message_timeout=SHORT), "typed": Batcher(schema=Worded, message_timeout=SHORT)}


@pytest.fixture(autouse=True)
def diary(tmp_path, monkeypatch):
    monkeypatch.setattr(Fragile, "diary", tmp_path / "diary", raising=False)
    return tmp_path / "diary"


def calls(diary: Path) -> Counter[str]:
    return Counter(diary.read_text().splitlines())


WAYS = ["hang", "swallow", "backtrack", "hold", "stop", "hanging text"]
STAGES = {"transform": "transform", "handle_message": "handle_message", "serialise": "lake"}


def test_a_message_that_hangs_fails_alone_and_says_where(lake, diary):
    ways = [*(("handle_message", way) for way in WAYS), ("transform", "hang"), ("serialise", "hold")]
    payloads = [b"0", b"fail", *(f"{callback} {how}".encode() for callback, how in ways), b"serialise", b"4", b"fail"]
    manifest = handled(lake, Timed, *payloads)
    failed = {row["data"]: row for row in rows_of(lake, "timed", manifest, "failed")}
    assert failed.keys() == {b"fail", *payloads[2:-3]}
    assert failed[b"fail"]["reason"] == "as told"
    for payload, (callback, _) in zip(payloads[2:], ways, strict=False):
        failure, stage = failed[payload], STAGES[callback]
        assert (failure["kind"], failure["stage"]) == ("timeout", stage)
        assert failure["reason"] == f"{stage} took longer than processors.message_timeout (0.5 s) allows"
        assert calls(diary)[f"handle_failed {failure['message_id']}"] == 1, "it gets the timed-out message"
    assert [row["text"] for row in rows_of(lake, "timed", manifest, "kept")] == ["0", "4"]
    assert len(rows_of(lake, "timed", manifest, "_receives/r1/called")) == 1


def test_a_hang_repeats_the_messages_before_it_once(lake, diary):
    handled(lake, Timed, *([b"0"] * 14), b"handle_message hang", *([b"0"] * 15))
    begun = calls(diary)
    assert [begun[f"handle_message m{number}"] for number in range(30)] == [*[2] * 14, 1, *[1] * 15]


def test_a_chunk_whose_preparing_hangs_fails_and_no_other_does(lake, diary):
    manifest = handled(lake, Timed, *([b"0"] * 14), b"prepare_messages hang", *([b"0"] * 15))
    told = outcomes(lake, "timed", manifest)
    assert {name for name, outcome in told.items() if outcome == "failed"} == {f"m{row}" for row in range(10, 20)}
    failures = rows_of(lake, "timed", manifest, "failed")
    assert {(row["kind"], row["stage"]) for row in failures} == {("timeout", "prepare_messages")}
    assert calls(diary)["prepare_messages m14"] == 1, "it may wait for an external system, and others would too"


def test_a_handle_failed_that_hangs_loses_no_failure_and_affects_no_good_message(lake, diary):
    manifest = handled(lake, Timed, b"0", b"fail", b"handle_failed hang", b"3", *([b"fail"] * 10))
    failed = {row["message_id"]: row for row in rows_of(lake, "timed", manifest, "failed")}
    assert {name: row["kind"] for name, row in failed.items()} == {
        **dict.fromkeys(["m1", "m2", *(f"m{row}" for row in range(4, 12))], "timeout"),
        **dict.fromkeys(["m12", "m13"], "failed"),
    }
    assert failed["m2"]["reason"] == "handle_failed took longer than processors.message_timeout (0.5 s) allows"
    assert Counter(outcomes(lake, "timed", manifest).values()) == {"handled": 2, "failed": 12}
    assert calls(diary)["handle_failed m2"] == 1


def test_many_calls_within_their_time_may_take_longer_together(lake):
    class Slow(Timed):
        name = "slow"
        batchers = {"kept": TableBatcher(schema=Slept), "called": Batcher()}

        def handle_message(self, message, context):
            time.sleep(0.1)
            return message.put(Slept(text=message.data.decode()), batcher="kept")

    manifest = handled(lake, Slow, *[b"slept"] * 10)

    assert set(outcomes(lake, "slow", manifest).values()) == {"handled"}
    assert len(rows_of(lake, "slow", manifest, "kept")) == 10


class Slept(Row):
    """Sleeps also while its column is built."""

    def __getattribute__(self, name):
        if name == "text":
            time.sleep(0.1)
        return super().__getattribute__(name)


def test_waiting_for_a_permit_does_not_count_as_time_of_a_call(lake, tmp_path):
    limit = RateLimiting(allowed_messages=2, interval=3 * SHORT)
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    manifest = handled(lake, Timed, b"1", b"2", b"3", b"4", b"5", pace=Pace(store, "timed", limit))
    store.close()
    assert set(outcomes(lake, "timed", manifest).values()) == {"handled"}


def test_a_process_that_a_hanging_call_waits_for_is_killed(lake):
    before = {process.pid for process in psutil.process_iter()}
    manifest = handled(lake, Timed, b"handle_message wait", b"2")
    assert outcomes(lake, "timed", manifest) == {"m0": "failed", "m1": "handled"}
    mine = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert [process for process in mine if process.info["cmdline"] == ["sleep", "1000000"]] == []


def test_a_pipeline_without_the_option_calls_its_callbacks_in_the_task_itself(lake):
    class Untimed(Timed):
        name = "untimed"
        processors = Processors()

        def handle_message(self, message, context):
            return message.put(Row(text=str(os.getpid())), batcher="kept")

    theirs = handled(lake, type("Here", (Untimed,), {"name": "here", "processors": Timed.processors}), b"1")
    ours = handled(lake, Untimed, b"1")

    assert rows_of(lake, "untimed", ours, "kept")[0]["text"] == str(os.getpid())
    assert rows_of(lake, "here", theirs, "kept")[0]["text"] != str(os.getpid())


# Batches


def test_a_batch_whose_callback_hangs_fails_and_costs_no_other(lake):
    batches = staged("1", "handle_batch hold", "3"), staged("4", "5", key="other")
    manifest = batched(lake, *batches, pipeline=TimedBatches)
    told = Counter(row["outcome"] for row in rows_of(lake, "timed_batches", manifest, "outcomes"))
    assert told == {"failed": 3, "handled": 2}
    failures = rows_of(lake, "timed_batches", manifest, "failed")
    assert {(row["kind"], row["stage"]) for row in failures} == {("timeout", "handle_batch")}
    reason = "handle_batch took longer than batchers['plain'].message_timeout (0.5 s) allows"
    assert {row["reason"] for row in failures} == {reason}


@pytest.mark.parametrize(("where", "stage"), [("serialise", "lake"), ("handle_failed", "handle_failed")])
def test_a_message_that_hangs_around_its_batch_affects_no_good_message(lake, where, stage):
    manifest = batched(lake, staged("0", f"{where} hang", "3"), pipeline=TimedBatches)
    assert outcomes(lake, "timed_batches", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, "timed_batches", manifest, "failed")
    assert (failure["kind"], failure["stage"]) == ("timeout", stage)


def test_a_message_that_hangs_where_it_is_decoded_fails_alone(lake):
    told = staged({"text": "one"}, {"text": "decode hang"}, {"text": "one"})
    manifest = batched(lake, told, pipeline=TimedBatches, batcher="typed")
    assert outcomes(lake, "timed_batches", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, "timed_batches", manifest, "failed")
    assert (failure["kind"], failure["stage"]) == ("timeout", "decode")
