"""Batching: handled messages of one batch key, in batches, through `handle_batch`."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline_platform.lake.reader import Range
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import BULK, BatchInfo, Delivery, Message, Standing
from pipeline_platform.model.options import Batcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks import cut
from pipeline_platform.tasks.by_position import ByPosition
from pipeline_platform.tasks.handle import checked
from pipeline_platform.tasks.isolate import UNWATCHED, Death, Progress, Sink, Watch, Written, in_a_fork, tries_before
from pipeline_platform.tasks.record import Recorder
from pipeline_platform.tasks.staged import STAGED, decode, staged_table

_NAMESPACE = uuid.UUID("6f1c3c0e-6a50-5a53-9f6e-0f3b6f0f6d5a")

DEATHS = 5
"""Forked processes that may die of single messages of a batch, before all of it is taken for the killer."""

GROUP_BYTES = 64 * 2**20
"""Batches of a task that are read together: their messages lie scattered, and a look for each would read all again."""


@dataclass(frozen=True)
class CutBatches:
    """Cuts the staged messages of a batcher into batches, and writes down which rows make which: no payloads.

    Attributes:
        staged: Whole files, in the order of their positions.
    """

    lake: Lake
    pipeline: str
    receive_id: str
    batcher: str
    batch_size: int
    staged: Sequence[Range]

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run the only task."""
        batches = cut.cut(pa.concat_tables(map(self._known, self.staged)), self.batch_size)
        with Writer(self.lake, self.pipeline, f"{self.receive_id}-{self.batcher}-cut-{index}") as writer:
            for batch in batches.combine_chunks().to_batches():
                writer.write(plan_table(self.receive_id, self.batcher), self.staged[0].window, batch)
            manifest = writer.close()
        yield from manifest.to_arrow().to_batches()

    def _known(self, file: Range) -> pa.Table:
        with self.lake.open_input(file.path) as opened:
            rows = pq.read_table(opened, columns=["batch_key", "position", "size", "batch_mode"])
        rows = rows.append_column("window", pa.repeat(file.window, rows.num_rows))
        return rows.append_column("flush", pc.equal(rows["batch_mode"], "flush")).select(cut.MESSAGES.names)


def plan_table(receive_id: str, batcher: str) -> str:
    """Where `CutBatches` writes the batches of a batcher."""
    return f"{staged_table(receive_id, batcher)}-batches"  # no batcher has a name like that


