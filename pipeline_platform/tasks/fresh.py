"""A fork server for tasks that fork, where their worker has called callbacks: a fork of that worker might hang.

A callback may start threads and connect. A fork has none of its parent's threads, but their locks as they were, which
nobody releases; and it shares the connections. So such a worker starts one process more, which calls no callback and
loads nothing of the author's. Each task runs in a fork of that.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from typing import IO, Any, Protocol, TypeVar

import pyarrow as pa

from pipeline_platform.lake.manifest import MANIFEST
from pipeline_platform.tasks.fork import end_with, scratch

_BEGIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from pipeline_platform.tasks import fresh
fresh.serve(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
"""
_LOADED = {"pipeline_platform", "pandas"}
"""Packages that the server loads if its worker has: else each fork would. PyArrow asks for pandas to make arrays."""
_STATUS = struct.Struct("i")
_RAISED = 3
"""Exit code where the task raised: its answer is the traceback."""

_is_clean = True
"""Whether this process has called no callback itself."""


class Forking(Protocol):
    """What a task says that may call callbacks in forks."""

    @property
    def forks(self) -> bool:
        """Whether it does."""

    def carefully(self) -> Any:
        """The same task, which does."""


T = TypeVar("T", bound=Forking)
Share = TypeVar("Share", int, Iterator[pa.RecordBatch])
_Run = Callable[[T, Share], Iterator[pa.RecordBatch]]


def tries_before() -> int:
    """How often this Spark task was tried before; 0 outside of Spark."""
    context = sys.modules.get("pyspark.taskcontext")
    task = context.TaskContext.get() if context else None
    return int(task.attemptNumber()) if task else 0


def calls_here() -> None:
    """Note that this process calls callbacks itself: nothing forks from it any more."""
    global _is_clean  # noqa: PLW0603 - it is the process that is clean or not
    _is_clean = False


def from_clean(run: _Run[T, Share]) -> _Run[T, Share]:
    """Have a task that forks run in a process that has called no callback: here, or in a fresh one."""

    @wraps(run)
    def run_clean(task: T, share: Share) -> Iterator[pa.RecordBatch]:
        yield from run(task, share) if _is_clean or not task.forks else _in_a_fresh_process(task.carefully(), share)

    return run_clean


class _Server:
    """The process that forks for this one, and ends with it."""

    def __init__(self) -> None:
        self._ask, theirs = socket.socketpair()
        path = [str(entry) for entry in sys.path]
        loaded = sorted(name for name in [*sys.modules] if name.partition(".")[0] in _LOADED)
        given = json.dumps(path), str(theirs.fileno()), str(os.getpid()), json.dumps(loaded)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", _BEGIN, *given], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def run(self, task: Any, share: Any, answer: IO[bytes]) -> int | None:
        """Have a fork run a share of a task and write its rows; return how it ended, or None if this server did.

        Returns:
            Its exit code, or less than 0 for a signal.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, suppress(BrokenPipeError):  # that server has ended
                socket.send_fds(self._ask, [b"1"], [theirs.fileno(), answer.fileno()])
            with suppress(BrokenPipeError, ConnectionResetError):
                with ours.makefile("wb") as given:
                    _send(task, share, given)
                ours.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                if status := ours.recv(_STATUS.size):
                    return int(_STATUS.unpack(status)[0])
        return None

    def end(self) -> None:
        """End it, with the task that it has."""
        self._process.kill()
        self._process.wait()
        self._ask.close()


_server: _Server | None = None
_turn = threading.Lock()


def _in_a_fresh_process(task: Any, share: Any) -> Iterator[pa.RecordBatch]:
    """Run a share of a task in a fork of the server, and yield its rows.

    Raises:
        RuntimeError: It raised, which the traceback tells, or it was ended.
    """
    global _server  # noqa: PLW0603 - one for all tasks of this process, one after the other
    with scratch() as file:
        with _turn:
            _server = _server or _Server()
            code = None
            try:
                code = _server.run(task, share, file)
            finally:
                if code is None:  # it has ended, or a task is left half-way
                    _server.end()
                    _server = None
        file.seek(0)
        if code == 0:
            yield from pa.ipc.open_stream(file)
            return
        if code == _RAISED:
            raise RuntimeError(f"the fresh process of this task raised:\n{file.read().decode()}")
    how = f"signal {-(code or -signal.SIGKILL)}" if code is None or code < 0 else f"exit code {code}"
    raise RuntimeError(f"the fresh process of this task ended early ({how})")


def _send(task: Any, share: Any, given: IO[bytes]) -> None:
    """Write a task, as Spark ships it, and its share: a number, or rows, which are never pickled."""
    from pyspark import cloudpickle

    if isinstance(share, int):
        given.write(cloudpickle.dumps((task, share)))
        return
    first = next(share, None)
    given.write(cloudpickle.dumps((task, None if first is None else first.schema)))
    if first is not None:
        with pa.ipc.new_stream(given, first.schema) as stream:
            stream.write_batch(first)
            for batch in share:
                stream.write_batch(batch)


def serve(descriptor: int, parent: int, modules: Sequence[str]) -> None:
    """Be the server: fork for each task, one after the other, and say how the fork ended."""
    end_with(parent)
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    asked, me = socket.socket(fileno=descriptor), os.getpid()
    while True:
        _, (given, answer), *_ = socket.recv_fds(asked, 1, 2)
        if (child := os.fork()) == 0:
            asked.close()
            end_with(me)
            _answer(given, answer)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(BrokenPipeError), socket.socket(fileno=given) as told:
            told.sendall(_STATUS.pack(status))
        os.close(answer)


def _answer(descriptor: int, answer: int) -> None:
    """Be the fork: run the task that is read, and write its rows, or how it raised."""
    code, given = 0, os.fdopen(os.dup(descriptor), "rb")
    with os.fdopen(answer, "wb") as file:
        try:
            task, share = pickle.load(given)  # noqa: S301 - the platform's own, as Spark ships it
            if not isinstance(share, int):
                share = iter(pa.ipc.open_stream(given)) if share else iter(())
            with pa.ipc.new_stream(file, MANIFEST) as stream:
                for rows in task(share):
                    stream.write_batch(rows)
        except BaseException:
            code = _RAISED
            file.seek(0)
            file.truncate()
            file.write(traceback.format_exc().encode())
    for said in (sys.stdout, sys.stderr):
        said.flush()
    os._exit(code)  # a thread that a module started would hold up the end
