"""Ack actions of failed messages."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from pipeline_platform.lake.early_acks import Entry
from pipeline_platform.model.actions import EARLY, AckPolicy
from pipeline_platform.tasks.record.block import Block


def actions_of_failures(
    block: Block, failed: Sequence[int], early: Mapping[int, Entry], ack_policy: AckPolicy
) -> tuple[list[str], list[bool]]:
    """Return the ack actions of failed messages, and whether their outcome is a decision.

    A message that is returned to the source is redelivered on purpose, so its outcome is not a decision. A held message
    is acknowledged as successful, because its failure keeps its payload. A retry leaves it open as it is.

    Args:
        block: Block of the messages.
        failed: Indexes of the failed messages.
        early: Early acknowledgements, by index.
        ack_policy: Ack actions of the source.
    """
    redelivered = block.rows.column("redelivered").take(pa.array(failed, pa.int64())).to_pylist()
    actions, ends = list[str](), list[bool]()
    for index, again in zip(failed, redelivered, strict=True):
        message = block.messages[index]
        action = (message.actions or (None, None))[1] or ack_policy.on_failure
        action = ack_policy.of_delivery(action, redelivered=again)
        end = ack_policy.ends(action)
        if message._is_held:
            end = not ack_policy.closes_failures
            action = ack_policy.on_success if end else "noop"
        if index in early:
            action, end = EARLY, not early[index].comes_back(ack_policy)
        actions.append(action)
        ends.append(end)
    return actions, ends
