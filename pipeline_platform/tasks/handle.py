"""Handling: messages through the callbacks, each failure its message's alone; what came out is written once."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import Range, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import MESSAGES, Message
from pipeline_platform.model.options import TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.isolate import (
    UNWATCHED,
    Attempt,
    Death,
    Progress,
    Sink,
    Watch,
    Written,
    in_a_fork,
    settle,
    tries_before,
)
from pipeline_platform.tasks.lookup import Already
from pipeline_platform.tasks.record import Recorder

READ = [*(name for name in MESSAGES.names if name not in ("receive_id", "published_at")), "position"]
"""What handling reads of a received message."""

BLOCK_ROWS = 8_192
"""Messages recorded at once, in one or several chunks: a fixed cost of a millisecond is not to be paid per chunk."""


class Pacing(Protocol):
    """Gives messages when they may be handled."""

    def each(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield every message when it may be handled."""


class Permits(Pacing, Protocol):
    """The rate limit; see `rate_limiter.Pace`."""

    @property
    def unlimited_until(self) -> float:
        """Until when there is no limit, as far as is known."""

    def permitted(self, wanted: int) -> tuple[int, float]:
        """Wait until some may be handled; return how many, and until when."""


class Handler:
    """Gives messages to `transform`, `prepare_messages` (a chunk at a time) and `handle_message`.

    Whatever a callback raises, a panic of a Rust library, SystemExit and KeyboardInterrupt among it, fails messages and
    no more: nobody interrupts a worker by a signal. Needs neither Spark nor a lake: the same object serves a task, a
    unit test and the testing kit.
    """

    def __init__(self, pipeline: Pipeline, context: Any, pace: Pacing | None = None, watch: Watch = UNWATCHED) -> None:
        """Prepare to handle.

        Args:
            pipeline: Whose callbacks.
            context: What they are handed.
            pace: Holds every message to the rate limit.
            watch: Told before a callback is called.
        """
        self._pipeline, self._context = pipeline, context
        self._pace, self._watch = pace, watch
        self._most_bytes = pipeline.processors.max_message_bytes
        self._chunk_size = pipeline.processors.chunk_size
        kind = type(pipeline)
        self._transforms = kind.transform is not Pipeline.transform
        self._prepares = kind.prepare_messages is not Pipeline.prepare_messages

    def handle(self, batch: pa.RecordBatch) -> list[Message]:
        """Handle some messages; return one for each row, in order, ok or failed.

        A pace that ends early leaves the last ones out.
        """
        messages = self._of_bearable_size(batch)
        if self._transforms:
            messages = self._each(lambda message, _: self._pipeline.transform(message), messages, "transform")
        if not self._prepares:
            return self._handle_all(messages)
        handled: list[Message] = []
        for start in range(0, len(messages), self._chunk_size):
            chunk = messages[start : start + self._chunk_size]
            handled += self._handle_all(self._prepare(chunk))
            if len(handled) < start + len(chunk):
                break
        return handled

    def failed(self, messages: list[Message]) -> list[Message]:
        """Give failed messages to `handle_failed`."""
        return self._pipeline.handle_failed(messages, self._context)

    def _of_bearable_size(self, batch: pa.RecordBatch) -> list[Message]:
        messages = list(Message.each(batch))
        for row in oversized(batch, self._most_bytes):
            messages[row] = messages[row].failed(too_large(messages[row].data, self._most_bytes))
        return messages

    def _handle_all(self, messages: Sequence[Message]) -> list[Message]:
        paced = messages if self._pace is None else self._pace.each(messages)
        return self._each(self._pipeline.handle_message, paced, "handle_message")

    def _each(
        self, callback: Callable[[Message, Any], Message], messages: Iterable[Message], stage: str
    ) -> list[Message]:
        # The hot loop: one call, one check and one append a message. To unpack arguments would cost twice the call.
        context, handled = self._context, []
        for message in self._watch.each(stage, messages):
            if message._standing.failure is not None:
                handled.append(message)
                continue
            try:
                result = callback(message, context)
                if (
                    result.__class__ is not Message
                    or result._row != message._row
                    or result._standing is not message._standing
                    or type(result.batcher) is not str
                    or type(result.batch_key) is not str
                ):
                    if not message.is_same(result):
                        raise TypeError(_not_the_message(stage, result))
                    result = result._checked(stage)
                handled.append(result)
            except BaseException as error:
                handled.append(message._rejected(Failure.of(error, stage)))
        return handled

    def _prepare(self, messages: list[Message]) -> list[Message]:
        waiting = [message for message in messages if message.failure is None]
        if not waiting:
            return messages
        self._watch.busy("prepare_messages", waiting)
        try:
            prepared = list(self._pipeline.prepare_messages(list(waiting), self._context))
            if len(prepared) != len(waiting) or not all(map(Message.is_same, waiting, prepared)):
                raise TypeError(
                    f"prepare_messages got {len(waiting)} messages and must return each of them, in order; "
                    f"it returned {len(prepared)}"
                )
        except BaseException as error:
            failure = Failure.of(error, "prepare_messages")
            prepared = [message._rejected(failure) for message in waiting]
        else:
            prepared = [checked(*pair, "prepare_messages") for pair in zip(waiting, prepared, strict=True)]
        if len(waiting) == len(messages):
            return prepared
        by_row = {message._row: message for message in prepared}
        return [by_row.get(message._row, message) for message in messages]


