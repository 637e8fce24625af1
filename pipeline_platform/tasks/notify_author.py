"""Notifying the pipeline's `acknowledge` of decided messages, before they are acknowledged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import RowRange, groups, keys_of, only, read_ranges, without
from pipeline_platform.lake.tables import DECISIONS
from pipeline_platform.lake.task_report import SAMPLE
from pipeline_platform.model.failure import Failure, words
from pipeline_platform.model.message import MESSAGE_KEY, Message
from pipeline_platform.tasks.callback_process.fork import Death
from pipeline_platform.tasks.calling_step import CallingStep
from pipeline_platform.tasks.handle.handle_messages import READ
from pipeline_platform.tasks.isolation import Tries, surely
from pipeline_platform.tasks.record.filtered import filtered_positions
from pipeline_platform.tasks.record.recording import Recording

ROWS = 1_000
"""Maximum number of messages in a call."""

NOT_TAKEN = pa.schema([("ack_ref", pa.string()), ("ack_id", pa.string())])
"""Columns of `NOT_TAKEN_TABLE`: messages whose notification raised. They are not acknowledged."""
NOT_TAKEN_TABLE = "_unheard"

_DELIVERY = (*MESSAGE_KEY, *NOT_TAKEN.names)
"""Columns that identify a delivery: copies of a message have the same id, and all rows of a file the same `ack_id`."""
_OUTCOMES = pa.schema({name: pa.string() for name in (*_DELIVERY, "outcome")})
_KEYS = only(READ, *_DELIVERY)
_FAILED = pa.schema(
    {name: pa.string() for name in (*MESSAGE_KEY, "state", "stage", "kind", "reason", "batcher", "batch_key")}
)
_ROWS = 65_536

Stretch = tuple[int, int]
"""Positions of received messages: first (inclusive) and end (exclusive)."""


def ended(
    messages: Sequence[Message], failures: Mapping[int, Mapping[str, Any]]
) -> tuple[list[Message], list[Message]]:
    """Return the arguments of `acknowledge`: successful messages and failed messages, as delivered.

    Args:
        messages: All decided messages, as delivered.
        failures: Rows of the table `failed`, by the index of their message.
    """
    successful, failed = list[Message](), list[Message]()
    for place, message in enumerate(messages):
        if (row := failures.get(place)) is None:
            successful.append(message)
            continue
        failure = Failure(row["kind"] or "", row["reason"] or "", "", row["stage"] or "")
        routed = message.put(message.data, batcher=row["batcher"], batch_key=row["batch_key"])
        failed.append(routed.failed(failure))
    return successful, failed


class _Fates(NamedTuple):
    """Outcomes of the messages of a task, by their index in it.

    Attributes:
        first: Position of the first message.
        decided: Whether each message is decided, and not filtered.
        failed: Index of each message's failure in `failures`; null if the message did not fail.
        failures: Rows of `_FAILED`.
    """

    first: int
    decided: pa.Array
    failed: pa.Array
    failures: pa.Table

    def places(self, rows: pa.RecordBatch) -> pa.Array:
        return pc.subtract(rows.column("position"), self.first)


@dataclass(frozen=True)
class NotifyAuthor(CallingStep):
    """Task `n` notifies `acknowledge` of the decided messages in `parts[n]`, one call per `ack_ref`.

    Attributes:
        outcomes: All outcomes of the receive; empty if all its messages are decided.
        failed: All rows that the receive wrote for the table `failed`.
        filtered: All positions of messages that `only` filtered.
        before: Positions of earlier calls, by `ack_ref`.
    """

    parts: Sequence[Sequence[RowRange]]
    outcomes: Sequence[RowRange] = ()
    failed: Sequence[RowRange] = ()
    filtered: Sequence[RowRange] = ()
    before: Mapping[str, Sequence[Stretch]] = field(default_factory=dict)
    stem = "unheard"

    def blocks(self, share: int, skip: int) -> Iterator[tuple[int, tuple[pa.RecordBatch, _Fates]]]:
        """Read the messages of a task and their outcomes."""
        fates = self._fates(share)
        for _, rows in read_ranges(self.lake, without(self.parts[share], skip), READ, ROWS):
            yield rows.num_rows, (rows, fates)

    def tries(self, block: tuple[pa.RecordBatch, _Fates], known: Death | None) -> Tries:
        """Notify of the messages of a block, a group at a time. A group that crashes the process is not notified."""
        given = list(self._groups(*block))
        for ack_ref, rows in given:
            death = known if len(given) == 1 else None
            while death is None or (isinstance(death, Death) and death.is_anyones):
                death = yield partial(self._notify, ack_ref, rows, block[1])
            if isinstance(death, Death):
                yield from surely(partial(self._note_not_taken, ack_ref, rows, death.failure("acknowledge").reason))

    def _fates(self, share: int) -> _Fates:
        blocks = (rows for _, rows in read_ranges(self.lake, self.parts[share], _KEYS, _ROWS))
        mine = pa.Table.from_batches(blocks, _KEYS)
        ids, deliveries = keys_of(mine, *MESSAGE_KEY), keys_of(mine, *_DELIVERY)
        is_open, has_ended = pc.field("state") != "closed", pc.field("outcome").isin(DECISIONS)
        failures = self._of(ids, self.failed, _FAILED, MESSAGE_KEY, is_open)
        failed = pc.index_in(ids, keys_of(failures, *MESSAGE_KEY))
        decided = self._of(deliveries, self.outcomes, _OUTCOMES, _DELIVERY, has_ended)
        is_decided = pa.repeat(True, len(ids))
        if self.outcomes:
            is_decided = pc.is_in(deliveries, keys_of(decided, *_DELIVERY))
        first, filtered = self.parts[share][0].position, filtered_positions(self.lake, self.filtered)
        if len(filtered):
            positions = pa.array(np.arange(first, first + len(ids)))
            is_decided = pc.and_not(is_decided, pc.is_in(positions, filtered))
        return _Fates(first, is_decided, failed, failures)

    def _of(
        self, mine: pa.Array, ranges: Sequence[RowRange], columns: pa.Schema, key: Sequence[str], wanted: pc.Expression
    ) -> pa.Table:
        """Return the wanted rows of this task's messages. The files contain rows of all tasks."""
        tables = (pa.table(rows).filter(wanted) for _, rows in read_ranges(self.lake, ranges, columns, _ROWS))
        return pa.concat_tables(
            [columns.empty_table(), *(table.filter(pc.is_in(keys_of(table, *key), mine)) for table in tables)]
        )

    def _groups(self, block: pa.RecordBatch, fates: _Fates) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yield the decided messages of a block that were not notified before, by `ack_ref`."""
        rows = block.filter(fates.decided.take(fates.places(block)))
        for ack_ref, mine in groups(rows, "ack_ref"):
            places, new = mine.column("position").to_numpy(), np.ones(mine.num_rows, bool)
            for first, end in self.before.get(ack_ref, ()):
                new &= (places < first) | (places >= end)
            if new.any():
                yield ack_ref, mine.filter(pa.array(new))

    def _notify(self, ack_ref: str, rows: pa.RecordBatch, fates: _Fates, recording: Recording) -> bool:
        """Call `acknowledge`. Record the positions notified, or the error."""
        failed = fates.failed.take(fates.places(rows))
        places = np.flatnonzero(failed.is_valid()).tolist()
        failures = dict(zip(places, fates.failures.take(failed.drop_null()).to_pylist(), strict=True))
        messages = list(Message.each(rows, self.ack_policy))
        assert recording.pipeline is not None
        try:
            with recording.watch.busy("acknowledge", messages):
                recording.pipeline.acknowledge(ack_ref, *ended(messages, failures), self.context)
        except BaseException as error:
            failure = Failure.of(error, "acknowledge")
            self._note_not_taken(ack_ref, rows, f"{failure.kind}: {failure.reason}", recording)
        else:
            positions = rows.column("position").to_pylist()
            recording.report.notified.setdefault(ack_ref, []).append((positions[0], positions[-1] + 1))
        return True

    def _note_not_taken(self, ack_ref: str, rows: pa.RecordBatch, why: str, recording: Recording) -> None:
        recording.report.not_taken += rows.num_rows
        if len(recording.report.errors) < SAMPLE:
            noun = "message" if rows.num_rows == 1 else "messages"
            recording.report.errors.append(words(f"acknowledge of {rows.num_rows} {noun} of {ack_ref}: {why}"))
        window = rows.column("window")[0].as_py()
        recording.stage(NOT_TAKEN_TABLE, window, rows.select(NOT_TAKEN.names))
