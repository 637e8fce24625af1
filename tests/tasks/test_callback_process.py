"""The callback process: damage by a callback fails only its own message, and no file is lost."""

import ctypes
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline_platform import Batcher, Pipeline, Processors, Producer, TableBatcher
from pipeline_platform.tasks import calling_step
from pipeline_platform.tasks.callback_process.fork import Death, Give, Written, in_a_fork
from pipeline_platform.tasks.callback_process.progress import Progress
from pipeline_platform.tasks.handle.handle_messages import Handle
from tests.fixtures.small_lake import (
    Memory,
    Row,
    Shared,
    batching,
    numbered,
    outcomes,
    ranges,
    received,
    returned,
    rows_of,
)
from tests.tasks.test_batch import staged


def fork_and(how):
    """Fork as user code may; the child returns into the platform."""
    child = ctypes.CDLL(None).fork() if how == "unseen" else os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if how == "exit":
        sys.exit(0)
    if how == "raise":
        raise ValueError("of the child")
    # It returns, and goes on as a second copy of the callback process.


def spoil(what):
    match what:
        case "json":
            json.dumps = None
        case "arrow":
            pa.array = None
        case "recursion":
            sys.setrecursionlimit(len(inspect.stack()) + 2)  # the platform needs a few frames more
        case "files":
            os.closerange(3, 1 << 16)  # the test's process may have hundreds open
        case _:
            raise AssertionError(what)


class Hostile(Pipeline):
    """Damages its process as the payload says, in the callback that the payload names."""

    name = "hostile"
    producer = Producer(source="memory")
    processors = Processors(chunk_size=10)
    batchers = {"kept": TableBatcher(schema=Row), "called": Batcher(batch_size=4)}

    def _do(self, callback, message):
        where, _, what = bytes(message.data).decode().partition(" ")
        if where != callback or not what:
            return
        verb, _, how = what.partition(" ")
        {"fork": fork_and, "spoil": spoil}[verb](how)

    def prepare_messages(self, messages, context):
        for message in messages:
            self._do("prepare_messages", message)
        return messages

    def handle_message(self, message, context):
        self._do("handle_message", message)
        if message.data.startswith((b"fail", b"handle_failed")):
            raise ValueError("as told")
        if message.data.startswith(b"broken"):
            message._state = None
            return message
        if message.data.startswith(b"handle_batch"):
            return message.put_batcher("called")
        return message.put(Row(text=message.data.decode()), batcher="kept")

    def handle_batch(self, batcher, messages, info, context):
        for message in messages:
            self._do("handle_batch", message)
        return messages

    def handle_failed(self, messages, context):
        for message in messages:
            self._do("handle_failed", message)
        return messages


def in_callback_process(lake, *payloads, pipeline=Hostile):
    """Return the manifest of a task with a callback process."""
    source = Memory(deliveries_=numbered(*payloads))
    rows = ranges(received(lake, pipeline.name, source), pipeline.name)
    return returned(Handle(pipeline, None, source.ack_policy, lake, "r1", parts=[rows])(0))


INNOCENT = [b"1", b"2", b"3", b"fail", b"5", b"6"]


@pytest.mark.parametrize("callback", ["handle_message", "prepare_messages", "handle_failed"])
def test_the_child_of_a_callback_that_forks_ends_before_it_touches_anything(lake, callback):
    forks = [f"{callback} fork {how}".encode() for how in ("exit", "raise", "return", "unseen")]
    manifest = in_callback_process(lake, *INNOCENT, *forks, *INNOCENT)
    failed = 6 if callback == "handle_failed" else 2
    assert Counter(outcomes(lake, "hostile", manifest).values()) == {"handled": 16 - failed, "failed": failed}
    assert [file.rows for file in manifest.of_table("outcomes")] == [16]
    assert len(list(os.scandir(_outcomes(lake)))) == 1, "no copy wrote a file"


def test_a_message_that_damages_its_process_fails_alone(lake):
    spoils = ["json", "arrow", "recursion", "files"]
    payloads = [*INNOCENT, *(payload for what in spoils for payload in (f"handle_message spoil {what}".encode(), b"7"))]
    manifest = in_callback_process(lake, *payloads, b"broken", b"8")
    failed = {row["message_id"]: row for row in rows_of(lake, "hostile", manifest, "failed")}
    assert failed.keys() == {"m3", "m6", "m8", "m10", "m12", "m14"}
    assert failed["m3"]["reason"] == "as told"
    assert {failed[name]["kind"] for name in ("m6", "m8", "m12")} == {"worker killed"}
    assert failed["m10"]["kind"] in ("worker killed", "RecursionError")
    kept = [row["text"] for row in rows_of(lake, "hostile", manifest, "kept")]
    assert kept == ["1", "2", "3", "5", "6", *["7"] * 4, "8"]


def test_a_batch_that_damages_its_process_fails_and_no_other(lake):
    payloads = [*[b"handle_batch"] * 5, b"handle_batch spoil json", *[b"handle_batch"] * 4]
    manifest = returned(batching(lake, Hostile, in_callback_process(lake, *payloads), "called")(0))
    told = outcomes(lake, "hostile", manifest)
    assert {name for name, outcome in told.items() if outcome == "failed"} == {"m4", "m5", "m6", "m7"}
    assert len(told) == 10