@dataclass(frozen=True)
class HandleBatches:
    """Task `n` of `tasks` handles each `tasks`-th batch.

    Attributes:
        staged: Whole files of staged messages, in the order of their positions.
        plan: The files that say which of their rows make which batch.
        careful: Handle each batch in a forked process: one that kills it fails, and costs no other. So does a task
            that is tried again.
    """

    pipeline: type[Pipeline]
    batcher: str
    context: Any
    source: Source
    origin: str
    lake: Lake
    receive_id: str
    staged: Sequence[Range]
    plan: Sequence[Range]
    tasks: int = 1
    careful: bool = False

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        started, name = time.monotonic(), self.pipeline.name
        with Writer(self.lake, name, f"{self.receive_id}-{self.batcher}-{index}") as writer:
            careful = self.careful or tries_before() > 0
            work: _Careful | _Here = _Careful(self, writer) if careful else _Here(self, writer)
            count = 0
            for batch in self._batches(index):
                work.handle(batch)
                count += 1
            notes = {"batches": count, "seconds": time.monotonic() - started, "task": index}
            manifest = writer.close(**work.recorder.tally.notes(), **notes)
        yield from manifest.to_arrow().to_batches()

    def _batches(self, index: int) -> Iterator[Batch]:
        rows = ByPosition(self.lake, self.staged)
        for group in _groups(self._planned(index)):
            wanted = np.concatenate([batch["rows"].values.to_numpy() for batch in group])
            columns = rows.take(STAGED.names, wanted)
            messages, first = pa.RecordBatch.from_arrays(columns, schema=STAGED), 0
            for batch in group:
                count = len(batch["rows"])
                yield self._batch(batch, messages.slice(first, count))
                first += count

    def _planned(self, index: int) -> Iterator[dict[str, pa.Scalar]]:
        number = 0
        for file in self.plan:
            with self.lake.open_input(file.path) as opened:
                for batch in pq.ParquetFile(opened).iter_batches(1_024):
                    for row in range(batch.num_rows):
                        if number % self.tasks == index:
                            yield {name: batch.column(name)[row] for name in cut.BATCHES.names}
                        number += 1

    def _batch(self, planned: dict[str, pa.Scalar], messages: pa.RecordBatch) -> Batch:
        window, key, number, full = (planned[name].as_py() for name in ("window", "batch_key", "number", "full"))
        batch_id = str(uuid.uuid5(_NAMESPACE, "\0".join((self.receive_id, self.batcher, window, key, str(number)))))
        trigger: Literal["size", "flush"] = "size" if full else "flush"
        return Batch(window, BatchInfo(self.batcher, key, None, messages.num_rows, trigger, batch_id), messages)

    def recorder(self, sink: Sink, pipeline: Pipeline | None = None, watch: Watch = UNWATCHED) -> Recorder:
        """A recorder for this task; without a pipeline it calls nothing of the author's."""

        def look(messages: list[Message]) -> list[Message]:
            return pipeline.handle_failed(messages, self.context) if pipeline else messages

        return Recorder(self.pipeline, self.source, self.origin, self.receive_id, sink, look, watch)

    def called(
        self, pipeline: Pipeline, batch: Batch, killers: Mapping[int, Failure], watch: Watch = UNWATCHED
    ) -> list[Message]:
        """Put a batch through `handle_batch`; return a message for each row. Known killers only fail."""
        decoded = list(self._decoded(batch.messages, killers, watch))
        ok = [message for message in decoded if message.failure is None]
        watch.busy("handle_batch", ok)
        handled = handle_batch(pipeline, self.batcher, ok, batch.info, self.context) if ok else []
        by_row = {message._row: message for message in handled}
        return [by_row.get(message._row, message) for message in decoded]

    def _decoded(self, rows: pa.RecordBatch, killers: Mapping[int, Failure], watch: Watch) -> Iterator[Message]:
        options = self.pipeline.batchers[self.batcher]
        assert isinstance(options, Batcher)
        names = ("value", "encoding", "batch_key", "batch_mode", "on_success", "on_failure")
        standing = Standing(Delivery(rows))
        for row, cells in enumerate(zip(*(rows.column(name).to_pylist() for name in names), strict=True)):
            value, encoding, key, mode, on_success, on_failure = cells
            message = Message(value, row, standing if mode == BULK else standing._replace(batch_mode=mode))
            message.batcher, message.batch_key = self.batcher, key
            if on_success is not None or on_failure is not None:
                message = message.configure_ack(on_success=on_success, on_failure=on_failure)
            if row in killers:
                yield message.failed(killers[row])
                continue
            watch.busy("decode", [message])
            try:
                message.data = decode(value, encoding, options.table_schema)
            except BaseException as error:  # code of the model's own may raise anything: an enum's, a private field's
                message = message.failed(Failure.of(error, "lake"))
            yield message


class Batch(NamedTuple):
    """A batch of staged messages.

    Attributes:
        window: Theirs.
        info: What `handle_batch` is told of it.
        messages: Rows of `STAGED`.
    """

    window: str
    info: BatchInfo
    messages: pa.RecordBatch


def _groups(planned: Iterator[dict[str, pa.Scalar]]) -> Iterator[list[dict[str, pa.Scalar]]]:
    """Batches to be read together, within `GROUP_BYTES`; a single larger one is a group."""
    group: list[dict[str, pa.Scalar]] = []
    size = 0
    for batch in planned:
        if group and size + batch["size"].as_py() > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(batch)
        size += batch["size"].as_py()
    if group:
        yield group


class _Here:
    """Handles batches in the task's own process."""

    def __init__(self, task: HandleBatches, writer: Writer) -> None:
        self._task, self._pipeline = task, task.pipeline()
        self.recorder = task.recorder(writer, self._pipeline)

    def handle(self, batch: Batch) -> None:
        messages = self._task.called(self._pipeline, batch, {})
        self.recorder.batched(self._task.batcher, batch.messages, batch.window, messages, batch.info.batch_id)


