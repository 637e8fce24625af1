"""Recording what became of messages: rows of their batchers, failures, and an outcome for each. Runs in tasks."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel
from pydantic_core import to_json

from pipeline_platform.lake.tables import FAILED, OUTCOMES
from pipeline_platform.model.failure import Failure, reason_of, words
from pipeline_platform.model.message import DEFAULT, Message
from pipeline_platform.model.options import Batcher, TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.schema import RowType
from pipeline_platform.source.contract import Source
from pipeline_platform.tasks.isolate import UNWATCHED, Sink, Watch
from pipeline_platform.tasks.staged import DELIVERY, STAGED, encode, staged_table
from pipeline_platform.tasks.tally import Tally

_OUTCOME = ["source", "message_id", "attempt", "ack_ref", "ack_id"]
_IDENTITY = ["source", "message_id", "attempt"]


class Recorder:
    """Writes, for batches of messages that went through a callback, what became of each.

    Args:
        pipeline: Whose messages they are.
        source: What the source is told of them follows its settings, unless a message has its own.
        origin: `source`, `failed` or `messages`: see `Receive.origin`.
        receive_id: Whose lease they are under.
        writer: The task's files.
        handle_failed: Called with the failed messages of each batch before they are recorded.
        watch: Told before code of the author's is called.
    """

    def __init__(
        self,
        pipeline: type[Pipeline],
        source: Source,
        origin: str,
        receive_id: str,
        writer: Sink,
        handle_failed: Callable[[list[Message]], Iterable[Message]] = list,
        watch: Watch = UNWATCHED,
    ) -> None:
        self._batchers: Mapping[str, Batcher | TableBatcher] = pipeline.batchers
        self._rows = {
            name: RowType(options.table_schema) if options.table_schema is not None else None
            for name, options in pipeline.batchers.items()
        }
        self._source, self._origin, self._receive_id = source, origin, receive_id
        self._writer, self._handle_failed, self._watch = writer, handle_failed, watch
        self._chunk_size = 1 if watch.exact else pipeline.processors.chunk_size
        self.tally = Tally(self._batchers)

    def handled(self, batch: pa.RecordBatch, window: str, messages: list[Message]) -> None:
        """Record messages that `handle_message` is done with, one for each row of `batch`, in its order."""
        groups: dict[str, list[int]] = {name: [] for name in self._batchers}
        failed: list[int] = []
        done: list[int] = []
        for index, message in enumerate(messages):
            if message._standing.failure is not None:
                failed.append(index)
                continue
            if (group := groups.get(message.batcher)) is not None:
                group.append(index)
            elif not self._batchers:
                done.append(index)
            else:
                messages[index] = message.failed(self._unknown(message.batcher))
                failed.append(index)
        for name, indexes in groups.items():
            if indexes and isinstance(self._batchers[name], TableBatcher):
                done += self._write_rows(name, batch, window, messages, indexes, failed, None)
            elif indexes:
                self._stage(name, batch, window, messages, indexes, failed)
        self.settle(batch, window, messages, done, failed)

    def batched(self, name: str, batch: pa.RecordBatch, window: str, messages: list[Message], batch_id: str) -> None:
        """Record one batch that `handle_batch` is done with, one message for each row of `batch`, in its order."""
        failed = [index for index, message in enumerate(messages) if message.failure is not None]
        indexes = [index for index, message in enumerate(messages) if message.failure is None]
        done = self._write_rows(name, batch, window, messages, indexes, failed, batch_id) if indexes else []
        self.settle(batch, window, messages, done, failed)

    def _unknown(self, batcher: str) -> Failure:
        reason = f"no batcher {words(repr(batcher), 200)}; there are {sorted(self._batchers)}"
        return Failure("unknown batcher", reason, "", "handle_message")

    def _write_rows(
        self,
        name: str,
        batch: pa.RecordBatch,
        window: str,
        messages: list[Message],
        indexes: list[int],
        failed: list[int],
        batch_id: str | None,
    ) -> list[int]:
        """Write the rows of one batcher; return whose fit, and put the others to the failed."""
        row_type = self._rows[name]

        def build(some: list[Message]) -> list[pa.Array]:
            data, keys = [one.data for one in some], [one.batch_key for one in some]
            columns = [_json_column(data)] if row_type is None else row_type.columns(data)
            return [*columns, pa.array(keys, pa.string())]

        columns, kept = _fitting(build, messages, indexes, failed, self._watch)
        if kept:
            self.tally.keys(name, columns[-1])
            names = ["data"] if row_type is None else row_type.schema.names
            self._write_table(name, _rows(batch, _IDENTITY, kept), window, columns, names, batch_id)
        return kept

    def _write_table(
        self,
        name: str,
        rows: pa.RecordBatch,
        window: str,
        columns: list[pa.Array],
        names: list[str],
        batch_id: str | None,
    ) -> None:
        """Write rows of a batcher's table: the columns of its data, the last one their batch keys."""
        count = rows.num_rows
        self.tally.counts[f"rows:{name}"] += count
        system = {
            "batch_id": pa.nulls(count, pa.string()) if batch_id is None else pa.repeat(batch_id, count),
            "receive_id": pa.repeat(self._receive_id, count),
        }
        identity = [rows.column(name) for name in _IDENTITY]
        batch = pa.RecordBatch.from_arrays(
            [*columns[:-1], *identity, columns[-1], *system.values()], names=[*names, *_IDENTITY, "batch_key", *system]
        )
        self._writer.write(name, window, batch)

    def columns(self, name: str, rows: pa.RecordBatch, window: str, columns: list[pa.Array], names: list[str]) -> None:
        """Record rows of one batcher that are columns already: the fast lane."""
        keys = rows.column("batch_key").fill_null(DEFAULT)
        self.tally.keys(name, keys)
        self._write_table(name, rows, window, [*columns, keys], names, None)
        self.settle_handled(rows, window)

    def settle_handled(self, rows: pa.RecordBatch, window: str) -> None:
        """Write the outcomes of rows that are all handled."""
        self.tally.outcome("handled", window, rows.num_rows)
        self._write_outcomes(rows, window, "handled", self._source.on_success)
        if self._origin == "failed":
            self._write_events(rows, window, state="closed")

    def _stage(
        self,
        name: str,
        batch: pa.RecordBatch,
        window: str,
        messages: list[Message],
        indexes: list[int],
        failed: list[int],
    ) -> None:
        model = self._batchers[name].table_schema

        def build(some: list[Message]) -> list[pa.Array]:
            encoded = [encode(one.data, model) for one in some]
            actions = [one.actions or (None, None) for one in some]
            texts = (
                [encoding for _, encoding in encoded],
                [one.batch_key for one in some],
                [one.batch_mode for one in some],
                [on_success for on_success, _ in actions],
                [on_failure for _, on_failure in actions],
            )
            values = pa.array([value for value, _ in encoded], pa.binary())
            return [values, *(pa.array(text, pa.string()) for text in texts)]

        columns, kept = _fitting(build, messages, indexes, failed, self._watch)
        if kept:
            self.tally.counts[f"staged:{name}"] += len(kept)
            rows = _rows(batch, DELIVERY, kept)
            sizes = [pc.fill_null(pc.binary_length(column), 0) for column in (rows.column("data"), columns[0])]
            size = pc.add(*(one.cast(pa.int64()) for one in sizes))
            staged = pa.RecordBatch.from_arrays([*rows.columns, *columns, size], schema=STAGED)
            self._writer.write(staged_table(self._receive_id, name), window, staged)

    def settle(
        self, batch: pa.RecordBatch, window: str, messages: list[Message], done: list[int], failed: list[int]
    ) -> None:
        """Write the outcomes of those that are at their end, and the events of those that failed or are closed."""
        failed.sort()
        done.sort()
        for index, message in zip(failed, self._look_at_failed([messages[index] for index in failed]), strict=True):
            messages[index] = message
        on_success, on_failure = self._source.on_success, self._source.on_failure
        if any(map(attrgetter("_standing.actions"), messages)):
            told = [(messages[index].actions or (None,))[0] or on_success for index in done]
            self._write_outcomes(_rows(batch, _OUTCOME, done), window, "handled", told)
        elif done:
            self._write_outcomes(_rows(batch, _OUTCOME, done), window, "handled", on_success)
        outcomes, told, recorded = [], [], []
        for index in failed:
            action = (messages[index].actions or (None, None))[1] or on_failure
            returned = self._origin == "source" and action != "ack"
            outcomes.append("returned" if returned else "failed")
            told.append(action)
            if not returned:
                recorded.append(index)
        self._write_outcomes(_rows(batch, _OUTCOME, failed), window, outcomes, told)
        self.tally.outcome("handled", window, len(done))
        self.tally.outcome("failed", window, len(recorded))
        self.tally.outcome("returned", window, len(failed) - len(recorded))
        for message in (messages[index] for index in failed):
            assert message.failure is not None
            self.tally.failure(message, message.failure)
        self._write_failures(batch, window, messages, recorded)
        if self._origin == "failed":
            self._write_events(_rows(batch, _IDENTITY, done), window, state="closed")

    def duplicates(self, rows: pa.RecordBatch, window: str, *, decided: bool) -> None:
        """Record deliveries that are not handled, for another copy is.

        Args:
            rows: The deliveries.
            window: Theirs.
            decided: An earlier receive decided the message: the source is told that it is done with. Else the
                other copy is of this receive, and may yet be given back: this one is left to its lease.
        """
        self.tally.outcome("duplicates", window, rows.num_rows)
        self._write_outcomes(rows, window, "duplicate", self._source.on_success if decided else "noop")

    def _write_outcomes(
        self, rows: pa.RecordBatch, window: str, outcome: str | list[str], action: str | list[str]
    ) -> None:
        """Write the outcomes of rows: one for all, or one each."""
        count = rows.num_rows
        if count:
            columns = {
                **{name: rows.column(name) for name in _OUTCOME},
                "receive_id": pa.repeat(self._receive_id, count),
                "outcome": _for_each(outcome, count),
                "action": _for_each(action, count),
            }
            names = OUTCOMES.names[:-1]
            self._writer.write(
                "outcomes", window, pa.RecordBatch.from_arrays([columns[name] for name in names], names=names)
            )

    def _look_at_failed(self, messages: list[Message]) -> list[Message]:
        size = self._chunk_size
        return [
            looked
            for start in range(0, len(messages), size)
            for looked in self._look_at_chunk(messages[start : start + size])
        ]

    def _look_at_chunk(self, messages: list[Message]) -> list[Message]:
        self._watch.busy("handle_failed", messages)
        looked: dict[int, Message] = {}
        try:
            given = {message._row: message for message in messages}
            for message in self._handle_failed(list(messages)):
                if message.__class__ is not Message or not message.is_same(given.get(message._row)):
                    raise TypeError("handle_failed must return the messages that it was given; it returned others")
                looked.setdefault(message._row, message)
            if len(looked) < len(messages):
                raise TypeError(f"handle_failed must return all {len(messages)} messages; it returned {len(looked)}")
        except BaseException as error:
            self._note_error_of_handle_failed(error)
        # What failed stays failed, whatever the callback made of it; a message that it left out, as it was.
        return [self._looked_at(message, looked.get(message._row, message)) for message in messages]

    def _looked_at(self, given: Message, looked: Message) -> Message:
        before = given.failure
        assert before is not None
        try:
            looked = looked._checked(before.stage)
        except BaseException as error:
            self._note_error_of_handle_failed(error)
            return looked._rejected(before)
        after = looked.failure or before
        return looked._but(failure=after._replace(traceback=after.traceback or before.traceback))

    def _note_error_of_handle_failed(self, error: BaseException) -> None:
        self.tally.counts["handle_failed_errors"] += 1
        self.tally.reason(f"handle_failed itself: {type(error).__name__}: {reason_of(error)}")

    def _write_failures(self, batch: pa.RecordBatch, window: str, messages: list[Message], failed: list[int]) -> None:
        if not failed:
            return
        rows = _rows(batch, [*_IDENTITY, "data", "metadata"], failed)
        told = [(messages[index], messages[index].failure or Failure("failed", "")) for index in failed]
        self._write_events(
            rows,
            window,
            state="open",
            stage=[words(failure.stage) for _, failure in told],
            kind=[words(failure.kind) for _, failure in told],
            reason=[words(failure.reason) for _, failure in told],
            traceback=[words(failure.traceback) for _, failure in told],
            batcher=[words(message.batcher) for message, _ in told],
            batch_key=[words(message.batch_key) for message, _ in told],
            data=rows.column("data"),
            metadata=rows.column("metadata"),
        )

    def _write_events(self, taken: pa.RecordBatch, window: str, state: str, **told: Any) -> None:
        rows = taken.num_rows
        if not rows:
            return
        now = pa.scalar(datetime.now(UTC), pa.timestamp("us", "UTC"))
        known = {
            "source": taken.column("source"),
            "message_id": taken.column("message_id"),
            "attempt": taken.column("attempt"),
            "state": pa.repeat(state, rows),
            "at": pa.repeat(now, rows),
            "receive_id": pa.repeat(self._receive_id, rows),
            **told,
        }
        columns = []
        for field in FAILED:
            if field.name != "window":
                value = known.get(field.name)
                if value is None:
                    value = pa.nulls(rows, field.type)
                columns.append(value if isinstance(value, pa.Array) else pa.array(value, field.type))
        self._writer.write("failed", window, pa.RecordBatch.from_arrays(columns, names=FAILED.names[:-1]))


