"""Running the callbacks of a task in a callback process, and starting a new one after a crash.

The first callback process writes the files of the task. After a crash, callback processes return their rows to the
task after each try and the task writes them, so that another crash loses one try and not all earlier work.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa

from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import is_whole
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.failure import RunError
from pipeline_platform.spark import environment
from pipeline_platform.tasks.callback_process.fork import Death, Give, Limit, Written, in_a_fork
from pipeline_platform.tasks.callback_process.output import captured
from pipeline_platform.tasks.callback_process.progress import UNWATCHED, Progress, Watch, end_copy
from pipeline_platform.tasks.callback_process.try_size import TrySize
from pipeline_platform.tasks.isolation import Call, Tries
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.step import Destination, Step

Rows = Iterator[pa.RecordBatch]

_FORKS = 3
"""Forks that may crash before their first try; then the task fails. gRPC ends some if the parent has channels."""


@dataclass(frozen=True)
class CallingStep(Step):
    """A step whose tasks call callbacks in a callback process. A share is processed in blocks, a block in tries."""

    stem: ClassVar[str] = ""
    """Prefix of the names of a task's files."""

    def __call__(self, share: Any) -> Rows:
        """Run the task of a share (by default its number). Return its manifest.

        Raises:
            RuntimeError: The callback process could not read or write, or raised or ended before any callback.
        """
        rows: list[pa.RecordBatch] = []

        def serve(progress: Progress, give: Give) -> None:
            written = Written()
            for batch in self.here(share, progress):
                written.write("", "", batch)
            give(written)

        death = self._fork(serve, lambda written: rows.extend(batch for *_, batch in written.batches))
        if death is None:
            # Only local files can be incomplete: object stores write objects atomically.
            files = Manifest.of(pa.Table.from_batches(rows)).files if rows and self.lake.is_local else []
            if all(is_whole(self.lake, f"{self.pipeline.name}/{file.table}/{file.path}", file) for file in files):
                yield from rows
                return
            death = Death("files that differ from its manifest")
        yield from self.after_death(share, death)

    def here(self, share: Any, watch: Watch = UNWATCHED) -> Rows:
        """Process a share in this process."""
        with self._writing(share) as (writer, report, manifest):
            _try_all(_Agenda(self, share), self.recording(writer, watch, report))
        yield from manifest

    def after_death(self, share: Any, death: Death | None = None) -> Rows:
        """Process a share in callback processes that return their rows to this process.

        Args:
            share: Share of the task.
            death: Crash of the callback process that processed the whole share before.
        """
        with self._writing(share) as (writer, report, manifest):
            agenda = _Agenda(self, share, death)
            while True:
                answers: list[Any] = []

                def take(written: Written, answers: list[Any] = answers) -> None:
                    for batch in written.batches:
                        writer.write(*batch)
                    report.load(written.notes["report"])
                    answers.append(written.notes["answer"])

                death = self._fork(partial(self._send_back, agenda, report), take)
                if death is None:
                    break
                agenda.go_on(answers, death)
        yield from manifest

    def _send_back(self, agenda: _Agenda, report: TaskReport, progress: Progress, give: Give) -> None:
        """Run in a callback process and send the rows of each try to the task."""
        written = Written()
        size = TrySize(self.pipeline.processors.chunk_size)

        def each(answer: Any) -> None:
            written.notes = {"answer": answer, "report": report.to_json()}
            give(written)
            written.batches.clear()

        _try_all(agenda, self.recording(written, progress, report, size), each)

    def _fork(self, serve: Callable[[Progress, Give], None], take: Give) -> Death | None:
        from pipeline_platform.control.store import ControlStoreError  # late: the testing kit needs no database

        def work(progress: Progress, give: Give) -> None:
            environment.restrict(self.variables)
            self.lake.leave_connections()
            serve(progress, give)

        how = ""
        for _ in range(_FORKS):
            death = in_a_fork(work, take, limit=self.limit(), outside=(OSError, ControlStoreError, RunError))
            if death is None or death.tries:
                return death
            how = death.how
        raise RuntimeError(
            f"the callback process ended {_FORKS} times before it got a message ({how}). Check `__init__` of "
            f"{self.pipeline.__qualname__} and the memory of the worker"
        )

    @contextmanager
    def _writing(self, share: Any) -> Generator[tuple[Writer, TaskReport, list[pa.RecordBatch]]]:
        """Open the files of a task and capture the output of callbacks. At the end, fill the manifest."""
        task, started, manifest = share if isinstance(share, int) else None, time.monotonic(), list[pa.RecordBatch]()
        report = TaskReport(task=task, began=time.time())
        name, package = uuid.uuid4().hex[:4] if task is None else task, self.pipeline.__module__.partition(".")[0]
        with self.writer(f"{self.stem}-{name}") as writer, captured(package) as output, self.traced(task):
            yield writer, report, manifest
            report.seconds, report.output = time.monotonic() - started, output.of(self.author(task))
            manifest += writer.close(report.bounded()).to_arrow().to_batches()

    @abstractmethod
    def blocks(self, share: Any, skip: int) -> Iterator[tuple[int, Any]]:
        """Read the blocks of a share, without blocks whose sizes add up to `skip`. Yield the size and the block.

        Boundaries of blocks may depend on `skip`.
        """

    @abstractmethod
    def tries(self, block: Any, known: Death | None) -> Tries:
        """Yield the tries of a block. `known` is an earlier crash of a callback process at this block."""

    def limit(self) -> Limit | None:
        """Return the time limit of a call."""
        return Limit.of("processors.message_timeout", self.pipeline.processors.message_timeout)

    def author(self, task: int | None) -> str:
        """Return the author of the output of a task, for people."""
        return "callbacks of a task" if task is None else f"callbacks of task {task}"

    def recording(
        self, destination: Destination, watch: Watch, report: TaskReport, size: TrySize | None = None
    ) -> Recording:
        """Return the recording of tries, with a new instance of the pipeline and so new connections."""
        recording = Recording(self, destination, self.pipeline(), watch, report=report, size=size)
        end_copy()
        return recording


