"""Threads: messages of one task handled at once, with isolated failures."""

import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest

from pipeline_platform import Message, Processors
from pipeline_platform.tasks.handle.row_lane import Handler
from pipeline_platform.tasks.handle.threads import at_once
from tests.fixtures.obedient import Obedient
from tests.fixtures.small_lake import batch_of, handled, outcomes, recorded, rows_of

LONG_S = 60
"""Maximum wait in seconds of a message for other messages."""


class Together(Obedient):
    """Each message waits until ten have started, and then obeys its payload."""

    name = "together"
    processors = Processors(threads=10, chunk_size=10)
    begun = threading.Barrier(10)

    def handle_message(self, message: Message, context: Any) -> Any:
        self.begun.wait(LONG_S)
        return super().handle_message(message, context)


def test_ten_messages_are_handled_at_once_in_order_and_each_fails_alone(lake):
    payloads = [b"0", b"raise", b"2", b"exit", b"4", b"panic", b"6", b"interrupt", b"8", b"none"]
    manifest = handled(lake, Together, *payloads)
    failed = {"m1", "m3", "m5", "m7", "m9"}
    assert outcomes(lake, "together", manifest) == {
        f"m{number}": "failed" if f"m{number}" in failed else "handled" for number in range(10)
    }
    assert [row["text"] for row in rows_of(lake, "together", manifest, "kept")] == ["0", "2", "4", "6", "8"]
    assert [row["message_id"] for row in rows_of(lake, "together", manifest, "failed")] == sorted(failed)


def test_prepare_messages_gets_chunks_by_itself_and_all_threads_share_an_instance(lake):
    class Preparing(Obedient):
        name = "preparing"
        processors = Processors(threads=3, chunk_size=3)
        chunks: list[int] = []
        instances: set[int] = set()

        def prepare_messages(self, messages, context):
            assert threading.current_thread() is threading.main_thread()
            self.chunks.append(len(messages))
            return messages

        def handle_message(self, message, context):
            self.instances.add(id(self))
            return super().handle_message(message, context)

    manifest = handled(lake, Preparing, *(b"%d" % number for number in range(8)))

    assert manifest.totals.handled.total() == 8
    assert Preparing.chunks == [3, 3, 2]
    assert len(Preparing.instances) == 1


class Held(Obedient):
    """Two threads, whose messages wait until they are released."""

    name = "held"
    processors = Processors(threads=2)
    begun: threading.Semaphore
    go: threading.Event

    def handle_message(self, message: Message, context: Any) -> Any:
        self.begun.release()
        assert self.go.wait(LONG_S)
        return super().handle_message(message, context)


@pytest.fixture
def held(monkeypatch):
    monkeypatch.setattr(Held, "begun", threading.Semaphore(0), raising=False)
    monkeypatch.setattr(Held, "go", threading.Event(), raising=False)
    return Held


def test_a_thread_takes_a_permit_only_when_it_starts_a_message(held):
    taken: list[int] = []

    def paced(messages: Iterable[Message]) -> Iterator[Message]:
        for number, message in enumerate(messages):
            taken.append(number)
            yield message

    handler = Handler(recorded(held()), paced=paced)
    results: list[Message] = []
    task = threading.Thread(target=lambda: results.extend(chain.from_iterable(handler.portions(batch_of(*[b"1"] * 6)))))
    task.start()
    for _ in range(2):
        assert held.begun.acquire(timeout=LONG_S)
    assert taken == [0, 1], "both threads are at work: no permit is taken for a third message"
    held.go.set()
    task.join(LONG_S)

    assert [message.status for message in results] == ["ok"] * 6
    assert taken == list(range(6))


def test_an_error_of_the_rate_limit_fails_the_task_after_started_messages_end():
    done: list[int] = []

    def permits() -> Iterator[int]:
        yield from range(3)
        raise ConnectionError("no answer")

    def worker(numbers: Iterable[int]) -> list[int]:
        return [done.append(number) or number for number in numbers]

    with pytest.raises(ConnectionError, match="no answer"):
        at_once(range(9), [worker, worker], permits(), {1: 2})

    assert sorted(done) == [0, 1, 2]


class Hanging(Obedient):
    """A message hangs while other messages of its task complete."""

    name = "hanging"
    processors = Processors(threads=4, chunk_size=20, message_timeout=timedelta(seconds=1))

    def handle_message(self, message: Message, context: Any) -> Any:
        if message.data == b"hang":
            threading.Event().wait()
        return super().handle_message(message, context)


def test_a_message_that_hangs_in_a_thread_times_out_alone(lake):
    payloads = [b"hang" if number in (5, 11) else b"%d" % number for number in range(20)]
    manifest = handled(lake, Hanging, *payloads)
    told = outcomes(lake, "hanging", manifest)
    assert told == {f"m{number}": "failed" if number in (5, 11) else "handled" for number in range(20)}
    failed = rows_of(lake, "hanging", manifest, "failed")
    assert {(row["message_id"], row["kind"]) for row in failed} == {("m5", "timeout"), ("m11", "timeout")}
