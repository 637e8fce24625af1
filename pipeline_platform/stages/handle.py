"""Handling: messages through the callbacks, each failure its message's alone; what came out is written once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from pipeline_platform.lake.reader import Range, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.message import MESSAGES, Delivery, Failure, Message
from pipeline_platform.options import TableBatcher
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.source import Source
from pipeline_platform.stages.lookup import Already
from pipeline_platform.stages.record import Recorder

READ = [*(name for name in MESSAGES.names if name != "receive_id"), "position"]
"""What handling reads of a received message."""

Raised = (Exception, SystemExit)
"""What a callback may raise without harm to others; a KeyboardInterrupt is for the worker."""


class Pace(Protocol):
    """Permits to handle messages; see `rate_limiter.Pace`."""

    def each(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield every message when it may be handled."""


class Handler:
    """Gives chunks of messages to `transform`, `prepare_messages` and `handle_message`.

    Needs neither Spark nor a lake: the same object serves a task, a unit test and the testing kit.
    """

    def __init__(self, pipeline: Pipeline, context: Any, pace: Pace | None = None) -> None:
        """Prepare to handle; a `pace` holds every message to the rate limit."""
        self._pipeline, self._context = pipeline, context
        self._pace = pace
        kind = type(pipeline)
        self._transforms = kind.transform is not Pipeline.transform
        self._prepares = kind.prepare_messages is not Pipeline.prepare_messages

    def handle(self, batch: pa.RecordBatch) -> list[Message]:
        """Handle one chunk; return a message for each row, in order, ok or failed."""
        messages = list(Message.each(batch))
        if self._transforms:
            messages = [self._attempt(self._transform, message, "transform") for message in messages]
        if self._prepares:
            messages = self._prepare(messages)
        return self._handle_all(messages if self._pace is None else self._pace.each(messages))

    def failed(self, messages: list[Message]) -> list[Message]:
        """Give failed messages to `handle_failed`."""
        return self._pipeline.handle_failed(messages, self._context)

    def _handle_all(self, messages: Iterable[Message]) -> list[Message]:
        # The hot loop: one call, one check and one append a message.
        handle, context, handled = self._pipeline.handle_message, self._context, []
        for message in messages:
            if message.failure is not None:
                handled.append(message)
                continue
            try:
                result = handle(message, context)
                if result.__class__ is not Message or result._row != message._row:
                    raise TypeError(_not_the_message("handle_message", result))
                handled.append(result)
            except Raised as error:
                handled.append(message.failed(Failure.of(error, "handle_message")))
        return handled

    def _attempt(self, callback: Callable[[Message], Message], message: Message, stage: str) -> Message:
        try:
            result = callback(message)
            if result.__class__ is not Message or result._row != message._row:
                raise TypeError(_not_the_message(stage, result))
        except Raised as error:
            return message.failed(Failure.of(error, stage))
        return result

    def _transform(self, message: Message) -> Message:
        return self._pipeline.transform(message)

    def _prepare(self, messages: list[Message]) -> list[Message]:
        waiting = [message for message in messages if message.failure is None]
        if not waiting:
            return messages
        try:
            prepared = self._pipeline.prepare_messages(list(waiting), self._context)
            if [one._row for one in prepared] != [one._row for one in waiting]:
                raise TypeError(
                    f"prepare_messages got {len(waiting)} messages and must return each of them, in order; "
                    f"it returned {len(prepared)}"
                )
        except Raised as error:
            failure = Failure.of(error, "prepare_messages")
            prepared = [message.failed(failure) for message in waiting]
        if len(waiting) == len(messages):
            return prepared
        by_row = {message._row: message for message in prepared}
        return [by_row.get(message._row, message) for message in messages]


def _not_the_message(callback: str, result: object) -> str:
    if isinstance(result, Message):
        return f"{callback} must return the message it was given, or one made from it; it returned another one"
    return f"{callback} must return a Message, got {type(result).__name__}"


@dataclass(frozen=True)
class Handle:
    """Task `n` handles the received rows `parts[n]` and writes all that came of them.

    Attributes:
        pipeline: The class; a task makes its own instance.
        already: Where the lookup wrote which deliveries are not to be handled.
        careful: Try each chunk in a forked process first: a message that kills it fails alone.
    """

    pipeline: type[Pipeline]
    context: Any
    source: Source
    origin: str
    lake: Lake
    receive_id: str
    parts: Sequence[Sequence[Range]]
    pace: Pace | None = None
    already: Sequence[Range] = ()
    careful: bool = False

    def __call__(self, index: int) -> Iterator[pa.RecordBatch]:
        """Run task `index`."""
        started = time.monotonic()
        pipeline, options = self.pipeline(), self.pipeline.processors
        handler = Handler(pipeline, self.context, self.pace)
        already = Already.read(self.lake, self.already)
        rows_per_file = {
            name: batcher.batch_size for name, batcher in pipeline.batchers.items() if isinstance(batcher, TableBatcher)
        }
        prefix = f"{self.receive_id}-handle-{index}"
        with Writer(self.lake, pipeline.name, prefix, rows_per_file) as writer:
            recorder = Recorder(self.pipeline, self.source, self.origin, self.receive_id, writer, handler.failed)
            chunks = read_ranges(self.lake, self.parts[index], READ, options.chunk_size, options.chunk_bytes)
            for _, chunk in chunks:
                window = chunk.column("window")[0].as_py()
                fresh, others = already.split(chunk)
                recorder.duplicates(others, window)
                if fresh.num_rows:
                    killers = self._killers(handler, fresh) if self.careful else {}
                    recorder.handled(fresh, window, self._handle(handler, fresh, killers))
            manifest = writer.close(**recorder.notes(), seconds=time.monotonic() - started, task=index)
        yield from manifest.to_arrow().to_batches()

    def _handle(self, handler: Handler, chunk: pa.RecordBatch, killers: Mapping[int, Failure]) -> list[Message]:
        if not killers:
            return handler.handle(chunk)
        safe = [row for row in range(chunk.num_rows) if row not in killers]
        delivery = Delivery(chunk)
        handled = {
            row: message._moved_to(delivery, row)
            for row, message in zip(safe, handler.handle(chunk.take(pa.array(safe, pa.int64()))), strict=True)
        }
        originals = list(Message.each(chunk))
        return [
            handled[row] if row in handled else originals[row].failed(killers[row]) for row in range(chunk.num_rows)
        ]

    def _killers(self, handler: Handler, chunk: pa.RecordBatch) -> dict[int, Failure]:
        """Find the rows whose handling kills the process, by trying halves in forked processes."""
        found: dict[int, Failure] = {}

        def look(start: int, rows: int) -> None:
            status = _try_in_a_fork(lambda: handler.handle(chunk.slice(start, rows)))
            if status == 0:
                return
            if rows == 1:
                found[start] = Failure(
                    "worker killed", f"handling it ended the worker ({_died(status)})", "", "handle_message"
                )
                return
            look(start, rows // 2)
            look(start + rows // 2, rows - rows // 2)

        look(0, chunk.num_rows)
        return found


def _try_in_a_fork(work: Callable[[], object]) -> int:
    """Run `work` in a child and throw its result away: 0 if the child lived, else its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def _died(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return f"exit code {os.WEXITSTATUS(status)}"
