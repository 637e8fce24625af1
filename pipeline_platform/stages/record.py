"""Recording what became of messages: rows of their batchers, failures, and an outcome for each. Runs in tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from pipeline_platform.lake.columns import ColumnError, RowType
from pipeline_platform.lake.tables import FAILED, OUTCOMES
from pipeline_platform.lake.writer import Writer
from pipeline_platform.message import Failure, Message
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
_DELIVERY = STAGED.names[: STAGED.names.index("position") + 1]


def staged_table(receive_id: str, batcher: str) -> str:
    """Where a receive keeps the messages of a batcher with a callback until their batches are handled."""
    return f"_receives/{receive_id}/{batcher}"


def encode(data: Any) -> tuple[bytes, str]:
    """Data as it crosses from handling to batching: bytes as they are, all else as JSON; never pickled.

    Raises:
        TypeError: It has no JSON.
    """
    if isinstance(data, bytes):
        return data, "bytes"
    if isinstance(data, BaseModel):
        return data.model_dump_json().encode(), "json"
    return json.dumps(data).encode(), "json"


def decode(value: bytes, encoding: str, model: type[BaseModel] | None) -> Any:
    """The inverse of `encode`; JSON becomes the batcher's model where it has one."""
    if encoding == "bytes":
        return value
    return json.loads(value) if model is None else model.model_validate_json(value)


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
        for index, message in enumerate(messages):
            if message.failure is not None:
                failed.append(index)
                continue
            try:
                groups[message.batcher].append(index)
            except KeyError:
                if self._batchers:
                    messages[index] = message.failed(self._unknown(message.batcher))
                    failed.append(index)
        done = [] if self._batchers else [index for index, message in enumerate(messages) if message.failure is None]
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

    def _unknown(self, batcher: object) -> Failure:
        return Failure(
            "unknown batcher", f"no batcher {batcher!r}; there are {sorted(self._batchers)}", "", "handle_message"
        )

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
        make = _json_row if row_type is None else row_type.row
        kept, rows = [], []
        for index in indexes:
            try:
                rows.append(make(messages[index].data))
                kept.append(index)
            except (ColumnError, TypeError, ValueError) as error:
                messages[index] = messages[index].failed(Failure.of(error, "lake"))
                failed.append(index)
        columns, kept = _fitting(_json_columns if row_type is None else row_type.columns, rows, kept, messages, failed)
        if not kept:
            return []
        taken = batch if len(kept) == batch.num_rows else batch.take(pa.array(kept, pa.int64()))
        keys = [messages[index].batch_key for index in kept]
        self.keys[name].update(keys)
        names = ["data"] if row_type is None else row_type.schema.names
        self._write_table(name, taken, window, columns, names, pa.array(keys, pa.string()), batch_id)
        return kept

    def _write_table(
        self,
        name: str,
        rows: pa.RecordBatch,
        window: str,
        columns: list[pa.Array],
        names: list[str],
        batch_keys: pa.Array,
        batch_id: str | None,
    ) -> None:
        self.counts[f"rows:{name}"] += rows.num_rows
        system = {
            "source": rows.column("source"),
            "message_id": rows.column("message_id"),
            "attempt": rows.column("attempt"),
            "batch_key": batch_keys,
            "batch_id": pa.nulls(rows.num_rows, pa.string())
            if batch_id is None
            else pa.repeat(batch_id, rows.num_rows),
            "receive_id": pa.repeat(self._receive_id, rows.num_rows),
        }
        batch = pa.RecordBatch.from_arrays([*columns, *system.values()], names=[*names, *system])
        self._writer.write(name, window, batch)

    def columns(self, name: str, rows: pa.RecordBatch, window: str, columns: list[pa.Array], names: list[str]) -> None:
        """Record rows of one batcher that are columns already: the fast lane."""
        keys = rows.column("batch_key").fill_null("default")
        for count in keys.value_counts().to_pylist():
            self.keys[name][count["values"]] += count["counts"]
        self._write_table(name, rows, window, columns, names, keys, None)
        self.settle_handled(rows, window)

    def settle_handled(self, rows: pa.RecordBatch, window: str) -> None:
        """Write the outcomes of rows that are all handled."""
        self._count("handled", window, rows.num_rows)
        every = range(rows.num_rows)
        self.write_outcomes(rows, window, every, ["handled"] * len(every), [self._source.on_success] * len(every))
        if self._origin == "failed":
            self._write_closed(rows, window, list(every))

    def _stage(
        self,
        name: str,
        batch: pa.RecordBatch,
        window: str,
        messages: list[Message],
        indexes: list[int],
        failed: list[int],
    ) -> None:
        values, encodings, kept = [], [], []
        for index in indexes:
            try:
                value, encoding = encode(messages[index].data)
            except (TypeError, ValueError) as error:
                messages[index] = messages[index].failed(Failure.of(error, "lake"))
                failed.append(index)
                continue
            values.append(value)
            encodings.append(encoding)
            kept.append(index)
        if not kept:
            return
        self.counts[f"staged:{name}"] += len(kept)
        taken = batch.select(_DELIVERY).take(pa.array(kept, pa.int64()))
        mine = [messages[index] for index in kept]
        actions = [message.actions or (None, None) for message in mine]
        self._writer.write(
            staged_table(self._receive_id, name),
            window,
            pa.RecordBatch.from_arrays(
                [
                    *taken.columns,
                    pa.array(values, pa.binary()),
                    pa.array(encodings, pa.string()),
                    pa.array([message.batch_key for message in mine], pa.string()),
                    pa.array([message.batch_mode for message in mine], pa.string()),
                    pa.array([action[0] for action in actions], pa.string()),
                    pa.array([action[1] for action in actions], pa.string()),
                ],
                schema=STAGED,
            ),
        )

    def settle(
        self, batch: pa.RecordBatch, window: str, messages: list[Message], done: list[int], failed: list[int]
    ) -> None:
        """Write the outcomes of those that are at their end, and the events of those that failed or are closed."""
        failed.sort()
        for index, message in zip(failed, self._look_at_failed([messages[index] for index in failed]), strict=True):
            messages[index] = message
        on_success, on_failure = self._source.on_success, self._source.on_failure
        outcomes, actions = ["handled"] * len(done), [(messages[i].actions or (None,))[0] or on_success for i in done]
        recorded = []
        for index in failed:
            action = (messages[index].actions or (None, None))[1] or on_failure
            returned = self._origin == "source" and action != "ack"
            outcomes.append("returned" if returned else "failed")
            actions.append(action)
            if not returned:
                recorded.append(index)
        self._count("handled", window, len(done))
        self._count("failed", window, len(recorded))
        self._count("returned", window, len(failed) - len(recorded))
        self._note_failures(messages, failed)
        self.write_outcomes(batch, window, done + failed, outcomes, actions)
        self._write_failures(batch, window, messages, recorded)
        if self._origin == "failed":
            self._write_closed(batch, window, done)

    def duplicates(self, rows: pa.RecordBatch, window: str) -> None:
        """Record deliveries that are not handled, for another copy is: the source is told of them all the same."""
        self._count("duplicates", window, rows.num_rows)
        told = [self._source.on_success] * rows.num_rows
        self.write_outcomes(rows, window, range(rows.num_rows), ["duplicate"] * rows.num_rows, told)

    def write_outcomes(
        self, batch: pa.RecordBatch, window: str, rows: Sequence[int], outcomes: Sequence[str], actions: Sequence[str]
    ) -> None:
        """Write the outcomes of some rows of a batch."""
        if not rows:
            return
        taken = batch.take(pa.array(rows, pa.int64()))
        self._writer.write(
            "outcomes",
            window,
            pa.RecordBatch.from_arrays(
                [
                    taken.column("source"),
                    taken.column("message_id"),
                    taken.column("attempt"),
                    pa.repeat(self._receive_id, len(rows)),
                    pa.array(outcomes, pa.string()),
                    taken.column("ack_ref"),
                    taken.column("ack_id"),
                    pa.array(actions, pa.string()),
                ],
                names=OUTCOMES.names[:-1],
            ),
        )

    def _count(self, outcome: str, window: str, messages: int) -> None:
        if messages:
            self.counts[outcome] += messages
            self.counts[f"{outcome}@{window}"] += messages

    def _look_at_failed(self, messages: list[Message]) -> list[Message]:
        if not messages:
            return messages
        try:
            looked = self._handle_failed(list(messages))
            if [one._row for one in looked] != [one._row for one in messages]:
                raise TypeError("handle_failed must return the messages it was given, in their order")
        except (Exception, SystemExit) as error:
            self.counts["handle_failed_errors"] += 1
            self.reasons[f"handle_failed itself: {type(error).__name__}: {error}"[:300]] += 1
            return messages
        # What failed stays failed, whatever the callback made of it.
        return [
            after if after.failure is not None else after.failed(before.failure)
            for before, after in zip(messages, looked, strict=True)
        ]

    def _note_failures(self, messages: list[Message], failed: list[int]) -> None:
        for index in failed:
            message, failure = messages[index], messages[index].failure
            assert failure is not None
            self.reasons[f"{failure.kind}: {failure.reason}"[:300]] += 1
            if len(self.sample) < _SAMPLE:
                self.sample.append(
                    {
                        "message_id": message.message_id,
                        "stage": failure.stage or "handle_message",
                        "kind": failure.kind,
                        "reason": failure.reason[:300],
                        "attempt": message.attempt,
                    }
                )

    def _write_failures(self, batch: pa.RecordBatch, window: str, messages: list[Message], rows: list[int]) -> None:
        if not rows:
            return
        taken = batch.take(pa.array(rows, pa.int64()))
        failures = [messages[index].failure for index in rows]
        self._write_events(
            taken,
            window,
            state="open",
            stage=[failure.stage or "handle_message" for failure in failures if failure],
            kind=[failure.kind for failure in failures if failure],
            reason=[failure.reason for failure in failures if failure],
            traceback=[failure.traceback for failure in failures if failure],
            batcher=[_text(messages[index].batcher) for index in rows],
            batch_key=[messages[index].batch_key for index in rows],
            data=taken.column("data"),
            metadata=taken.column("metadata"),
        )

    def _write_closed(self, batch: pa.RecordBatch, window: str, rows: list[int]) -> None:
        if rows:
            self._write_events(batch.take(pa.array(rows, pa.int64())), window, state="closed")

    def _write_events(self, taken: pa.RecordBatch, window: str, state: str, **told: Any) -> None:
        rows = taken.num_rows
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
    build: Callable[[list[Any]], list[pa.Array]],
    rows: list[Any],
    indexes: list[int],
    messages: list[Message],
    failed: list[int],
) -> tuple[list[pa.Array], list[int]]:
    """Build the columns of the rows that fit; one by one only where some row does not."""
    try:
        return build(rows), indexes
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        fit, kept = [], []
        for row, index in zip(rows, indexes, strict=True):
            try:
                build([row])
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                messages[index] = messages[index].failed(Failure.of(error, "lake"))
                failed.append(index)
            else:
                fit.append(row)
                kept.append(index)
        return build(fit), kept


def _json_row(data: Any) -> str:
    value, encoding = encode(data)
    return value.decode() if encoding == "json" else json.dumps(value.decode())


def _json_columns(rows: list[str]) -> list[pa.Array]:
    return [pa.array(rows, pa.string())]


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
