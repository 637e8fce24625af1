"""Isolation: a message that crashes its process fails alone and is found in few tries."""

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform import Processors
from pipeline_platform.control.pace import Pace
from pipeline_platform.control.store import ControlStore
from pipeline_platform.tasks.callback_process import try_size
from pipeline_platform.tasks.callback_process.fork import Death, Written
from pipeline_platform.tasks.isolation import BEGUN_AGAIN, Try, isolate
from pipeline_platform.tasks.record.staging import STAGED
from tests.fixtures.faults import fault
from tests.fixtures.fragile import Fragile, Gathering
from tests.fixtures.small_lake import Keeping, Row, handled, outcomes, rows_of
from tests.tasks.test_batch import batched, staged

WAYS = ["quit", "close"]


@pytest.fixture
def diary(tmp_path, monkeypatch):
    monkeypatch.setattr(Fragile, "diary", tmp_path / "diary", raising=False)
    return tmp_path / "diary"


STAGES = {"serialise": "lake", "validate": "handle_message"}
CALLBACKS = ["transform", "prepare_messages", "handle_message", "handle_failed", *STAGES]


def test_a_message_that_ends_its_worker_fails_alone_and_says_where(lake, diary):
    ways = [*((callback, "kill") for callback in CALLBACKS), *product(["handle_message", "handle_failed"], WAYS)]
    payloads = [b"0", b"fail", *(f"{callback} {how}".encode() for callback, how in ways), b"3", b"4", b"fail"]

    manifest = handled(lake, Fragile, *payloads, careful=True)

    failed = {row["message_id"]: row for row in rows_of(lake, "fragile", manifest, "failed")}
    assert failed.keys() == {f"m{place}" for place, payload in enumerate(payloads) if not payload.isdigit()}
    assert (failed["m1"]["reason"], failed[f"m{len(payloads) - 1}"]["reason"]) == ("as told", "as told")
    for place, (callback, how) in enumerate(ways, 2):
        killer = failed[f"m{place}"]
        assert killer["kind"] == "worker killed"
        assert killer["data"] == payloads[place], "a retry needs the original payload"
        if how != "close":  # which is noticed at the end, wherever it came to pass
            assert killer["stage"] == STAGES.get(callback, callback)
            assert killer["reason"].startswith(f"{killer['stage']} ended the worker (")
    assert [row["text"] for row in rows_of(lake, "fragile", manifest, "kept")] == ["0", "3", "4"]


def test_a_message_that_raises_what_ends_programs_fails_alone(lake, diary):
    ways = [*((callback, "interrupt") for callback in CALLBACKS if callback != "prepare_messages")]
    ways += product(["handle_message", "serialise"], ["exit", "mute", "eat"])
    payloads = [b"0", *(payload for way in ways for payload in (" ".join(way).encode(), b"1"))]
    chunk = [b"prepare_messages interrupt", *[b"2"] * 9]  # prepared together
    manifest = handled(lake, Fragile, *[b"0"] * (-len(payloads) % 10), *payloads, *chunk, careful=True)
    assert sorted(row["data"] for row in rows_of(lake, "fragile", manifest, "failed")) == sorted(
        [*payloads[1::2], *chunk]
    )