def _fitting(
    build: Callable[[list[Message]], list[pa.Array]],
    messages: list[Message],
    indexes: list[int],
    failed: list[int],
    watch: Watch,
) -> tuple[list[pa.Array], list[int]]:
    """Build the columns of the messages that fit; one by one only where some does not.

    Building runs code of the models' own, so that anything may be raised.
    """
    if not watch.exact:
        with suppress(BaseException):
            return build([messages[index] for index in indexes]), indexes
    kept = []
    for index in indexes:
        watch.busy("lake", [messages[index]])
        try:
            build([messages[index]])
        except BaseException as error:
            messages[index] = messages[index].failed(Failure.of(error, "lake"))
            failed.append(index)
        else:
            kept.append(index)
    return (build([messages[index] for index in kept]) if kept else []), kept


def _rows(batch: pa.RecordBatch, names: list[str], indexes: list[int]) -> pa.RecordBatch:
    """Some columns of some rows, in order; no copy where it is all of them."""
    columns = batch.select(names)
    return columns if len(indexes) == batch.num_rows else columns.take(pa.array(indexes, pa.int64()))


def _for_each(value: str | list[str], count: int) -> pa.Array:
    return pa.repeat(value, count) if isinstance(value, str) else pa.array(value, pa.string())


def _json_column(data: list[Any]) -> pa.Array:
    return pa.array([_json(one) for one in data], pa.string())


def _json(data: Any) -> str:
    """Data for a column of JSON, which has no NaN and no infinity: they become null, as pydantic has it."""
    if isinstance(data, bytes):
        try:
            return json.dumps(data.decode())
        except UnicodeDecodeError:  # the batch is handled: that its data has no text must not fail it now
            return json.dumps({"base64": b64encode(data).decode()})
    if isinstance(data, BaseModel):
        return encode(data)[0].decode()
    return to_json(data, inf_nan_mode="null").decode()