class _Agenda:
    """The remaining tries of a share. `known` is the crash of a callback process that had the same blocks before."""

    def __init__(self, step: CallingStep, share: Any, known: Death | None = None) -> None:
        self._step, self._share, self._known = step, share, known
        self.block = self._skip = 0
        self._blocks: Iterator[tuple[int, Any]] | None = None
        self._tries: Tries | None = None
        self._try: Call | None = None

    def next(self, answer: Any = None) -> Call | None:
        """Pass the answer of the last try. Return the next try, or None at the end."""
        while True:
            if self._tries is not None:
                try:
                    self._try = self._tries.send(answer)
                except StopIteration:
                    self._tries = None
                else:
                    return self._try
            if self._blocks is None:
                self._blocks = self._step.blocks(self._share, self._skip)
            size, block = next(self._blocks, (0, None))
            if block is None:
                self._try = None
                return None
            self.block, self._skip = self.block + 1, self._skip + size
            known = self._known if self._known and self._known.rows and self._known.block == self.block else None
            self._tries, answer = self._step.tries(block, known), None

    def first(self) -> Call | None:
        """Return the first try of a callback process: the one that crashed its predecessor, if any."""
        return self._try or self.next()

    def go_on(self, answers: list[Any], death: Death) -> None:
        """Apply the answers and the crash of a callback process. The next one continues with the rest of the block."""
        self.first()
        for answer in answers:
            self.next(answer)
        if death.tries == len(answers) and answers:  # between two tries
            death = death._replace(callback="", rows=(), tries=death.tries + 1)
        if self._try is not None:
            self.next(death)
        self._known = None
        if not self._step.lake.is_local:  # open connections cannot be shared: the next process reads again
            self._blocks = None


def _try_all(agenda: _Agenda, recording: Recording, each: Callable[[Any], None] = lambda _: None) -> None:
    call = agenda.first()
    while call is not None:
        recording.watch.begin(agenda.block)
        answer = call(recording)
        each(answer)
        call = agenda.next(answer)
