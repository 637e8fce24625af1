"""Failed messages: passing them to `handle_failed` and recording them."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from pipeline_platform.lake.tables import FAILED
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.failure import FAILURE_COLUMNS, HELD, Failure, reason_of, words
from pipeline_platform.model.message import ATTEMPT_KEY, PAYLOAD, Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.callback_process.progress import UNWATCHED, Watch
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.step import Destination, Step
from pipeline_platform.telemetry.spans import span

RECEIVING = "receive_messages"
"""Stage of failures before any callback. `handle_failed` cannot rescue them."""


def unknown_batcher(batcher: str | None, batchers: Iterable[str], stage: str) -> Failure:
    """Return the failure of a message whose batcher does not exist."""
    reason = f"{words(repr(batcher), 200)} is not a batcher. Batchers: {sorted(batchers)}"
    return Failure("unknown batcher", reason, "", stage)


class FailureWriter:
    """Writes the events of the table `failed` for one task.

    Args:
        step: Step of the messages.
        destination: Destination of the events.
        report: Report to update.
        watch: Watch that is notified of calls of `handle_failed`.
    """

    def __init__(self, step: Step, destination: Destination, report: TaskReport, watch: Watch) -> None:
        self._step, self._destination, self._report, self._watch = step, destination, report, watch

    def judge(self, block: Block) -> None:
        """Apply the rules of the option `retry` to the failed messages of a block. Those of children are judged."""
        retry = self._step.pipeline.retry
        if retry is None or block.are_parents:
            return
        watch = self._watch if retry.functions else UNWATCHED
        for index in block.failed:
            message = block.messages[index]
            if (
                message.failure is not None and message.failure.stage != "batch_size"
            ):  # `cut` applies `retry` to these failures
                with watch.busy("retry", [message]):
                    failure = retry.judged(message.failure)
                if failure is not message.failure:
                    block.messages[index] = message._but(failure=failure)

    def shown(
        self, messages: Sequence[Message], pipeline: Pipeline, may_rescue: Callable[[Message], bool]
    ) -> list[Message]:
        """Pass failed messages to `handle_failed`, a chunk at a time. Return the resulting messages.

        A message that it returns as ok stays failed unless `may_rescue`.
        """
        size = 1 if self._watch.exact else self._step.pipeline.processors.chunk_size
        chunks = (messages[start : start + size] for start in range(0, len(messages), size))
        return [message for chunk in chunks for message in self._shown(chunk, pipeline, may_rescue)]

    def _shown(
        self, messages: Sequence[Message], pipeline: Pipeline, may_rescue: Callable[[Message], bool]
    ) -> list[Message]:
        given = {message._row: message for message in messages}
        made: dict[int, Message] = {}
        with self._watch.busy("handle_failed", messages):
            try:
                with span("handle_failed", self._step.pipeline, messages=len(given)) as event:
                    returned: dict[int, Message] = {}
                    for message in pipeline.handle_failed(list(messages), self._step.context):
                        if message.__class__ is not Message or not message.is_same(given.get(message._row)):
                            raise TypeError("handle_failed must return the messages that it was given, got others")
                        returned.setdefault(message._row, message)
                    made = returned  # all or nothing: it neither raised nor returned other messages
                    if len(returned) < len(given):
                        raise TypeError(f"handle_failed must return all {len(given)} messages, got {len(returned)}")
                    event.add(rescuing=sum(message.failure is None for message in returned.values()))
            except BaseException as error:
                self._count_error(error)
        # A message that the callback omitted stays unchanged.
        return [self._looked_at(message, made.get(row, message), may_rescue) for row, message in given.items()]

    def _looked_at(self, given: Message, returned: Message, may_rescue: Callable[[Message], bool]) -> Message:
        before = given.failure
        assert before is not None
        try:
            returned = returned._checked(before.stage)
        except BaseException as error:
            self._count_error(error)
            return returned._rejected(before)
        if returned.failure is None:
            rescued = before.stage != RECEIVING and may_rescue(given)
            if rescued:
                self._report.rescued += 1
                return returned
            self._report.not_rescued += 1
        after = returned.failure or before
        return returned._but(failure=after._replace(traceback=after.traceback or before.traceback))

    def _count_error(self, error: BaseException) -> None:
        self._report.handle_failed_errors += 1
        self._report.count_reason(f"handle_failed: {type(error).__name__}: {reason_of(error)}")

    def record(self, rows: pa.RecordBatch, window: str, messages: Sequence[Message]) -> None:
        """Write an `open` or `dead` event for each row, with its payload as delivered, not as callbacks changed it."""
        failed = [(message, message.failure or Failure("failed", "")) for message in messages]
        texts: dict[str, list[str]] = {
            name: [words(getattr(failure, name)) for _, failure in failed] for name in FAILURE_COLUMNS
        }
        texts |= {name: [words(getattr(message, name)) for message, _ in failed] for name in ("batcher", "batch_key")}
        retry, at = self._step.pipeline.retry, max(datetime.now(UTC), self._step.started_at)
        sources, ids, attempts = (rows.column(name).to_pylist() for name in ATTEMPT_KEY)
        dead = [
            failure.kind != HELD and (not failure.retry or (retry is not None and retry.is_last(attempt)))
            for (_, failure), attempt in zip(failed, attempts, strict=True)
        ]
        due = [
            None if is_dead or retry is None or kind == HELD else retry.due_at(source, message_id, attempt, at)
            for source, message_id, attempt, is_dead, kind in zip(
                sources, ids, attempts, dead, texts["kind"], strict=True
            )
        ]
        self._report.dead += sum(dead)
        self._report.permanent += sum(not failure.retry for _, failure in failed)
        self._write(
            rows,
            window,
            at,
            ["dead" if is_dead else "open" for is_dead in dead],
            **texts,
            **{name: rows.column(name) for name in PAYLOAD},
            due_at=pa.array(due, FAILED.field("due_at").type),
            **({"own_partition": rows.column("own")} if "own" in rows.schema.names else {}),
        )

    def close(self, rows: pa.RecordBatch, window: str) -> None:
        """Write a `closed` event for each row: a failed message that was retried and handled."""
        self._write(rows, window, datetime.now(UTC), ["closed"] * rows.num_rows)

    def _write(self, rows: pa.RecordBatch, window: str, at: datetime, states: Sequence[str], **columns: Any) -> None:
        count = rows.num_rows
        columns |= {name: rows.column(name) for name in ATTEMPT_KEY}
        columns["state"] = pa.array(states, pa.string())
        columns["at"] = pa.repeat(pa.scalar(at, FAILED.field("at").type), count)
        columns["receive_id"] = pa.repeat(self._step.receive_id, count)
        schema = pa.schema([field for field in FAILED if field.name != "window"])
        missing = {field.name: pa.nulls(count, field.type) for field in schema if field.name not in columns}
        self._destination.write("failed", window, pa.RecordBatch.from_pydict({**columns, **missing}, schema=schema))
