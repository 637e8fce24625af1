"""Verdicts: the outcome of each delivery, and the failures of messages. Nothing is remembered between calls."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from operator import attrgetter

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.decisions.early_acks import Entry
from pipeline_platform.lake.reader import filled
from pipeline_platform.lake.tables import OUTCOMES
from pipeline_platform.model.actions import EARLY, AckPolicy
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import DELIVERY_KEY, Message
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.failures import close_failures, judge, shown, write_failures
from pipeline_platform.tasks.record.filtered import write_filtered
from pipeline_platform.tasks.record.held import failure_columns, stop
from pipeline_platform.tasks.record.recording import Recording


def record_ended(
    recording: Recording,
    block: Block,
    may_rescue: Callable[[Message], bool] = lambda _: False,
    take_back: Callable[[list[tuple[int, Message]]], None] = lambda _: None,
) -> None:
    """Pass failed messages to `handle_failed`, write the rescued messages, and record all outcomes.

    `take_back` writes rescued messages, given with their indexes. A message that fails in it stays failed.
    """
    judge(recording, block)
    if block.failed and recording.pipeline is not None:
        held = {index for index in block.failed if block.messages[index]._is_held}
        losers = [(index, block.messages[index]) for index in sorted({*block.failed} - held)]
        after = shown(recording, [message for _, message in losers], recording.pipeline, may_rescue)
        block.failed[:] = held
        rescued = []
        for (index, _), message in zip(losers, after, strict=True):
            block.messages[index] = message
            if message.failure is None:
                rescued.append((index, message))
            else:
                block.failed.append(index)
        if rescued:
            take_back(rescued)
            recording.report.rescued += len({index for index, _ in rescued} - {*block.failed})
        judge(recording, block)
    early = recording.early(block.rows)
    _record_done(recording, block, early)
    if block.failed:
        _record_failed(recording, block, early)
    recording.keep(block)


def record_failed(recording: Recording, rows: pa.RecordBatch, window: str, failures: Sequence[Failure]) -> None:
    """Record rows as failed, each with its failure. `handle_failed` cannot rescue them."""
    messages = [
        message.failed(why) for message, why in zip(Message.each(rows, recording.ack_policy), failures, strict=True)
    ]
    record_ended(recording, Block(rows, window, messages, failed=list(range(len(messages)))))


def record_handled(
    recording: Recording,
    rows: pa.RecordBatch,
    window: str,
    batcher: str | None = None,
    columns: Sequence[pa.Array] = (),
) -> None:
    """Record the outcomes of rows that are all handled. `columns` are those of their batcher, which are written."""
    action, early = recording.ack_policy.on_success, recording.early(rows)
    actions = [EARLY if index in early else action for index in range(rows.num_rows)] if early else action
    _write_decided(recording, rows, window, "handled", actions)
    recording.keep_rows(rows, batcher, columns)


def record_duplicates(recording: Recording, rows: pa.RecordBatch, window: str, *, decided: bool) -> None:
    """Record deliveries that are not handled.

    Args:
        recording: Recording of the task.
        rows: Rows of the deliveries.
        window: Window of the rows.
        decided: Whether an earlier receive decided the message; then it is acknowledged as handled. Otherwise this
            receive handles another copy, which may still be released, and the lease of this copy expires.
    """
    recording.report.duplicates[window] += rows.num_rows
    _write(recording, rows, window, "duplicate", recording.ack_policy.on_success if decided else "noop")


def record_released(recording: Recording, rows: pa.RecordBatch, window: str) -> None:
    """Record messages that were not started as returned: the source redelivers them, and open failures stay open.

    Messages that were acknowledged early would not be redelivered, so they fail.
    """
    if early := recording.early(rows):
        begun = [index in early for index in range(rows.num_rows)]
        why = Failure("not handled", "acknowledged early, but the run stopped before handle_message")
        record_failed(recording, rows.filter(pa.array(begun)), window, [why] * len(early))
        rows = rows.filter(pc.invert(pa.array(begun)))
    recording.report.released += rows.num_rows
    recording.report.returned[window] += rows.num_rows
    _write(recording, rows, window, "returned", recording.ack_policy.giving_back or "noop")


def _record_done(recording: Recording, block: Block, early: Mapping[int, Entry]) -> None:
    on_success, done = recording.ack_policy.on_success, sorted(block.done)
    skipped = [index for index in done if block.messages[index]._state.skip_reason is not None]
    if skipped:
        write_filtered(recording, block, skipped)
        done = sorted({*done} - {*skipped})
        for index in skipped:
            recording.report.count_skipped(block.messages[index].reason)
    has_actions = bool(early) or any(map(attrgetter("_state.actions"), block.messages))
    for outcome, indexes in ("handled", done), ("skipped", skipped):
        if not indexes:
            continue
        actions: str | list[str] = on_success
        if has_actions:
            actions = [(block.messages[index].actions or (None,))[0] or on_success for index in indexes]
            actions = [EARLY if index in early else action for index, action in zip(indexes, actions, strict=True)]
        _write_decided(recording, block.take(DELIVERY_KEY, indexes), block.window, outcome, actions)


def _record_failed(recording: Recording, block: Block, early: Mapping[int, Entry]) -> None:
    step, report, ack_policy, failed = recording.step, recording.report, recording.ack_policy, sorted(block.failed)
    losers = [block.messages[index] for index in failed]
    actions, ends = _actions_of_failures(block, failed, early, ack_policy)
    outcomes = ["failed" if end else "returned" for end in ends]
    _write(recording, block.take(DELIVERY_KEY, failed), block.window, outcomes, actions)
    report.failed[block.window] += sum(ends)
    report.returned[block.window] += len(ends) - sum(ends)
    for message in losers:
        report.count_failure(message)
    if held := sum(message._is_held for message in losers):
        report.count_held(held, in_retry=ack_policy.closes_failures)
    stop(block, failed, step, report)
    if recorded := list(compress(failed, ends)):
        rows = failure_columns(block, recorded, step)
        write_failures(recording, rows, block.window, list(compress(losers, ends)))


def _actions_of_failures(
    block: Block, failed: Sequence[int], early: Mapping[int, Entry], ack_policy: AckPolicy
) -> tuple[list[str], list[bool]]:
    """Return the ack actions of failed messages, and whether their outcome is a decision.

    A message that is returned to the source is redelivered on purpose, so its outcome is not a decision. A held message
    is acknowledged as successful, because its failure keeps its payload. A retry leaves it open as it is.
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


def _write_decided(
    recording: Recording, rows: pa.RecordBatch, window: str, outcome: str, action: str | list[str]
) -> None:
    counted = recording.report.handled if outcome == "handled" else recording.report.skipped
    counted[window] += rows.num_rows
    _write(recording, rows, window, outcome, action)
    if recording.ack_policy.closes_failures:
        close_failures(recording, rows, window)


def _write(
    recording: Recording, rows: pa.RecordBatch, window: str, outcome: str | list[str], action: str | list[str]
) -> None:
    """Write the outcomes of rows. `outcome` and `action` are for all rows, or lists with a value per row."""
    values = {"receive_id": recording.step.receive_id, "outcome": outcome, "action": action}
    recording.write("outcomes", window, filled(rows, OUTCOMES, **values))
