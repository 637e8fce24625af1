"""A host: a fork of a task's process that calls callbacks for it. What it gives back, and how it ends early."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import math
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import IO, Any, NamedTuple

import pyarrow as pa

from pipeline_platform.model.failure import Failure
from pipeline_platform.tasks.host.progress import DELIVERED, RAISED, Progress, begin_host, end_copy, end_process

_LOOKS = 10
"""How often a parent looks at a call before it is over its limit."""

_HOW = 300
"""Characters of what the platform raised that a failure says."""

_HAS_PIDFD = hasattr(os, "pidfd_open")
_NAP_S = 1.0 if _HAS_PIDFD else 0.01
"""The longest time between two looks. Where the end of a process wakes nobody, each fork may take so much longer."""

_forking = threading.Lock()
"""One fork at a time: filelock, which Dagster loads, refuses one that begins during another from Python 3.12 on."""

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
    """How a host ended early.

    Attributes:
        how: `signal 9`, `exit code 3`; of a call that took too long, what it is held to.
        callback: The one that was under way, or empty if that is unknown.
        rows: The rows that it had.
        in_time: False if the call took too long: then it is these rows' for certain.
        block: The number of the block that it was at.
        tries: How many tries had begun in the host. What earlier ones left behind may be to blame.
        tried: How many rows the last one had; 0 if unknown.
        traceback: Of what the platform raised there after a callback; empty where it did not. No row is known then.
    """

    how: str
    callback: str = ""
    rows: Sequence[int] = ()
    in_time: bool = True
    block: int = 0
    tries: int = 0
    tried: int = 0
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

    @property
    def is_anyones(self) -> bool:
        """Whether an earlier try may have caused it: no row is known, and the host had others."""
        return not self.rows and self.tries > 1


class Written:
    """What a host would have written: its sink.

    Attributes:
        batches: `(table, window, rows)`, in order.
        notes: More that it has to say, as JSON has it.
    """

    def __init__(self, **notes: Any) -> None:
        self.batches: list[tuple[str, str, pa.RecordBatch]] = []
        self.notes = notes

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
        head = json.loads(file.readline())
        written = cls(**head["notes"])
        for table, window in head["places"]:
            with pa.ipc.open_stream(file) as stream:
                written.batches += [(table, window, batch) for batch in stream]
        return written


Give = Callable[[Written], None]


def in_a_fork(
    work: Callable[[Progress, Give], None], take: Give, *, limit: Limit | None = None, outside: Errors = ()
) -> Death | None:
    """Have a fork work; return how it died, if it did.

    With the fork end the processes that callbacks started in it.

    Args:
        work: Called in the fork, with what it notes its calls in, and what takes what it gives back.
        take: Called here with each thing that it gives back, in order, while it goes on.
        limit: How long a call may take.
        outside: Errors of what the platform reads and writes there, which say nothing of a callback.

    Raises:
        RuntimeError: The fork raised before any callback, or raised an error of `outside`. What the
            platform raises after a callback is a death: the callback may have left modules or limits as nobody can
            use them. What callbacks themselves raise is caught.
    """
    progress, (gifts, out), raised = Progress(), socket.socketpair(type=socket.SOCK_DGRAM), dict[str, Any]()
    gifts.setblocking(False)
    out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # as small as can be: a host is ahead by few
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else the child would print it once more
    with _forking:
        gc.freeze()  # or the child would collect the parent's garbage: destructors of native libraries, without threads
        parent, child = os.getpid(), os.fork()
        if child:
            gc.unfreeze()
    if child == 0:
        try:
            _be_host(work, progress, out, parent, outside)
        finally:  # a callback's handler of a signal may raise anywhere, also as that ends: no copy of the task goes on
            end_process(1)
    out.close()

    def take_or_note(written: Written) -> None:
        if "raised" in written.notes:
            raised.update(written.notes["raised"])
        else:
            take(written)

    try:
        ended = _ended(child, progress, limit, gifts, take_or_note)
    except BaseException:  # nobody takes more
        _end_group(child)
        os.waitpid(child, 0)
        raise
    finally:
        gifts.close()
    block, tries, tried = progress.place
    if isinstance(ended, Death):
        return ended._replace(block=block, tries=tries, tried=tried)
    if progress.state == RAISED:
        if raised["is_outside"] or not progress.has_called:
            raise RuntimeError(f"a host of this task raised:\n{raised['traceback']}")
        return Death(raised["how"], block=block, tries=tries, tried=tried, traceback=raised["traceback"])
    if progress.state == DELIVERED:
        return None
    rows = progress.rows  # none: between two calls, nobody knows of which it died
    return Death(ended, progress.callback if rows else "", rows, block=block, tries=tries, tried=tried)


def _taken(gifts: socket.socket, take: Give) -> bool:
    """Take what has come; return whether anything has."""
    for some in count():
        try:
            _, (file, *_), *_ = socket.recv_fds(gifts, 1, 1)
        except BlockingIOError:
            return some > 0
        with os.fdopen(file, "rb") as opened:
            opened.seek(0)
            take(Written.load(opened))
    raise AssertionError


def _ended(child: int, progress: Progress, limit: Limit | None, gifts: socket.socket, take: Give) -> str | Death:
    """Take what a child gives, and kill it in a call that takes too long; return how it ended, or which call that was.

    Looks are counted, and no clock is read: where the whole machine stands still for a while, nobody is late.
    """
    seconds = limit.span.total_seconds() if limit else math.inf
    nap = max(min(seconds / _LOOKS, _NAP_S), 0.001)
    spent: dict[int, float] = {}
    process = os.pidfd_open(child) if _HAS_PIDFD else -1
    try:
        while True:
            waited = _wait(gifts, process, nap if limit or not _HAS_PIDFD else None)
            has_ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
            if _taken(gifts, take) and not has_ended:
                continue
            if has_ended:
                break
            if limit is None or not waited:
                continue
            spent = {call: spent[call] + nap if call in spent else 0.0 for call in progress.calls}
            callback = progress.callback
            # It was set for one message, and `acknowledge` gets many.
            times = len(progress.rows) if callback == "acknowledge" else 1
            late = next((call for call, since in spent.items() if since >= seconds * times), None)
            if late is None:
                continue
            held_to = f"{times:,} times {limit.option}" if callback == "acknowledge" else limit.option
            death = Death(f"{held_to} ({seconds * times:g} s)", callback, progress.rows_of(late), in_time=False)
            if late in progress.calls:  # else it is over, and what was read may be the next one's
                _end_group(child)
                os.waitpid(child, 0)
                return death
    finally:
        if process >= 0:
            os.close(process)
    _end_group(child)  # its number is its own until it is waited for
    status = os.waitpid(child, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


def _wait(gifts: socket.socket, process: int, seconds: float | None) -> bool:
    """Wait until a host gives something or ends; return whether all of the time has passed."""
    poll = select.poll()
    if process >= 0:
        poll.register(process, select.POLLIN)
    poll.register(gifts, select.POLLIN)
    return not poll.poll(None if seconds is None else seconds * 1_000)


def _end_group(child: int) -> None:
    """End a child, with the processes that it started: a callback may hang because it waits for one."""
    with suppress(ProcessLookupError, PermissionError):  # the last one has ended, and it is a zombie elsewhere
        (os.killpg if sys.platform == "linux" else os.kill)(child, signal.SIGKILL)


def _be_host(
    work: Callable[[Progress, Give], None], progress: Progress, out: socket.socket, parent: int, outside: Errors
) -> None:
    """Be the child. Only `_exit` ends it, so that nothing of the parent's is cleaned up twice."""
    place = os.fstat(out.fileno()).st_ino

    def give(written: Written) -> None:
        with scratch() as file:
            written.save(file)
            file.flush()
            end_copy()
            if os.fstat(out.fileno()).st_ino != place:
                raise OSError(errno.EBADF, "a callback closed the socket of its host")
            socket.send_fds(out, [b"."], [file.fileno()])

    try:
        begin_host()
        end_with(parent)
        _go_first()
        work(progress, give)
        end_copy()
        progress.state = DELIVERED
    except BaseException as error:
        with suppress(BaseException):  # a callback may have closed the socket, or worse: that is a death
            end_copy()
            # Of a closed file it is the callback's doing.
            is_outside = isinstance(error, outside) and getattr(error, "errno", 0) != errno.EBADF
            how = "".join(traceback.format_exception_only(error)).strip()[:_HOW]
            give(Written(raised={"is_outside": is_outside, "how": how, "traceback": traceback.format_exc()}))
            progress.state = RAISED
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        end_process(0)


def scratch() -> IO[bytes]:
    """A file without a name; in memory if the system can, because a disk may be full."""
    return os.fdopen(os.memfd_create("gift"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


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