def calls(diary: Path) -> dict[str, Counter[str]]:
    """Return the number of calls of each callback with each message."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for line in diary.read_text().splitlines():
        callback, name = line.split()
        counted[callback][name] += 1
    return counted


@pytest.fixture
def small_blocks(monkeypatch):
    """Limit tries to a chunk even after quick tries."""
    monkeypatch.setattr(try_size, "QUICK_S", 0)


@pytest.mark.parametrize("killers", [[137], [131, 135, 138]])
def test_a_killer_costs_its_block_one_more_try(lake, diary, small_blocks, killers):
    payloads = [b"handle_message kill" if number in killers else b"%d" % number for number in range(200)]
    handled(lake, Fragile, *payloads, careful=True)
    begun = calls(diary)["handle_message"]
    times = {number: begun[f"m{number}"] for number in range(200)}
    assert {number for number in range(200) if times[number] > 1} <= set(range(130, killers[-1] + 1)), "its block alone"
    assert [times[number] for number in killers] == [2] * len(killers), "with its block, and alone"
    for number in set(range(130, 140)) - set(killers):
        assert times[number] == 1 + sum(number < killer for killer in killers)


@pytest.mark.parametrize(("quick_s", "given"), [(10**6, [10, 20, 40, 30]), (0, [10] * 10)])
def test_tries_grow_as_long_as_they_are_quick_and_one_host_makes_them(lake, monkeypatch, quick_s, given):
    class Placed(Keeping):
        name = "placed"
        processors = Processors(chunk_size=10)

        def handle_message(self, message, context):
            return message.put(Row(text=str(os.getpid())), batcher="kept")

    counted, real = [], Written.load

    def counting(file):
        written = real(file)
        counted.append(sum(batch.num_rows for table, _, batch in written.batches if table == "kept"))
        return written

    monkeypatch.setattr(Written, "load", counting)
    monkeypatch.setattr(try_size, "QUICK_S", quick_s)
    manifest = handled(lake, Placed, *[b"1"] * 100, careful=True)

    assert counted == given
    assert len({row["text"] for row in rows_of(lake, "placed", manifest, "kept")}) == 1


def test_a_killer_of_a_serializer_costs_its_block_two_more_tries(lake, diary, small_blocks):
    payloads = [b"serialise kill" if number == 5 else b"serialise" for number in range(10)]
    handled(lake, Fragile, *payloads, careful=True)
    times = calls(diary)["handle_message"]
    assert times.pop("m5") == 3
    assert set(times.values()) == {3}, "together, one by one, and without it"


def test_a_thread_that_kills_after_its_message_returned_fails_no_message(lake):
    class Late(Keeping):
        name = "late"

        def handle_message(self, message, context):
            if message.data == b"later":
                threading.Timer(0.02, fault, ["kill"]).start()
            time.sleep(0.01)
            return message.put(Row(text=message.data.decode()), batcher="kept")

    payloads = [b"later" if number == 7 else b"%d" % number for number in range(30)]

    manifest = handled(lake, Late, *payloads, careful=True)

    told = outcomes(lake, "late", manifest)
    assert len(told) == 30
    assert {name for name, outcome in told.items() if outcome == "failed"} <= {"m7"}


def test_each_try_has_an_instance_and_connections_of_its_own(lake, tmp_path):
    class Connected(Keeping):
        name = "connected"

        def __init__(self):
            self.made_in = os.getpid()

        def handle_message(self, message, context):
            if message.data == b"kill":
                fault("kill")
            return message.put(Row(text=f"{self.made_in == os.getpid()} {self.made_in != PARENT}"), batcher="kept")

    manifest = handled(lake, Connected, b"1", b"kill", b"3", careful=True)

    assert [row["text"] for row in rows_of(lake, "connected", manifest, "kept")] == ["True True", "True True"]


PARENT = os.getpid()


# Batches


@pytest.mark.parametrize("how", ["kill", "quit"])
def test_a_batch_whose_callback_ends_the_worker_fails_and_costs_no_other(lake, diary, how):
    batches = staged("1", f"handle_batch {how}", "3"), staged("4", "5", key="other")
    manifest = batched(lake, *batches, pipeline=Gathering, careful=True)
    assert Counter(row["outcome"] for row in rows_of(lake, "gathering", manifest, "outcomes")) == {
        "failed": 3,
        "handled": 2,
    }
    failures = rows_of(lake, "gathering", manifest, "failed")
    assert {(row["kind"], row["stage"]) for row in failures} == {("worker killed", "handle_batch")}
    assert manifest.totals.batches == 2


def test_a_message_that_ends_the_worker_where_it_is_decoded_fails_alone(lake, diary):
    told = staged({"text": "one"}, {"text": "decode kill"}, {"text": "one"})
    manifest = batched(lake, told, pipeline=Gathering, batcher="typed", careful=True)
    assert outcomes(lake, "gathering", manifest) == {"m0": "handled", "m1": "failed", "m2": "handled"}
    (failure,) = rows_of(lake, "gathering", manifest, "failed")
    assert (failure["kind"], failure["stage"]) == ("worker killed", "decode")


@pytest.mark.parametrize("how", ["kill", "quit"])
@pytest.mark.parametrize("where", ["serialise", "handle_failed"])
def test_a_message_that_ends_the_worker_around_its_batch_fails_alone(lake, diary, where, how):
    manifest = batched(lake, staged("0", "fail", f"{where} {how}", "3"), pipeline=Gathering, careful=True)
    told = outcomes(lake, "gathering", manifest)
    assert told == {"m0": "handled", "m1": "failed", "m2": "failed", "m3": "handled"}
    failed = {row["message_id"]: row for row in rows_of(lake, "gathering", manifest, "failed")}
    assert failed["m1"]["reason"] == "as told"
    assert failed["m2"]["kind"] == "worker killed"


def test_a_culprit_that_also_crashes_handle_failed_keeps_its_ack_actions(lake, diary):
    batch = staged("0", "fail", "handle_failed kill")
    rows = batch.rows.set_column(STAGED.get_field_index("on_failure"), "on_failure", pa.array([None, None, "nack:60"]))
    manifest = batched(lake, batch._replace(rows=rows), pipeline=Gathering, careful=True)
    told = {row["message_id"]: row["action"] for row in rows_of(lake, "gathering", manifest, "outcomes")}
    assert told["m2"] == "nack:60"


@pytest.mark.parametrize("told", [["handle_batch close", *map(str, range(30))], ["fail", *["handle_failed kill"] * 30]])
def test_a_batch_that_breaks_its_process_is_not_retried_per_message(lake, diary, told):
    batched(lake, staged(*told), pipeline=Gathering, careful=True)
    called = [line for line in diary.read_text().splitlines() if line == "handle_batch m0"]
    assert len(called) <= 7


def test_a_slow_preparation_runs_once_without_a_limit(lake, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline_platform.control.pace._LOOK_S", 0.05)

    class Long(Fragile):
        name = "long"

        def prepare_messages(self, messages, context):
            time.sleep(0.1)
            return super().prepare_messages(messages, context)

    Long.diary = tmp_path / "calls"
    store = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")

    manifest = handled(lake, Long, *[b"1"] * 10, careful=True, pace=Pace(store, "long", None))

    store.close()
    assert set(outcomes(lake, "long", manifest).values()) == {"handled"}
    assert calls(Long.diary)["prepare_messages"].total() == 10


# How killers are found


def isolated(
    rows: Sequence[int],
    attempt: Callable[[Sequence[int]], Death | None],
    failed: list[int],
    most: int = 10**6,
    **options: Any,
) -> None:
    """Try rows, at most `most` at once, with the results of `attempt`. Collect the failed rows."""
    tries, answer = isolate(rows, lambda attempted: attempted, **options), None
    with suppress(StopIteration):
        while True:
            current: Try = tries.send(answer)
            failed += current.rows if current.death else []
            answer = (None if current.death else attempt(current.rows)) or (min(most, len(current.rows)), ())


def dying(killers: set[int], begun: list[Sequence[int]], *, blames: bool) -> Any:
    def attempt(rows: Sequence[int]) -> Death | None:
        deadly = [place for place, row in enumerate(rows) if row in killers]
        begun.append(rows[: deadly[0] + 1] if deadly else rows)
        return Death("signal 9", "", deadly[:1] if blames else ()) if deadly else None

    return attempt


@given(st.integers(0, 60), st.sets(st.integers(0, 59)), st.booleans())
def test_every_killer_is_found_and_nothing_else(rows, killers, blames):
    failed, begun = [], []
    isolated(range(rows), dying(killers, begun, blames=blames), failed)
    assert failed == sorted(killers & set(range(rows))), "in order"
    if blames:
        assert sum(map(len, begun)) <= (BEGUN_AGAIN + 4) * rows, "however many killers there are"


@given(st.integers(2, 60), st.integers(0, 59))
def test_a_wrongly_suspected_row_does_not_fail(rows, blamed):
    failed, tries = [], []

    def attempt(some: Sequence[int]) -> Death | None:
        tries.append(some)
        return Death("signal 9", "", [blamed % len(some)]) if len(some) > 1 else None

    isolated(range(rows), attempt, failed)

    assert failed == []
    assert len(tries) <= 4 * rows


def test_a_row_that_crashes_by_the_damage_of_another_does_not_fail():
    failed = []

    def attempt(rows: Sequence[int]) -> Death | None:
        deadly = [place for place, row in enumerate(rows) if row == 3 or 5 in rows[:place]]
        return Death("signal 11", "handle_message", deadly[:1]) if deadly else None

    isolated(range(12), attempt, failed)

    assert failed == [3]


def test_a_crash_after_earlier_tries_is_verified():
    """A side effect of an earlier try, for example a thread, may be the cause."""
    failed, deaths = [], iter([Death("signal 9", "", [0], tries=2)])
    isolated(range(1), lambda some: next(deaths, None), failed)
    assert failed == []
