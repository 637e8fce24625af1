"""The plan of a batcher's batches: which of the messages that wait make which batch, written before any is handled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from pipeline_platform.lake.reader import RowRange, row_groups
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message, Trigger
from pipeline_platform.model.options import Batcher, Splitter
from pipeline_platform.model.portions import portions
from pipeline_platform.tasks.batch import cutting
from pipeline_platform.tasks.by_position import ByPosition
from pipeline_platform.tasks.host.fork import Death, Limit, Written, in_a_fork
from pipeline_platform.tasks.host.hosting import in_a_host
from pipeline_platform.tasks.host.output import Output, captured
from pipeline_platform.tasks.host.progress import UNWATCHED, Watch
from pipeline_platform.tasks.record.staging import CUT_BY, STAGED, staged_messages, staged_table, to_be_cut

SPLIT_ROWS, SPLIT_BYTES = 8_192, 16 * 2**20
"""Messages that are read together for a splitter."""


@dataclass(frozen=True)
class CutBatches:
    """Cuts the staged messages of a batcher into batches, and writes which rows make which: no payloads.

    Attributes:
        pipeline: Name of the pipeline.
        batcher: Name of the batcher.
        options: Its.
        ack_policy: How messages are acknowledged.
        staged: Whole files, in the order of their positions.
        rest: The trigger of what is left when no more messages come.
        tasks: Tasks that partitions are dealt to.
    """

    lake: Lake
    pipeline: str
    receive_id: str
    batcher: str
    options: Batcher
    ack_policy: AckPolicy
    staged: Sequence[RowRange]
    rest: Trigger = "flush"
    tasks: int = 1

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run the only task."""
        if not self._splits:
            return self.work(index)
        return in_a_host(partial(self.work, index), self.lake, self.pipeline, self._limit())

    def work(self, index: int, watch: Watch | None = UNWATCHED, death: Death | None = None) -> Iterator[pa.RecordBatch]:
        """Cut; a splitter is called here if it has a watch, and else in forks."""
        known = pa.concat_tables(map(self._known, self.staged)).combine_chunks()
        # Without one there is no output, and a thread of the driver may do this.
        with captured() if self._splits else nullcontext(Output()) as output:
            batches = self._cut_in_forks(known, death) if watch is None else self._cut(known, {}, watch)
        with Writer(self.lake, self.pipeline, f"{self.receive_id}-{self.batcher}-cut-{index}") as writer:
            for batch in batches.combine_chunks().to_batches():
                writer.write(plan_table(self.receive_id, self.batcher), self.staged[0].window, batch)
            manifest = writer.close(**output.notes(), who=f"the splitter of {self.batcher!r}")
        yield from manifest.to_arrow().to_batches()

    @property
    def _splits(self) -> bool:
        return isinstance(self.options.batch_size, Splitter)

    def _limit(self) -> Limit | None:
        return Limit.of(f"batchers[{self.batcher!r}].message_timeout", self.options.message_timeout)

    def _known(self, file: RowRange) -> pa.Table:
        return to_be_cut(pa.concat_tables(row_groups(self.lake, file.path, CUT_BY)), file.window)

    def _cut(self, known: pa.Table, killers: Mapping[int, Failure], watch: Watch) -> pa.Table:
        options, read = self.options, partial(self._messages, known["size"].to_pylist(), killers, watch)
        bounds = options.batch_size, options.batch_bytes
        return cutting.cut_and_deal(known, *bounds, tasks=self.tasks, rest=self.rest, read=read)

    def _messages(
        self, sizes: list[int], killers: Mapping[int, Failure], watch: Watch, rows: list[int]
    ) -> Iterator[Message]:
        """Yield the messages of some rows. A killer, by its place among them, fails undecoded."""
        staged, model, first = ByPosition(self.lake, self.staged, STAGED), self.options.table_schema, 0
        for some in portions(rows, sizes.__getitem__, SPLIT_BYTES, SPLIT_ROWS):
            places = np.array(some)
            read = pa.RecordBatch.from_arrays(staged.take(STAGED.names, places), schema=STAGED)
            read = read.append_column("window", staged.windows(places))
            known = {place - first: why for place, why in killers.items() if 0 <= place - first < len(some)}
            watch.name(range(first, first + len(some)))
            decoded = staged_messages(read, self.batcher, self.ack_policy, model, known, _Named(watch))
            for message in list(decoded):
                with watch.busy("batch_size", [message]):
                    yield message
            first += len(some)

    def _cut_in_forks(self, known: pa.Table, death: Death | None) -> pa.Table:
        """Cut until a fork lives: each message that one dies of, or that takes too long, fails alone."""
        killers, rows = dict[int, Failure](), known.num_rows

        def tried(apart: Mapping[int, Failure]) -> Written | Death:
            return in_a_fork(lambda progress: self._written(known, apart, progress), limit=self._limit())

        answer: Written | Death = death if death and death.rows else tried(killers)
        while isinstance(answer, Death):
            culprits = {*answer.rows} - killers.keys()
            why = answer.failure("batch_size")
            if not culprits:  # nobody knows which it was: the last of the fewest first ones that a fork dies of
                first = bisect_left(
                    range(rows + 1), True, key=lambda few: isinstance(tried(self._but(few, rows, killers, why)), Death)
                )
                if not 0 < first <= rows:
                    raise RuntimeError(f"cutting batches for {self.batcher!r} failed without a message: {why.reason}")
                culprits = {first - 1}
            killers |= dict.fromkeys(culprits, why)
            answer = tried(killers)
        return pa.Table.from_batches([batch for *_, batch in answer.batches], cutting.BATCHES)

    def _written(self, known: pa.Table, killers: Mapping[int, Failure], watch: Watch) -> Written:
        written = Written()
        for batch in self._cut(known, killers, watch).to_batches():
            written.write("", "", batch)
        return written

    @staticmethod
    def _but(few: int, rows: int, killers: dict[int, Failure], why: Failure) -> dict[int, Failure]:
        """Killers, and all messages but the first few: what fails undecoded is not called for."""
        return dict.fromkeys(range(few, rows), why) | killers


class _Named(Watch):
    """Names each message to a watch by the place that `Watch.name` gave it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def each(self, callback: str, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, each as its callback begins."""
        for message in messages:
            with self._watch.busy(callback, [message]):
                yield message


def plan_table(receive_id: str, batcher: str) -> str:
    """Where `CutBatches` writes the batches of a batcher."""
    return f"{staged_table(receive_id, batcher)}-batches"  # no batcher has a name like that
