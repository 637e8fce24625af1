"""Isolation: a message that ends its process, wherever and however, fails alone; and is found in few tries."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, field_serializer

from pipeline_platform.control.pace import Pace
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher, Processors, Producer, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.fork import Death, Written, in_a_fork
from pipeline_platform.tasks.isolate import BEGUN_AGAIN, settle
from pipeline_platform.tasks.progress import Progress
from pipeline_platform.tasks.staging import STAGED
from tests.fixtures.small_lake import Row, handled, outcomes, rows_of
from tests.tasks.test_batch import batched, staged


@pytest.fixture
def lake(tmp_path):
    return Lake(root=str(tmp_path))


def die(how: str) -> None:
    """End this process, or make it useless."""
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)
        case "close":
            os.closerange(3, 256)


WAYS = ["kill", "exit", "close"]


class Deadly(BaseModel):
    """Dies where it is made JSON, if its text says so."""

    text: str

    @field_serializer("text")
    def _or_die(self, text: str) -> str:
        if text.startswith("serialise"):
            die(text.split()[1])
        return text


class Fragile(Pipeline):
    """Dies in the callback, and in the way, that a payload names; and writes down each call."""

    name = "fragile"
    producer = Producer(source="memory")
    processors = Processors(chunk_size=10)
    batchers = {"kept": TableBatcher(schema=Row), "called": Batcher()}
    diary: Path

    def _called(self, callback: str, message: Message) -> None:
        with self.diary.open("a") as diary:
            diary.write(f"{callback} {message.message_id}\n")
        text = message.data.decode() if isinstance(message.data, bytes) else str(message.data)
        if text.startswith(f"{callback} "):
            die(text.split()[1])

    def transform(self, event: Message) -> Message:
        self._called("transform", event)
        return event

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        for message in messages:
            self._called("prepare_messages", message)
        return messages

    def handle_message(self, message: Message, context: Any) -> Message:
        self._called("handle_message", message)
        if message.data.startswith((b"handle_failed", b"fail")):
            return message.failed("as told")
        if message.data.startswith(b"serialise"):
            return message.put(Deadly(text=message.data.decode()), batcher="called")
        return message.put(Row(text=message.data.decode()), batcher="kept")

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        for message in messages:
            self._called("handle_failed", message)
        return messages

    def handle_batch(self, batcher, messages, batch_info, context):
        return messages


@pytest.fixture
def diary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(Fragile, "diary", tmp_path / "diary", raising=False)
    return tmp_path / "diary"


CALLBACKS = ["transform", "prepare_messages", "handle_message", "handle_failed", "serialise"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_message_that_ends_its_worker_fails_alone_and_says_where(lake, diary, callback, how):
    payloads = [b"0", b"fail", f"{callback} {how}".encode(), b"3", b"4", b"fail"]

    manifest = handled(lake, Fragile, *payloads, careful=True)

    told = outcomes(lake, "fragile", manifest)
    assert told == {"m0": "handled", "m1": "failed", "m2": "failed", "m3": "handled", "m4": "handled", "m5": "failed"}
    failed = {row["message_id"]: row for row in rows_of(lake, "fragile", manifest, "failed")}
    assert (failed["m1"]["reason"], failed["m5"]["reason"]) == ("as told", "as told")
    killer = failed["m2"]
    assert killer["kind"] == "worker killed"
    assert killer["data"] == payloads[2], "driving it again needs the original"
    if how != "close":  # which is noticed at the end, wherever it came to pass
        assert killer["stage"] == ("lake" if callback == "serialise" else callback)
        assert killer["reason"].startswith(f"{killer['stage']} ended the worker (")
    assert [row["text"] for row in rows_of(lake, "fragile", manifest, "kept")] == ["0", "3", "4"]


def test_one_killer_costs_its_block_one_more_try(lake, diary):
    payloads = [b"%d" % number for number in range(200)]
    payloads[137] = b"handle_message kill"

    handled(lake, Fragile, *payloads, careful=True)

    calls = Counter(line.split()[0] for line in diary.read_text().splitlines())
    assert calls["handle_message"] <= 200 + 10 + 1, "once each; the killer's chunk, and the killer, once more"


def test_a_thread_that_kills_after_its_message_returned_costs_no_message_for_good(lake):
    class Late(Pipeline):
        name = "late"
        producer = Producer(source="memory")
        batchers = {"kept": TableBatcher(schema=Row)}

        def handle_message(self, message, context):
            if message.data == b"later":
                threading.Timer(0.02, die, ["kill"]).start()
            time.sleep(0.01)
            return message.put(Row(text=message.data.decode()), batcher="kept")

    payloads = [b"later" if number == 7 else b"%d" % number for number in range(30)]

    manifest = handled(lake, Late, *payloads, careful=True)

    told = outcomes(lake, "late", manifest)
    assert len(told) == 30
    assert {name for name, outcome in told.items() if outcome == "failed"} <= {"m7"}


def test_each_try_has_an_instance_and_connections_of_its_own(lake, tmp_path):
    class Connected(Pipeline):
        name = "connected"
        producer = Producer(source="memory")
        batchers = {"kept": TableBatcher(schema=Row)}

        def __init__(self):
            self.made_in = os.getpid()

        def handle_message(self, message, context):
            if message.data == b"kill":
                die("kill")
            return message.put(Row(text=f"{self.made_in == os.getpid()} {self.made_in != PARENT}"), batcher="kept")

    manifest = handled(lake, Connected, b"1", b"kill", b"3", careful=True)

    assert [row["text"] for row in rows_of(lake, "connected", manifest, "kept")] == ["True True", "True True"]


PARENT = os.getpid()


# Batches


class Gathering(Fragile):
    """Dies in `handle_batch`, where it is decoded or in `handle_failed`, as data say."""

    name = "gathering"
    batchers = {"plain": Batcher(), "typed": Batcher(schema=Row)}

    def handle_batch(self, batcher, messages, batch_info, context):
        for message in messages:
            self._called("handle_batch", message)
        returned = [message.failed("as told") if "fail" in str(message.data) else message for message in messages]
        return [self._deadly(message) for message in returned]

    def _deadly(self, message: Message) -> Message:
        text = str(message.data)
        return message.put_data(Deadly(text=text)) if text.startswith("serialise") else message

    def handle_failed(self, messages, context):
        for message in messages:
            self._called("handle_failed", message)
        return messages


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_a_batch_whose_callback_ends_the_worker_fails_and_costs_no_other(lake, diary, how):
    batches = staged("1", f"handle_batch {how}", "3"), staged("4", "5", key="other")

    manifest = batched(lake, *batches, pipeline=Gathering, careful=True)

    assert Counter(row["outcome"] for row in rows_of(lake, "gathering", manifest, "outcomes")) == {
        "failed": 3,
        "handled": 2,
    }
    failures = rows_of(lake, "gathering", manifest, "failed")
    assert {(row["kind"], row["stage"]) for row in failures} == {("worker killed", "handle_batch")}
    assert manifest.total("batches") == 2


@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.parametrize("where", ["serialise", "handle_failed"])
def test_a_message_that_ends_the_worker_around_its_batch_fails_alone(lake, diary, where, how):
    manifest = batched(lake, staged("0", "fail", f"{where} {how}", "3"), pipeline=Gathering, careful=True)

    told = outcomes(lake, "gathering", manifest)
    assert told == {"m0": "handled", "m1": "failed", "m2": "failed", "m3": "handled"}
    failed = {row["message_id"]: row for row in rows_of(lake, "gathering", manifest, "failed")}
    assert failed["m1"]["reason"] == "as told"
    assert failed["m2"]["kind"] == "worker killed"


def test_a_killer_that_handle_failed_cannot_bear_keeps_its_own_acknowledgement(lake, diary):
    batch = staged("0", "fail", "handle_failed kill")
    rows = batch.rows.set_column(STAGED.get_field_index("on_failure"), "on_failure", pa.array([None, None, "nack:60"]))

    manifest = batched(lake, batch._replace(rows=rows), pipeline=Gathering, careful=True)

    told = {row["message_id"]: row["action"] for row in rows_of(lake, "gathering", manifest, "outcomes")}
    assert told["m2"] == "nack:60"


def test_a_batch_that_makes_its_worker_useless_is_not_tried_for_each_of_its_messages(lake, diary):
    batched(lake, staged("handle_batch close", *map(str, range(30))), pipeline=Gathering, careful=True)

    called = [line for line in diary.read_text().splitlines() if line == "handle_batch m0"]
    assert len(called) <= 7


def test_a_chunk_that_is_long_prepared_is_prepared_once_where_there_is_no_limit(lake, tmp_path, monkeypatch):
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
    calls = Counter(line.split()[0] for line in Long.diary.read_text().splitlines())
    assert calls["prepare_messages"] == 10


# How killers are found


def dying(killers: set[int], calls: list[Sequence[int]], *, blames: bool) -> Any:
    def attempt(rows: Sequence[int]) -> tuple[Death | None, int]:
        deadly = [row for row in rows if row in killers]
        calls.append([row for row in rows if not deadly or row <= deadly[0]])
        return Death("signal 9", "", deadly[:1] if blames else ()) if deadly else None, len(rows)

    return attempt


@given(st.integers(0, 60), st.sets(st.integers(0, 59)), st.booleans())
def test_every_killer_is_found_and_nothing_else(rows, killers, blames):
    failed, calls = [], []

    settle(range(rows), dying(killers, calls, blames=blames), lambda rows, _: failed.extend(rows))

    assert failed == sorted(killers & set(range(rows))), "in order"
    if blames:
        assert sum(map(len, calls)) <= (BEGUN_AGAIN + 4) * rows, "however many killers there are"


@given(st.integers(2, 60), st.integers(0, 59))
def test_a_row_that_is_blamed_wrongly_is_not_failed_and_costs_little(rows, blamed):
    failed, calls = [], []

    def attempt(some: Sequence[int]) -> tuple[Death | None, int]:
        calls.append(some)
        return Death("signal 9", "", [some[blamed % len(some)]]) if len(some) > 1 else None, len(some)

    settle(range(rows), attempt, lambda rows, _: failed.extend(rows))

    assert failed == []
    assert len(calls) <= 4 * rows


# The fork


def test_what_a_fork_wrote_comes_back(tmp_path):
    def work(progress: Progress) -> Written:
        written = Written()
        written.write("t", "w", staged("a", "b").rows)
        written.notes = {"pid": os.getpid()}
        return written

    answer = in_a_fork(work, 2)

    assert isinstance(answer, Written)
    assert answer.notes["pid"] != os.getpid()
    ((table, window, rows),) = answer.batches
    assert (table, window, rows.to_pylist()) == ("t", "w", staged("a", "b").rows.to_pylist())


def test_a_fault_of_the_platform_in_a_fork_is_raised_and_is_no_messages():
    def work(progress: Progress) -> Written:
        raise OSError("no such table")

    with pytest.raises(RuntimeError, match="no such table"):
        in_a_fork(work, 1)


def test_a_fork_ends_with_its_parent():
    """A worker that Spark ends must leave nobody behind who goes on calling callbacks."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:

        def work(progress: Progress) -> Written:
            os.write(write, str(os.getpid()).encode())
            time.sleep(60)
            return Written()

        in_a_fork(work, 1)
        os._exit(0)
    child = int(os.read(read, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)

    end = time.monotonic() + 10
    while time.monotonic() < end and _lives(child):
        time.sleep(0.01)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
