"""Blocks: messages as rows of a `polars.DataFrame` or a `pyarrow.Table`, for `handle_messages`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.model.columns.fields import ModelClass
from pipeline_platform.model.columns.nested_casts import ModelOf
from pipeline_platform.model.columns.schema import arrow_schema, row_type
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.formats.payload import SHORT, decoder_of
from pipeline_platform.model.message import Message, acknowledge_at_once

if TYPE_CHECKING:
    import polars as pl

    BlockOf = TypeVar("BlockOf", pl.DataFrame, pa.Table)

ROUTING = ("batcher", "batch_key", "status", "reason")
"""Columns that route a row, in addition to the received columns."""

BLOCK_TYPES = {"polars.DataFrame", "pyarrow.Table"}
_MODULES = {"pl": "polars", "pa": "pyarrow"}


class _Given(NamedTuple):
    """The rows of the current block, their ack policy, and the failures that `columns` found, by position."""

    rows: pa.RecordBatch
    ack_policy: Any
    refused: dict[int, Failure]


_given: ContextVar[_Given | None] = ContextVar("_given", default=None)


def name_of(kind: Any) -> str:
    """Return the name of a class with its top-level package: `polars.DataFrame`."""
    return f"{getattr(kind, '__module__', '').partition('.')[0]}.{getattr(kind, '__name__', kind)}"


@lru_cache(maxsize=256)
def annotated(callback: Callable[..., Any]) -> Any:
    """Return the annotated class of a method's first argument; None without one, or if only type checkers import it.

    The names of a textual annotation are looked up; the text is never evaluated.
    """
    _, *parameters = inspect.signature(callback).parameters.values()
    annotation = parameters[0].annotation if parameters else inspect.Parameter.empty
    if not isinstance(annotation, str):
        return None if annotation in (inspect.Parameter.empty, Any) else annotation
    head, *names = annotation.split(".")
    try:
        return reduce(getattr, names, inspect.unwrap(callback).__globals__[head])
    except (AttributeError, KeyError):
        full = ".".join([_MODULES.get(head, head), *names])
        return getattr(import_module(full.partition(".")[0]), names[0]) if full in BLOCK_TYPES else None


def as_block(rows: pa.Table, kind: Any) -> Any:
    """Return rows as a block of the class `kind`."""
    if kind is pa.Table:
        return rows
    import polars as pl

    return pl.from_arrow(rows)


def as_arrow(block: Any) -> pa.Table:
    """Return a block as an Arrow table."""
    return block if isinstance(block, pa.Table) else block.to_arrow()


def columns(messages: BlockOf, model: ModelClass) -> BlockOf:
    """Decode the payloads of a block, in `data`, into the columns of a model, by the rules of `message.json(model)`.

    A row that does not fit the model or its columns gets the `status` `failed` and the `reason` of
    `message.json(model)`. It fails even if its `status` is changed later, unless a later call decodes it. A row that
    has already failed is not changed, and gets nulls.

    Args:
        messages: A block, or some of its rows.
        model: A pydantic model or a `msgspec.Struct`. Models of plain fields without validators are several times
            faster than others.

    Returns:
        The block with a column for each field.

    Raises:
        ValueError: A field has the name of a column that routes rows.
    """
    block: BlockOf = decoded_columns(messages, model, decoded_json)
    return block


Decode = Callable[[pa.ChunkedArray, Sequence[int], ModelClass, dict[int, Failure]], tuple[list[Any], Sequence[int]]]
"""Function from payloads, the rows to decode and a model to the values and the indices of their rows. The values are
instances of the class `made` of `decoder_of`. It adds failures of other rows to its last argument."""


def decoded_columns(messages: BlockOf, model: ModelClass, decode: Decode) -> BlockOf:
    """Decode the payloads of a block as `columns` does, by another function."""
    schema = arrow_schema(model)
    if taken := sorted({"position", *ROUTING} & set(schema.names)):
        raise ValueError(
            f"{model.__name__} has the fields {taken}, which handle_messages uses to route rows. Rename them."
        )
    known = as_arrow(messages.select(["data", "status", "reason"]))
    waiting = pc.fill_null(pc.equal(known["status"], "ok"), True)
    rows = pc.indices_nonzero(waiting).to_pylist()
    failures = dict[int, Failure]()
    values, fitting = decode(known["data"], rows, model, failures)
    arrays = _built(row_type(decoder_of(model).made), values, fitting, failures)
    if len(arrays[1]) < known.num_rows:
        place = {row: place for place, row in enumerate(arrays[1])}
        index = pa.array([place.get(row) for row in range(known.num_rows)], pa.int64())
        made = [column.take(index) for column in arrays[0]]
    else:
        made = arrays[0]
    block: BlockOf = with_columns(messages, dict(zip(schema.names, made, strict=True)), arrays[1], failures)
    return block


def with_columns(
    messages: BlockOf, columns: Mapping[str, Any], good: Iterable[int], failures: Mapping[int, Failure]
) -> BlockOf:
    """Return a block with columns added or replaced, in which some rows fail. Failures of good rows are forgotten."""
    if (block_now := _given.get()) is not None and (failures or block_now.refused):
        positions = as_arrow(messages.select(["position"]))["position"].to_pylist()
        for row in good:
            block_now.refused.pop(positions[row], None)
        block_now.refused.update((positions[row], failure) for row, failure in failures.items())
    named = dict(columns)
    if failures:
        known = as_arrow(messages.select(["status", "reason"]))
        failed = pa.array([row in failures for row in range(known.num_rows)])
        reasons = {row: failure.reason for row, failure in failures.items()}
        why = pa.array([reasons.get(row) for row in range(known.num_rows)], pa.string())
        named["status"] = pc.if_else(failed, "failed", known["status"].cast(pa.string()))
        named["reason"] = pc.if_else(failed, why, known["reason"].cast(pa.string()))
    block: BlockOf = _with(messages, pa.table(named))
    return block


def _with(block: Any, made: pa.Table) -> Any:
    """Return a block with columns added or replaced."""
    if not isinstance(block, pa.Table):
        return block.with_columns(as_block(made, None))
    for name, column in zip(made.schema.names, made.columns, strict=True):
        at = block.schema.get_field_index(name)
        block = block.append_column(name, column) if at < 0 else block.set_column(at, name, column)
    return block


def decoded_json(
    data: pa.ChunkedArray, rows: Sequence[int], model: ModelClass, failures: dict[int, Failure]
) -> tuple[list[Any], Sequence[int]]:
    """Decode payloads. Return the values and the indices of their rows; add failures of other rows to `failures`."""
    decoder, payloads = decoder_of(model), data.to_pylist()
    data = data.cast(pa.binary())
    try:
        data.cast(pa.string())
        is_text = True
    except pa.ArrowInvalid:  # msgspec ignores invalid UTF-8 in a field that the model lacks
        is_text = False
    if is_text and len(rows) == len(payloads) and (pc.max(pc.binary_length(data)).as_py() or SHORT) < SHORT:
        with suppress(BaseException):
            return list(map(decoder.short, payloads)), rows
    values, fitting = list[Any](), list[int]()
    for row in rows:
        payload = payloads[row]
        try:
            is_sure = payload is not None and (is_text or payload.isascii())
            values.append(decoder.fast(payload) if is_sure else decoder.exact(payload))
            fitting.append(row)
        except BaseException as error:
            failures[row] = Failure.of(error, "handle_messages")
    return values, fitting


def _built(
    row_type: ModelOf, values: Sequence[Any], rows: Sequence[int], failures: dict[int, Failure]
) -> tuple[list[pa.Array], Sequence[int]]:
    """Build columns of the values that fit. Return them and their rows; add failures of other rows to `failures`."""
    try:
        return row_type.columns(values), rows
    except BaseException as error:
        if len(values) == 1:
            failures[rows[0]] = Failure.of(error, "lake")
            return [pa.array([], field.type) for field in row_type.schema], ()
    half = len(values) // 2
    (first, fitting), (last, more) = (
        _built(row_type, values[part], rows[part], failures) for part in (slice(half), slice(half, None))
    )
    return [pa.concat_arrays(pair) for pair in zip(first, last, strict=True)], [*fitting, *more]


@contextmanager
def given(rows: pa.RecordBatch, ack_policy: Any) -> Iterator[Mapping[int, Failure]]:
    """Set the current block of a callback; yield the failures that `columns` finds, by position."""
    known = _Given(rows, ack_policy, {})
    token = _given.set(known)
    try:
        yield known.refused
    finally:
        _given.reset(token)


def messages_of(block: Any) -> list[Message]:
    """Return the messages of rows of the current block, failed if their `status` is.

    Raises:
        TypeError: There is no current block, or the rows are not part of it.
    """
    if (block_now := _given.get()) is None:
        raise TypeError("ack_immediately requires rows of the current block. Call it in handle_messages.")
    known = as_arrow(block)
    at = pc.index_in(known["position"].cast(pa.int64()), value_set=block_now.rows["position"]).combine_chunks()
    if at.null_count:
        raise TypeError("ack_immediately requires rows of the current block, got rows of another block")
    verdicts = zip(known["status"].to_pylist(), known["reason"].to_pylist(), strict=True)
    messages = Message.each(block_now.rows.take(at), block_now.ack_policy)
    return [
        message if status in ("ok", "skipped", None) else message.failed(reason or "")
        for message, (status, reason) in zip(messages, verdicts, strict=True)
    ]


def ack_immediately(messages: Iterable[Message] | pl.DataFrame | pa.Table) -> list[Message]:
    """Acknowledge messages at their source now, in as few calls as possible, instead of at the end of the run.

    The action depends on the present state: on failure if the message has failed, otherwise on success. A message that
    fails later is recorded as failed, and is not redelivered. Messages that the source refuses are acknowledged again
    at the end.

    Args:
        messages: Messages of the callback, or rows of its block. The pipeline must set `acks_immediately`.

    Returns:
        The messages.

    Raises:
        TypeError: A value is not a message, or a row is not part of the current block.
        RuntimeError: The pipeline does not set `acks_immediately`, or another run has fenced this receive.
        OSError: The ids could not be written to the lake first; nothing was acknowledged.
    """
    is_block = name_of(type(messages)) in BLOCK_TYPES
    return acknowledge_at_once(messages_of(messages) if is_block else cast("Iterable[Message]", messages))
