"""Logs that are read by offsets, such as Kafka: the control store tracks the offsets that receives have leased."""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import ClassVar, NamedTuple

from pydantic import Field

from pipeline_platform.source.backlog import ENDLESS, Backlog
from pipeline_platform.source.contract import LeasedIds, Share, SourceError
from pipeline_platform.source.offsets import Choice, Offsets, Place
from pipeline_platform.source.positioned import PositionedSource
from pipeline_platform.source.readers import Reader

logger = logging.getLogger(__name__)

_NAMED = 5
"""Maximum partitions named in a description of losses."""


class Extent(NamedTuple):
    """Range of offsets of a partition of a log.

    Attributes:
        low: Offset of the oldest message that still exists.
        past: Offset after the newest message; None for a log without an end.
        committed: Committed offset at which readers continue; None if nothing is committed, or the commit has expired.
        begin: Offset at which reading starts without a committed offset.
        is_ours: Whether `commit` wrote the committed offset. If not, another tool has set it.
        readers: Marks of the deployments that committed here; None for a log without marks.
    """

    low: int
    past: int | None
    committed: int | None
    begin: int
    is_ours: bool = False
    readers: Sequence[Reader] | None = None

    @property
    def end(self) -> int:
        """Offset after the newest message; for a log without an end an offset `ENDLESS` beyond any start."""
        return 2 * ENDLESS - 1 if self.past is None else self.past


