"""Forking the callback process of a task, receiving its results, and detecting its crash or timeout."""

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
from pipeline_platform.tasks.callback_process.progress import (
    DELIVERED,
    RAISED,
    Progress,
    begin_callback_process,
    end_copy,
    end_process,
)

_LOOKS = 10
"""Number of times that the parent checks a call within its time limit."""

_HOW = 300
"""Characters of an exception of the platform that are shown in a failure."""

_HAS_PIDFD = hasattr(os, "pidfd_open")
_NAP_S = 1.0 if _HAS_PIDFD else 0.01
"""Maximum time between two checks. Without pidfd, the end of each fork is noticed up to this much later."""

_forking = threading.Lock()
"""One fork at a time: filelock, which Dagster loads, rejects concurrent forks from Python 3.12 on."""

Errors = tuple[type[BaseException], ...]


class Limit(NamedTuple):
    """Time limit of a call of a callback.

    Attributes:
        option: Option that sets it, for example `processors.message_timeout`.
        span: Length of the limit.
    """

    option: str
    span: timedelta

    @classmethod
    def of(cls, option: str, span: timedelta | None) -> Limit | None:
        """Return the limit set by an option; None if the option is not set."""
        return None if span is None else cls(option, span)


class Death(NamedTuple):
    """The crash or timeout of a callback process.

    Attributes:
        how: `signal 9`, `exit code 3`, or the time limit that was exceeded.
        callback: Callback that was running; empty if unknown.
        rows: Rows of that call.
        in_time: Whether the call was within its limit. After a timeout the rows are culprits for certain.
        block: Number of the current block.
        tries: Number of tries started in the process. Side effects of earlier tries may be the cause.
        tried: Number of rows of the last try; 0 if unknown.
        traceback: Traceback of an exception of the platform after a callback; empty if none. The rows are then unknown.
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
        """Return the failure of the culprit. `callback` is used if the callback is unknown."""
        callback = self.callback or callback
        if not self.in_time:
            return Failure("timeout", f"{callback} took longer than {self.how} allows", "", callback)
        if self.traceback:
            reason = f"{callback} left its process in a state in which the platform fails ({self.how})"
            return Failure("worker killed", reason, self.traceback, callback)
        return Failure("worker killed", f"{callback} ended the worker ({self.how})", "", callback)

    @property
    def has_several(self) -> bool:
        """Whether an exact try can find the culprit among several rows; see `Watch`.

        A timeout of `handle_failed` is not retried row by row: it may wait for an external system.
        """
        together = ("lake", "handle_failed") if self.in_time else ("lake",)
        return self.callback in together and len(self.rows) > 1

    @property
    def is_anyones(self) -> bool:
        """Whether an earlier try may be the cause: the rows are unknown, and the process had earlier tries."""
        return not self.rows and self.tries > 1


class Written:
    """A sink that collects rows in a callback process and sends them to its parent.

    Attributes:
        batches: `(table, window, rows)`, in order.
        notes: Other values for the parent; must be JSON.
    """

    def __init__(self, **notes: Any) -> None:
        self.batches: list[tuple[str, str, pa.RecordBatch]] = []
        self.notes = notes

    def write(self, table: str, window: str, batch: pa.RecordBatch) -> None:
        """Add rows for the parent. Empty batches are ignored."""
        if batch.num_rows:
            self.batches.append((table, window, batch))

    def save(self, file: IO[bytes]) -> None:
        """Write everything to a file: a line of JSON and Arrow streams. No pickles, so loading runs no code."""
        places = [(table, window) for table, window, _ in self.batches]
        file.write(json.dumps({"places": places, "notes": self.notes}).encode() + b"\n")
        for _, _, batch in self.batches:
            with pa.ipc.new_stream(file, batch.schema) as stream:
                stream.write_batch(batch)

    @classmethod
    def load(cls, file: IO[bytes]) -> Written:
        """Return the contents of a file written by `save`."""
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
    """Run `work` in a fork. Return its crash or timeout, or None if it completed.

    Processes that callbacks started end with the fork.

    Args:
        work: Called in the fork, with the progress to update and a function that sends results.
        take: Called in this process with each result, in order, while the fork continues.
        limit: Time limit of a call.
        outside: Exceptions of the platform's own input and output, which are not the fault of a callback.

    Raises:
        RuntimeError: The fork raised before any callback, or raised an error of `outside`. An exception of the platform
            after a callback is a crash instead: the callback may have broken modules or limits of the process.
            Exceptions of callbacks are caught in the fork.
    """
    progress, (gifts, out), raised = Progress(), socket.socketpair(type=socket.SOCK_DGRAM), dict[str, Any]()
    gifts.setblocking(False)
    out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # minimal, so that few results wait in the socket
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise the child would print it too
    with _forking:
        gc.freeze()  # the child must not collect the parent's garbage: native destructors would miss their threads
        parent, child = os.getpid(), os.fork()
        if child:
            gc.unfreeze()
    if child == 0:
        try:
            _be_callback_process(work, progress, out, parent, outside)
        finally:  # a signal handler of a callback may raise anywhere, but the child must never continue as the task
            end_process(1)
    out.close()

    def take_or_note(written: Written) -> None:
        if "raised" in written.notes:
            raised.update(written.notes["raised"])
        else:
            take(written)

    try:
        ended = _ended(child, progress, limit, gifts, take_or_note)
    except BaseException:  # no more results are taken
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
            raise RuntimeError(f"the callback process of this task raised:\n{raised['traceback']}")
        return Death(raised["how"], block=block, tries=tries, tried=tried, traceback=raised["traceback"])
    if progress.state == DELIVERED:
        return None
    rows = progress.rows  # empty between two calls: the culprit is unknown
    return Death(ended, progress.callback if rows else "", rows, block=block, tries=tries, tried=tried)


def _taken(gifts: socket.socket, take: Give) -> bool:
    """Take the results that have arrived. Return whether there were any."""
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
    """Take the results of a child, and kill it if a call exceeds its limit. Return how it ended, or the timeout.

    Time is measured by counting checks, not by a clock, so that a suspended machine causes no timeouts.
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
            if limit is None or not waited or progress.is_waiting:
                continue
            spent = {call: spent[call] + nap if call in spent else 0.0 for call in progress.calls}
            callback = progress.callback
            # The limit is per message, and `acknowledge` gets many.
            times = len(progress.rows) if callback == "acknowledge" else 1
            late = next((call for call, since in spent.items() if since >= seconds * times), None)
            if late is None:
                continue
            option = f"{times:,} times {limit.option}" if callback == "acknowledge" else limit.option
            death = Death(f"{option} ({seconds * times:g} s)", callback, progress.rows_of(late), in_time=False)
            if late in progress.calls:  # otherwise the call has just ended, and the rows may be those of the next call
                _end_group(child)
                os.waitpid(child, 0)
                return death
    finally:
        if process >= 0:
            os.close(process)
    _end_group(child)  # safe: the process id is not reused before waitpid
    status = os.waitpid(child, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


def _wait(gifts: socket.socket, process: int, seconds: float | None) -> bool:
    """Wait until a callback process sends a result or ends. Return whether the time has passed without either."""
    poll = select.poll()
    if process >= 0:
        poll.register(process, select.POLLIN)
    poll.register(gifts, select.POLLIN)
    return not poll.poll(None if seconds is None else seconds * 1_000)


def _end_group(child: int) -> None:
    """Kill a child and the processes that it started: a callback may hang because it waits for one of them."""
    with suppress(ProcessLookupError, PermissionError):  # already ended; PermissionError for zombies on macOS
        (os.killpg if sys.platform == "linux" else os.kill)(child, signal.SIGKILL)


def _be_callback_process(
    work: Callable[[Progress, Give], None], progress: Progress, out: socket.socket, parent: int, outside: Errors
) -> None:
    """Run as the child. Only `_exit` ends it, so that no resource of the parent is cleaned up twice."""
    place = os.fstat(out.fileno()).st_ino

    def give(written: Written) -> None:
        with scratch() as file:
            written.save(file)
            file.flush()
            end_copy()
            if os.fstat(out.fileno()).st_ino != place:
                raise OSError(errno.EBADF, "a callback closed the socket of its callback process")
            socket.send_fds(out, [b"."], [file.fileno()])

    try:
        begin_callback_process(progress)
        end_with(parent)
        _go_first()
        work(progress, give)
        end_copy()
        progress.state = DELIVERED
    except BaseException as error:
        with suppress(BaseException):  # a callback may have closed the socket: the parent then treats it as a crash
            end_copy()
            # A closed file is the fault of the callback.
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
    """Return an unnamed temporary file, in memory if supported, because a disk may be full."""
    return os.fdopen(os.memfd_create("gift"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def end_with(parent: int) -> None:
    """End this process when its parent does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before prctl
        end_process(1)


def _go_first() -> None:
    """Make the kernel kill this process before its parent if memory runs out. Start the group of `_end_group`."""
    if sys.platform == "linux":
        os.setpgid(0, 0)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write("1000")
