"""The plan that assigns the staged messages of a batcher to batches, written before any batch is handled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from pipeline_platform.lake.reader import RowRange, row_groups
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher, Splitter
from pipeline_platform.model.pipeline import Trigger
from pipeline_platform.model.portions import portions
from pipeline_platform.tasks.batch import cutting
from pipeline_platform.tasks.by_position import ByPosition
from pipeline_platform.tasks.callback_process.fork import Death, Limit
from pipeline_platform.tasks.callback_process.progress import UNWATCHED, Watch
from pipeline_platform.tasks.callback_process.try_size import TrySize
from pipeline_platform.tasks.calling_step import CallingStep
from pipeline_platform.tasks.isolation import Tries
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.staging import CUT_BY, STAGED, staged_messages, to_be_cut
from pipeline_platform.tasks.record.step import Destination, receive_table

SPLIT_ROWS, SPLIT_BYTES = 8_192, 16 * 2**20
"""Rows and bytes of messages that are read together for a splitter."""


@dataclass(frozen=True)
class CutBatches(CallingStep):
    """Cuts the staged messages of a batcher into batches, and writes the rows of each batch without payloads.

    Attributes:
        staged: Whole files, in the order of their positions.
        rest: Trigger of the last, incomplete batches.
    """

    batcher: str
    options: Batcher
    staged: Sequence[RowRange]
    rest: Trigger = "flush"
    tasks: int = 1

    def __call__(self, share: int) -> Iterator[pa.RecordBatch]:
        """Run the only task. Without a splitter no user code is called, so a thread of the driver may run it."""
        if isinstance(self.options.batch_size, Splitter):
            yield from super().__call__(share)
            return
        with self.writer(f"{self.stem}-{share}") as writer:
            self._write(self._known(), {}, self.recording(writer, UNWATCHED, TaskReport()))
            manifest = writer.close()
        yield from manifest.to_arrow().to_batches()

    @property
    def stem(self) -> str:  # type: ignore[override]
        """Prefix of the names of its files."""
        return f"{self.batcher}-cut"

    def limit(self) -> Limit | None:
        """Return the time limit of a call of a splitter."""
        return Limit.of(f"batchers[{self.batcher!r}].message_timeout", self.options.message_timeout)

    def author(self, task: int | None) -> str:
        """Return the author of its output."""
        return f"the splitter of {self.batcher!r}"

    def recording(
        self, destination: Destination, watch: Watch, report: TaskReport, size: TrySize | None = None
    ) -> Recording:
        """Record without an instance of the pipeline."""
        return Recording(replace(self, source=None), destination, None, watch, report=report, size=size)

    def blocks(self, share: int, skip: int) -> Iterator[tuple[int, pa.Table]]:
        """Yield one block: the columns of all messages that cutting needs."""
        if not skip:
            yield 1, self._known()

    def tries(self, block: pa.Table, known: Death | None) -> Tries:
        """Cut until a callback process succeeds: each message that crashes it or exceeds the timeout fails alone."""
        killers, rows = dict[int, Failure](), block.num_rows
        death = known or (yield partial(self._write, block, killers))
        while isinstance(death, Death):
            culprits, why = {*death.rows} - killers.keys(), death.failure("batch_size")
            if not culprits:  # unknown: find the shortest prefix of messages that crashes; its last one is the culprit
                first, end = 0, rows + 1
                while first < end:
                    few = (first + end) // 2
                    # The splitter is not called for messages that failed undecoded.
                    but = dict.fromkeys(range(few, rows), why) | killers
                    dies = isinstance((yield partial(self._probe, block, but)), Death)
                    first, end = (first, few) if dies else (few + 1, end)
                if not 0 < first <= rows:
                    raise RuntimeError(f"cutting batches for {self.batcher!r} failed without a message: {why.reason}")
                culprits = {first - 1}
            killers |= dict.fromkeys(culprits, why)
            death = yield partial(self._write, block, killers)

    def _known(self) -> pa.Table:
        tables = (row_groups(self.lake, file.path, CUT_BY) for file in self.staged)
        known = (
            to_be_cut(pa.concat_tables(groups), file.window) for groups, file in zip(tables, self.staged, strict=True)
        )
        return pa.concat_tables(known).combine_chunks()

    def _probe(self, known: pa.Table, killers: Mapping[int, Failure], recording: Recording) -> None:
        self._cut(known, killers, recording.watch)

    def _write(self, known: pa.Table, killers: Mapping[int, Failure], recording: Recording) -> None:
        table, window = plan_table(self.receive_id, self.batcher), self.staged[0].window
        for batch in self._cut(known, killers, recording.watch).combine_chunks().to_batches():
            recording.write(table, window, batch)

    def _cut(self, known: pa.Table, killers: Mapping[int, Failure], watch: Watch) -> pa.Table:
        options, read = self.options, partial(self._messages, known["size"].to_pylist(), killers, watch)
        bounds = options.batch_size, options.batch_bytes
        retry = self.pipeline.retry
        return cutting.cut_and_deal(known, *bounds, tasks=self.tasks, rest=self.rest, read=read, retry=retry)

    def _messages(
        self, sizes: list[int], killers: Mapping[int, Failure], watch: Watch, rows: list[int]
    ) -> Iterator[Message]:
        """Yield the messages of some rows. Culprits in `killers`, by their index in `rows`, fail undecoded."""
        staged, model, first = ByPosition(self.lake, self.staged, STAGED), self.options.table_schema, 0
        for some in portions(rows, sizes.__getitem__, SPLIT_BYTES, SPLIT_ROWS):
            places = np.array(some)
            read = staged.take(STAGED.names, places).append_column("window", staged.windows(places))
            known = {place - first: why for place, why in killers.items() if 0 <= place - first < len(some)}
            watch.name(range(first, first + len(some)))
            decoded = staged_messages(read, self.batcher, self.ack_policy, model, known, watch)
            for message in list(decoded):
                with watch.busy("batch_size", [message]):
                    yield message
            first += len(some)


def plan_table(receive_id: str, batcher: str) -> str:
    """Return the table in which `CutBatches` writes the batches of a batcher. No batcher can have this name."""
    return receive_table(receive_id, f"{batcher}-batches")