class LogSource(PositionedSource):
    """A source of partitions, each a sequence of messages by offset.

    A connector implements `extents`, `read` and `commit`. A receive leases spans of offsets, which no other receive
    gets until it is abandoned. A position advances over all acknowledged offsets without a gap, so neither a slow
    message nor a failed one blocks others.

    The `ack_ref` of a message is its partition's name, and its `ack_id` is the offset: with these a stopped run
    releases its unstarted messages for a later run.

    The `at` of its shares is `{"spans": [[partition, first, past, reached], ...]}`: a message at an offset below
    `reached` may have been delivered before.
    """

    reads_again: ClassVar[bool] = True
    has_gaps: ClassVar[bool] = False
    """Whether some offsets have no message, as in a compacted log, or a log that skips offsets.

    They count in the backlog and in the demand of a run, which may then receive fewer messages than it requested.
    """

    one_receive_per_partition: bool = Field(
        False, description="Whether a partition is leased to one receive at a time, which keeps its order."
    )

    @property
    def leases_partitions(self) -> bool:  # type: ignore[override]
        """The value of `one_receive_per_partition`."""
        return self.one_receive_per_partition

    @abstractmethod
    def extents(self) -> dict[str, Extent]:
        """Return the extent of each partition, or raise `SourceError`. Sensors call it, so it must be quick.

        A partition's name is permanent and unique over all logs: it contains the topic's own id, if there is one.
        """

    @abstractmethod
    def commit(self, acknowledged_to: Mapping[str, int]) -> None:
        """Commit how far partitions are acknowledged, or raise `SourceError`."""

    def is_younger(self, partition: str, known: Iterable[str]) -> bool:
        """Return whether a new partition was created after the first look at this source.

        It is then read from its oldest message, wherever reading of other partitions starts.

        Args:
            partition: Name of the partition.
            known: Names of the partitions that were seen before. At the first look this method is not called.
        """
        return False

    def backlog(self) -> Backlog:
        """Count the offsets that no receive has leased, including gaps if the log `has_gaps`."""
        before, extents, places = self._look()
        starts = {
            partition: _start(places[partition], extent, before.get(partition)) for partition, extent in extents.items()
        }
        free = (
            free_offsets(extent, places[partition], starts[partition].offset) for partition, extent in extents.items()
        )
        is_held = {partition: any(span.holder for span in places[partition].spans) for partition in extents}
        lost = [
            f"{partition} {starts[partition].what}"
            for partition in sorted(extents)
            if starts[partition].is_loss and not is_held[partition]
        ]
        marks = [extent.readers for extent in extents.values() if extent.readers is not None]
        left = len(lost) - _NAMED
        more = f"; and {left} more partition{'s' if left > 1 else ''}" if left > 0 else ""
        return Backlog(
            sum(span.past - span.first for spans in free for span in spans),
            counts_gaps=self.has_gaps,
            lost="; ".join(lost[:_NAMED]) + more,
            others=self.others(chain(*marks) if marks else None),
        )

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Lease spans, fairly over the partitions, and divide them evenly."""
        before, extents, _ = self._look()
        reached: dict[str, int] = {}

        def choose(now: Mapping[str, Place]) -> Choice:
            reached.update({partition: place.reached for partition, place in now.items()})
            found = {
                partition: _start(now[partition], extent, before.get(partition))
                for partition, extent in extents.items()
            }
            for partition, start in found.items():
                if start.what:
                    logger.log(start.level, "%s: %s %s", self.name, partition, start.what)
            starts = {partition: start.offset for partition, start in found.items()}
            free = {
                partition: free_offsets(extent, now[partition], starts[partition])
                for partition, extent in extents.items()
                if not (self.one_receive_per_partition and any(span.holder for span in now[partition].spans))
            }
            return Choice(fair(free, demand), starts)

        return divided(self.positions.reserve(self.name, receive_id, choose), reached, concurrency)

    def give_back(self, receive_id: str, not_begun: LeasedIds, begun: LeasedIds) -> None:
        """Release the spans of unstarted messages, so that positions do not pass them."""
        offsets: dict[str, list[tuple[int, bool]]] = {}
        for is_free, groups in (False, begun()), (True, not_begun()):
            for partition, ack_ids in groups:
                offsets.setdefault(partition, []).extend((_offset(self.name, ack_id), is_free) for ack_id in ack_ids)
        if strange := offsets.keys() - self.positions.places(self.name).keys():
            raise self.error(f"ack_ref must be the name of a partition, got {min(strange)!r}. Correct read().")
        free = [
            Offsets(partition, run[0], run[-1] + 1)
            for partition, some in offsets.items()
            for is_free, run in _runs(some)
            if is_free
        ]
        self.positions.give_back(self.name, receive_id, free)

    def finish(self, receive_id: str, held: LeasedIds = list) -> None:
        """Advance positions over all acknowledged offsets without a gap."""
        acknowledged_to = self.positions.acknowledge(self.name, receive_id)
        while acknowledged_to:
            self.commit(acknowledged_to)
            acknowledged_to = self.positions.committed(self.name, acknowledged_to)

    def _look(self) -> tuple[dict[str, Place], dict[str, Extent], dict[str, Place]]:
        """Return the positions before the log was queried, the extents of its partitions, and their positions now."""
        before = self.positions.places(self.name)
        extents = self.extents()
        fresh = {partition: extent for partition, extent in extents.items() if partition not in before}
        if fresh:
            self.positions.begin(
                self.name, [self._begin(partition, extent, before) for partition, extent in fresh.items()]
            )
        places = self.positions.places(self.name)
        uncommitted = {
            partition: places[partition].acknowledged_to
            for partition, extent in extents.items()
            if extent.committed is None
        }
        if uncommitted:  # otherwise reading would start elsewhere if the control store is lost
            self.commit(uncommitted)
        return before, extents, places

    def _begin(self, partition: str, extent: Extent, known: Mapping[str, Place]) -> Place:
        if extent.committed is not None:
            # Messages before the end may have been delivered before: nothing is known about earlier readers.
            return Place(partition, extent.committed, extent.end)
        begin = extent.low if known and self.is_younger(partition, known) else extent.begin
        return Place(partition, begin, begin)


class _Start(NamedTuple):
    """Offset at which reading of a partition continues, with a description of any anomaly."""

    offset: int
    what: str = ""
    level: int = logging.WARNING
    is_loss: bool = False


def _start(now: Place, extent: Extent, before: Place | None) -> _Start:
    """Return where reading continues: at the stored position, unless another tool has set the log's committed offset.

    The position from before the log was queried shows whether the log has lost messages or was truncated.
    """
    start, committed = now.acknowledged_to, extent.committed
    if committed is not None and committed > start:
        # Our own commits since the log was queried are not worth a warning.
        what = "" if extent.is_ours else f"was set forward from offset {start} to {committed}"
        found = _Start(committed, what)
    elif before and committed is not None and committed < before.acknowledged_to and not extent.is_ours:
        found = _Start(committed, f"was set back from offset {start} to {committed}")
    else:
        found = _Start(start)
    if before and extent.end < before.acknowledged_to and found.offset > extent.end:
        return found._replace(
            what=f"ends at offset {extent.end}, before the position {found.offset}: it was truncated, or its offset "
            "was set beyond its end. Messages before the position are not read. To read them, set the offset back",
            level=logging.ERROR,
            is_loss=True,
        )
    if found.offset < extent.low:
        what = (
            f"lost its messages from offset {found.offset} to before {extent.low}, which were not read. Keep messages "
            "for longer, or run the pipeline more often"
        )
        return _Start(extent.low, what, logging.ERROR, is_loss=True)
    return found


def _offset(source: str, ack_id: str) -> int:
    try:
        return int(ack_id)
    except ValueError:
        raise SourceError(f"source {source!r}: ack_id must be an offset, got {ack_id!r}. Correct read().") from None


def _runs(offsets: Iterable[tuple[int, bool]]) -> Iterator[tuple[bool, list[int]]]:
    """Yield runs of consecutive offsets with the same mark, ignoring missing offsets."""
    for mark, run in groupby(sorted(offsets), itemgetter(1)):
        yield mark, [offset for offset, _ in run]


def free_offsets(extent: Extent, place: Place, start: int) -> list[Offsets]:
    """Return the offsets of a partition from `start` that are neither leased nor acknowledged."""
    free, at = [], start
    end = Offsets("", extent.end, extent.end)
    for span in (*place.spans, end):
        if at < min(span.first, extent.end):
            free.append(Offsets(place.partition, at, min(span.first, extent.end)))
        at = max(at, span.past)
    return free


def fair(free: Mapping[str, Sequence[Offsets]], demand: int) -> list[Offsets]:
    """Return up to `demand` offsets of free spans: the same number from each partition, or all that it has."""
    sizes = {partition: sum(span.past - span.first for span in spans) for partition, spans in free.items()}
    chosen, left = [], demand
    # Smallest first: the others share the rest of its equal part.
    for nth, partition in enumerate(sorted(sizes, key=lambda name: (sizes[name], name))):
        wanted = -(-left // (len(sizes) - nth))
        for span in free[partition]:
            size = min(span.past - span.first, wanted)
            if size:
                chosen.append(span._replace(past=span.first + size))
                wanted, left = wanted - size, left - size
    return chosen


def divided(spans: Sequence[Offsets], reached: Mapping[str, int], concurrency: int) -> list[Share]:
    """Divide spans into shares of equal size, in order."""
    total = sum(span.past - span.first for span in spans)
    shares: list[Share] = []
    rest = list(spans)
    for nth in range(min(concurrency, total)):
        size = room = total // min(concurrency, total) + (nth < total % min(concurrency, total))
        mine = []
        while room:
            span = rest.pop(0)
            past = min(span.past, span.first + room)
            mine.append([span.partition, span.first, past, reached[span.partition]])
            room -= past - span.first
            if past < span.past:
                rest.insert(0, span._replace(first=past))
        shares.append(Share(at={"spans": mine}, messages=size))
    return shares
