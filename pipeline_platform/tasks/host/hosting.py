"""Hosting: a task has a host call its callbacks, and another one in its place where it dies.

The first host writes the files of the task. From its death on, hosts give back what they would write, try by try, and
the task writes it: so a further death costs a try, and not all that came before it.
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
from pipeline_platform.lake.writer import Writer
from pipeline_platform.spark import environment
from pipeline_platform.tasks.host.fork import Death, Give, Limit, Written, in_a_fork
from pipeline_platform.tasks.host.isolation import Call, Tries
from pipeline_platform.tasks.host.output import captured
from pipeline_platform.tasks.host.progress import UNWATCHED, Progress, Watch, end_copy
from pipeline_platform.tasks.host.step import Sink, Step
from pipeline_platform.tasks.record.outcomes import Outcomes
from pipeline_platform.tasks.record.tally import Tally

Rows = Iterator[pa.RecordBatch]

_FORKS = 3
"""How often a host is forked that dies before its first try: gRPC, beside whose channels it is, ends some at once."""


@dataclass(frozen=True)
class CallingStep(Step):
    """A step whose tasks call callbacks, in a host: they do their shares in blocks, and each block in tries."""

    stem: ClassVar[str] = ""
    """What the names of a task's files begin with, for people who look."""

    def __call__(self, share: Any) -> Rows:
        """Run the task that has a share: its number, if nothing else is said. Return its manifest.

        Raises:
            RuntimeError: The host could not read or write, or raised before any callback.
        """
        rows: list[pa.RecordBatch] = []

        def host(progress: Progress, give: Give) -> None:
            written = Written()
            for batch in self.here(share, progress):
                written.write("", "", batch)
            give(written)

        death = self._fork(host, lambda written: rows.extend(batch for *_, batch in written.batches))
        if death is None:
            # An object is there as a whole, or not at all.
            files = Manifest.of(pa.Table.from_batches(rows)).files if rows and self.lake.is_local else []
            if all(is_whole(self.lake, f"{self.pipeline.name}/{file.table}/{file.path}", file) for file in files):
                yield from rows
                return
            death = Death("files that are not as it named them")
        yield from self.after_death(share, death)

    def here(self, share: Any, watch: Watch = UNWATCHED) -> Rows:
        """Do a share in this process."""
        with self._writing(share) as (writer, tally, manifest):
            _try_all(_Agenda(self, share), self.recording(writer, watch, tally))
        yield from manifest

    def after_death(self, share: Any, death: Death | None = None) -> Rows:
        """Do a share by hosts that give back what they would write.

        Args:
            share: Of the task.
            death: How a host died that did all of it before.
        """
        with self._writing(share) as (writer, tally, manifest):
            agenda = _Agenda(self, share, death)
            while True:
                answers: list[Any] = []

                def take(written: Written, answers: list[Any] = answers) -> None:
                    for batch in written.batches:
                        writer.write(*batch)
                    tally.load(written.notes["tally"])
                    answers.append(written.notes["answer"])

                death = self._fork(partial(self._give_back, agenda, tally), take)
                if death is None:
                    break
                agenda.go_on(answers, death)
        yield from manifest

    def _give_back(self, agenda: _Agenda, tally: Tally, progress: Progress, give: Give) -> None:
        """Be a host that gives back what each try would write."""
        written = Written()
        outcomes = self.recording(written, progress, tally)
        outcomes.most_rows = self.pipeline.processors.chunk_size

        def each(answer: Any) -> None:
            written.notes = {"answer": answer, "tally": tally.to_json()}
            give(written)
            written.batches.clear()

        _try_all(agenda, outcomes, each)

    def _fork(self, host: Callable[[Progress, Give], None], take: Give) -> Death | None:
        from pipeline_platform.control.store import ControlStoreError  # late: the testing kit needs no database

        def work(progress: Progress, give: Give) -> None:
            environment.restrict(self.variables)
            self.lake.leave_connections()
            host(progress, give)

        for _ in range(_FORKS):
            death = in_a_fork(work, take, limit=self.limit(), outside=(OSError, ControlStoreError))
            if death is None or death.tries:
                break
        return death

    @contextmanager
    def _writing(self, share: Any) -> Generator[tuple[Writer, Tally, list[pa.RecordBatch]]]:
        """Have files written, and callbacks heard, meanwhile; then there is a manifest."""
        began, started, manifest = time.time(), time.monotonic(), list[pa.RecordBatch]()
        tally, task = Tally(self.pipeline.batchers), share if isinstance(share, int) else None
        name, package = uuid.uuid4().hex[:4] if task is None else task, self.pipeline.__module__.partition(".")[0]
        with self.writer(f"{self.stem}-{name}") as writer, captured(package) as output, self.traced(task):
            yield writer, tally, manifest
            took = {"began": began, "seconds": time.monotonic() - started, "task": task}
            manifest += writer.close(**tally.notes(), **output.notes(), **took).to_arrow().to_batches()

    @abstractmethod
    def blocks(self, share: Any, skip: int) -> Iterator[tuple[int, Any]]:
        """Read the blocks of a share, without those of which the sizes are `skip` together; yield size and block.

        Where they end may differ with what is skipped.
        """

    @abstractmethod
    def tries(self, block: Any, known: Death | None) -> Tries:
        """What there is to do for a block; `known` is how a host died at its callbacks before."""

    def limit(self) -> Limit | None:
        """How long a call may take."""
        return Limit.of("processors.message_timeout", self.pipeline.processors.message_timeout)

    def recording(self, sink: Sink, watch: Watch, tally: Tally) -> Outcomes:
        """What tries record in, with an instance of the pipeline, and so connections, of its own."""
        outcomes = Outcomes(self, sink, self.pipeline(), watch, tally=tally)
        end_copy()
        return outcomes


class _Agenda:
    """What there is to do for a share, try by try.

    Args:
        step: Whose.
        share: Of the task.
        known: How a host died before that did all of it; its blocks are numbered as here.
    """

    def __init__(self, step: CallingStep, share: Any, known: Death | None = None) -> None:
        self._step, self._share, self._known = step, share, known
        self.block = self._skip = 0
        self._blocks: Iterator[tuple[int, Any]] | None = None
        self._tries: Tries | None = None
        self._try: Call | None = None

    def next(self, answer: Any = None) -> Call | None:
        """Say what the last try came to; return the next one, None at the end."""
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
        """The first try of a host: the one that another one died of, if one did."""
        return self._try or self.next()

    def go_on(self, answers: list[Any], death: Death) -> None:
        """Take what a host gave back before it died; what is left of the block is tried by the next one."""
        self.first()
        for answer in answers:
            self.next(answer)
        if death.tries == len(answers) and answers:  # between two tries
            death = death._replace(callback="", rows=(), tries=death.tries + 1)
        if self._try is not None:
            self.next(death)
        self._known = None
        if not self._step.lake.is_local:  # connections that are open are no other process's: the next one reads anew
            self._blocks = None


def _try_all(agenda: _Agenda, outcomes: Outcomes, each: Callable[[Any], None] = lambda _: None) -> None:
    """Make all tries that are left; hand over what each comes to."""
    call = agenda.first()
    while call is not None:
        outcomes.watch.begin(agenda.block)
        answer = call(outcomes)
        each(answer)
        call = agenda.next(answer)