def test_a_file_that_differs_from_its_manifest_is_dropped(lake, monkeypatch):
    real = calling_step.in_a_fork

    def damaged(work, take, **options):
        monkeypatch.setattr(calling_step, "in_a_fork", real)
        death = real(work, take, **options)
        (path,) = [entry.path for entry in os.scandir(_outcomes(lake))]
        with open(path, "ab") as file:
            file.write(b"of a stranger")
        return death

    monkeypatch.setattr(calling_step, "in_a_fork", damaged)

    manifest = in_callback_process(lake, b"1", b"2")

    assert outcomes(lake, "hostile", manifest) == {"m0": "handled", "m1": "handled"}
    (file,) = manifest.of_table("outcomes")
    path = f"{lake.root}/hostile/outcomes/{file.path}"
    assert (pq.read_metadata(path).num_rows, os.path.getsize(path)) == (2, file.bytes)


def test_a_crash_before_the_first_try_fails_no_message(lake, monkeypatch):
    real, deaths = calling_step.in_a_fork, [Death("signal 6")] * 2
    monkeypatch.setattr(
        calling_step, "in_a_fork", lambda *given, **more: deaths.pop() if deaths else real(*given, **more)
    )
    assert outcomes(lake, "hostile", in_callback_process(lake, b"1")) == {"m0": "handled"}


def _outcomes(lake):
    return f"{lake.root}/hostile/outcomes/window=2026-01-01T0000"


def test_a_constructor_that_ends_its_process_fails_the_task_and_no_message(lake):
    class Ending(Hostile):
        def __init__(self):
            os._exit(3)

    with pytest.raises(RuntimeError, match="exit code 3"):
        in_callback_process(lake, b"1", b"2", pipeline=Ending)


def test_processes_that_callbacks_started_end_with_their_host():
    read, write = os.pipe()

    def work(progress, give):
        if (child := os.fork()) == 0:
            time.sleep(60)
        os.write(write, str(child).encode())

    in_a_fork(work, lambda written: None)

    started = int(os.read(read, 100))
    end = time.monotonic() + 10
    while psutil.pid_exists(started) and psutil.Process(started).status() != "zombie" and time.monotonic() < end:
        time.sleep(0.01)
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == "zombie"


def test_a_late_exception_of_a_callback_never_continues_as_a_copy_of_the_task():
    def interrupt(frame, event, _):  # as a timer does now and then that a callback left behind
        if event == "return" and frame.f_code.co_name == "__exit__" and frame.f_back.f_code.co_name == "_be_host":
            raise InterruptedError

    here, copies = os.getpid(), Shared(0)
    try:
        death = in_a_fork(lambda progress, give: sys.setprofile(interrupt), lambda written: None)
    finally:
        if os.getpid() != here:
            copies.value += 1
            os._exit(1)

    assert (death, copies.value) == (None, 0)


def test_an_exception_of_the_constructor_fails_the_task_and_no_message(lake):
    class Away(Hostile):
        def __init__(self):
            raise ConnectionError("no bank")

    with pytest.raises(RuntimeError, match="no bank"):
        in_callback_process(lake, b"1", pipeline=Away)


@pytest.mark.parametrize("times", [50, pytest.param(10_000, marks=pytest.mark.soak)])
def test_forking_again_and_again_harms_neither_process(times):
    """The parent has garbage of native libraries, and threads that the fork lacks."""
    garbage = []
    for number in range(times):
        cycle = [pa.array(range(100))]
        cycle.append(cycle)
        garbage.append(pa.table({"n": pa.array(range(number % 300))}))
        del garbage[:-600]
        assert in_a_fork(lambda progress, give: None, garbage.append) is None


def test_large_results_and_results_before_a_crash_arrive():
    rows = staged(*("x" * 10_000 for _ in range(1_000))).rows

    def work(progress: Progress, give: Give) -> None:
        for _ in range(3):
            written = Written()
            written.write("t", "w", rows)
            give(written)
        os.kill(os.getpid(), signal.SIGKILL)

    given: list[Written] = []
    death = in_a_fork(work, given.append)

    assert death is not None
    assert death.how == "signal 9"
    assert [batch.equals(rows) for written in given for *_, batch in written.batches] == [True] * 3


def test_a_fork_is_killed_if_its_results_cannot_be_taken():
    read, write = os.pipe()

    def work(progress: Progress, give: Give) -> None:
        os.write(write, str(os.getpid()).encode())
        while True:
            give(Written())

    def take(written: Written) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        in_a_fork(work, take)

    assert not _lives(int(os.read(read, 100)))


def test_a_result_socket_replaced_by_a_callback_is_a_crash():
    def work(progress: Progress, give: Give) -> None:
        os.closerange(3, 1 << 16)
        files = [os.open(os.devnull, os.O_WRONLY) for _ in range(1_000)]
        give(Written(files=len(files)))

    death = in_a_fork(work, lambda written: None)

    assert death is not None
    assert death.how == "exit code 0"


def test_a_fault_of_the_platform_in_a_fork_is_raised_and_fails_no_message():
    def work(progress: Progress, give: Give) -> None:
        raise OSError("no such table")

    with pytest.raises(RuntimeError, match="no such table"):
        in_a_fork(work, lambda written: None)


def test_forks_of_several_threads_do_not_overlap(monkeypatch):
    fork, under_way, overlaps = os.fork, threading.Semaphore(), list[int]()

    def watched() -> int:
        if not under_way.acquire(blocking=False):
            overlaps.append(1)
        time.sleep(0.01)
        child = fork()
        under_way.release()
        return child

    monkeypatch.setattr("os.fork", watched)
    with ThreadPoolExecutor(4) as threads:
        deaths = list(threads.map(lambda _: in_a_fork(lambda progress, give: None, lambda written: None), range(8)))
    assert (deaths, overlaps) == ([None] * 8, [])


def test_a_fork_ends_with_its_parent():
    """After Spark kills a worker, no callback process may continue."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:

        def work(progress: Progress, give: Give) -> None:
            os.write(write, str(os.getpid()).encode())
            time.sleep(60)

        in_a_fork(work, lambda written: None)
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
