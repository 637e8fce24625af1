"""A fork that works for a task: what it gives back, or how it ended early."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any, NamedTuple

import pyarrow as pa

from pipeline_platform.model.failure import Failure
from pipeline_platform.tasks.progress import DELIVERED, RAISED, Progress

_LOOKS = 10
"""How often a parent looks at a call before it is over its limit."""

_NAP_S = 1.0 if hasattr(os, "pidfd_open") else 0.01
"""The longest time between two looks. Where the end of a process wakes nobody, each fork may take so much longer."""


class Limit(NamedTuple):
    """How long a call of a callback may take.

    Attributes:
        option: What says so: `processors.message_timeout`.
        span: How long.
    """

    option: str
    span: timedelta

    @classmethod
    def of(cls, option: str, span: timedelta | None) -> Limit | None:
        """The limit that an option sets; None where it is not set."""
        return None if span is None else cls(option, span)


class Death(NamedTuple):
    """How a fork ended early.

    Attributes:
        how: `signal 9`, `exit code 3`; of a call that took too long, what it is held to.
        callback: The one that was under way, or empty if that is unknown.
        rows: The rows that it had.
        in_time: False if the call took too long: then it is these rows' for certain.
    """

    how: str
    callback: str
    rows: Sequence[int]
    in_time: bool = True

    def failure(self, callback: str) -> Failure:
        """What a message fails with that did this in `callback`, if no other is known."""
        callback = self.callback or callback
        if not self.in_time:
            return Failure("timeout", f"{callback} took longer than {self.how} allows", "", callback)
        return Failure("worker killed", f"{callback} ended the worker ({self.how})", "", callback)

    @property
    def has_several(self) -> bool:
        """Whether an exact try may tell which of several rows it was; see `Watch`.

        One of `handle_failed` that took too long is not tried again for each row: it may wait for something outside.
        """
        together = ("lake", "handle_failed") if self.in_time else ("lake",)
        return self.callback in together and len(self.rows) > 1


class Written:
    """What a fork would have written: the sink of a fork.

    Attributes:
        batches: `(table, window, rows)`, in order.
        notes: More that it has to say, as JSON has it.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[str, str, pa.RecordBatch]] = []
        self.notes: dict[str, Any] = {}

    def write(self, table: str, window: str, batch: pa.RecordBatch) -> None:
        """Hold rows for the parent; an empty batch adds nothing."""
        if batch.num_rows:
            self.batches.append((table, window, batch))

    def save(self, file: IO[bytes]) -> None:
        """Write all of it into a file: a line of JSON and Arrow's streams, nothing that is evaluated."""
        places = [(table, window) for table, window, _ in self.batches]
        file.write(json.dumps({"places": places, "notes": self.notes}).encode() + b"\n")
        for _, _, batch in self.batches:
            with pa.ipc.new_stream(file, batch.schema) as stream:
                stream.write_batch(batch)

    @classmethod
    def load(cls, file: IO[bytes]) -> Written:
        """The inverse of `save`."""
        head, written = json.loads(file.readline()), cls()
        written.notes = head["notes"]
        for table, window in head["places"]:
            with pa.ipc.open_stream(file) as stream:
                written.batches += [(table, window, batch) for batch in stream]
        return written


def in_a_fork(
    work: Callable[[Progress], Written], rows: int, *, exact: bool = True, limit: Limit | None = None
) -> Written | Death:
    """Have a fork work, and give back what it wrote, or how it died; see `Isolation.fork`.

    Raises:
        RuntimeError: The fork raised. No callback did: what they raise is caught.
    """
    progress = Progress(rows, exact=exact)
    with scratch() as answer:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the child would print it once more
        parent, child = os.getpid(), os.fork()
        if child == 0:
            _answer(work, progress, answer, parent)
        status = _status_in_time(child, progress, limit) if limit else os.waitpid(child, 0)[1]
        if isinstance(status, Death):
            return status
        answer.seek(0)
        if progress.state == DELIVERED:
            return Written.load(answer)
        if progress.state == RAISED:
            raise RuntimeError(f"a fork of this task raised:\n{answer.read().decode()}")
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
    return Death(how, progress.callback, progress.rows)


def _status_in_time(child: int, progress: Progress, limit: Limit) -> int | Death:
    """Wait for a child, and kill it in a call that takes too long; return its status, or which call that was.

    Looks are counted, and no clock is read: where the whole machine stands still for a while, nobody is late.
    """
    seconds = limit.span.total_seconds()
    nap = max(min(seconds / _LOOKS, _NAP_S), 0.001)
    spent: dict[int, float] = {}
    while (status := _status(child, nap)) is None:
        spent = {call: spent[call] + nap if call in spent else 0.0 for call in progress.calls}
        late = next((call for call, since in spent.items() if since >= seconds), None)
        if late is None:
            continue
        death = Death(f"{limit.option} ({seconds:g} s)", progress.callback, progress.rows_of(late), in_time=False)
        if late in progress.calls:  # else it is over, and what was read may be the next one's
            # With the processes that it started: a callback may hang because it waits for one.
            (os.killpg if sys.platform == "linux" else os.kill)(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return death
    return status


def _status(child: int, seconds: float) -> int | None:
    """The status of a child that ends within some time."""
    if hasattr(os, "pidfd_open"):
        file, poll = os.pidfd_open(child), select.poll()
        poll.register(file, select.POLLIN)
        poll.poll(seconds * 1_000)
        os.close(file)
    else:
        time.sleep(seconds)
    ended, status = os.waitpid(child, os.WNOHANG)
    return status if ended else None


def scratch() -> IO[bytes]:
    """A file without a name; in memory if the system can, because a disk may be full."""
    return os.fdopen(os.memfd_create("answer"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _answer(work: Callable[[Progress], Written], progress: Progress, answer: IO[bytes], parent: int) -> None:
    """Be the child. Only `os._exit` ends it, so that nothing of the parent's is cleaned up twice."""
    try:
        end_with(parent)
        _go_first()
        work(progress).save(answer)
        answer.flush()
        progress.state = DELIVERED
    except BaseException:
        with suppress(OSError):  # a callback may have closed the file: that is a death
            answer.seek(0)
            answer.truncate()
            answer.write(traceback.format_exc().encode())
            answer.flush()
            progress.state = RAISED
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def end_with(parent: int) -> None:
    """End this process when its parent does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before this child asked to end with it
        os._exit(1)


def _go_first() -> None:
    """End before the parent where memory runs out, and with the processes that callbacks start."""
    if sys.platform == "linux":
        os.setpgid(0, 0)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write("1000")
