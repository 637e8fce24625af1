"""Cutting messages into batches. Only splitters read payloads."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.model.failure import FAILURE_COLUMNS, Failure
from pipeline_platform.model.message import Message
from pipeline_platform.model.options import BATCH_MESSAGES, DEFAULT_BATCH_BYTES, Splitter
from pipeline_platform.model.pipeline import Trigger
from pipeline_platform.model.retry import Retry
from pipeline_platform.tasks.handle.source_order import dealt, in_source_order

_GROUP = ["window", "partition", "batch_key"]
_GROUPED = dict.fromkeys(_GROUP, pa.string())

TO_CUT = pa.schema({**_GROUPED, "position": pa.int64(), "size": pa.int64(), "flush": pa.bool_()})
"""Columns of a staged message. `position` counts messages in order of arrival; `size` is in bytes.

`partition` is null if the batcher has no partitions.
"""

FAILURE = pa.struct({**dict.fromkeys(FAILURE_COLUMNS, pa.string()), "retry": pa.bool_()})
"""A `Failure`."""

_CUT = {"number": pa.int64(), "trigger": pa.string(), "size": pa.int64(), "rows": pa.list_(pa.int64())}
BATCHES = pa.schema({**_GROUPED, **_CUT, "failure": FAILURE, "task": pa.int64()})
"""A batch: its number within its group, its trigger, its bytes, its rows, and the task that handles its partition; null
if any task may handle it.

A message that fails in a splitter has a row with its `Failure`, and is in no batch.
"""


def each(batches: pa.Table | pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield batches as dicts by column name: Python values, and `rows` as an array."""
    for rows, batch in zip(batches["rows"], batches.drop_columns(["rows"]).to_pylist(), strict=True):
        yield {**batch, "rows": rows.values}


Read = Callable[[list[int]], Iterable[Message]]
"""Function that yields the messages of some rows, in the order given."""


def cut(
    messages: pa.Table,
    batch_size: int | Splitter,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
    *,
    rest: Trigger = "flush",
    read: Read | None = None,
    retry: Retry | None = None,
) -> pa.Table:
    """Cut messages of the same window, partition and key into batches, in order of arrival.

    A batch ends when it has `batch_size` messages or its splitter ends it, before a message that would make it larger
    than `batch_bytes` (a larger message is a batch by itself), and after a message in mode `flush`.

    Args:
        messages: Rows of `TO_CUT`. The result refers to them by index.
        batch_size: Maximum number of messages in a batch, or a splitter.
        batch_bytes: Maximum number of bytes in a batch.
        rest: Trigger of the last, incomplete batches.
        read: Reads the messages for a splitter.
        retry: Option `retry` of the pipeline, which applies to the failures of a splitter.

    Returns:
        Rows of `BATCHES`, by the arrival of their first messages. The column `task` is null.
    """
    if not messages.num_rows:
        return BATCHES.empty_table()
    keys = [(name, "ascending") for name in (*_GROUP, "position")]
    ordered = messages.take(order := pc.sort_indices(messages, sort_keys=keys))
    begins = np.ones(len(order), bool)
    begins[1:] = ~np.logical_and.reduce([_repeats(ordered[name]) for name in _GROUP])
    splits = None
    if isinstance(batch_size, Splitter):
        assert read is not None, "a splitter needs read"
        splits, batch_size = _Splits(batch_size, read(order.to_pylist()), retry), BATCH_MESSAGES
    ends = _ends(begins, ordered["size"].to_numpy(), ordered["flush"].to_numpy(), batch_size, batch_bytes, rest, splits)
    batches = _table(ordered, order.cast(pa.int64()), np.cumsum(begins), ends)
    return batches.take(pc.sort_indices(messages["position"].take(pc.list_element(batches["rows"], 0))))


def cut_and_deal(
    messages: pa.Table,
    batch_size: int | Splitter,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
    *,
    tasks: int = 1,
    rest: Trigger = "flush",
    read: Read | None = None,
    retry: Retry | None = None,
) -> pa.Table:
    """Cut messages into batches. Batches of a partition are in the order of the source and have one task.

    `messages` also have the columns `SOURCE_ORDER`, in which `partition` is the source's. Cutting uses `own`.
    """
    own, messages = messages["own"], messages.drop_columns("own")
    has_partitions = own.null_count < messages.num_rows
    if has_partitions:
        place = np.empty(messages.num_rows, np.int64)
        place[in_source_order(messages)] = np.arange(messages.num_rows)
        messages = _put(messages, position=place)
    batches = cut(_put(messages, partition=own), batch_size, batch_bytes, rest=rest, read=read, retry=retry)
    if not has_partitions:
        return batches
    counts = pc.list_value_length(batches["rows"]).to_numpy()
    return _put(batches, task=dealt(batches["partition"], counts, tasks))


def _put(rows: pa.Table, **columns: Any) -> pa.Table:
    for name, values in columns.items():
        column = values if isinstance(values, pa.ChunkedArray) else pa.array(values)
        rows = rows.set_column(rows.schema.get_field_index(name), name, column)
    return rows


