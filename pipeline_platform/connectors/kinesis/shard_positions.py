"""Positions and leases of shards in the control store. Messages of a shard are numbered as they are read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeline_platform.connectors.kinesis.kinesis_messages import mark_after
from pipeline_platform.connectors.kinesis.marks import Mark
from pipeline_platform.source.contract import LeasedIds
from pipeline_platform.source.log import fair
from pipeline_platform.source.offsets import Choice, Offsets, Place, Positions


class Leased(NamedTuple):
    """A leased part of a shard: up to `messages` messages after a mark, numbered from `first` on."""

    shard: str
    first: int
    messages: int
    mark: str


class ShardPositions:
    """Leases a shard to one receive at a time, and moves its mark when the receive is finished."""

    def __init__(self, positions: Positions, source: str) -> None:
        self._positions, self._source = positions, source

    def places(self) -> dict[str, Place]:
        """Return the position of each shard."""
        return self._positions.places(self._source)

    def begin(self, marks: Mapping[str, Mark]) -> None:
        """Add shards with their marks."""
        number = int(time.time() * 1_000_000)  # above all numbers of a control store that was lost
        self._positions.begin(
            self._source, [Place(name, number, number, mark=str(mark)) for name, mark in marks.items()]
        )

    def remark(self, changed: Mapping[str, tuple[str, Mark]]) -> None:
        """Replace marks of shards that no receive has leased, unless the marks have changed since."""

        def choose(now: Mapping[str, Place]) -> Choice:
            free = {name for name in changed if not now[name].spans and now[name].mark == changed[name][0]}
            return Choice(marks={name: str(changed[name][1]) for name in free})

        if changed:
            self._positions.reserve(self._source, "", choose)

    def lease(
        self, receive_id: str, wanted: Iterable[tuple[str, Sequence[str], int | None]], demand: int
    ) -> list[Leased]:
        """Lease shards, and divide the demand evenly.

        Args:
            receive_id: The receive.
            wanted: The shards that may be read, in order of preference: name, parents, and number of messages if known.
            demand: Maximum messages.
        """
        marks: dict[str, str] = {}

        def choose(now: Mapping[str, Place]) -> Choice:
            spans = []
            for name, parents, messages in [each for each in wanted if not now[each[0]].spans][:demand]:
                # The numbers of a shard follow those of its parents.
                first = max(now[each].acknowledged_to for each in (name, *parents) if each in now)
                spans.append(Offsets(name, first, first + min(demand, demand if messages is None else messages)))
            marks.update({span.partition: now[span.partition].mark for span in spans})
            chosen = fair({span.partition: [span] for span in spans}, demand)
            return Choice(chosen, {span.partition: span.first for span in chosen})

        spans = self._positions.reserve(self._source, receive_id, choose)
        return [Leased(span.partition, span.first, span.past - span.first, marks[span.partition]) for span in spans]

    def release(self, receive_id: str, not_begun: LeasedIds | None = None) -> None:
        """Release the shards of a receive: all messages, or the messages from the first unstarted message on.

        Messages that arrived until now are marked as delivered from then on.
        """
        mine, now_s = self._leased(receive_id), time.time()
        kept: dict[str, Offsets] = {}
        if not_begun is not None:
            kept = dict(mine)
            for name, ack_ids in not_begun():
                if name in kept:
                    least = min(int(ack_id.partition(":")[0]) for ack_id in ack_ids)
                    kept[name] = kept[name]._replace(past=min(kept[name].past, least))

        def choose(now: Mapping[str, Place]) -> Choice:
            still = {name for name in mine if not now[name].spans and now[name].acknowledged_to == mine[name].first}
            released = {name for name in still if kept.get(name) != mine[name]}
            marks = {name: str(Mark.of(now[name].mark).released(now_s)) for name in released}
            return Choice([span for name, span in kept.items() if name in still and span.first < span.past], {}, marks)

        if mine:
            self._positions.reserve(self._source, receive_id, choose)

    def finish(self, receive_id: str, held: LeasedIds) -> None:
        """Move the mark of each shard after the last message that the receive still has, and release its shards."""
        if not (mine := self._leased(receive_id)):
            return
        last: dict[str, tuple[int, str]] = {}
        for name, ack_ids in held():
            if name in mine:
                numbered = ((int(ack_id.partition(":")[0]), ack_id) for ack_id in ack_ids)
                kept = [each for each in numbered if each[0] < mine[name].past]
                if kept:
                    last[name] = max(*kept, last.get(name, kept[0]))

        def choose(now: Mapping[str, Place]) -> Choice:
            # Another process may have finished the same receive meanwhile, and a later receive may have the shard.
            ours = {name for name in last if not now[name].spans and now[name].acknowledged_to == mine[name].first}
            marks = {name: str(mark_after(last[name][1], Mark.of(now[name].mark))) for name in ours}
            return Choice([], {name: last[name][0] + 1 for name in ours}, marks)

        self._positions.reserve(self._source, receive_id, choose)

    def _leased(self, receive_id: str) -> dict[str, Offsets]:
        spans = (span for place in self.places().values() for span in place.spans)
        return {span.partition: span for span in spans if span.holder == receive_id}
