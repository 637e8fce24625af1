"""Isolation: callbacks that end their process do so in a fork of it, and cost no message but their own.

A task that is tried again is careful: it calls no callback itself. A forked process does, on some rows at a time, and
gives back as Arrow what it would have written. One that dies is followed by others with fewer rows, until the smallest
part that still dies is known.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple, Protocol

import pyarrow as pa

from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message
from pipeline_platform.tasks.tally import Tally

_CALLBACKS = ("", "transform", "prepare_messages", "handle_message", "decode", "handle_batch", "lake", "handle_failed")
_RUNNING, _DELIVERED, _RAISED = 0, 1, 2
_CELL = 8


class Sink(Protocol):
    """Where rows go: the task's files, or a forked process's answer."""

    def write(self, table: str, window: str, batch: pa.RecordBatch) -> None:
        """Add rows to a table."""


class Watch(Protocol):
    """Is told where callbacks are."""

    exact: bool
    """Whether serialisers and `handle_failed` are called for one message at a time, so that a killer is known."""

    def each(self, callback: str, messages: Iterable[Message]) -> Iterable[Message]:
        """Yield messages, each as its callback begins."""

    def busy(self, callback: str, messages: Sequence[Message]) -> None:
        """A callback begins with these messages."""


class Unwatched:
    """Costs nothing: a task that has not died before."""

    exact = False

    def each(self, callback: str, messages: Iterable[Message]) -> Iterable[Message]:
        """Give them back."""
        del callback
        return messages

    def busy(self, callback: str, messages: Sequence[Message]) -> None:
        """Ignore it."""


UNWATCHED = Unwatched()


class Progress:
    """Where a forked process is, in memory that it shares with its parent: which callback has which rows."""

    def __init__(self, rows: int, *, exact: bool) -> None:
        self.exact = exact
        self._cells = memoryview(mmap.mmap(-1, _CELL * (3 + rows))).cast("q")

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, each as its callback begins."""
        number = _CALLBACKS.index(callback)
        for message in messages:
            self._cells[1], self._cells[2], self._cells[3] = number, 1, message._row
            yield message

    def busy(self, callback: str, messages: Sequence[Message]) -> None:
        """A callback begins with these messages."""
        for cell, message in enumerate(messages, start=3):
            self._cells[cell] = message._row
        self._cells[1], self._cells[2] = _CALLBACKS.index(callback), len(messages)

    @property
    def state(self) -> int:
        """Whether it runs, has delivered, or raised."""
        return self._cells[0]

    @state.setter
    def state(self, state: int) -> None:
        self._cells[0] = state

    @property
    def callback(self) -> str:
        """The callback that began last."""
        return _CALLBACKS[self._cells[1]]

    @property
    def rows(self) -> list[int]:
        """The rows that it has."""
        return self._cells[3 : 3 + self._cells[2]].tolist()


class Death(NamedTuple):
    """How a forked process ended early.

    Attributes:
        how: `signal 9`, `exit code 3`.
        callback: The one that was under way.
        rows: What it had.
    """

    how: str
    callback: str
    rows: Sequence[int]

    def failure(self, callback: str) -> Failure:
        """What a message fails with that did this; `callback` where none was under way that is known."""
        callback = self.callback or callback
        return Failure("worker killed", f"{callback} ended the worker ({self.how})", "", callback)


class Written:
    """What a forked process would have written: takes a `Writer`'s place there.

    Attributes:
        batches: `(table, window, rows)`, in order.
        notes: More that it has to say, as JSON has it.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[str, str, pa.RecordBatch]] = []
        self.notes: dict[str, Any] = {}

    def write(self, table: str, window: str, batch: pa.RecordBatch) -> None:
        """Keep rows for the parent; an empty batch adds nothing."""
        if batch.num_rows:
            self.batches.append((table, window, batch))

    def pour(self, sink: Sink, tally: Tally) -> None:
        """Write the rows where they belong, and add what the child counted."""
        for table, window, batch in self.batches:
            sink.write(table, window, batch)
        tally.add(self.notes["tally"])

    def save(self, file: IO[bytes]) -> None:
        """Put all of it in a file: Arrow's streams and JSON, nothing that is evaluated."""
        bodies = [_stream(batch) for _, _, batch in self.batches]
        places = [(table, window, body.size) for (table, window, _), body in zip(self.batches, bodies, strict=True)]
        head = json.dumps({"places": places, "notes": self.notes}).encode()
        file.write(struct.pack("<q", len(head)) + head)
        for body in bodies:
            file.write(body)

    @classmethod
    def load(cls, file: IO[bytes]) -> Written:
        """The inverse of `save`."""
        (size,) = struct.unpack("<q", file.read(_CELL))
        head, written = json.loads(file.read(size)), cls()
        written.notes = head["notes"]
        for table, window, length in head["places"]:
            with pa.ipc.open_stream(pa.py_buffer(file.read(length))) as stream:
                written.batches += [(table, window, batch) for batch in stream]
        return written