class _Careful:
    """Handles each batch in a forked process, with an instance of the pipeline and connections of its own."""

    def __init__(self, task: HandleBatches, writer: Writer) -> None:
        self._task, self._writer = task, writer
        self.recorder = task.recorder(writer)

    def handle(self, batch: Batch) -> None:
        rows, killers, mute = batch.messages.num_rows, dict[int, Failure](), set[int]()
        deaths = 0
        while len(mute) < rows and isinstance(
            answer := in_a_fork(partial(self._work, batch, killers, mute), rows), Death
        ):
            deaths, known = deaths + 1, len(killers)
            # Each time `handle_batch` is called once more: soon it is the batch that is to blame.
            blamed = answer.rows if answer.rows and deaths <= DEATHS else range(rows)
            killers |= {row: answer.failure("handle_batch") for row in blamed if row not in killers}
            if answer.callback == "handle_failed" or len(killers) == known:
                mute |= {*blamed}
        if len(mute) < rows:
            assert isinstance(answer, Written)
            answer.pour(self._writer, self.recorder.tally)
        if mute:
            self._record_mute(batch, sorted(mute), killers)

    def _record_mute(self, batch: Batch, rows: list[int], killers: Mapping[int, Failure]) -> None:
        """Record messages that no callback is to see any more: `handle_failed` dies of them, too."""
        left = batch.messages.take(pa.array(rows, pa.int64()))
        actions = zip(left.column("on_success").to_pylist(), left.column("on_failure").to_pylist(), strict=True)
        messages = [
            message.put(None, batcher=self._task.batcher, batch_key=batch.info.batch_key)
            .configure_ack(on_success=on_success, on_failure=on_failure)
            .failed(killers[row])
            for row, message, (on_success, on_failure) in zip(rows, Message.each(left), actions, strict=True)
        ]
        self.recorder.batched(self._task.batcher, left, batch.window, messages, batch.info.batch_id)

    def _work(self, batch: Batch, killers: Mapping[int, Failure], mute: Set[int], progress: Progress) -> Written:
        """Be the forked process."""
        task, pipeline, written = self._task, self._task.pipeline(), Written()
        recorder = task.recorder(written, pipeline, progress)
        messages = task.called(pipeline, batch, killers, progress)
        rows = [row for row in range(len(messages)) if row not in mute]
        left = batch.messages.take(pa.array(rows, pa.int64()))
        recorder.batched(task.batcher, left, batch.window, [messages[row] for row in rows], batch.info.batch_id)
        written.notes = {"tally": recorder.tally.to_json()}
        return written


def handle_batch(
    pipeline: Pipeline, batcher: str, messages: Sequence[Message], info: BatchInfo, context: Any
) -> list[Message]:
    """Call `handle_batch`, and hold it to its contract: a message it does not return fails, none may be new."""
    try:
        returned = pipeline.handle_batch(batcher, list(messages), info, context)
        if not isinstance(returned, list) or any(one.__class__ is not Message for one in returned):
            raise TypeError(f"handle_batch must return a list of Messages, got {_kinds(returned)}")
        given = {message._row: message for message in messages}
        times = Counter(message._row for message in returned)
        by_row = {message._row: message for message in returned}
        if not all(row in given and given[row].is_same(by_row[row]) for row in by_row):
            raise TypeError("handle_batch must return the messages it was given; it returned others")
    except BaseException as error:
        failure = Failure.of(error, "handle_batch")
        return [message._rejected(failure) for message in messages]
    return [_as_batched(message, by_row.get(message._row), times[message._row]) for message in messages]


def _kinds(returned: object) -> str:
    if not isinstance(returned, list):
        return type(returned).__name__
    return f"a list with {sorted({type(one).__name__ for one in returned if not isinstance(one, Message)})}"


def _as_batched(given: Message, returned: Message | None, times: int) -> Message:
    if returned is None:
        return given._rejected(Failure("not returned", "handle_batch did not return it", "", "handle_batch"))
    if times > 1:
        return given._rejected(Failure("returned twice", f"handle_batch returned it {times} times", "", "handle_batch"))
    return checked(given, returned, "handle_batch")
