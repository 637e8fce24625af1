"""Properties of a batch, for `handle_batch`."""

from typing import Literal, NamedTuple

Trigger = Literal["size", "flush", "timeout"]


class BatchInfo(NamedTuple):
    """Properties of a batch, for `handle_batch`.

    Attributes:
        batcher: Name of the batcher.
        batch_key: Key of its messages.
        partition: Partition of its messages, from `partition_by` or the source; None without `partition_by`.
        size: Number of its messages.
        trigger: Reason for which it ended: `size` (`batch_size`, `batch_bytes` or the splitter), `flush` (a message in
            mode `flush`, or the end of a retry, a replay or a drain) or `timeout` (the end of a run that pulls).
        batch_id: Id that stays the same when the batch of a receive is handled again. Retries and replays make new
            batches: for idempotent writes use `source`, `message_id` and `child` of each message.
    """

    batcher: str
    batch_key: str
    partition: int | str | None
    size: int
    trigger: Trigger
    batch_id: str
