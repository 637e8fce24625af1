"""Routing: writing handled messages to the tables of their batchers, or staging them until their batch."""

from collections.abc import Iterable, Sequence

import pyarrow as pa

from pipeline_platform.model.message import ATTEMPT_KEY, DEFAULT, Message
from pipeline_platform.model.options import has_table
from pipeline_platform.tasks.record.block import Block
from pipeline_platform.tasks.record.columns import build_columns, must_wait
from pipeline_platform.tasks.record.failures import unknown_batcher
from pipeline_platform.tasks.record.fan_out import ENDS_TABLE, PARENTS_TABLE, ends_of, waiting_parents
from pipeline_platform.tasks.record.held import own_of
from pipeline_platform.tasks.record.recording import Recording
from pipeline_platform.tasks.record.staging import DELIVERED, staged_rows
from pipeline_platform.tasks.record.verdicts import record_ended, record_handled


def record_messages(recording: Recording, rows: pa.RecordBatch, window: str, messages: list[Message]) -> None:
    """Record messages that `handle_message` has processed, one for each row, in the order of the rows."""
    block = Block(rows, window, messages)
    _route(recording, block, enumerate(messages))
    can_rescue = recording.step.pipeline.processors.rescue
    record_ended(recording, block, lambda _: can_rescue, lambda rescued: _route(recording, block, rescued))


def record_columns(
    recording: Recording, name: str, rows: pa.RecordBatch, window: str, columns: Sequence[pa.Array]
) -> None:
    """Record handled rows of a batcher, given as columns."""
    written = [*columns, rows.column("batch_key").fill_null(DEFAULT)]
    _write_rows(recording, name, rows, window, written, None, pa.nulls(rows.num_rows, pa.int32()))
    record_handled(recording, rows, window, name, columns)


def write_for(recording: Recording, name: str, block: Block, indexes: list[int], batch_id: str | None = None) -> None:
    """Write messages for a batcher: staged, or to its table, if any, if they have a `batch_id` or need none."""
    if batch_id is not None and not has_table(recording.step.pipeline.batchers[name]):
        keys = pa.array([block.messages[index].batch_key for index in indexes], pa.string())
        recording.report.count_keys(name, keys)
        recording.report.count_effects(name, block.window, handled=len(indexes))
        block.done.extend(indexes)
        return
    _put(recording, name, block, *build_columns(recording, name, block, indexes, batch_id), batch_id)


def _route(recording: Recording, block: Block, messages: Iterable[tuple[int, Message]]) -> None:
    batchers = recording.step.pipeline.batchers
    groups, parents = {name: list[int]() for name in batchers}, list[int]()
    for index, message in messages:
        state = message._state
        if state.failure is not None:
            block.failed.append(index)
        elif state.skip_reason is not None:
            block.done.append(index)
        elif state.children is not None:
            parents.append(index)
        elif (group := groups.get(message.batcher)) is not None:
            group.append(index)
        elif not batchers:
            block.done.append(index)
        else:
            block.fail(index, unknown_batcher(message.batcher, batchers, "handle_message"))
    for name, indexes in groups.items():
        if indexes:
            write_for(recording, name, block, indexes)
    if parents:
        _route_children(recording, block, parents)


def _route_children(recording: Recording, block: Block, parents: list[int]) -> None:
    """Write the children of messages for their batchers. If a child fails, none of its siblings is written."""
    batchers = recording.step.pipeline.batchers
    # Without the payloads: a message may have thousands of children.
    payloads = pa.nulls(block.rows.num_rows, pa.binary())
    rows = block.rows.set_column(block.rows.schema.get_field_index("data"), "data", payloads)
    pairs = [(index, child) for index in parents for child in block.messages[index]._state.children or ()]
    at = [index for index, _ in pairs]
    family = Block(rows, block.window, [child for _, child in pairs], at=at)
    groups = {name: list[int]() for name in batchers}
    for number, child in enumerate(family.messages):
        if (group := groups.get(child.batcher)) is not None:
            group.append(number)
        elif batchers:
            family.fail(number, unknown_batcher(child.batcher, batchers, "handle_message"))
    built = {name: build_columns(recording, name, family, numbers) for name, numbers in groups.items() if numbers}
    failed: dict[int, Message] = {}
    for number in sorted(family.failed):
        failed.setdefault(at[number], family.messages[number])
    waiting = set[int]()
    for name, (columns, fitting) in built.items():
        kept = [place for place, number in enumerate(fitting) if at[number] not in failed]
        if must_wait(recording, name):
            waiting.update(at[fitting[place]] for place in kept)
        if kept:
            taken = [column.take(pa.array(kept, pa.int64())) for column in columns]
            _put(recording, name, family, taken, [fitting[place] for place in kept])
    for index in parents:
        if index in failed:
            block.messages[index] = block.messages[index]._failed_as(failed[index])
            block.failed.append(index)
        elif index not in waiting:
            block.done.append(index)
    if waiting:
        recording.keep_children(block.rows, [pair for pair in pairs if pair[0] in waiting])
        _await_children(recording, block, sorted(waiting))


def _await_children(recording: Recording, block: Block, parents: list[int]) -> None:
    own = own_of(block, parents, recording.step)
    waiting = waiting_parents(block.take(["position", "data"], parents), own)
    recording.stage(PARENTS_TABLE, block.window, waiting)
    ends = ends_of(block.rows, [(index, block.messages[index]) for index in parents])
    recording.stage(ENDS_TABLE, block.window, ends)


def _put(
    recording: Recording,
    name: str,
    block: Block,
    columns: list[pa.Array],
    fitting: list[int],
    batch_id: str | None = None,
) -> None:
    if not fitting:
        return
    children = block.children(fitting)
    if must_wait(recording, name, batch_id):
        recording.report.staged[name] += len(fitting)
        *handled, own = columns
        rows = staged_rows(block.take(DELIVERED, fitting), handled, own, children)
        recording.stage(name, block.window, rows)
    else:
        _write_rows(recording, name, block.take(ATTEMPT_KEY, fitting), block.window, columns, batch_id, children)
        block.done.extend(fitting)


def _write_rows(
    recording: Recording,
    name: str,
    rows: pa.RecordBatch,
    window: str,
    columns: list[pa.Array],
    batch_id: str | None,
    children: pa.Array,
) -> None:
    """Write rows of a batcher's table. `columns` are those of its data, then the batch keys."""
    count, row_type = rows.num_rows, recording.row_types.get(name)
    recording.report.count_keys(name, columns[-1])
    names = [*(row_type.schema.names if row_type else ["data"]), "batch_key"]
    table = dict(zip(names, columns, strict=True)) | {column: rows.column(column) for column in ATTEMPT_KEY}
    table["batch_id"] = pa.nulls(count, pa.string()) if batch_id is None else pa.repeat(batch_id, count)
    table["receive_id"] = pa.repeat(recording.step.receive_id, count)
    table["child"] = children
    recording.write(name, window, pa.RecordBatch.from_pydict(table))
