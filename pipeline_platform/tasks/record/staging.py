"""Staged messages: the files in which handled messages wait for their batch."""

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import only
from pipeline_platform.model.actions import AckPolicy
from pipeline_platform.model.columns.crossing import decode, encode
from pipeline_platform.model.columns.fields import ModelClass
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import BULK, MESSAGE_KEY, MESSAGES, Delivery, Message, MessageState
from pipeline_platform.tasks.callback_process.progress import Watch

STAGED = pa.schema(
    [
        *only(MESSAGES, *MESSAGE_KEY, "data", "metadata", "ack_ref", "ack_id", "attempt", "redelivered"),
        *only(MESSAGES, "received_at", "partition", "sequence"),
        ("position", pa.int64()),
        ("value", pa.binary()),
        ("encoding", pa.string()),
        ("batch_key", pa.string()),
        ("batch_mode", pa.string()),
        ("on_success", pa.string()),
        ("on_failure", pa.string()),
        ("size", pa.int64()),
        ("own", pa.string()),
        ("child", pa.int32()),
    ]
)
"""A staged message: its delivery, and its data after handling.

`size` is the bytes of both payloads, used for cutting. `own` is the partition from `partition_by`; `partition` is the
source's. The row of a `child` has no delivered payload, because thousands of children may share it.
"""

CUT_BY = only(STAGED, "batch_key", "position", "size", "batch_mode", "source", "partition", "sequence", "own")
"""Columns that cutting reads."""

DELIVERED = STAGED.names[: STAGED.names.index("position") + 1]
_HANDLED = STAGED.names[len(DELIVERED) : STAGED.names.index("size")]


def handled_columns(messages: Sequence[Message], model: ModelClass | None) -> list[pa.Array]:
    """Build the columns of `STAGED` that handling fills.

    Raises:
        Exception: Data cannot be encoded for batching; see `encode`.
    """
    cells = [
        (*encode(message.data, model), message.batch_key, message.batch_mode, *(message.actions or (None, None)))
        for message in messages
    ]
    columns = zip(_HANDLED, zip(*cells, strict=True), strict=True)
    return [pa.array(values, STAGED.field(name).type) for name, values in columns]


def staged_rows(
    delivered: pa.RecordBatch, handled: Sequence[pa.Array], own: pa.Array, child: pa.Array
) -> pa.RecordBatch:
    """Combine the columns `DELIVERED`, the `handled_columns`, the partitions and the child numbers into rows."""
    value, *_ = handled
    sizes = [pc.fill_null(pc.binary_length(column), 0).cast(pa.int64()) for column in (delivered.column("data"), value)]
    return pa.RecordBatch.from_arrays([*delivered.columns, *handled, pc.add(*sizes), own, child], schema=STAGED)


def to_be_cut(rows: pa.Table, window: str) -> pa.Table:
    """Return the input of `cut_and_deal` from the columns `CUT_BY` of staged rows."""
    rows = rows.append_column("window", pa.repeat(window, rows.num_rows))
    return rows.append_column("flush", pc.equal(rows["batch_mode"], "flush")).drop_columns("batch_mode")


def staged_messages(
    rows: pa.RecordBatch,
    batcher: str,
    ack_policy: AckPolicy,
    model: ModelClass | None,
    failures: Mapping[int, Failure],
    watch: Watch,
) -> Iterator[Message]:
    """Yield the message of each row of `STAGED` with its window.

    Messages in `failures` fail undecoded. Messages that cannot be decoded fail.
    """
    messages = watch.each("decode", _undecoded(rows, batcher, ack_policy))
    for message, encoding in zip(messages, rows.column("encoding").to_pylist(), strict=True):
        try:
            if message._row not in failures:
                message.data = decode(message.data, encoding, model)
        except BaseException as error:  # user code of the model (an enum, for example) may raise anything
            yield message.failed(Failure.of(error, "lake"))
        else:
            yield message.failed(failures[message._row]) if message._row in failures else message


def _undecoded(rows: pa.RecordBatch, batcher: str, ack_policy: AckPolicy) -> Iterator[Message]:
    state = MessageState(Delivery(rows, ack_policy))
    names = [*(name for name in _HANDLED if name != "encoding"), "child"]
    for row, cells in enumerate(zip(*(rows.column(name).to_pylist() for name in names), strict=True)):
        value, key, mode, on_success, on_failure, child = cells
        message = Message(value, row, state if mode == BULK else state._replace(batch_mode=mode))
        message.batcher, message.batch_key = batcher, key
        if on_success is not None or on_failure is not None:
            message = message.configure_ack(on_success=on_success, on_failure=on_failure)
        if child is not None:
            message = message._but(child=child)
        yield message
