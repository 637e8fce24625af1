"""Writing rows that contain their routing to the tables of their batchers. A row that does not fit fails alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.readable import refuse_unreadable
from pipeline_platform.model.columns.casts import ColumnError
from pipeline_platform.model.columns.nested_casts import ModelOf
from pipeline_platform.model.columns.schema import arrow_schema
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import BULK, DEFAULT, BatchMode, Message
from pipeline_platform.model.options import TableBatcher
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.portions import halves
from pipeline_platform.tasks.record.failures import unknown_batcher
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.routing import record_columns, record_messages
from pipeline_platform.tasks.record.verdicts import record_handled

FIELD = "."
"""Prefix of the columns of model fields: a model may have a field `received_at`."""
ROUTES = ("position", "batcher", "batch_key", "_status", "_reason")
"""Columns of the routing: a model may have a field `status`."""

_FIRST = 16
"""Payloads that are looked up first, while their size is unknown."""


def fields_of_all(pipeline: type[Pipeline]) -> list[str]:
    """Return the fields of all batchers' models. A batcher without a model has the column `data`."""
    models = [options.table_schema for options in pipeline.batchers.values()]
    names = [name for model in models for name in (["data"] if model is None else arrow_schema(model).names)]
    return list(dict.fromkeys(names))


def has_failed(statuses: pa.Array, positions: pa.Array, refused: Mapping[int, Failure]) -> pa.Array:
    """Return whether each row has failed. An unknown status fails too: a misspelt `failed` must not pass.

    Rows whose payload is `refused`, by position, fail even if the callback set another status.
    """
    failed = pc.invert(pc.is_in(statuses, pa.array(["ok", "skipped", None])))
    return pc.or_(failed, pc.is_in(positions, pa.array([*refused], pa.int64()))) if refused else failed


