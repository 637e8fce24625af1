"""Blocks: messages through the callbacks some thousand at a time, as columns; each failure its row's alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.blocks import ROUTING, as_arrow, as_block, given, name_of
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import BULK, DEFAULT, BatchMode
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.handle.row_lane import LANE, oversized, too_large
from pipeline_platform.tasks.record.outcomes import Outcomes
from pipeline_platform.tasks.record.routed import FIELD, KEPT, RoutedRows, failure_of, fields_of_all

_Permitted = Callable[[int], tuple[int, float]]

_READ = {"position": pa.int64(), **dict.fromkeys(ROUTING, pa.string())}
"""What the platform reads of every block that comes back."""
_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
"""Types of which Arrow takes no rows, and those that hold the same: DataFusion and others make columns of them."""

_AT_FIRST = DEFAULT, DEFAULT, "ok", None
"""The routing of a row of which nothing is said."""


class BlockLane:
    """Gives blocks to `prepare_messages` and `handle_messages`, and writes the rows that come back.

    A call that raises is made again for halves of its block, until the rows are found that it raises at. What it
    returns is refused for the whole block where that says nothing of a row: a wrong class, strange positions.

    Args:
        pipeline: Whose callbacks.
        context: What they are handed.
        ack_policy: How messages are acknowledged.
        permitted: Given how many messages wait, says how many may begin, and until when; None where all may.
        batch_mode: That of each message.

    Attributes:
        is_over: Whether `permitted` gave none.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        context: Any,
        ack_policy: AckPolicy,
        permitted: _Permitted | None = None,
        batch_mode: BatchMode = BULK,
    ) -> None:
        self._pipeline, self._context, self._ack_policy = pipeline, context, ack_policy
        self._permitted, self._batch_mode, self.is_over = permitted, batch_mode, False
        kind = type(pipeline)
        self._kind, self._fields = kind.block_type(), fields_of_all(kind)
        self._prepares = kind.prepare_messages is not Pipeline.prepare_messages

    def record(self, rows: pa.RecordBatch, window: str, outcomes: Outcomes) -> Iterator[Sequence[int]]:
        """Handle rows and record what came of them; yield which are."""
        self._rows, self._outcomes = rows, outcomes
        left = list[pa.Table]()
        with given(rows, self._ack_policy) as self._refused:
            self._routed = RoutedRows(
                outcomes, window, rows["position"], self._received, self._batch_mode, self._refused
            )
            waiting = [self._without_large(rows)]
            if self._prepares:
                waiting = list(map(self._well, self._called("prepare_messages", waiting, left)))
            for part in self._called("handle_messages", waiting, left, self._permitted):
                self._write(part, self._fields)
        begun = np.ones(rows.num_rows, np.bool_)
        for part in left:
            begun[self._places(part["position"]).to_numpy()] = False
        self.is_over = bool(left)
        yield np.flatnonzero(begun).tolist()

    def _without_large(self, rows: pa.RecordBatch) -> pa.Table:
        """The block, in which nothing is said of any row yet; the too large have failed."""
        most_bytes = self._pipeline.processors.max_message_bytes
        columns = {name: rows.column(name) for name in rows.schema.names if name != LANE}
        at_first = (pa.repeat(pa.scalar(value, pa.string()), rows.num_rows) for value in _AT_FIRST)
        block = pa.table(columns | dict(zip(ROUTING, at_first, strict=True)))
        if not (large := oversized(rows, most_bytes)):
            return block
        failures = {rows["position"][row].as_py(): too_large(rows["data"][row].as_py(), most_bytes) for row in large}
        self._routed.fail(rows.take(pa.array(large)), lambda row: failures[row["position"]])
        return block.filter(pc.invert(pc.is_in(block["position"], pa.array([*failures]))))

    def _called(
        self, callback: str, blocks: Sequence[pa.Table], left: list[pa.Table], permitted: _Permitted | None = None
    ) -> Iterator[pa.Table]:
        """What a callback makes of blocks, in parts; rows that it raises at, or does not return, have failed.

        Args:
            callback: Its name.
            blocks: In order.
            left: Gets what may not begin any more.
            permitted: See the class.
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
                with self._outcomes.watch.busy(callback, ()):  # of no row alone: a death, or a hang, is found by halves
                    returned = getattr(self._pipeline, callback)(as_block(block, self._kind), self._context)
            except BaseException as error:
                waiting += self._halves(callback, block, error)
                continue
            try:
                rows, missing = self._checked(callback, block, returned)
            except pa.ArrowInvalid as error:  # of a value: a batch key of bytes that are no UTF-8, say
                waiting += self._halves(callback, block, error)
            except BaseException as error:
                self._fail(block["position"], Failure.of(error, callback))
            else:
                self._fail(missing, Failure("not returned", f"{callback} did not return it", "", callback))
                yield rows

    def _halves(self, callback: str, block: pa.Table, error: BaseException) -> list[pa.Table]:
        """The halves of a block, the first one last; none of a single row, which has failed."""
        half = block.num_rows // 2
        if half:
            return [block.slice(half), block.slice(0, half)]
        self._fail(block["position"], Failure.of(error, callback))
        return []

    def _well(self, block: pa.Table) -> pa.Table:
        """A block without the rows that `prepare_messages` said had failed, which are recorded."""
        failure = self._failure(block)
        self._write(block.filter(pc.is_valid(failure)), ())
        return block.filter(pc.is_null(failure))

    def _checked(self, callback: str, block: pa.Table, returned: Any) -> tuple[pa.Table, pa.Array]:
        """The rows that a callback returned, in the order of its block, and the positions of those it did not.

        Raises:
            TypeError: It returned something else.
            pa.ArrowInvalid: A value of a column that the platform reads is no text.
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
        for name, type_ in (views | _READ).items():  # a key may be a number
            rows = rows.set_column(rows.schema.get_field_index(name), name, rows[name].cast(type_))
        rows.take(pa.array([], pa.int64()))  # raises here, not where rows are divided, what it would raise there
        if rows["position"].combine_chunks().equals(own):
            return rows, own.slice(0, 0)
        places = pc.index_in(rows["position"], value_set=own).combine_chunks()
        if places.null_count or len(pc.unique(places)) < len(places):
            raise TypeError(
                f"{callback} returned a position that it was not given, or one twice: a row is known again by it"
            )
        missing = own.filter(pc.invert(pc.is_in(pa.array(np.arange(len(own)), pa.int32()), places)))
        return rows.take(pc.sort_indices(places)), missing

    def _write(self, block: pa.Table, fields: Sequence[str]) -> None:
        """Write rows that a callback returned, or their failures."""
        if not block.num_rows:
            return
        received, column = self._received(block["position"]), {name: block[name] for name in block.schema.names}
        columns = {name: received.column(name) for name in ("position", *KEPT)}
        columns |= {name: column[name] for name in ("batcher", "batch_key")}
        columns["_failure"] = self._failure(block)
        columns |= {FIELD + name: column[name] for name in fields}
        arrays = [one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for one in columns.values()]
        self._routed.write(pa.RecordBatch.from_arrays(arrays, names=list(columns)))

    def _failure(self, block: pa.Table) -> pa.Array:
        """The column `_failure`: what `columns` refuses has failed, also if the callback set another status since."""
        said = failure_of(block["status"], block["reason"])
        if not self._refused:
            return said
        why = [failure and failure.reason for failure in map(self._refused.get, block["position"].to_pylist())]
        is_silent = pc.fill_null(pc.equal(said, ""), True)
        return pc.if_else(is_silent, pc.coalesce(pa.array(why, pa.string()), said), said)

    def _fail(self, positions: Any, failure: Failure) -> None:
        if len(positions):
            rows = pa.RecordBatch.from_pydict({"position": pa.chunked_array([positions]).combine_chunks()})
            self._routed.fail(rows, lambda _: failure)

    def _received(self, positions: Any) -> pa.RecordBatch:
        """The rows at some positions, as they were received."""
        if len(positions) == self._rows.num_rows:  # in order, as each part of a block is
            return self._rows
        return self._rows.take(self._places(positions))

    def _places(self, positions: Any) -> pa.Array:
        places = pc.index_in(positions, value_set=self._rows["position"])
        return places.combine_chunks() if isinstance(places, pa.ChunkedArray) else places
