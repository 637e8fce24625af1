"""Isolation: a callback that ends its process does so in a fork of it, and costs no message but its own.

A task that is tried again calls no callback itself. A fork does, on some rows at a time, and gives back as Arrow what
it would have written. One that dies is followed by others with fewer rows, until the smallest part that still dies is
known.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple

import pyarrow as pa

from pipeline_platform.model.failure import Failure
from pipeline_platform.tasks.outcomes import Outcomes
from pipeline_platform.tasks.progress import DELIVERED, RAISED, Progress
from pipeline_platform.tasks.step import Sink, Step


class Isolation:
    """Has the callbacks of one task called: here, or in forks if the task was tried before.

    Each fork has an instance of the pipeline, and so connections, of its own.

    Attributes:
        forks: Whether callbacks are called in forks.
        outcomes: Where everything is recorded in the end. In a task that forks it calls no callback.
    """

    def __init__(self, step: Step, sink: Sink, *, careful: bool) -> None:
        self.forks = careful or tries_before() > 0
        self.outcomes = Outcomes(step, sink, None if self.forks else step.pipeline())
        self._step, self._sink = step, sink

    def deal(
        self,
        rows: pa.RecordBatch,
        work: Callable[[pa.RecordBatch, Outcomes, float | None], int],
        fail: Callable[[pa.RecordBatch, Outcomes, Death], None],
        permitted: Callable[[int], tuple[int, float]] = lambda wanted: (wanted, math.inf),
        give_back: Callable[[pa.RecordBatch, Outcomes], None] | None = None,
        *,
        knows_rows: bool = True,
    ) -> None:
        """Have rows dealt with, whichever of them end the process that does.

        Args:
            rows: In order.
            work: Deals with rows; returns with how many. A fork gets a time on the monotonic clock, and begins none
                after it.
            fail: Records a row that ended its process alone.
            permitted: Called before each try in a fork, which must not touch the connections of its parent: how many
                of some rows may be dealt with, and until when. 0 where none may any more.
            give_back: Records rows that may not be dealt with any more.
            knows_rows: Whether the messages that `work` makes are numbered as these rows are.
        """
        if not rows.num_rows:
            return
        if not self.forks:
            done = work(rows, self.outcomes, None)
            if give_back and done < rows.num_rows:
                give_back(rows.slice(done), self.outcomes)
            return
        exact = False  # to build columns for each message by itself takes several times as long: only once one died
        in_time = True

        def attempt(some: Sequence[int]) -> _Tried:
            nonlocal exact, in_time
            # Where preparing took longer than permits hold, one message begins late: the others never would.
            count, until = permitted(len(some) if in_time else 1)
            if give_back and not count:
                give_back(rows.take(pa.array(some, pa.int64())), self.outcomes)
                return None, len(some)
            chosen = rows.take(pa.array(some[:count], pa.int64()))
            begin_until = until if in_time else math.inf
            answer = self.fork(lambda outcomes: work(chosen, outcomes, begin_until), count, exact=exact)
            if isinstance(answer, Death):
                exact = knows_rows
                return answer._replace(rows=[some[row] for row in answer.rows if knows_rows]), count
            in_time = answer > 0
            return None, answer

        def fail_alone(row: int, death: Death) -> None:
            one = rows.slice(row, 1)
            if isinstance(self.fork(lambda outcomes: fail(one, outcomes, death), 1), Death):
                fail(one, self.outcomes, death)  # `handle_failed` dies of it too

        settle(range(rows.num_rows), attempt, fail_alone)

    def fork(self, work: Callable[[Outcomes], int | None], rows: int, *, exact: bool = True) -> int | Death:
        """Have a fork work on some rows and record here what it recorded; return its answer, or how it died.

        Args:
            work: Called in the fork.
            rows: Messages that it is about, at the most.
            exact: See `Watch`; without it a death is blamed on as many rows as were at work.
        """

        def child(progress: Progress) -> Written:
            written = Written()
            outcomes = Outcomes(self._step, written, self._step.pipeline(), progress)
            written.notes = {"answer": work(outcomes), "tally": outcomes.tally.to_json()}
            return written

        answer = in_a_fork(child, rows, exact=exact)
        if isinstance(answer, Death):
            return answer
        for table, window, batch in answer.batches:
            self._sink.write(table, window, batch)
        self.outcomes.tally.add(answer.notes["tally"])
        return int(answer.notes["answer"] or 0)


def tries_before() -> int:
    """How often this Spark task was tried before; 0 outside of Spark."""
    context = sys.modules.get("pyspark.taskcontext")
    task = context.TaskContext.get() if context else None
    return int(task.attemptNumber()) if task else 0


class Death(NamedTuple):
    """How a fork ended early.

    Attributes:
        how: `signal 9`, `exit code 3`.
        callback: The one that was under way, or empty if that is unknown.
        rows: The rows that it had.
    """

    how: str
    callback: str
    rows: Sequence[int]

    def failure(self, callback: str) -> Failure:
        """What a message fails with that did this in `callback`, if no other is known."""
        callback = self.callback or callback
        return Failure("worker killed", f"{callback} ended the worker ({self.how})", "", callback)


_Tried = tuple[Death | None, int]


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


def in_a_fork(work: Callable[[Progress], Written], rows: int, *, exact: bool = True) -> Written | Death:
    """Have a fork work, and give back what it wrote, or how it died; see `Isolation.fork`.

    Raises:
        RuntimeError: The fork raised. No callback did: what they raise is caught.
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
        if progress.state == DELIVERED:
            return Written.load(answer)
        if progress.state == RAISED:
            raise RuntimeError(f"a fork of this task raised:\n{answer.read().decode()}")
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
    return Death(how, progress.callback, progress.rows)


def _scratch() -> IO[bytes]:
    """A file without a name; in memory if the system can, because a disk may be full."""
    return os.fdopen(os.memfd_create("answer"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _answer(work: Callable[[Progress], Written], progress: Progress, answer: IO[bytes], parent: int) -> None:
    """Be the child. Only `os._exit` ends it, so that nothing of the parent's is cleaned up twice."""
    try:
        _go_first()
        if os.getppid() != parent:  # it died before this child asked to end with it
            os._exit(1)
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


def _go_first() -> None:
    """End with the parent, and before it where memory runs out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write("1000")


def settle(
    rows: Sequence[int],
    attempt: Callable[[Sequence[int]], _Tried],
    fail: Callable[[int, Death], None],
    *,
    trust: bool = True,
) -> bool:
    """Have rows dealt with, whichever of them end the process that does; return whether a row failed.

    Rows are attempted together. Where that dies, the rows that it was busy with go alone. Where these do not die,
    something else ended the process (a thread, say), and halves are attempted.

    Args:
        rows: In order.
        attempt: Deals with rows in another process. Returns how it died, if it did, and how many rows, from the first,
            a dead one was given or another one dealt with. It names rows as they are given here.
        fail: Called for a row that ends its process alone.
        trust: Whether to believe a death in what it had.
    """
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
            suspects = list(tried[len(tried) // 2 :])
        apart = set(suspects)
        before = [row for row in tried if row < suspects[0]]
        after = [row for row in tried if row > suspects[0] and row not in apart]
        failed |= settle(before, attempt, fail, trust=False)
        found = settle(suspects, attempt, fail)
        failed |= found | settle(after, attempt, fail, trust=found)
    return failed