def _stream(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def in_a_fork(work: Callable[[Progress], Written], rows: int, *, exact: bool = True) -> Written | Death:
    """Have a child work, and give back what it wrote, or how it died.

    Args:
        work: Called in the child.
        rows: Messages it is about, at the most.
        exact: See `Watch`; without it a death is blamed on as many rows as were at work.

    Raises:
        RuntimeError: The child raised: no callback's doing, for these are caught.
    """
    progress = Progress(rows, exact=exact)
    with _scratch() as answer:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the child would print it once more
        parent, child = os.getpid(), os.fork()
        if child == 0:
            _answer(work, progress, answer, parent)
        status = os.waitpid(child, 0)[1]
        answer.seek(0)
        if progress.state == _DELIVERED:
            return Written.load(answer)
        if progress.state == _RAISED:
            raise RuntimeError(f"a forked process of this task raised:\n{answer.read().decode()}")
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
    return Death(how, progress.callback, progress.rows)


def _scratch() -> IO[bytes]:
    """A file without a name; in memory where the system has such, for a disk may be full."""
    return os.fdopen(os.memfd_create("answer"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _answer(work: Callable[[Progress], Written], progress: Progress, answer: IO[bytes], parent: int) -> None:
    """Be the child. `os._exit` alone ends it: nothing of the parent's is cleaned up twice."""
    try:
        _go_first()
        if os.getppid() != parent:  # it died before its child asked to end with it
            os._exit(1)
        work(progress).save(answer)
        answer.flush()
        progress.state = _DELIVERED
    except BaseException:
        with suppress(OSError):  # a callback may have closed the file: that is a death
            answer.seek(0)
            answer.truncate()
            answer.write(traceback.format_exc().encode())
            answer.flush()
            progress.state = _RAISED
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _go_first() -> None:
    """End with the parent, and before it where memory runs out: a message that eats it is the child's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write("1000")


def tries_before() -> int:
    """How often this Spark task was tried before; 0 where there is none."""
    context = sys.modules.get("pyspark.taskcontext")
    task = context.TaskContext.get() if context else None
    return int(task.attemptNumber()) if task else 0


class Attempt(NamedTuple):
    """What came of trying some rows.

    Attributes:
        death: How the process ended; None where it came to its end.
        tried: How many of the rows, the first ones, it was given or, at its end, dealt with. Others may not begin yet.
    """

    death: Death | None
    tried: int


def settle(
    rows: Sequence[int], attempt: Callable[[Sequence[int]], Attempt], fail: Callable[[int, Death], None]
) -> None:
    """Have rows dealt with, whichever of them end the process that does.

    Rows are attempted together. Where that dies, those that it was busy with go alone; where these do not die, it was
    another's doing (a thread's, say), and halves are attempted.

    Args:
        rows: In order.
        attempt: Deals with rows in another process; says what came of it. It names rows as they are given here.
        fail: Called for a row that ends its process alone.
    """
    _settle(list(rows), attempt, fail, trust=True)


def _settle(
    rows: list[int], attempt: Callable[[Sequence[int]], Attempt], fail: Callable[[int, Death], None], *, trust: bool
) -> bool:
    """Return whether a row failed."""
    failed = False
    while rows:
        death, count = attempt(rows)
        tried, rows = rows[:count], rows[count:]
        if death is None:
            continue
        if len(tried) == 1:
            fail(tried[0], death)
            failed = True
            continue
        blamed = set(death.rows) if trust else set()
        suspects = [row for row in tried if row in blamed]
        if not 0 < len(suspects) < len(tried):
            suspects = tried[len(tried) // 2 :]
        apart = set(suspects)
        before = [row for row in tried if row < suspects[0]]
        after = [row for row in tried if row > suspects[0] and row not in apart]
        failed |= _settle(before, attempt, fail, trust=False)
        found = _settle(suspects, attempt, fail, trust=True)
        failed |= found | _settle(after, attempt, fail, trust=found)
    return failed