class RoutedRows:
    """Writes rows of one window.

    Args:
        recording: Recording of the rows.
        window: Window of the rows.
        positions: Positions of all rows of the try, in order. The watch identifies rows by their index in them.
        received: Function that returns the rows at some positions, as received.
        batch_mode: Batch mode of messages for batchers with a callback.
        refused: Failures of payloads, by position.
    """

    def __init__(
        self,
        recording: Recording,
        window: str,
        positions: pa.Array,
        received: Callable[[pa.Array], pa.RecordBatch],
        batch_mode: BatchMode = BULK,
        refused: Mapping[int, Failure] | None = None,
    ) -> None:
        self._recording, self._window, self._positions = recording, window, positions
        self._received, self._batch_mode, self._refused = received, batch_mode, {} if refused is None else refused
        self._batchers, self._options = recording.step.pipeline.batchers, recording.step.pipeline.processors
        self._misfits: dict[int, Failure] = {}
        """By position."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows with the columns `ROUTES` and `DELIVERY_KEY`, and their fields'."""
        is_ok = pc.fill_null(pc.equal(rows.column("_status"), "ok"), True)
        reasons = rows.column("_reason")
        reasons = pc.if_else(is_ok, pa.scalar(None, reasons.type), reasons)  # a reason without a failure is not used
        rows = rows.set_column(rows.schema.get_field_index("_reason"), "_reason", reasons)
        try:
            refuse_unreadable(ROUTES, map(rows.column, ROUTES))
        except ColumnError as error:
            if rows.num_rows > 1:
                for half in _halves(rows):
                    self.write(half)
                return
            failure = Failure("ColumnError", str(error), "", "handle_messages")
            self.fail(rows.select(["position"]), lambda _: failure)
            return
        failed = has_failed(rows.column("_status"), rows.column("position"), self._refused)
        skipped = pc.and_not(pc.fill_null(pc.equal(rows.column("_status"), "skipped"), False), failed)
        self._end(rows.filter(skipped), lambda message, row: message.skip(row["_reason"] or ""))
        rows, failed = (kept.filter(pc.invert(skipped)) for kept in (rows, failed))
        batcher = pc.fill_null(rows.column("batcher"), "")
        known = pc.is_in(batcher, pa.array([*self._batchers], pa.string()))
        unknown = pc.invert(known) if self._batchers else pc.and_(known, failed)
        self.fail(rows.filter(failed), self._failed)
        unknown_rows = rows.filter(pc.and_not(unknown, failed))
        self.fail(unknown_rows, lambda row: unknown_batcher(row["batcher"], self._batchers, "handle_messages"))
        good = pc.and_not(pc.invert(unknown), failed)
        if not self._batchers:
            record_handled(self._recording, rows.filter(good), self._window)
        for name, options in self._batchers.items():
            mine = rows.filter(pc.and_(good, pc.equal(batcher, name)))
            if mine.num_rows and isinstance(options, TableBatcher):
                self._write(name, mine)
            elif mine.num_rows:
                self._stage(name, mine)
        misfits = pc.is_in(rows.column("position"), pa.array([*self._misfits], pa.int64()))
        self.fail(rows.filter(misfits), lambda row: self._misfits[row["position"]])

    def fail(self, rows: pa.RecordBatch, why: Callable[[dict[str, Any]], Failure]) -> None:
        """Record rows as failed. Their columns include some or all of `ROUTES`."""
        self._end(rows, lambda message, row: message.failed(why(row)))

    def _end(self, rows: pa.RecordBatch, ended: Callable[[Message, dict[str, Any]], Message]) -> None:
        known = rows.select([name for name in ROUTES if name in rows.schema.names])
        for some, delivered in self._delivered(known):
            routes = some.to_pylist()
            messages = [
                ended(message.put(message.data, batcher=row.get("batcher") or DEFAULT, batch_key=key), row)
                for message, row in zip(self._messages(delivered), routes, strict=True)
                for key in [row.get("batch_key") or DEFAULT]
            ]
            record_messages(self._recording, delivered, self._window, messages)

    def _write(self, name: str, rows: pa.RecordBatch) -> None:
        for some, columns in self._fitting(rows, name):
            record_columns(self._recording, name, some, self._window, columns)

    def _fitting(self, rows: pa.RecordBatch, name: str) -> Iterator[tuple[pa.RecordBatch, list[pa.Array]]]:
        """Yield the rows that fit the columns of a batcher, and these columns. Other rows become misfits."""
        known = self._recording.row_types[name]
        try:
            columns = known.cast([rows.column(FIELD + name) for name in known.casts])
            ids = ["batch_key", "message_id"]
            self._recording.step.check_sink(name, [*known.casts, *ids], [*columns, *rows.select(ids).columns])
        except BaseException as error:  # user code of an enum may raise anything
            if rows.num_rows > 1:
                for half in _halves(rows):
                    yield from self._fitting(half, name)
            else:
                self._misfits[rows.column("position")[0].as_py()] = Failure.of(error, "lake")
        else:
            yield rows, columns

    def _stage(self, name: str, rows: pa.RecordBatch) -> None:
        """Stage rows for a batcher with a callback, as messages whose data is a dict of its model's fields."""
        if (known := self._recording.row_types.get(name)) is None:
            self._hand_over(name, rows, None)
            return
        for some, columns in self._fitting(rows, name):
            fitting = dict(zip(some.schema.names, some.columns, strict=True))
            fitting |= {FIELD + field: column for field, column in zip(known.casts, columns, strict=True)}
            self._hand_over(name, pa.RecordBatch.from_pydict(fitting), known)

    def _hand_over(self, name: str, rows: pa.RecordBatch, known: ModelOf | None) -> None:
        for some, delivered in self._delivered(rows):
            try:
                if known is None:
                    data = some.column(f"{FIELD}data").to_pylist()
                else:
                    columns = [some.column(FIELD + field) for field in known.casts]
                    dicts = pa.RecordBatch.from_arrays(columns, [*known.casts]).to_pylist(maps_as_pydicts="strict")
                    data = list(map(known.read, dicts))
            except (ValueError, OverflowError) as error:  # a date out of Python's range
                if some.num_rows == 1:
                    failure = Failure.of(error, "lake")
                    self.fail(some, lambda _, failure=failure: failure)  # type: ignore[misc]
                else:
                    for half in _halves(some):
                        self._hand_over(name, half, known)
                continue
            keys = some.column("batch_key").fill_null(DEFAULT).to_pylist()
            messages = [
                message.put(value, batcher=name, batch_key=key)
                for message, value, key in zip(self._messages(delivered), data, keys, strict=True)
            ]
            record_messages(self._recording, delivered, self._window, messages)

    def _messages(self, delivered: pa.RecordBatch) -> Iterator[Message]:
        return Message.each(delivered, self._recording.ack_policy, self._batch_mode)

    def _delivered(self, rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Yield slices of rows, with the same rows as received. Slices start small, and grow if payloads are small."""
        options, start, step = self._options, 0, _FIRST
        while start < rows.num_rows:
            some = rows.slice(start, step)
            delivered = self._received(some.column("position"))
            done = 0
            for part in halves(delivered, options.chunk_bytes):
                mine = some.slice(done, part.num_rows)
                self._recording.watch.name(pc.index_in(mine["position"], value_set=self._positions).to_pylist())
                yield mine, part
                done += part.num_rows
            start += some.num_rows
            fitting = options.chunk_bytes * some.num_rows // (delivered.nbytes + 1)
            step = max(1, min(4 * step, options.chunk_size, fitting))

    def _failed(self, row: dict[str, Any]) -> Failure:
        known, reason = self._refused.get(row["position"]), row["_reason"] or ""
        if known is not None and (row["_status"] in ("ok", "skipped", None) or reason in ("", known.reason)):
            return known
        return Failure("failed", reason or "handle_messages gave no reason", "", "handle_messages")


def _halves(rows: pa.RecordBatch) -> Sequence[pa.RecordBatch]:
    half = rows.num_rows // 2
    return rows.slice(0, half), rows.slice(half)