def checked(given: Message, returned: Message, stage: str) -> Message:
    """What a callback made of a message; failed where it set something that no later step can take."""
    try:
        return returned._checked(stage)
    except BaseException as error:
        return given._rejected(Failure.of(error, stage))


def _not_the_message(callback: str, result: object) -> str:
    if isinstance(result, Message):
        return f"{callback} must return the message it was given, or one made from it; it returned another one"
    return f"{callback} must return a Message, got {type(result).__name__}"


def oversized(batch: pa.RecordBatch, most_bytes: int) -> list[int]:
    """The rows whose payload is larger than a pipeline takes."""
    larger = pc.greater(pc.binary_length(batch.column("data")), most_bytes)
    return list(pc.indices_nonzero(larger).to_pylist())


def too_large(payload: bytes, most_bytes: int) -> Failure:
    """Why a message fails that is larger than its pipeline takes."""
    reason = f"its payload has {len(payload):,} bytes, and processors.max_message_bytes allows {most_bytes:,}"
    return Failure("too large", reason, "", "receive_messages")


@dataclass(frozen=True)
class Handle:
    """Task `n` handles the received rows `parts[n]` and writes all that came of them.

    Attributes:
        pipeline: The class; a task makes its own instance.
        already: Where the lookup wrote which deliveries are not to be handled.
        careful: Handle in forked processes: a message that kills one fails alone. So does a task that is tried again.
    """

    pipeline: type[Pipeline]
    context: Any
    source: Source
    origin: str
    lake: Lake
    receive_id: str
    parts: Sequence[Sequence[Range]]
    pace: Permits | None = None
    already: Sequence[Range] = ()
    careful: bool = False

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        started, options = time.monotonic(), self.pipeline.processors
        already = Already.read(self.lake, self.already)
        rows_per_file = {
            name: batcher.batch_size
            for name, batcher in self.pipeline.batchers.items()
            if isinstance(batcher, TableBatcher)
        }
        prefix = f"{self.receive_id}-handle-{index}"
        with Writer(self.lake, self.pipeline.name, prefix, rows_per_file) as writer:
            careful = self.careful or tries_before() > 0
            work: _Careful | _Here = _Careful(self, writer) if careful else _Here(self, writer)
            recorder = work.recorder
            rows = options.chunk_size if careful else max(options.chunk_size, BLOCK_ROWS)
            with rare_collections():
                for _, block in read_ranges(self.lake, self.parts[index], READ, rows, options.chunk_bytes):
                    window, split = block.column("window")[0].as_py(), already.split(block)
                    recorder.duplicates(split.decided, window, decided=True)
                    recorder.duplicates(split.copies, window, decided=False)
                    if split.fresh.num_rows:
                        work.handle(split.fresh, window)
            manifest = writer.close(**recorder.tally.notes(), seconds=time.monotonic() - started, task=index)
        yield from manifest.to_arrow().to_batches()

    def recorder(self, sink: Sink, handler: Handler | None = None, watch: Watch = UNWATCHED) -> Recorder:
        """A recorder for this task; without a handler it calls nothing of the author's."""
        looks = handler.failed if handler else list
        return Recorder(self.pipeline, self.source, self.origin, self.receive_id, sink, looks, watch)