class _Ends(NamedTuple):
    """Starts of batches and the end of the last one, triggers, and failures by row. Failed rows lie within batches."""

    starts: list[int]
    triggers: list[Trigger]
    failures: Mapping[int, Failure]


class _Splits:
    """Calls a splitter for each message, in order."""

    def __init__(self, splitter: Splitter, messages: Iterable[Message], retry: Retry | None) -> None:
        self._splitter, self._messages, self._retry = splitter, iter(messages), retry
        self._accumulator: Any = None

    def after(self, *, begins: bool) -> bool | Failure:
        """Return whether the batch ends after the next message, or that message's failure.

        `begins`: whether the message is the first of its batch.
        """
        message = next(self._messages)
        if message.failure is not None:
            return self._judged(message.failure)
        try:
            if begins:
                self._accumulator = deepcopy(self._splitter.initial)
            step = self._splitter.step(message, self._accumulator)
            if type(step) is not tuple or len(step) != 2 or type(step[0]) is not str or step[0] not in ("emit", "cont"):
                raise TypeError(f"a step must return ('emit', acc) or ('cont', acc), got {_shown(step)}")
        except BaseException as error:
            return self._judged(Failure.of(error, "batch_size"))
        self._accumulator = step[1]
        return step[0] == "emit"

    def _judged(self, failure: Failure) -> Failure:
        """Apply the option `retry` here, because later steps do not have the exception."""
        return failure if self._retry is None else self._retry.judged(failure)


def _shown(step: object) -> str:
    """Return the type of a value and of its first item, not the values: they may contain payloads."""
    parts = f" of {len(step)}, beginning with {type(step[0]).__name__}" if type(step) is tuple and step else ""
    return f"{type(step).__name__}{parts}"


def _repeats(column: pa.ChunkedArray) -> Any:
    """Return whether each value but the first equals the previous value. Null equals null."""
    now, before = column.slice(1), column.slice(0, len(column) - 1)
    same = pc.fill_null(pc.equal(now, before), False)
    return pc.or_(same, pc.and_(pc.is_null(now), pc.is_null(before))).to_numpy()


def _ends(
    begins: Any, sizes: Any, flushes: Any, batch_size: int, batch_bytes: int, rest: Trigger, splits: _Splits | None
) -> _Ends:
    starts, triggers, failures = [0], list[Trigger](), dict[int, Failure]()
    count = size = 0
    for row, (new, weight, flush) in enumerate(zip(begins.tolist(), sizes.tolist(), flushes.tolist(), strict=True)):
        if count and (new or size + weight > batch_bytes):
            starts.append(row)
            triggers.append(rest if new else "size")
            count = size = 0
        split = splits.after(begins=not count) if splits else False
        if isinstance(split, Failure):
            failures[row] = split
            continue
        count, size = count + 1, size + weight
        if split or flush or count == batch_size:
            starts.append(row + 1)
            triggers.append("size" if split or count == batch_size else "flush")
            count = size = 0
    if count:
        starts.append(len(begins))
        triggers.append(rest)
    return _Ends(starts, triggers, failures)


def _table(ordered: pa.Table, order: pa.Array, groups: Any, ends: _Ends) -> pa.Table:
    """Return rows of `BATCHES`: first the batches, then the messages that failed."""
    kept = np.ones(len(order), bool)
    kept[list(ends.failures)] = False
    # Indexes into all rows become indexes into the kept rows.
    starts = np.concatenate([[0], np.cumsum(kept)])[ends.starts]
    rows, good, group = order.filter(pa.array(kept)), ordered.filter(pa.array(kept)), groups[kept][starts[:-1]]
    place = np.arange(len(group))
    new = np.ones(len(group), bool)
    new[1:] = group[1:] != group[:-1]
    first = good.take(pa.array(starts[:-1]))
    batches = {
        **{name: first[name] for name in _GROUP},
        "number": place - np.maximum.accumulate(np.where(new, place, 0)),
        "trigger": ends.triggers,
        "size": np.add.reduceat(good["size"].to_numpy(), starts[:-1]) if len(place) else [],
        "rows": pa.ListArray.from_arrays(pa.array(starts, pa.int32()), rows),
        "failure": pa.nulls(len(place), FAILURE),
        "task": pa.nulls(len(place), pa.int64()),
    }
    made = pa.Table.from_pydict(batches, schema=BATCHES)
    if not ends.failures:
        return made
    at = pa.array(ends.failures.keys(), pa.int64())
    failed = ordered.take(at)
    alone = {
        **{name: failed[name] for name in (*_GROUP, "size")},
        "number": pa.repeat(pa.scalar(-1, pa.int64()), len(at)),
        "trigger": pa.repeat("size", len(at)),
        "rows": pa.array([[row] for row in order.take(at).to_pylist()]),
        "failure": [failure._asdict() for failure in ends.failures.values()],
        "task": pa.nulls(len(at), pa.int64()),
    }
    return pa.concat_tables([made, pa.Table.from_pydict(alone, schema=BATCHES)]).combine_chunks()
