"""A fresh process for a task that forks, where its worker has called callbacks: a fork of that one might hang.

A callback may start threads and connect. A fork has none of its parent's threads, but their locks as they were, which
nobody releases; and it shares the connections.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
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
fresh.answer(int(sys.argv[2]), int(sys.argv[3]))
"""
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


def _in_a_fresh_process(task: Any, share: Any) -> Iterator[pa.RecordBatch]:
    """Run a share of a task in another Python, which ends with this one, and yield its rows.

    Raises:
        RuntimeError: It raised, which the traceback tells, or it was ended.
    """
    path = json.dumps([str(entry) for entry in sys.path])
    with scratch() as file:
        command = [sys.executable, "-c", _BEGIN, path, str(file.fileno()), str(os.getpid())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[file.fileno()]) as process:  # noqa: S603
            try:
                assert process.stdin
                with suppress(BrokenPipeError), process.stdin as stdin:
                    _send(task, share, stdin)
                code = process.wait()
            except BaseException:
                process.kill()
                raise
        file.seek(0)
        if code == 0:
            yield from pa.ipc.open_stream(file)
            return
        if code == _RAISED:
            raise RuntimeError(f"the fresh process of this task raised:\n{file.read().decode()}")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise RuntimeError(f"the fresh process of this task ended early ({how})")


def _send(task: Any, share: Any, stdin: IO[bytes]) -> None:
    """Write a task, as Spark ships it, and its share: a number, or rows, which are never pickled."""
    from pyspark import cloudpickle

    if isinstance(share, int):
        stdin.write(cloudpickle.dumps((task, share)))
        return
    first = next(share, None)
    stdin.write(cloudpickle.dumps((task, None if first is None else first.schema)))
    if first is not None:
        with pa.ipc.new_stream(stdin, first.schema) as stream:
            stream.write_batch(first)
            for batch in share:
                stream.write_batch(batch)


def answer(descriptor: int, parent: int) -> None:
    """Be the fresh process: run the task that is read, and write its rows, or how it raised."""
    end_with(parent)
    code, given = 0, os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a callback that reads must not read what is given
    with suppress(ImportError):
        importlib.import_module("pandas")  # PyArrow imports it when it makes an array: each fork would, by itself
    with os.fdopen(descriptor, "wb") as file:
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