class _Here:
    """Handles in the task's own process."""

    def __init__(self, task: Handle, writer: Writer) -> None:
        self._handler = Handler(task.pipeline(), task.context, task.pace)
        self.recorder = task.recorder(writer, self._handler)

    def handle(self, rows: pa.RecordBatch, window: str) -> None:
        self.recorder.handled(rows, window, self._handler.handle(rows))


class _Careful:
    """Handles in forked processes, each with an instance of the pipeline and connections of its own."""

    def __init__(self, task: Handle, writer: Writer) -> None:
        self._task, self._writer = task, writer
        self.recorder = task.recorder(writer)
        self._in_time = True

    def handle(self, rows: pa.RecordBatch, window: str) -> None:
        exact = False  # to build columns for each message by itself takes several times as long: only once one died

        def attempt(some: Sequence[int]) -> Attempt:
            nonlocal exact
            # Where preparing took longer than permits hold, one message begins late: the others never would.
            count, until = self._permitted(len(some) if self._in_time else 1)
            chosen = rows.take(pa.array(some[:count], pa.int64()))
            work = partial(self._work, chosen, window, until if self._in_time else math.inf)
            answer = in_a_fork(work, count, exact=exact)
            if isinstance(answer, Death):
                exact = True
                return Attempt(answer._replace(rows=[some[row] for row in answer.rows]), count)
            answer.pour(self._writer, self.recorder.tally)
            self._in_time = bool(answer.notes["done"])
            return Attempt(None, answer.notes["done"])

        def fail(row: int, death: Death) -> None:
            one, failure = rows.slice(row, 1), death.failure("handle_message")
            answer = in_a_fork(partial(self._work_on_failed, one, window, failure), 1)
            if isinstance(answer, Death):  # it kills `handle_failed`, too, or that alone
                self.recorder.handled(one, window, [message.failed(failure) for message in Message.each(one)])
            else:
                answer.pour(self._writer, self.recorder.tally)

        settle(range(rows.num_rows), attempt, fail)

    def _permitted(self, wanted: int) -> tuple[int, float]:
        """Permits are taken before a try: a forked process must not touch the control store's connection."""
        if self._task.pace is None:
            return wanted, math.inf
        count, until = self._task.pace.permitted(wanted)
        # Without a limit nothing begins late: a chunk that is long prepared must not be prepared again for it.
        return count, math.inf if until == self._task.pace.unlimited_until else until

    # In the forked process

    def _work(self, rows: pa.RecordBatch, window: str, until: float, progress: Progress) -> Written:
        handler = Handler(self._task.pipeline(), self._task.context, _Until(until), progress)
        return self._recorded(rows, window, handler.handle(rows), handler, progress)

    def _work_on_failed(self, rows: pa.RecordBatch, window: str, failure: Failure, progress: Progress) -> Written:
        handler = Handler(self._task.pipeline(), self._task.context, None, progress)
        messages = [message.failed(failure) for message in Message.each(rows)]
        return self._recorded(rows, window, messages, handler, progress)

    def _recorded(
        self, rows: pa.RecordBatch, window: str, messages: list[Message], handler: Handler, progress: Progress
    ) -> Written:
        written = Written()
        recorder = self._task.recorder(written, handler, progress)
        recorder.handled(rows.slice(0, len(messages)), window, messages)
        written.notes = {"tally": recorder.tally.to_json(), "done": len(messages)}
        return written


class _Until:
    """The pace of a forked process: it begins no message after a deadline."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def each(self, messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            if time.monotonic() >= self._deadline:
                return
            yield message


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect cyclic garbage rarely: messages live for one block, and looking at them all in between finds nothing.

    Saves a sixth of the time of a handler that makes a model of each message.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
