"""Fan-out: `handle_message` returns several messages for one message, its children.

A message is handled once all its children are in tables. If children wait for a batch, the message is a *parent*: its
outcome is decided after all batches, and it fails if a child failed.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.model.failure import FAILURE_COLUMNS, words
from pipeline_platform.model.message import MESSAGE_KEY, Message

MOST_CHILDREN = 10_000
"""Maximum number of children of a message. All are in memory at once."""

MOST_BYTES = 2**30
"""Maximum size of data (bytes or text) in the children of a message: an Arrow array must be smaller than 2 GiB."""

PARENTS_TABLE, ENDS_TABLE = "_parents", "_ends"

PARENTS = pa.schema([("position", pa.int64()), ("size", pa.int64()), ("own", pa.string())])
"""Columns of `PARENTS_TABLE`: messages that wait for their children, the bytes of their payloads, and their partitions,
if these are held."""

ENDS = pa.schema(
    [
        ("position", pa.int64()),
        ("child", pa.int32()),
        ("source", pa.string()),
        ("message_id", pa.string()),
        *((name, pa.string()) for name in (*FAILURE_COLUMNS, "batcher", "batch_key", "on_success", "on_failure")),
        ("retry", pa.bool_()),
        ("may_rescue", pa.bool_()),
    ]
)
"""Columns of `ENDS_TABLE`: the end of a child, its failure (`kind` is null if it did not fail) and its ack actions.

Child -1 is the parent, with its ack actions.
"""


def waiting_parents(rows: pa.RecordBatch, own: pa.Array) -> pa.RecordBatch:
    """Return `PARENTS` of rows with the columns `position` and `data`, and of their partitions."""
    size = pc.binary_length(rows.column("data")).cast(pa.int64())
    return pa.RecordBatch.from_arrays([rows.column("position"), size, own], schema=PARENTS)


def with_children(message: Message, returned: list[Message]) -> Message:
    """Return a message with the children that `handle_message` returned for it, failed if a child failed.

    Raises:
        ValueError: There are too many children, or they are too large.
        TypeError: A child is not a message, or was made from another message.
    """
    if len(returned) > MOST_CHILDREN:
        raise ValueError(
            f"handle_message must return at most {MOST_CHILDREN:,} messages for a message, got {len(returned):,}. "
            "Combine several results in one message"
        )
    children = []
    for number, item in enumerate(returned):
        if not message.is_same(item):
            what = "another Message" if isinstance(item, Message) else type(item).__name__
            raise TypeError(
                f"handle_message must return messages made from the message it was given; item {number} is {what}"
            )
        child = item._checked("handle_message")._but(child=number)
        if child.status != "skipped":
            children.append(child)
    if (size := sum(map(_bytes, children))) > MOST_BYTES:
        raise ValueError(
            f"handle_message must return at most {MOST_BYTES:,} bytes for a message, got {size:,} bytes in "
            f"{len(children):,} messages. Remove data that they have in common"
        )
    actions = [child.actions for child in children if child.actions]
    family = message._but(children=tuple(children), actions=actions[-1] if actions else message.actions)
    failed = next((child for child in children if child.failure is not None), None)
    return family if failed is None else family._failed_as(failed)


def bytes_held(message: Message) -> int:
    """Return an estimate of the memory of a message beside its delivery.

    For children: their data, if it is bytes or text, and a KiB for each. Otherwise: the bytes of a fetched payload.
    """
    children = message._state.children
    return message._state.fetched if children is None else sum(map(_bytes, children)) + 1_024 * len(children)


def _bytes(message: Message) -> int:
    return len(message.data) if isinstance(message.data, bytes | str) else 0


def ends_of(
    rows: pa.RecordBatch, messages: Sequence[tuple[int, Message]], rescuable: Iterable[Message] = ()
) -> pa.RecordBatch:
    """Return the ends of children (or parents). Messages that are ok and have no ack actions of their own are omitted.

    Args:
        rows: Rows of the parents, with the columns `position`, `source` and `message_id`.
        messages: Messages, each with the index of its row.
        rescuable: Failed messages that `handle_failed` may rescue.
    """
    may_rescue = {id(message) for message in rescuable}
    ended = [(row, message) for row, message in messages if message.failure is not None or message.actions]
    keys = rows.select(["position", *MESSAGE_KEY]).take(pa.array([row for row, _ in ended], pa.int64()))
    ends = [
        {**key, **_end(message), "may_rescue": id(message) in may_rescue}
        for key, (_, message) in zip(keys.to_pylist(), ended, strict=True)
    ]
    return pa.RecordBatch.from_pylist(ends, schema=ENDS)


def _end(message: Message) -> dict[str, Any]:
    failure, (on_success, on_failure) = message.failure, message.actions or (None, None)
    end = {
        "child": -1 if message.child is None else message.child,
        "batcher": words(message.batcher),
        "batch_key": words(message.batch_key),
        "on_success": on_success,
        "on_failure": on_failure,
    }
    if failure is None:
        return end
    return end | {name: words(getattr(failure, name)) for name in FAILURE_COLUMNS} | {"retry": failure.retry}
