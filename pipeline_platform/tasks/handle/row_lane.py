"""The lane of rows: callbacks handle messages singly. A failure concerns one message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import rows_at
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import BULK, BatchMode, Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.callback_process.progress import Watch
from pipeline_platform.tasks.handle.threads import at_once, followers
from pipeline_platform.tasks.record.failures import RECEIVING
from pipeline_platform.tasks.record.fan_out import bytes_held, with_children
from pipeline_platform.tasks.record.filtered import FILTERED, ONLY, Filter
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.routing import record_messages
from pipeline_platform.telemetry.spans import has_listeners, span

LANE = "lane"
"""Column of lanes: messages with the same lane are handled in order even with several threads. Null for no lane."""

HELD_BYTES = 16 * 2**20
"""Bytes of children and of fetched payloads (by `bytes_held`) at which a portion ends and is recorded."""

_Paced = Callable[[Sequence[Message]], Iterable[Message]]


class Handler:
    """Passes messages to `transform`, `prepare_messages` (a chunk at a time) and `handle_message`.

    Every exception of a callback fails only its messages, including panics of Rust libraries, SystemExit and
    KeyboardInterrupt: workers are not interrupted by signals. Needs neither Spark nor a lake.

    Attributes:
        is_over: Whether `paced` ended early.
    """

    def __init__(self, recording: Recording, paced: _Paced | None = None, batch_mode: BatchMode = BULK) -> None:
        """Prepare to handle.

        Args:
            recording: Recording of the task.
            paced: Yields messages when they may be handled. If it ends early, the last messages are not handled.
            batch_mode: Initial batch mode of messages.
        """
        assert recording.pipeline is not None
        self._recording, self._pipeline, self._context = recording, recording.pipeline, recording.step.context
        self._paced, self._watch, self._batch_mode = paced, recording.watch, batch_mode
        kind = type(self._pipeline)
        self._filter = Filter(kind)
        self._transforms = kind.transform is not Pipeline.transform
        self._prepares = kind.prepare_messages is not Pipeline.prepare_messages
        self._held, self.is_over = 0, False

    def record(self, rows: pa.RecordBatch, window: str) -> Iterator[Sequence[int]]:
        """Handle rows and record their outcomes. Yield the indexes of the recorded rows, in portions."""
        for messages in self.portions(rows):
            begun = [message._row for message in messages]
            record_messages(self._recording, rows_at(rows, begun), window, messages)
            yield begun

    def portions(self, batch: pa.RecordBatch) -> Iterator[list[Message]]:
        """Handle the messages of a batch. Yield processed messages, ok or failed, in portions.

        Filtered messages are a portion without permits. Another portion ends when its children and fetched payloads
        reach `HELD_BYTES`. If `paced` ends early, messages that did not start are missing. If the batch has a column
        `lane`, messages of the same lane are handled in order, even with threads.
        """
        messages = self.transformed(batch)
        lanes = batch.column(LANE).to_pylist() if LANE in batch.schema.names else []
        if self._filter and (filtered := [message for message in messages if message.reason == FILTERED]):
            yield filtered  # without permits
            kept = [place for place, message in enumerate(messages) if message.reason != FILTERED]
            messages, lanes = [messages[place] for place in kept], [lanes[place] for place in kept] if lanes else []
        size = self._pipeline.processors.chunk_size if self._prepares else len(messages)
        portion = list[Message]()
        for start in range(0, len(messages), size or 1):
            left, mine = messages[start : start + size], lanes[start : start + size]
            if self._prepares:
                left = self._prepare(left)
            permits = iter(self._paced(left) if self._paced else left)  # shared by the portions of the chunk
            while left:
                begun = self._handle(left, permits, mine)
                portion += begun
                if self._held < HELD_BYTES:
                    self.is_over = len(begun) < len(left)
                    break
                yield portion
                portion, self._held = [], 0
                rows = {message._row for message in begun}
                kept = [place for place, message in enumerate(left) if message._row not in rows]
                left, mine = [left[place] for place in kept], [mine[place] for place in kept] if mine else []
            if self.is_over:
                break
        if portion:
            yield portion

    def transformed(self, batch: pa.RecordBatch) -> list[Message]:
        """Return the messages of a batch after `only` and `transform`, one for each row."""
        messages = self.let_through(batch)
        if not self._transforms:
            return messages
        return self._each(lambda message, _: self._pipeline.transform(message), messages, "transform")

    def let_through(self, batch: pa.RecordBatch) -> list[Message]:
        """Return the messages of a batch. Too large messages have failed, and filtered messages are skipped."""
        most_bytes = self._pipeline.processors.max_message_bytes
        messages = list(Message.each(batch, self._recording.ack_policy, self._batch_mode))
        for row in oversized(batch, most_bytes):
            messages[row] = messages[row].failed(too_large(messages[row].data, most_bytes))
        return self._each(self._filter, messages, ONLY) if self._filter else messages

    def record_ended(self, rows: pa.RecordBatch, window: str) -> pa.Array:
        """Record rows that are too large or filtered. Return whether each row is recorded."""
        messages = self.let_through(rows)
        ended = pa.array([message.status != "ok" for message in messages], pa.bool_())
        some = [message for message in messages if message.status != "ok"]
        record_messages(self._recording, rows.filter(ended), window, some)
        return ended

    def _handle(self, messages: Sequence[Message], permits: Iterator[Message], lanes: Sequence[Any]) -> list[Message]:
        """Handle as many messages as there are permits. Return the messages that started, in order."""
        callback, stage = self._pipeline.handle_message, "handle_message"
        if has_listeners("message", type(self._pipeline)):
            callback = partial(_emitting, self._pipeline)
        threads = min(self._pipeline.processors.threads, len(messages))
        if threads <= 1:
            return [*self._timed(callback, permits, stage), *self._each(callback, permits, stage)]
        watches = self._watch.of_threads(stage, threads)
        workers = [partial(self._each, callback, stage=stage, watch=watch) for watch in watches]
        return at_once(messages, workers, permits, followers(lanes))

    def _timed(
        self, callback: Callable[[Message, Any], Message | list[Message]], permits: Iterator[Message], stage: str
    ) -> list[Message]:
        """Handle the first message, and measure it for the mean time of its type. To time each would cost 2 %."""
        sample, began = list(islice(permits, 1)), time.perf_counter()
        handled = self._each(callback, sample, stage)
        for message in handled:
            if message.status == "ok":
                kind, report = type(message.data).__name__, self._recording.report
                report.timed[kind] += 1
                report.timed_s[kind] = report.timed_s.get(kind, 0.0) + time.perf_counter() - began
        return handled

    def _each(
        self,
        callback: Callable[[Message, Any], Message | list[Message]],
        messages: Iterable[Message],
        stage: str,
        watch: Watch | None = None,
    ) -> list[Message]:
        # The hot loop: one call, one check and one append per message. Unpacking arguments would double the cost.
        context, handled = self._context, []
        for message in (watch or self._watch).each(stage, messages):
            state = message._state
            if state.failure is not None or state.skip_reason is not None:
                handled.append(message)
                continue
            try:
                result = callback(message, context)
                if (
                    result.__class__ is not Message
                    or result._row != message._row
                    or result._state is not state
                    or type(result.batcher) is not str
                    or type(result.batch_key) is not str
                ):
                    result = _accepted(message, result, stage)
                    size = bytes_held(result) if stage == "handle_message" else 0
                    if size:  # computed first: another thread may add meanwhile
                        self._held += size
                        if self._held >= HELD_BYTES:
                            handled.append(result)
                            break
                handled.append(result)
            except BaseException as error:
                handled.append(message._rejected(Failure.of(error, stage)))
        return handled

    def _prepare(self, messages: list[Message]) -> list[Message]:
        waiting = [message for message in messages if message.status == "ok"]
        if not waiting:
            return messages
        with self._watch.busy("prepare_messages", waiting):
            try:
                prepared = list(self._pipeline.prepare_messages(list(waiting), self._context))
                if len(prepared) != len(waiting) or not all(map(Message.is_same, waiting, prepared)):
                    raise TypeError(
                        f"prepare_messages must return the {len(waiting)} messages that it was given, in order; "
                        f"it returned {len(prepared)}"
                    )
            except BaseException as error:
                failure = Failure.of(error, "prepare_messages")
                prepared = [message._rejected(failure) for message in waiting]
            else:
                prepared = [checked(*pair, "prepare_messages") for pair in zip(waiting, prepared, strict=True)]
        by_row = {message._row: message for message in prepared}
        return [by_row.get(message._row, message) for message in messages]


def checked(given: Message, returned: Message, stage: str) -> Message:
    """Return the result of a callback for a message, failed if the callback set an invalid value."""
    try:
        return returned._checked(stage)
    except BaseException as error:
        return given._rejected(Failure.of(error, stage))


def _accepted(given: Message, returned: object, stage: str) -> Message:
    """Return the message for a callback's result that is not the plain message, for example a list.

    Raises:
        TypeError: The result is invalid.
    """
    if isinstance(returned, list) and stage == "handle_message":
        return with_children(given, returned)
    if not isinstance(returned, Message) or not given.is_same(returned):
        raise TypeError(_not_the_message(stage, returned))
    return returned._checked(stage)


def _emitting(pipeline: Pipeline, message: Message, context: Any) -> Message:
    """Call `handle_message` within a span. An invalid result counts as an exception."""
    with span("message", type(pipeline), message_id=message.message_id, attempt=message.attempt) as event:
        result = _accepted(message, pipeline.handle_message(message, context), "handle_message")
        event.add(failed=int(result.failure is not None))
        return result


def _not_the_message(callback: str, result: object) -> str:
    if isinstance(result, Message):
        return (
            f"{callback} must return the message it was given, or a message made from it; it returned another message"
        )
    wanted = "a Message or a list of Messages" if callback == "handle_message" else "a Message"
    return f"{callback} must return {wanted}, got {type(result).__name__}"


def oversized(batch: pa.RecordBatch, most_bytes: int) -> list[int]:
    """Return the rows whose payload exceeds `most_bytes`."""
    larger = pc.greater(pc.binary_length(batch.column("data")), most_bytes)
    return list(pc.indices_nonzero(larger).to_pylist())


def too_large(payload: bytes, most_bytes: int) -> Failure:
    """Return the failure of a message whose payload exceeds `most_bytes`."""
    reason = f"its payload has {len(payload):,} bytes, and processors.max_message_bytes allows {most_bytes:,}"
    return Failure("too large", reason, "", RECEIVING, retry=False)
