"""Failed messages: passing them to `handle_failed` and recording them."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pipeline_platform.lake.reader import filled
from pipeline_platform.lake.tables import FAILED
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.failure import FAILURE_COLUMNS, HELD, Failure, RunError, reason_of, words
from pipeline_platform.model.message import ATTEMPT_KEY, Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.callback_process.progress import UNWATCHED
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.telemetry.spans import span

RECEIVING = "receive_messages"
"""Stage of failures before any callback. `handle_failed` cannot rescue them."""


def unknown_batcher(batcher: str | None, batchers: Iterable[str], stage: str) -> Failure:
    """Return the failure of a message whose batcher does not exist."""
    reason = f"{words(repr(batcher), 200)} is not a batcher. Batchers: {sorted(batchers)}"
    return Failure("unknown batcher", reason, "", stage)


def judge(recording: Recording, block: Block) -> None:
    """Apply the rules of the option `retry` to the failed messages of a block. Those of children are judged."""
    retry = recording.step.pipeline.retry
    if retry is None or block.are_parents:
        return
    watch = recording.watch if retry.functions else UNWATCHED
    for index in block.failed:
        message = block.messages[index]
        # `cut` applies `retry` to the failures of a splitter.
        if message.failure is not None and message.failure.stage != "batch_size":
            with watch.busy("retry", [message]):
                failure = retry.judged(message.failure)
            if failure is not message.failure:
                block.messages[index] = message._but(failure=failure)


def shown(
    recording: Recording, messages: Sequence[Message], pipeline: Pipeline, may_rescue: Callable[[Message], bool]
) -> list[Message]:
    """Pass failed messages to `handle_failed`, a chunk at a time. Return the resulting messages.

    A message that it returns as ok stays failed unless `may_rescue`.
    """
    size = 1 if recording.watch.exact else recording.step.pipeline.processors.chunk_size
    chunks = (messages[start : start + size] for start in range(0, len(messages), size))
    return [message for chunk in chunks for message in _shown(recording, chunk, pipeline, may_rescue)]


def _shown(
    recording: Recording, messages: Sequence[Message], pipeline: Pipeline, may_rescue: Callable[[Message], bool]
) -> list[Message]:
    given = {message._row: message for message in messages}
    made: dict[int, Message] = {}
    with recording.watch.busy("handle_failed", messages):
        try:
            with span("handle_failed", recording.step.pipeline, messages=len(given)) as event:
                returned: dict[int, Message] = {}
                for message in pipeline.handle_failed(list(messages), recording.step.context):
                    if message.__class__ is not Message or not message.is_same(given.get(message._row)):
                        raise TypeError("handle_failed must return the messages that it was given, got others")
                    returned.setdefault(message._row, message)
                made = returned  # all or nothing: it neither raised nor returned other messages
                if len(returned) < len(given):
                    raise TypeError(f"handle_failed must return all {len(given)} messages, got {len(returned)}")
                event.add(rescuing=sum(message.failure is None for message in returned.values()))
        except RunError:
            raise
        except BaseException as error:
            _count_error(recording.report, error)
    # A message that the callback omitted stays unchanged.
    return [_looked_at(recording.report, message, made.get(row, message), may_rescue) for row, message in given.items()]


def _looked_at(report: TaskReport, given: Message, returned: Message, may_rescue: Callable[[Message], bool]) -> Message:
    before = given.failure
    assert before is not None
    try:
        returned = returned._checked(before.stage)
    except BaseException as error:
        _count_error(report, error)
        return returned._rejected(before)
    if returned.failure is None:
        if before.stage != RECEIVING and may_rescue(given):
            return returned
        report.not_rescued += 1
    after = returned.failure or before
    return returned._but(failure=after._replace(traceback=after.traceback or before.traceback))


def _count_error(report: TaskReport, error: BaseException) -> None:
    report.handle_failed_errors += 1
    report.count_reason(f"handle_failed: {type(error).__name__}: {reason_of(error)}")


def write_failures(recording: Recording, rows: pa.RecordBatch, window: str, messages: Sequence[Message]) -> None:
    """Write an `open` or `dead` event for each row, with its payload as delivered, not as callbacks changed it."""
    failed = [(message, message.failure or Failure("failed", "")) for message in messages]
    texts = {name: [words(getattr(failure, name)) for _, failure in failed] for name in FAILURE_COLUMNS}
    texts |= {name: [words(getattr(message, name)) for message, _ in failed] for name in ("batcher", "batch_key")}
    retry, at = recording.step.pipeline.retry, max(datetime.now(UTC), recording.step.started_at)
    states, due = list[str](), list[datetime | None]()
    attempts = zip(*(rows.column(name).to_pylist() for name in ATTEMPT_KEY), strict=True)
    for (_, failure), (source, message_id, attempt) in zip(failed, attempts, strict=True):
        is_held = failure.kind == HELD
        is_dead = not is_held and (not failure.retry or (retry is not None and retry.is_last(attempt)))
        states.append("dead" if is_dead else "open")
        due.append(retry.due_at(source, message_id, attempt, at) if retry and not (is_dead or is_held) else None)
    recording.report.dead += states.count("dead")
    recording.report.permanent += sum(not failure.retry for _, failure in failed)
    own = rows["own"] if "own" in rows.schema.names else None
    _write(recording, rows, window, at, state=states, **texts, due_at=due, own_partition=own)


def close_failures(recording: Recording, rows: pa.RecordBatch, window: str) -> None:
    """Write a `closed` event for each row: a failed message that was retried and handled."""
    _write(recording, rows.select(ATTEMPT_KEY), window, datetime.now(UTC), state="closed")


def _write(recording: Recording, rows: pa.RecordBatch, window: str, at: datetime, **columns: Any) -> None:
    events = filled(rows, FAILED, at=at, receive_id=recording.step.receive_id, **columns)
    recording.write("failed", window, events)
