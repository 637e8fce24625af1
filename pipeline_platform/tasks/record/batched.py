"""Recording the messages of a batch, and the parents of children that waited for batches."""

from collections.abc import Callable, Container

import pyarrow as pa

from pipeline_platform.model.message import Message
from pipeline_platform.model.options import Batcher, has_table
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.failures import judge
from pipeline_platform.tasks.record.fan_out import ENDS_TABLE, ends_of
from pipeline_platform.tasks.record.held import stop
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.routing import write_for
from pipeline_platform.tasks.record.verdicts import record_ended


def record_batch(
    recording: Recording,
    name: str,
    rows: pa.RecordBatch,
    window: str,
    messages: list[Message],
    batch_id: str,
    called: Container[int] = (),
) -> None:
    """Record one batch that `handle_batch` has processed, one message for each row, in the order of the rows.

    Args:
        recording: Recording of the task.
        name: Name of the batcher.
        rows: Rows of the batch.
        window: Window of the rows.
        messages: Messages of the rows, ok or failed.
        batch_id: Id of the batch.
        called: Rows of the messages that `handle_batch` got. The data of other messages is not decoded.
    """
    block, options = Block(rows, window, messages), recording.step.pipeline.batchers[name]
    failed = [index for index, message in enumerate(messages) if message.failure is not None]
    block.failed.extend(failed)
    _write(recording, name, block, {*range(len(messages))} - {*failed}, batch_id)

    def may_rescue(message: Message) -> bool:
        return isinstance(options, Batcher) and options.rescue and message._row in called

    def take_back(rescued: list[tuple[int, Message]]) -> None:
        _write(recording, name, block, {index for index, _ in rescued}, batch_id)

    if block.has_children:
        judge(recording, block)  # later steps know only the kinds of failures
        _set_children_apart(recording, block, may_rescue)
    record_ended(recording, block, may_rescue, take_back)
    if not has_table(options):
        failures = sum(message.failure is not None for message in messages)
        recording.report.count_effects(name, window, failed=failures)


def record_parents(
    recording: Recording,
    rows: pa.RecordBatch,
    window: str,
    messages: list[Message],
    may_rescue: Callable[[Message], bool],
) -> None:
    """Record messages whose children have ended, one for each row. A rescued message adds no row to a table."""
    block = Block(rows, window, messages, are_parents=True)
    for index, message in enumerate(messages):
        (block.done if message.failure is None else block.failed).append(index)
    record_ended(recording, block, may_rescue, lambda rescued: block.done.extend(index for index, _ in rescued))


def _write(recording: Recording, name: str, block: Block, indexes: set[int], batch_id: str) -> None:
    skipped = [index for index in sorted(indexes) if block.messages[index].status == "skipped"]
    block.done.extend(skipped)
    if kept := sorted(indexes.difference(skipped)):
        write_for(recording, name, block, kept, batch_id)


def _set_children_apart(recording: Recording, block: Block, may_rescue: Callable[[Message], bool]) -> None:
    """Write the ends of children, whose parents end later, and remove the children from the block."""
    children = [(index, message) for index, message in enumerate(block.messages) if message.child is not None]
    recording.keep_children(block.rows, children)
    ends = ends_of(block.rows, children, [child for _, child in children if may_rescue(child)])
    recording.stage(ENDS_TABLE, block.window, ends)
    failed = [index for index, child in children if child.failure is not None and not child._is_held]
    stop(block, failed, recording.step, recording.report)
    for indexes in block.done, block.failed:
        indexes[:] = [index for index in indexes if block.messages[index].child is None]
