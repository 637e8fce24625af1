"""Local worker: a process of a run that executes tasks with callbacks for a few messages, as Spark's workers do.

A task forks a callback process, and a process that forks must not have threads, clients or connections, as the process
of a run has. It therefore starts another process, which loads the modules of tasks and forks for each request. That
process ends with the run, because it waits for requests on a socket of the run's process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import BytesIO
from operator import itemgetter
from pathlib import Path

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.spark import engine, environment
from pipeline_platform.tasks.callback_process.fork import Written, end_with, scratch
from pipeline_platform.tasks.callback_process.progress import end_process

_MODULES = (
    "pandas",  # PyArrow imports it when it makes an array
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.dialects.sqlite",
    "pipeline_platform.control.store",
    "pipeline_platform.tasks.batch.handle_batches",
    "pipeline_platform.tasks.handle.in_order",
)
"""Modules of nearly all tasks. The worker loads them once; a fork that imports a module does so for itself only."""

_OUTPUT = (1, 2)
"""Standard output and error, which each request passes on: a run may redirect its own at any time."""


class LocalWorkerError(Exception):
    """The worker crashed, or a task in it raised. Spark may run the tasks again."""


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    channel: socket.socket
    is_closed: bool = False

    def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # already ended; PermissionError for zombies on macOS
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.channel.close()


_prepared: list[_Process] = []


def prepare() -> None:
    """Start the process of the first local worker of this process, so that it need not be waited for."""
    _prepared.append(_started())


class LocalWorker:
    """The local worker of this process. Several threads may use it at the same time.

    Args:
        cores: Number of tasks of a call that run in parallel.
    """

    def __init__(self, cores: int) -> None:
        self._cores, self._lock = cores, threading.Lock()
        self._process: _Process | None = None

    def start(self) -> _Process:
        """Start the process unless it is running. It loads its modules while this process continues."""
        with self._lock:
            if self._process and self._process.popen.poll() is not None:
                self._process.end()
                self._process = None
            if self._process is None:
                self._process = _prepared.pop() if _prepared else _started()
            return self._process

    def run(self, task: engine.Task, shares: int) -> Manifest:
        """Run a task for each share.

        Args:
            task: Task that is picklable by reference.
            shares: Number of shares, at most 256.

        Raises:
            LocalWorkerError: The worker or a task failed. Its tasks have ended.
            engine.TaskError: The worker was closed meanwhile, because the run ends.
        """
        process = None
        try:
            process = self.start()
            return _run(process.channel, task, shares, min(shares, self._cores))
        except Exception as error:
            if process and process.is_closed:
                raise engine.TaskError("The local worker was closed: the run was terminated") from None
            if process:  # it may be crashing
                process.end()
            raise LocalWorkerError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process and its tasks. The next use starts another process."""
        with self._lock:
            if self._process:
                self._process.is_closed = True
                self._process.end()
                self._process = None


def _started() -> _Process:
    ours, theirs = socket.socketpair()
    with theirs:
        code = f"import json, sys; sys.path[:] = json.loads(sys.argv[2]); import {__name__} as worker; worker.main()"
        command = [sys.executable, "-P", "-X", "faulthandler", "-c", code, str(theirs.fileno()), json.dumps(sys.path)]
        popen = subprocess.Popen(  # noqa: S603
            command,
            env=environment.allowed(os.environ),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C asks the run to end, which ends its worker
        )
    return _Process(popen, ours)


def _run(channel: socket.socket, task: engine.Task, shares: int, parallel: int) -> Manifest:
    """Send a request for each of the parallel tasks, and return what they wrote, by the order of shares."""
    with ExitStack() as open_files:
        given = open_files.enter_context(scratch())
        given.write(pickle.dumps(_folders()) + pickle.dumps(task))
        given.flush()
        numbers, writing = os.pipe()
        with open(writing, "wb") as pipe:
            pipe.write(bytes(range(shares)))
        open_files.enter_context(open(numbers, "rb"))
        answers = []
        for _ in range(parallel):
            ours, theirs = socket.socketpair()
            answers.append(open_files.enter_context(ours))
            with theirs:
                socket.send_fds(channel, [b"."], [given.fileno(), numbers, theirs.fileno(), *_OUTPUT])
        # All of them, so that none is in progress after an error.
        written = [_answer(answer) for answer in answers]
    for each in written:
        if each is None:
            raise RuntimeError("a task crashed")
        if each.notes["raised"]:
            raise RuntimeError(each.notes["raised"])
    rows = [(int(share), batch) for each in written if each for share, _, batch in each.batches]
    return sum((Manifest.of(batch) for _, batch in sorted(rows, key=itemgetter(0))), Manifest())


def _folders() -> list[str]:
    """Return the folders of the top-level modules that are not on `sys.path`.

    Dagster adds the working directory of a code location to the path only while it loads the location.
    """
    places = [
        Path(paths[0]) if (paths := list(getattr(module, "__path__", ()))) else Path(file)
        for name, module in list(sys.modules.items())
        if "." not in name and (file := getattr(module, "__file__", None))
    ]
    return sorted({str(place.parent) for place in places if place.is_absolute()} - {*sys.path})


def _answer(answer: socket.socket) -> Written | None:
    """Wait for the answer to a request, and return it; None if its process crashed."""
    poll = select.poll()
    poll.register(answer, select.POLLIN)
    # A signal does not interrupt a read if a library, such as Polars, replaced the handler, or another thread gets it.
    while not poll.poll(1_000):
        pass
    with answer.makefile("rb") as file, suppress(ValueError, OSError):
        return Written.load(file)
    return None


def main() -> None:
    """Fork a process for each request, until the run ends."""
    for module in _MODULES:
        importlib.import_module(module)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        while (request := socket.recv_fds(channel, 1, 5))[0]:
            with suppress(ChildProcessError):  # there was none
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            _fork(*request[1])
            for file in request[1]:
                os.close(file)


def _fork(given: int, numbers: int, answer: int, *output: int) -> None:
    worker = os.getpid()
    with suppress(Exception):  # the fork will report it
        _task(given)  # for its imports
    gc.freeze()  # the fork must not copy memory to collect garbage of this process
    if os.fork() == 0:
        try:
            end_with(worker)
            for ours, theirs in zip(_OUTPUT, output, strict=True):
                os.dup2(theirs, ours)
            _answer_request(given, numbers, answer)
        finally:
            end_process(0)
    gc.unfreeze()


def _answer_request(given: int, numbers: int, answer: int) -> None:
    written = Written(raised="")
    try:
        task = _task(given)
        while number := os.read(numbers, 1):
            for rows in task(number[0]):
                written.write(str(number[0]), "", rows)
    except BaseException:  # the run has to know
        written.notes["raised"] = traceback.format_exc().strip().rpartition("\n")[2]
    with open(answer, "wb") as file:
        written.save(file)


def _task(given: int) -> engine.Task:
    request = BytesIO(os.pread(given, os.fstat(given).st_size, 0))
    sys.path += [folder for folder in pickle.load(request) if folder not in sys.path]  # noqa: S301 - of this run
    task: engine.Task = pickle.load(request)  # noqa: S301
    return task
