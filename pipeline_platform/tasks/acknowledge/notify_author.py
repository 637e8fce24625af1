"""Notifying the pipeline's own `acknowledge` of messages that are decided, before they are acknowledged."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import RowRange, keys_of, only, read_ranges
from pipeline_platform.model.failure import Failure
from pipeline_platform.model.message import Message
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.tasks.handle.handle_messages import READ
from pipeline_platform.tasks.host.calling_step import CallingStep
from pipeline_platform.tasks.host.fork import Death, Written, in_a_fork
from pipeline_platform.tasks.host.output import captured
from pipeline_platform.tasks.host.progress import UNWATCHED, Progress, Watch, end_copy

ROWS = 1_000
"""Messages of one call, at the most."""

NOT_TAKEN = pa.schema([("ack_ref", pa.string()), ("ack_id", pa.string())])
"""Messages of which a call raised: they are not acknowledged."""

ENDED = ["handled", "failed"]
"""Outcomes that end a message."""

_OUTCOMES = NOT_TAKEN.append(pa.field("outcome", pa.string()))
_IDENTITY = ("source", "message_id")
_KEYS = only(READ, *NOT_TAKEN.names, *_IDENTITY)
_FAILED = pa.schema(
    {name: pa.string() for name in ("source", "message_id", "state", "stage", "kind", "reason", "batcher", "batch_key")}
)
_SAMPLE = 10
_ROWS = 65_536

Stretch = tuple[int, int]
"""Positions of received messages, the last one excluded."""


def not_taken_table(receive_id: str) -> str:
    """Where `NotifyAuthor` writes `NOT_TAKEN`; no batcher has a name like that."""
    return f"_receives/{receive_id}/_unheard"


def ended(
    messages: Sequence[Message], failures: Mapping[int, Mapping[str, Any]]
) -> tuple[list[Message], list[Message]]:
    """Messages as `acknowledge` gets them: those that succeeded and those that failed, as they were delivered.

    Args:
        messages: All that are decided, as the source delivered them.
        failures: What the table `failed` has of those that failed, by their place.
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


class _Ends(NamedTuple):
    """What became of the messages of a task, by their places in it.

    Attributes:
        first: Position of the first one.
        decided: Whether each is.
        failed: Row of its failure; null where it did not fail.
        failures: Rows of `_FAILED`.
    """

    first: int
    decided: pa.Array
    failed: pa.Array
    failures: pa.Table

    def places(self, rows: pa.RecordBatch) -> pa.Array:
        """Which these rows are."""
        return pc.subtract(rows.column("position"), self.first)


