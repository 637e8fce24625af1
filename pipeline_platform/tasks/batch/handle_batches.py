"""Handling batches: calls of `handle_batch` with handled messages of one batch key."""

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import RowRange, rows_at, stored_file
from pipeline_platform.model.failure import Failure, words
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher
from pipeline_platform.model.partition import as_given
from pipeline_platform.model.pipeline import BatchInfo, Pipeline
from pipeline_platform.model.portions import portions
from pipeline_platform.tasks.batch import cutting
from pipeline_platform.tasks.by_position import ByPosition
from pipeline_platform.tasks.callback_process.fork import Death, Limit
from pipeline_platform.tasks.callback_process.progress import UNWATCHED
from pipeline_platform.tasks.calling_step import CallingStep
from pipeline_platform.tasks.handle.row_lane import checked
from pipeline_platform.tasks.isolation import Tries, surely
from pipeline_platform.tasks.record.batched import record_batch
from pipeline_platform.tasks.record.held import held_by, hold
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.staging import STAGED, staged_messages
from pipeline_platform.telemetry.spans import span

_NAMESPACE = uuid.UUID("6f1c3c0e-6a50-5a53-9f6e-0f3b6f0f6d5a")

DEATHS = 5
"""Crashes by single messages of a batch before the whole batch is treated as the culprit."""

GROUP_BYTES = 64 * 2**20
"""Bytes of batches that a task reads together. Their rows are scattered, so single reads would repeat row groups."""


class Batch(NamedTuple):
    """A batch of staged messages: rows of `STAGED` with their window. `failure` is set if its only message failed."""

    window: str
    info: BatchInfo
    messages: pa.RecordBatch
    failure: Failure | None = None


@dataclass(frozen=True)
class HandleBatches(CallingStep):
    """Task `n` of `tasks` handles the batches of its partitions and every `tasks`-th of the other batches, in order.

    Attributes:
        staged: Files of staged messages, in the order of their positions.
        plan: Files that contain the rows of each batch.
    """

    batcher: str
    staged: Sequence[RowRange]
    plan: Sequence[RowRange]
    tasks: int = 1

    @property
    def stem(self) -> str:  # type: ignore[override]
        """Prefix of the names of its files."""
        return self.batcher

    def limit(self) -> Limit | None:
        """Return the time limit of a call of `handle_batch`."""
        options = self.pipeline.batchers[self.batcher]
        span = options.message_timeout if isinstance(options, Batcher) else None
        return Limit.of(f"batchers[{self.batcher!r}].message_timeout", span)

    def blocks(self, share: int, skip: int) -> Iterator[tuple[int, Batch]]:
        """Read the batches of a task."""
        rows = ByPosition(self.lake, self.staged, STAGED)
        planned = islice(self._planned(share), skip, None)
        for group in portions(planned, lambda batch: int(batch["size"]), GROUP_BYTES):
            wanted = np.concatenate([batch["rows"].to_numpy() for batch in group])
            messages, first = rows.take(STAGED.names, wanted), 0
            for batch in group:
                count = len(batch["rows"])
                yield 1, self.batch(batch, messages.slice(first, count))
                first += count

    def _planned(self, index: int) -> Iterator[dict[str, Any]]:
        first = 0
        for file in self.plan:
            with stored_file(self.lake, file.path, cutting.BATCHES) as stored:
                for batches in stored.batches(1_024):
                    in_turn = np.arange(first, first + batches.num_rows) % self.tasks
                    tasks = pc.coalesce(batches.column("task"), pa.array(in_turn))
                    yield from cutting.each(batches.filter(pc.equal(tasks, index)))
                    first += batches.num_rows

    def batch(self, planned: Mapping[str, Any], messages: pa.RecordBatch) -> Batch:
        """Return the batch of a planned row of `cutting.each` and its messages."""
        window, partition, key, number, trigger, failure = (
            planned[name] for name in ("window", "partition", "batch_key", "number", "trigger", "failure")
        )
        within = () if partition is None else (partition,)
        names = (self.receive_id, self.batcher, window, key, str(number), *within)
        batch_id = str(uuid.uuid5(_NAMESPACE, "\0".join(names)))
        own = as_given(self.pipeline.partitioning(self.batcher), partition)
        info = BatchInfo(self.batcher, key, own, messages.num_rows, trigger, batch_id)
        rows = messages.append_column("window", pa.repeat(window, messages.num_rows))
        return Batch(window, info, rows, failure and Failure(**failure))

    def tries(self, block: Batch, known: Death | None) -> Tries:
        """Handle a batch until a callback process succeeds.

        A message that crashes a callback of its own fails alone; a crash of `handle_batch` fails the batch. Messages
        that crash `handle_failed` are recorded without calling it.
        """
        rows, killers, mute = block.messages.num_rows, _killers(block), set[int]()
        deaths, exact = 0, False
        while len(mute) < rows:
            death = known or (yield partial(self._handle, block, killers, mute, exact))
            if not isinstance(death, Death):
                break
            known = None
            if death.is_anyones:
                continue
            deaths, before = deaths + 1, len(killers)
            if death.has_several and not exact:
                exact = True
                continue
            # Each attempt repeats `handle_batch`, so attempts are few.
            culprits = death.rows if death.rows and deaths <= DEATHS else range(rows)
            killers |= {row: death.failure("handle_batch") for row in culprits if row not in killers}
            if death.callback == "handle_failed" or len(killers) == before:
                mute |= {*culprits}
        yield from surely(partial(self._end, block, killers, mute))

    def handle(self, batch: Batch, recording: Recording) -> None:
        """Handle a batch and record it."""
        self._handle(batch, _killers(batch), frozenset(), False, recording)

    def _handle(
        self, batch: Batch, killers: Mapping[int, Failure], mute: Set[int], exact: bool, recording: Recording
    ) -> None:
        """Handle a batch and record it without the mute rows. Known culprits fail without a call."""
        recording.watch.exact = exact
        model = self.pipeline.batchers[self.batcher].table_schema
        decoded = list(
            staged_messages(batch.messages, self.batcher, recording.ack_policy, model, killers, recording.watch)
        )
        if self.pipeline.holds_partitions():
            decoded = hold(decoded, held_by(batch.messages, recording.report))
        ok = [message for message in decoded if message.failure is None]
        assert recording.pipeline is not None
        info = batch.info._replace(size=len(ok))
        with recording.watch.busy("handle_batch", ok):
            handled = handle_batch(recording.pipeline, self.batcher, ok, info, self.context) if ok else []
        by_row = {message._row: message for message in handled}
        messages = [by_row.get(message._row, message) for message in decoded if message._row not in mute]
        rows = rows_at(batch.messages, [message._row for message in messages])
        record_batch(recording, self.batcher, rows, batch.window, messages, batch.info.batch_id, by_row.keys())

    def _end(self, batch: Batch, killers: Mapping[int, Failure], mute: Set[int], recording: Recording) -> None:
        """Count a batch, and record its mute rows without calling back."""
        recording.report.batches += batch.failure is None
        if mute:
            left = rows_at(batch.messages, sorted(mute))
            failures = {row: killers[number] for row, number in enumerate(sorted(mute))}
            failed = list(staged_messages(left, self.batcher, self.ack_policy, None, failures, UNWATCHED))
            silent = recording.without_callbacks()
            record_batch(silent, self.batcher, left, batch.window, failed, batch.info.batch_id)


