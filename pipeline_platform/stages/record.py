"""Recording what became of messages: rows of their batchers, failures, and an outcome for each. Runs in tasks."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import pyarrow as pa
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from pipeline_platform.failure import Failure, reason_of, words
from pipeline_platform.lake.columns import RowType
from pipeline_platform.lake.crossing import crossing_of
from pipeline_platform.lake.tables import FAILED, OUTCOMES
from pipeline_platform.lake.writer import Writer
from pipeline_platform.message import DEFAULT, Message
from pipeline_platform.options import Batcher, TableBatcher
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.source import Source

STAGED = pa.schema(
    [
        ("source", pa.string()),
        ("message_id", pa.string()),
        ("data", pa.binary()),
        ("metadata", pa.string()),
        ("ack_ref", pa.string()),
        ("ack_id", pa.string()),
        ("attempt", pa.int32()),
        ("received_at", pa.timestamp("us", "UTC")),
        ("position", pa.int64()),
        ("value", pa.binary()),
        ("encoding", pa.string()),
        ("batch_key", pa.string()),
        ("batch_mode", pa.string()),
        ("on_success", pa.string()),
        ("on_failure", pa.string()),
    ]
)
"""A handled message on its way to a batcher with a callback: the delivery, and what handling made of its data."""

_SAMPLE, _KEYS = 10, 100
_KEY = 200
"""Characters of a batch key that are counted by and shown: keys are data, of any length."""
_DISTINCT = 10_000
"""Reasons or batch keys that a task counts at once: beyond that it forgets the rarest."""
_OUTCOME = ["source", "message_id", "attempt", "ack_ref", "ack_id"]
_IDENTITY = ["source", "message_id", "attempt"]
_DELIVERY = STAGED.names[: STAGED.names.index("position") + 1]


def staged_table(receive_id: str, batcher: str) -> str:
    """Where a receive keeps the messages of a batcher with a callback until their batches are handled."""
    return f"_receives/{receive_id}/{batcher}"


def encode(data: Any, model: type[BaseModel] | None = None) -> tuple[bytes, str]:
    """Data as it crosses from handling to batching: bytes as they are, all else as JSON; never pickled.

    Args:
        data: What handling made of a message.
        model: The batcher's; without one data crosses as its JSON says it, a model's own serializers included.

    Raises:
        Exception: It has no JSON, or is none of what the batcher's model takes.
    """
    if isinstance(data, bytes):
        return data, "bytes"
    if model is not None:
        return crossing_of(model).encode(data), "json"
    if isinstance(data, BaseModel):
        return data.model_dump_json(by_alias=False, round_trip=True).encode(), "json"
    return to_json(data), "json"


def decode(value: bytes, encoding: str, model: type[BaseModel] | None = None) -> Any:
    """The inverse of `encode`; JSON becomes the batcher's model where it has one, with the very values put.

    Raises:
        Exception: It does not fit the types of the model's fields.
    """
    if encoding == "bytes":
        return value
    return from_json(value) if model is None else crossing_of(model).decode(value)


class Recorder:
    """Writes, for batches of messages that went through a callback, what became of each.

    Args:
        pipeline: Whose messages they are.
        source: What the source is told of them follows its settings, unless a message has its own.
        origin: `source`, `failed` or `messages`: see `Receive.origin`.
        receive_id: Whose lease they are under.
        writer: The task's files.
        handle_failed: Called with the failed messages of each batch before they are recorded.
    """

    def __init__(
        self,
        pipeline: type[Pipeline],
        source: Source,
        origin: str,
        receive_id: str,
        writer: Writer,
        handle_failed: Callable[[list[Message]], list[Message]],
    ) -> None:
        self._batchers: Mapping[str, Batcher | TableBatcher] = pipeline.batchers
        self._rows = {
            name: RowType(options.table_schema) if options.table_schema is not None else None
            for name, options in pipeline.batchers.items()
        }
        self._source, self._origin, self._receive_id = source, origin, receive_id
        self._writer, self._handle_failed = writer, handle_failed
        self._chunk_size = pipeline.processors.chunk_size
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.keys: dict[str, Counter[str]] = {name: Counter() for name in self._batchers}
        self.sample: list[dict[str, Any]] = []

    def notes(self) -> dict[str, Any]:
        """What the task tells the driver: numbers, batch keys and a sample of failures, all bounded."""
        return {
            **self.counts,
            "reasons": dict(self.reasons.most_common(_SAMPLE)),
            "keys": {name: dict(keys.most_common(_KEYS)) for name, keys in self.keys.items() if keys},
            "sample": self.sample,
        }

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

        columns, kept = _fitting(build, messages, indexes, failed)
        if kept:
            self._count_keys(name, columns[-1])
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
        self.counts[f"rows:{name}"] += count
        system = {
            "batch_id": pa.nulls(count, pa.string()) if batch_id is None else pa.repeat(batch_id, count),
            "receive_id": pa.repeat(self._receive_id, count),
        }
        identity = [rows.column(name) for name in _IDENTITY]
        batch = pa.RecordBatch.from_arrays(
            [*columns[:-1], *identity, columns[-1], *system.values()], names=[*names, *_IDENTITY, "batch_key", *system]
        )
        self._writer.write(name, window, batch)

    def _count_keys(self, name: str, keys: pa.Array) -> None:
        counted = self.keys[name]
        for count in keys.value_counts().to_pylist():
            counted[count["values"][:_KEY]] += count["counts"]
        _forget_rare(counted)

    def columns(self, name: str, rows: pa.RecordBatch, window: str, columns: list[pa.Array], names: list[str]) -> None:
        """Record rows of one batcher that are columns already: the fast lane."""
        keys = rows.column("batch_key").fill_null(DEFAULT)
        self._count_keys(name, keys)
        self._write_table(name, rows, window, [*columns, keys], names, None)
        self.settle_handled(rows, window)

    def settle_handled(self, rows: pa.RecordBatch, window: str) -> None:
        """Write the outcomes of rows that are all handled."""
        self._count("handled", window, rows.num_rows)
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

        columns, kept = _fitting(build, messages, indexes, failed)
        if kept:
            self.counts[f"staged:{name}"] += len(kept)
            rows = _rows(batch, _DELIVERY, kept)
            staged = pa.RecordBatch.from_arrays([*rows.columns, *columns], schema=STAGED)
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
        self._count("handled", window, len(done))
        self._count("failed", window, len(recorded))
        self._count("returned", window, len(failed) - len(recorded))
        self._note_failures(messages, failed)
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
        self._count("duplicates", window, rows.num_rows)
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

    def _count(self, outcome: str, window: str, messages: int) -> None:
        """Count in all, and by window: a run over several tells each window its own."""
        if messages:
            self.counts[outcome] += messages
            self.counts[f"{outcome}@{window}"] += messages

    def _look_at_failed(self, messages: list[Message]) -> list[Message]:
        size = self._chunk_size
        return [
            looked
            for start in range(0, len(messages), size)
            for looked in self._look_at_chunk(messages[start : start + size])
        ]

    def _look_at_chunk(self, messages: list[Message]) -> list[Message]:
        failures = [message.failure or Failure("failed", "") for message in messages]
        try:
            looked = list(self._handle_failed(list(messages)))
            if len(looked) != len(messages) or not all(map(Message.is_same, messages, looked)):
                raise TypeError("handle_failed must return the messages it was given, in their order")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._note_error_of_handle_failed(error)
            looked = messages
        # What failed stays failed, whatever the callback made of it.
        return [self._looked_at(message, failure) for message, failure in zip(looked, failures, strict=True)]

    def _looked_at(self, message: Message, failure: Failure) -> Message:
        try:
            looked = message._checked()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._note_error_of_handle_failed(error)
            return message._rejected(failure)
        return looked if looked.failure is not None else looked.failed(failure)

    def _note_error_of_handle_failed(self, error: BaseException) -> None:
        self.counts["handle_failed_errors"] += 1
        self._count_reason(f"handle_failed itself: {type(error).__name__}: {reason_of(error)}")

    def _count_reason(self, reason: str) -> None:
        self.reasons[reason[:300]] += 1
        _forget_rare(self.reasons)

    def _note_failures(self, messages: list[Message], failed: list[int]) -> None:
        for index in failed:
            message, failure = messages[index], messages[index].failure
            assert failure is not None
            self._count_reason(words(f"{failure.kind}: {failure.reason}"))
            if len(self.sample) < _SAMPLE:
                self.sample.append(
                    {
                        "message_id": message.message_id,
                        "stage": failure.stage or "handle_message",
                        "kind": failure.kind,
                        "reason": words(failure.reason, 300),
                        "attempt": message.attempt,
                    }
                )

    def _write_failures(self, batch: pa.RecordBatch, window: str, messages: list[Message], failed: list[int]) -> None:
        if not failed:
            return
        rows = _rows(batch, [*_IDENTITY, "data", "metadata"], failed)
        told = [(messages[index], messages[index].failure or Failure("failed", "")) for index in failed]
        self._write_events(
            rows,
            window,
            state="open",
            stage=[words(failure.stage or "handle_message") for _, failure in told],
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
    build: Callable[[list[Message]], list[pa.Array]], messages: list[Message], indexes: list[int], failed: list[int]
) -> tuple[list[pa.Array], list[int]]:
    """Build the columns of the messages that fit; one by one only where some does not.

    Building runs code of the models' own, so that anything may be raised.
    """
    try:
        return build([messages[index] for index in indexes]), indexes
    except KeyboardInterrupt:
        raise
    except BaseException:
        kept = []
        for index in indexes:
            try:
                build([messages[index]])
            except KeyboardInterrupt:
                raise
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


def _forget_rare(counter: Counter[str]) -> None:
    if len(counter) > _DISTINCT:
        kept = dict(counter.most_common(_DISTINCT // 2))
        counter.clear()
        counter.update(kept)
