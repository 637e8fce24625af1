"""Fan-out: `handle_message` makes several messages of one, its children, which share its fate.

A message whose children are all in tables is handled. One with children that wait for a batch, a parent, ends after all
batches: then each says what became of it, and the worst counts.
"""

from collections.abc import Iterable, Sequence

import pyarrow as pa

from pipeline_platform.model.failure import words
from pipeline_platform.model.message import Message

MOST_CHILDREN = 10_000
"""Of one message: a task holds them all at once."""

MOST_BYTES = 2**30
"""Of data that is bytes or text, in the children of one message: an array of Arrow holds less than 2 GiB."""

PARENTS = pa.schema([("position", pa.int64()), ("size", pa.int64())])
"""The messages that wait for their children, and the bytes of their payloads."""

_FAILURE = ("kind", "reason", "traceback", "stage")
ENDS = pa.schema(
    [
        ("position", pa.int64()),
        ("child", pa.int32()),
        ("source", pa.string()),
        ("message_id", pa.string()),
        *((name, pa.string()) for name in (*_FAILURE, "batcher", "batch_key", "on_success", "on_failure")),
        ("retry", pa.bool_()),
        ("may_rescue", pa.bool_()),
    ]
)
"""What a child says of its message: how it failed (`kind` is null if it did not), and how to acknowledge it.

The message itself says as child -1 how it is acknowledged.
"""


def parents_table(receive_id: str) -> str:
    """Where `PARENTS` are written; no batcher has a name like that."""
    return f"_receives/{receive_id}/_parents"


def ends_table(receive_id: str) -> str:
    """Where `ENDS` is written."""
    return f"_receives/{receive_id}/_ends"


def with_children(message: Message, returned: list[Message]) -> Message:
    """A message with the children that `handle_message` made of it; failed, if one of them is.

    Raises:
        ValueError: There are too many, or they hold too much.
        TypeError: One of them is something else, or made from another message.
    """
    if len(returned) > MOST_CHILDREN:
        raise ValueError(
            f"handle_message returned {len(returned):,} messages for one, which may have {MOST_CHILDREN:,}: put what "
            "belongs together into one of them"
        )
    children = []
    for number, one in enumerate(returned):
        if not message.is_same(one):
            what = "another Message" if isinstance(one, Message) else type(one).__name__
            raise TypeError(
                f"handle_message must return messages made from the one it was given; number {number} is {what}"
            )
        child = one._checked("handle_message")._but(child=number)
        children.append(child)
    if (size := sum(map(_bytes, children))) > MOST_BYTES:
        raise ValueError(
            f"handle_message returned {size:,} bytes for one message, whose {len(children):,} children may hold "
            f"{MOST_BYTES:,} together: put into each what is its own"
        )
    actions = [child.actions for child in children if child.actions]
    family = message._but(children=tuple(children), actions=actions[-1] if actions else message.actions)
    failed = next((child for child in children if child.failure is not None), None)
    return family if failed is None else family._failed_as(failed)


def held_bytes(children: Sequence[Message]) -> int:
    """About what a task holds of children: their data, where that is bytes or text, and a KiB for each."""
    return sum(map(_bytes, children)) + 1_024 * len(children)


def _bytes(message: Message) -> int:
    return len(message.data) if isinstance(message.data, bytes | str) else 0


def ends_of(
    rows: pa.RecordBatch, messages: Sequence[tuple[int, Message]], rescuable: Iterable[Message] = ()
) -> pa.RecordBatch:
    """What messages say of the parents whose rows they lie in; nothing of one that is well and acknowledged as usual.

    Args:
        rows: With the columns `position`, `source` and `message_id`.
        messages: Each with the index of its row.
        rescuable: Failed ones that `handle_failed` may rescue.
    """
    may_rescue = {id(one) for one in rescuable}
    saying = [(row, one) for row, one in messages if one.failure is not None or one.actions]
    taken = rows.select(["position", "source", "message_id"]).take(pa.array([row for row, _ in saying], pa.int64()))
    cells = []
    for _, one in saying:
        failure, (on_success, on_failure) = one.failure, one.actions or (None, None)
        why = (None,) * len(_FAILURE) if failure is None else tuple(map(words, failure[: len(_FAILURE)]))
        ends = words(one.batcher), words(one.batch_key), on_success, on_failure
        cells.append(
            (-1 if one.child is None else one.child, *why, *ends, failure and failure.retry, id(one) in may_rescue)
        )
    names = ["child", *_FAILURE, "batcher", "batch_key", "on_success", "on_failure", "retry", "may_rescue"]
    table = dict(zip(names, zip(*cells, strict=True), strict=True)) if cells else dict.fromkeys(names, ())
    return pa.RecordBatch.from_pydict(
        {**dict(zip(taken.schema.names, taken.columns, strict=True)), **{name: list(table[name]) for name in names}},
        schema=ENDS,
    )