def _killers(batch: Batch) -> dict[int, Failure]:
    return {} if batch.failure is None else {0: batch.failure}


def handle_batch(
    pipeline: Pipeline, batcher: str, messages: Sequence[Message], info: BatchInfo, context: Any
) -> list[Message]:
    """Call `handle_batch`. Messages that it does not return, or that it moves to another batch, fail."""
    known = {"batch_id": info.batch_id, "trigger": info.trigger}
    try:
        with span("batch", type(pipeline), batcher=batcher, **known, messages=len(messages)) as event:
            returned = pipeline.handle_batch(batcher, list(messages), info, context)
            if not isinstance(returned, list) or any(item.__class__ is not Message for item in returned):
                raise TypeError(f"handle_batch must return a list of Messages, got {_kinds(returned)}")
            given = {message._row: message for message in messages}
            if not all(message.is_same(given.get(message._row)) for message in returned):
                raise TypeError("handle_batch must return the messages of its batch, got other messages")
            by_row = {message._row: message for message in returned}
            times = Counter(message._row for message in returned)
            done = [_as_batched(message, by_row.get(message._row), times[message._row], info) for message in messages]
            ok = sum(message.failure is None for message in done)
            event.add(ok=ok, failed=len(done) - ok)
            return done
    except BaseException as error:
        failure = Failure.of(error, "handle_batch")
        return [message._rejected(failure) for message in messages]


def _kinds(returned: object) -> str:
    if not isinstance(returned, list):
        return type(returned).__name__
    return f"a list with {sorted({type(item).__name__ for item in returned if not isinstance(item, Message)})}"


def _as_batched(given: Message, returned: Message | None, times: int, info: BatchInfo) -> Message:
    if returned is None:
        return given._rejected(Failure("not returned", "handle_batch did not return it", "", "handle_batch"))
    if times > 1:
        return given._rejected(Failure("returned twice", f"handle_batch returned it {times} times", "", "handle_batch"))
    batched = checked(given, returned, "handle_batch")
    for name in ("batcher", "batch_key"):
        was, now = getattr(info, name), getattr(batched, name)  # not `given`: the callback may have changed it
        if batched.failure is None and now != was:
            why = f"handle_batch changed its {name} from {words(was, 200)!r} to {words(now, 200)!r}"
            failure = Failure("moved", f"{why}. Set it in handle_message", "", "handle_batch")
            return given.put(given.data, batcher=info.batcher, batch_key=info.batch_key)._rejected(failure)
    return batched
