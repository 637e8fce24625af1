"""The lane of blocks: callbacks handle thousands of messages at a time, as columns. A failure concerns one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.model.blocks import ROUTING, as_arrow, as_block, given, name_of
from pipeline_platform.model.failure import Failure, RunError
from pipeline_platform.model.message import BULK, DEFAULT, DELIVERY_KEY, BatchMode
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.handle.row_lane import LANE, Handler, oversized
from pipeline_platform.tasks.record.filtered import Filter
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.routed import FIELD, ROUTES, RoutedRows, fields_of_all, has_failed

_Permitted = Callable[[int], tuple[int, float]]

_READ = {"position": pa.int64(), **dict.fromkeys(ROUTING, pa.string())}
"""Columns that the platform reads of every returned block."""
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
"""Equivalents of types for which Arrow cannot take rows. DataFusion and others return such columns."""

_AT_FIRST = DEFAULT, DEFAULT, "ok", None
"""Default routing of a row."""


class BlockLane:
    """Passes blocks to `prepare_messages` and `handle_messages`, and writes the returned rows.

    If a call raises, it is repeated for halves of its block until the failing rows are found. An invalid result that
    cannot be attributed to a row (a wrong class, unknown positions) fails the whole block.

    Args:
        recording: Recording of the task.
        permitted: Function from the number of waiting messages to the number that may start and the time until which
            they may; None for no limit.
        batch_mode: Batch mode of messages.

    Attributes:
        is_over: Whether `permitted` returned 0.
    """

    def __init__(self, recording: Recording, permitted: _Permitted | None = None, batch_mode: BatchMode = BULK) -> None:
        assert recording.pipeline is not None
        self._recording, self._pipeline, self._context = recording, recording.pipeline, recording.step.context
        self._permitted, self._batch_mode, self.is_over = permitted, batch_mode, False
        kind = type(self._pipeline)
        self._filter, self._kind, self._fields = Filter(kind), kind.block_type(), fields_of_all(kind)
        self._prepares = kind.prepare_messages is not Pipeline.prepare_messages

    def record(self, rows: pa.RecordBatch, window: str) -> Iterator[Sequence[int]]:
        """Handle rows and record their outcomes. Yield the indexes of the handled rows."""
        self._rows = rows
        left = list[pa.Table]()
        with given(rows, self._recording.ack_policy) as self._refused:
            self._routed = RoutedRows(
                self._recording, window, rows["position"], self._received, self._batch_mode, self._refused
            )
            waiting = [self._let_through(rows, window)]
            if self._prepares:
                waiting = list(map(self._well, self._called("prepare_messages", waiting, left)))
            for part in self._called("handle_messages", waiting, left, self._permitted):
                self._write(part, self._fields)
        begun = np.ones(rows.num_rows, np.bool_)
        for part in left:
            begun[self._places(part["position"]).to_numpy()] = False
        self.is_over = bool(left)
        yield np.flatnonzero(begun).tolist()

    def _let_through(self, rows: pa.RecordBatch, window: str) -> pa.Table:
        """Return the block of rows with default routing. Rows that are too large or filtered are recorded."""
        columns = {name: rows.column(name) for name in rows.schema.names if name != LANE}
        at_first = (pa.repeat(pa.scalar(value, pa.string()), rows.num_rows) for value in _AT_FIRST)
        block = pa.table(columns | dict(zip(ROUTING, at_first, strict=True)))
        if not self._filter and not oversized(rows, self._pipeline.processors.max_message_bytes):
            return block
        ended = Handler(self._recording).record_ended(rows, window)
        return block.filter(pc.invert(ended))

    def _called(
        self, callback: str, blocks: Sequence[pa.Table], left: list[pa.Table], permitted: _Permitted | None = None
    ) -> Iterator[pa.Table]:
        """Call a callback for blocks. Yield its results in parts. Rows at which it raises, or that it omits, fail.

        Blocks that may not start are added to `left`.
        """
        waiting = [*reversed(blocks)]
        while waiting:
            block = waiting.pop()
            count = permitted(block.num_rows)[0] if permitted and block.num_rows else block.num_rows
            if block.num_rows and not count:
                left += [block, *waiting]
                break
            block, rest = block.slice(0, count), block.slice(count)
            if rest.num_rows:
                waiting.append(rest)
            if not block.num_rows:
                continue
            try:
                with self._recording.watch.busy(callback, ()):  # without rows: the culprit is found by halving
                    returned = getattr(self._pipeline, callback)(as_block(block, self._kind), self._context)
            except RunError:
                raise
            except BaseException as error:
                waiting += self._halves(callback, block, error)
                continue
            try:
                rows, missing = self._checked(callback, block, returned)
            except pa.ArrowInvalid as error:  # an invalid value, for example a batch key that is not UTF-8
                waiting += self._halves(callback, block, error)
            except BaseException as error:
                self._fail(block["position"], Failure.of(error, callback))
            else:
                self._fail(missing, Failure("not returned", f"{callback} did not return it", "", callback))
                yield rows

    def _halves(self, callback: str, block: pa.Table, error: BaseException) -> list[pa.Table]:
        """Return the halves of a block, the first half last. A single row fails instead."""
        half = block.num_rows // 2
        if half:
            return [block.slice(half), block.slice(0, half)]
        self._fail(block["position"], Failure.of(error, callback))
        return []

    def _well(self, block: pa.Table) -> pa.Table:
        """Record the rows that `prepare_messages` marked as failed or skipped. Return the other rows."""
        failed = has_failed(block["status"], block["position"], self._refused)
        ended = pc.or_(failed, pc.fill_null(pc.equal(block["status"], "skipped"), False))
        self._write(block.filter(ended), ())
        return block.filter(pc.invert(ended))

    def _checked(self, callback: str, block: pa.Table, returned: Any) -> tuple[pa.Table, pa.Array]:
        """Return the rows that a callback returned, in the order of its block, and the positions of missing rows.

        Raises:
            TypeError: The result is invalid as a whole.
            pa.ArrowInvalid: A value of a column that the platform reads is not text.
        """
        if not isinstance(returned, self._kind):
            raise TypeError(f"{callback} must return a {name_of(self._kind)}, got {type(returned).__name__}")
        wanted = ["position", *ROUTING, *(self._fields if callback == "handle_messages" else ())]
        names = returned.column_names if isinstance(returned, pa.Table) else returned.columns
        if lacking := sorted(set(wanted) - set(names)):
            raise TypeError(f"{callback} returned no column {lacking}")
        rows = as_arrow(returned.select(wanted) if callback == "handle_messages" else returned)
        own = block["position"].combine_chunks()
        views = {field.name: _VIEWS[field.type] for field in rows.schema if field.type in _VIEWS}
        for name, type_ in (views | _READ).items():  # batch keys may be numbers
            rows = rows.set_column(rows.schema.get_field_index(name), name, rows[name].cast(type_))
        rows.take(pa.array([], pa.int64()))  # raises now for types that Arrow cannot take
        if rows["position"].combine_chunks().equals(own):
            return rows, own.slice(0, 0)
        places = pc.index_in(rows["position"], value_set=own).combine_chunks()
        if places.null_count or len(pc.unique(places)) < len(places):
            raise TypeError(
                f"{callback} must return each position at most once, and only positions of its block. Keep the column "
                "position unchanged: it identifies the message"
            )
        missing = own.filter(pc.invert(pc.is_in(pa.array(np.arange(len(own)), pa.int32()), places)))
        return rows.take(pc.sort_indices(places)), missing

    def _write(self, block: pa.Table, fields: Sequence[str]) -> None:
        if not block.num_rows:
            return
        received = self._received(block["position"])
        columns = {name: received.column(name) for name in DELIVERY_KEY}
        columns |= {route: block[name] for route, name in zip(ROUTES, ("position", *ROUTING), strict=True)}
        columns |= {FIELD + name: block[name] for name in fields}
        arrays = [
            column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column for column in columns.values()
        ]
        self._routed.write(pa.RecordBatch.from_arrays(arrays, names=list(columns)))

    def _fail(self, positions: Any, failure: Failure) -> None:
        if len(positions):
            rows = pa.RecordBatch.from_pydict({"position": pa.chunked_array([positions]).combine_chunks()})
            self._routed.fail(rows, lambda _: failure)

    def _received(self, positions: Any) -> pa.RecordBatch:
        if len(positions) == self._rows.num_rows:  # parts of a block are in order
            return self._rows
        return self._rows.take(self._places(positions))

    def _places(self, positions: Any) -> pa.Array:
        places = pc.index_in(positions, value_set=self._rows["position"])
        return places.combine_chunks() if isinstance(places, pa.ChunkedArray) else places