@dataclass(frozen=True)
class NotifyAuthor(CallingStep):
    """Task `n` notifies `acknowledge` of the decided messages in `parts[n]`, a group of `ack_ref` a call.

    Attributes:
        outcomes: Of the receive, all; none where all its messages are decided.
        failed: What the receive wrote for the table `failed`, all.
        before: The positions of earlier calls, by `ack_ref`.
    """

    parts: Sequence[Sequence[RowRange]]
    outcomes: Sequence[RowRange] = ()
    failed: Sequence[RowRange] = ()
    before: Mapping[str, Sequence[Stretch]] = field(default_factory=dict)

    def work(self, share: int, watch: Watch | None = UNWATCHED, death: Death | None = None) -> Iterator[pa.RecordBatch]:
        """Do the part of task `share`; its notes say of which positions it was notified, and why not of others."""
        number = 0
        began, started = time.time(), time.monotonic()
        spans, not_taken, errors = dict[str, list[Stretch]](), 0, list[str]()
        with self.writer(f"unheard-{share}") as writer, captured() as output, self.traced(share):
            ends = self._ends(share)
            for _, block in read_ranges(self.lake, self.parts[share], READ, ROWS):
                for ack_ref, rows in self._groups(block, ends):
                    number += 1
                    if watch is not None:
                        watch.begin_block(number)
                    known = death if death and death.block == number and death.rows else None
                    error = self._notify(ack_ref, rows, ends, watch, known)
                    if error is None:
                        places = rows.column("position").to_pylist()
                        spans.setdefault(ack_ref, []).append((places[0], places[-1] + 1))
                        continue
                    not_taken += rows.num_rows
                    errors.append(f"acknowledge of {rows.num_rows} messages of {ack_ref}: {error}")
                    keys = rows.select(NOT_TAKEN.names)
                    writer.write(not_taken_table(self.receive_id), rows.column("window")[0].as_py(), keys)
            took = {"began": began, "seconds": time.monotonic() - started, "task": share}
            notes = {"heard": spans, "unheard": not_taken, "unheard_why": errors[:_SAMPLE], **output.notes(), **took}
            manifest = writer.close(**notes)
        yield from manifest.to_arrow().to_batches()

    def _ends(self, share: int) -> _Ends:
        """What became of the messages of task `share`."""
        blocks = (rows for _, rows in read_ranges(self.lake, self.parts[share], _KEYS, _ROWS))
        mine = pa.Table.from_batches(blocks, _KEYS)
        ids, acks = keys_of(mine, *_IDENTITY), keys_of(mine, *NOT_TAKEN.names)
        failures = self._of(ids, self.failed, _FAILED, _IDENTITY, pc.field("state") != "closed")
        failed = pc.index_in(ids, keys_of(failures, *_IDENTITY))
        decided = self._of(acks, self.outcomes, _OUTCOMES, NOT_TAKEN.names, pc.field("outcome").isin(ENDED))
        is_decided = pc.is_in(acks, keys_of(decided, *NOT_TAKEN.names)) if self.outcomes else pa.repeat(True, len(acks))
        return _Ends(self.parts[share][0].position, is_decided, failed, failures)

    def _of(
        self, mine: pa.Array, ranges: Sequence[RowRange], columns: pa.Schema, key: Sequence[str], such: pc.Expression
    ) -> pa.Table:
        """Such rows of these messages: what other tasks' messages came to is read, and not kept."""
        some = (pa.table(rows).filter(such) for _, rows in read_ranges(self.lake, ranges, columns, _ROWS))
        return pa.concat_tables(
            [columns.empty_table(), *(one.filter(pc.is_in(keys_of(one, *key), mine)) for one in some)]
        )

    def _groups(self, block: pa.RecordBatch, ends: _Ends) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The decided messages of a block that are left, by `ack_ref`."""
        rows = block.filter(ends.decided.take(ends.places(block)))
        for ack_ref in pc.unique(rows.column("ack_ref")).to_pylist():
            mine = rows.filter(pc.equal(rows.column("ack_ref"), ack_ref))
            places, new = mine.column("position").to_numpy(), np.ones(mine.num_rows, bool)
            for first, end in self.before.get(ack_ref, ()):
                new &= (places < first) | (places >= end)
            if new.any():
                yield ack_ref, mine.filter(pa.array(new))

    @cached_property
    def _instance(self) -> Pipeline:
        return self.pipeline()

    def _notify(
        self, ack_ref: str, rows: pa.RecordBatch, ends: _Ends, watch: Watch | None, known: Death | None
    ) -> str | None:
        """Call `acknowledge`, unless a host is known to have died of this call; return what went wrong."""
        if known is not None:
            return known.failure("acknowledge").reason
        failed = ends.failed.take(ends.places(rows))
        places = np.flatnonzero(failed.is_valid()).tolist()
        failures = dict(zip(places, ends.failures.take(failed.drop_null()).to_pylist(), strict=True))
        messages = list(Message.each(rows, self.ack_policy))
        groups = ended(messages, failures)

        def call(pipeline: Callable[[], Pipeline], watch: Watch) -> str | None:
            try:
                instance = pipeline()
                end_copy()
                with watch.busy("acknowledge", messages):
                    instance.acknowledge(ack_ref, *groups, self.context)
            except BaseException as error:
                failure = Failure.of(error, "acknowledge")
                return f"{failure.kind}: {failure.reason}"
            return None

        if watch is not None:
            return call(lambda: self._instance, watch)

        def child(progress: Progress) -> Written:
            written = Written()
            written.notes = {"error": call(self.pipeline, progress)}
            return written

        answer = in_a_fork(child, limit=self.limit())
        return answer.failure("acknowledge").reason if isinstance(answer, Death) else answer.notes["error"]
