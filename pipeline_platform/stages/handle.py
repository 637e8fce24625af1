"""Handling: messages through the callbacks, each failure its message's alone; what came out is written once."""

from __future__ import annotations

import gc
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from pipeline_platform.failure import Failure
from pipeline_platform.lake.reader import Range, read_ranges
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.writer import Writer
from pipeline_platform.message import MESSAGES, Delivery, Message
from pipeline_platform.options import TableBatcher
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.source import Source
from pipeline_platform.stages.lookup import Already
from pipeline_platform.stages.record import Recorder

READ = [*(name for name in MESSAGES.names if name not in ("receive_id", "published_at")), "position"]
"""What handling reads of a received message."""

BLOCK_ROWS = 8_192
"""Messages recorded at once, in one or several chunks: a fixed cost of a millisecond is not to be paid per chunk."""


class Permits(Protocol):
    """Gives messages when they may be handled; see `rate_limiter.Pace`."""

    def each(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield every message when it may be handled."""

    def permitted(self, wanted: int) -> tuple[int, float]:
        """Wait until some may be handled; return how many, and until when."""


class Handler:
    """Gives messages to `transform`, `prepare_messages` (a chunk at a time) and `handle_message`.

    Whatever a callback raises, a panic of a Rust library or a SystemExit among it, fails messages and no more; only a
    KeyboardInterrupt is for the worker. Needs neither Spark nor a lake: the same object serves a task, a unit test
    and the testing kit.
    """

    def __init__(self, pipeline: Pipeline, context: Any, pace: Permits | None = None) -> None:
        """Prepare to handle; a `pace` holds every message to the rate limit."""
        self._pipeline, self._context = pipeline, context
        self._pace = pace
        self._chunk_size = pipeline.processors.chunk_size
        kind = type(pipeline)
        self._transforms = kind.transform is not Pipeline.transform
        self._prepares = kind.prepare_messages is not Pipeline.prepare_messages

    def handle(self, batch: pa.RecordBatch) -> list[Message]:
        """Handle some messages; return one for each row, in order, ok or failed."""
        messages = list(Message.each(batch))
        if self._transforms:
            messages = self._each(lambda message, _: self._pipeline.transform(message), messages, "transform")
        if not self._prepares:
            return self._handle_all(messages)
        size = self._chunk_size
        return [
            handled
            for start in range(0, len(messages), size)
            for handled in self._handle_all(self._prepare(messages[start : start + size]))
        ]

    def failed(self, messages: list[Message]) -> list[Message]:
        """Give failed messages to `handle_failed`."""
        return self._pipeline.handle_failed(messages, self._context)

    def at(self, pace: Permits) -> Handler:
        """The same at another pace."""
        return Handler(self._pipeline, self._context, pace)

    def _handle_all(self, messages: Sequence[Message]) -> list[Message]:
        paced = messages if self._pace is None else self._pace.each(messages)
        return self._each(self._pipeline.handle_message, paced, "handle_message")

    def _each(
        self, callback: Callable[[Message, Any], Message], messages: Iterable[Message], stage: str
    ) -> list[Message]:
        # The hot loop: one call, one check and one append a message. To unpack arguments would cost twice the call.
        context, handled = self._context, []
        for message in messages:
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
                    result = result._checked()
                handled.append(result)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                handled.append(message._rejected(Failure.of(error, stage)))
        return handled

    def _prepare(self, messages: list[Message]) -> list[Message]:
        waiting = [message for message in messages if message.failure is None]
        if not waiting:
            return messages
        try:
            prepared = list(self._pipeline.prepare_messages(list(waiting), self._context))
            if len(prepared) != len(waiting) or not all(map(Message.is_same, waiting, prepared)):
                raise TypeError(
                    f"prepare_messages got {len(waiting)} messages and must return each of them, in order; "
                    f"it returned {len(prepared)}"
                )
        except KeyboardInterrupt:
            raise
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
        return returned._checked()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return given._rejected(Failure.of(error, stage))


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
    pace: Permits | None = None
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
            rows = options.chunk_size if self.careful else max(options.chunk_size, BLOCK_ROWS)
            with rare_collections():
                for _, block in read_ranges(self.lake, self.parts[index], READ, rows, options.chunk_bytes):
                    window, split = block.column("window")[0].as_py(), already.split(block)
                    recorder.duplicates(split.decided, window, decided=True)
                    recorder.duplicates(split.copies, window, decided=False)
                    if split.fresh.num_rows:
                        killers = self._killers(handler, split.fresh) if self.careful else {}
                        recorder.handled(split.fresh, window, self._handle(handler, split.fresh, killers))
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
        """Find the rows whose handling kills the process, by trying halves in forked processes.

        The rate limit holds for each try: its permits are taken before it, and it begins no message after them.
        """
        found: dict[int, Failure] = {}

        def look(start: int, rows: int) -> None:
            in_time = True
            while rows:
                # Where preparing took longer than permits hold, one message begins late: the others never would.
                count, until = self._permitted(rows if in_time else 1)
                fork = _Fork(until if in_time else math.inf)
                death = try_in_a_fork(partial(handler.at(fork).handle, chunk.slice(start, count)))
                if death is None:
                    count = fork.begun
                    in_time = bool(count)
                elif count == 1:
                    reason = f"handling it ended the worker ({death})"
                    found[start] = Failure("worker killed", reason, "", "handle_message")
                else:
                    look(start, count // 2)
                    look(start + count // 2, count - count // 2)
                start, rows = start + count, rows - count

        look(0, chunk.num_rows)
        return found

    def _permitted(self, wanted: int) -> tuple[int, float]:
        return (wanted, math.inf) if self.pace is None else self.pace.permitted(wanted)


class _Fork:
    """The pace of a forked process, which must not touch the control store's connection: until a deadline."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._begun = mmap.mmap(-1, 8)  # shared with the child

    @property
    def begun(self) -> int:
        return int.from_bytes(self._begun[:], "little")

    def permitted(self, wanted: int) -> tuple[int, float]:
        return wanted, self._until

    def each(self, messages: Sequence[Message]) -> Iterator[Message]:
        for message in messages:
            if time.monotonic() >= self._until:
                return
            self._begun[:] = (self.begun + 1).to_bytes(8, "little")
            yield message


def try_in_a_fork(work: Callable[[], object]) -> str | None:
    """Run `work` in a child and throw its result away: None if it came to its end, else how the child died."""
    ended = mmap.mmap(-1, 1)  # shared with the child: exit code 0 says nothing, for `work` may exit with it
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            ended[0] = 1
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    if ended[0]:
        return None
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


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
