"""A host: a fork of a task's process that calls callbacks for it. What it gives back, or how it ended early."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import math
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
from pipeline_platform.tasks.host.progress import DELIVERED, RAISED, Progress, begin_host, end_copy, end_process

_LOOKS = 10
"""How often a parent looks at a call before it is over its limit."""

_HOW = 300
"""Characters of what the platform raised that a failure says."""

_NAP_S = 1.0 if hasattr(os, "pidfd_open") else 0.01
"""The longest time between two looks. Where the end of a process wakes nobody, each fork may take so much longer."""


Errors = tuple[type[Exception], ...]


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
        block: The number of the block that it was at.
        traceback: Of what the platform raised there after a callback; empty where it did not. No row is known then.
    """

    how: str
    callback: str
    rows: Sequence[int]
    in_time: bool = True
    block: int = 0
    traceback: str = ""

    def failure(self, callback: str) -> Failure:
        """What a message fails with that did this in `callback`, if no other is known."""
        callback = self.callback or callback
        if not self.in_time:
            return Failure("timeout", f"{callback} took longer than {self.how} allows", "", callback)
        if self.traceback:
            reason = f"{callback} left a process in which the platform cannot go on ({self.how})"
            return Failure("worker killed", reason, self.traceback, callback)
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
    work: Callable[[Progress], Written], *, exact: bool = False, limit: Limit | None = None, outside: Errors = ()
) -> Written | Death:
    """Have a fork work, and give back what it wrote, or how it died; see `Isolation.fork`.

    With the fork end the processes that callbacks started in it.

    Args:
        work: Called in the fork.
        exact: See `Watch`.
        limit: How long a call may take.
        outside: Errors of what the platform reads and writes there, which say nothing of a callback.

    Raises:
        RuntimeError: The fork raised before any callback, or raised an error of `outside`. What the
            platform raises after a callback is a death: the callback may have left modules or limits as nobody can
            use them. What callbacks themselves raise is caught.
    """
    progress = Progress(exact=exact)
    with scratch() as answer:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else the child would print it once more
        gc.freeze()  # or the child would collect the parent's garbage: destructors of native libraries, without threads
        parent, child = os.getpid(), os.fork()
        if child == 0:
            _answer(work, progress, answer, parent, outside)
        gc.unfreeze()
        ended = _ended_in_time(child, progress, limit)
        if isinstance(ended, Death):
            return ended
        answer.seek(0)
        if progress.state == DELIVERED:
            return Written.load(answer)
        if progress.state == RAISED:
            raised = json.loads(answer.read())
            if raised["is_outside"] or not progress.has_called:
                raise RuntimeError(f"a fork of this task raised:\n{raised['traceback']}")
            return Death(raised["how"], "", (), block=progress.block, traceback=raised["traceback"])
    rows = progress.rows  # none: between two calls, nobody knows of which it died
    return Death(ended, progress.callback if rows else "", rows, block=progress.block)


def _ended_in_time(child: int, progress: Progress, limit: Limit | None) -> str | Death:
    """Wait for a child, and kill it in a call that takes too long; return how it ended, or which call that was.

    Looks are counted, and no clock is read: where the whole machine stands still for a while, nobody is late.
    """
    seconds = limit.span.total_seconds() if limit else math.inf
    nap = max(min(seconds / _LOOKS, _NAP_S), 0.001)
    spent: dict[int, float] = {}
    while not _has_ended(child, nap if limit else math.inf):
        assert limit is not None
        spent = {call: spent[call] + nap if call in spent else 0.0 for call in progress.calls}
        callback = progress.callback
        # It was set for one message, and `acknowledge` gets many.
        times = len(progress.rows) if callback == "acknowledge" else 1
        late = next((call for call, since in spent.items() if since >= seconds * times), None)
        if late is None:
            continue
        held_to = f"{times:,} times {limit.option}" if callback == "acknowledge" else limit.option
        rows = progress.rows_of(late)
        death = Death(f"{held_to} ({seconds * times:g} s)", callback, rows, in_time=False, block=progress.block)
        if late in progress.calls:  # else it is over, and what was read may be the next one's
            _end_group(child)
            os.waitpid(child, 0)
            return death
    _end_group(child)  # its number is its own until it is waited for
    status = os.waitpid(child, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


def _end_group(child: int) -> None:
    """End a child, with the processes that it started: a callback may hang because it waits for one."""
    with suppress(ProcessLookupError, PermissionError):  # the last one has ended, and it is a zombie elsewhere
        (os.killpg if sys.platform == "linux" else os.kill)(child, signal.SIGKILL)


def _has_ended(child: int, seconds: float) -> bool:
    """Whether a child ends within some time. It is not waited for."""
    if seconds == math.inf:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        return True
    if hasattr(os, "pidfd_open"):
        file, poll = os.pidfd_open(child), select.poll()
        poll.register(file, select.POLLIN)
        poll.poll(seconds * 1_000)
        os.close(file)
    else:
        time.sleep(seconds)
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def scratch() -> IO[bytes]:
    """A file without a name; in memory if the system can, because a disk may be full."""
    return os.fdopen(os.memfd_create("answer"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _answer(
    work: Callable[[Progress], Written], progress: Progress, answer: IO[bytes], parent: int, outside: Errors
) -> None:
    """Be the child. Only `_exit` ends it, so that nothing of the parent's is cleaned up twice."""
    try:
        begin_host()
        end_with(parent)
        _go_first()
        written = work(progress)
        end_copy()
        written.save(answer)
        answer.flush()
        progress.state = DELIVERED
    except BaseException as error:
        with suppress(BaseException):  # a callback may have closed the file, or worse: that is a death
            end_copy()
            # Of a closed file it is the callback's doing.
            is_outside = isinstance(error, outside) and getattr(error, "errno", 0) != errno.EBADF
            how = "".join(traceback.format_exception_only(error)).strip()[:_HOW]
            raised = {"is_outside": is_outside, "how": how, "traceback": traceback.format_exc()}
            answer.seek(0)
            answer.truncate()
            answer.write(json.dumps(raised).encode())
            answer.flush()
            progress.state = RAISED
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        end_process(0)


def end_with(parent: int) -> None:
    """End this process when its parent does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before this child asked to end with it
        end_process(1)


def _go_first() -> None:
    """End before the parent where memory runs out, and with the processes that callbacks start."""
    if sys.platform == "linux":
        os.setpgid(0, 0)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write("1000")
