"""Sources that remember nothing of what they give out: Kafka. Which offsets a receive holds is for us to know."""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import ClassVar, NamedTuple

from pydantic import Field

from pipeline_platform.model.actions import Word, Words
from pipeline_platform.source.backlog import ENDLESS, Backlog
from pipeline_platform.source.contract import Held, Refused, Share, Source, SourceError
from pipeline_platform.source.offsets import Offsets, Place, Positions
from pipeline_platform.source.readers import Reader

logger = logging.getLogger(__name__)

_NAMED = 5
"""Partitions that a look names at the most."""


class Extent(NamedTuple):
    """What a partition of a log holds.

    Attributes:
        low: Offset of the oldest message that is still there.
        past: Offset after the newest one; None for a log without an end.
        committed: Where its readers go on, as the log remembers it; None if nothing was committed, or it has forgotten.
        begin: Where reading begins if nobody ever read it.
        is_ours: Whether `commit` said so. If not, somebody has set the log to another place.
        readers: Marks of the deployments that committed here; None for a log that keeps none.
    """

    low: int
    past: int | None
    committed: int | None
    begin: int
    is_ours: bool = False
    readers: Sequence[Reader] | None = None

    @property
    def end(self) -> int:
        """Where it ends; a log without an end at `ENDLESS` beyond any beginning."""
        return 2 * ENDLESS - 1 if self.past is None else self.past


class LogSource(Source):
    """A source of partitions, each a sequence of messages by offset.

    A connector writes `extents`, `read` and `commit`. A receive gets spans of offsets, which no other receive is given
    until it is abandoned; a position moves over all that is acknowledged without a gap. So neither a message that takes
    long nor one that fails holds another back. Failed messages are acknowledged: the failed-message table holds them.

    The `ack_ref` of a message is its partition's name, and its `ack_id` the offset: by them a run that is stopped frees
    what it did not begin, for a later one.

    The `at` of its shares is `{"spans": [[partition, first, past, reached], ...]}`: a message at an offset below
    `reached` may have been delivered before.
    """

    reads_again: ClassVar[bool] = True
    acknowledges_by_id: ClassVar[bool] = False
    gives_back_offsets: ClassVar[bool] = True
    has_gaps: ClassVar[bool] = False
    """Whether some offsets have no message, as of a log that is compacted, or whose numbers skip some.

    They count in the backlog and in the demand of a run, which may then get less than it asked for.
    """

    one_receive_per_partition: bool = Field(
        False, description="Whether a partition is given to one receive at a time, which keeps its order."
    )

    @property
    def leases_partitions(self) -> bool:  # type: ignore[override]
        """By its option."""
        return self.one_receive_per_partition

    @property
    def words(self) -> Words:
        """An offset is acknowledged or not, so all is acknowledged."""
        return {"ack": Word(ends=True)}

    @property
    def positions(self) -> Positions:
        """Who knows what receives hold; a `SourceError` if `open` was not called."""
        if self._positions is None:
            raise SourceError(f"source {self.name!r} is not open: call open() with a control store first")
        return self._positions

    @abstractmethod
    def extents(self) -> dict[str, Extent]:
        """Say what each partition holds, or raise `SourceError`. Sensors call it: it is quick.

        A partition's name is the same for ever, and no other log's: it names the topic's own id, where there is one.
        """

    @abstractmethod
    def commit(self, acknowledged_to: Mapping[str, int]) -> None:
        """Have the log remember how far partitions are acknowledged, or raise `SourceError`."""

    def is_younger(self, partition: str, known: Iterable[str]) -> bool:
        """Whether a partition that is seen for the first time was made since the first look at this source.

        It is read from its oldest message on then, wherever reading of others begins.

        Args:
            partition: Its name.
            known: Names of those that were seen before; at the first look there are none, and nobody asks.
        """
        return False

    def backlog(self) -> Backlog:
        """Count the offsets that no receive was given; gaps count, too, where the log `has_gaps`."""
        before, extents, places = self._look()
        starts = {partition: _start(places[partition], extent, before.get(partition)) for partition, extent in extents.items()}
        free = (free_offsets(extent, places[partition], starts[partition].offset) for partition, extent in extents.items())
        is_held = {partition: any(span.holder for span in places[partition].spans) for partition in extents}
        lost = [f"{partition} {starts[partition].what}" for partition in sorted(extents) if starts[partition].is_loss and not is_held[partition]]
        marks = [extent.readers for extent in extents.values() if extent.readers is not None]
        more = f"; and {len(lost) - _NAMED} partitions more" if len(lost) > _NAMED else ""
        return Backlog(
            sum(span.past - span.first for spans in free for span in spans),
            counts_gaps=self.has_gaps,
            lost="; ".join(lost[:_NAMED]) + more,
            others=self.others(chain(*marks) if marks else None),
        )

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Reserve spans, fair over the partitions, and divide them evenly."""
        before, extents, _ = self._look()
        reached: dict[str, int] = {}

        def choose(now: Mapping[str, Place]) -> tuple[list[Offsets], dict[str, int]]:
            reached.update({partition: place.reached for partition, place in now.items()})
            found = {partition: _start(now[partition], extent, before.get(partition)) for partition, extent in extents.items()}
            for partition, start in found.items():
                if start.what:
                    logger.log(start.level, "%s: %s %s", self.name, partition, start.what)
            starts = {partition: start.offset for partition, start in found.items()}
            free = {
                partition: free_offsets(extent, now[partition], starts[partition])
                for partition, extent in extents.items()
                if not (self.one_receive_per_partition and any(span.holder for span in now[partition].spans))
            }
            return fair(free, demand), starts

        return divided(self.positions.reserve(self.name, receive_id, choose), reached, concurrency)

    def acknowledge(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Do nothing: positions move once for a whole receive, in `finish`."""
        return []

    def give_back(self, receive_id: str, not_begun: Held, begun: Held) -> None:
        """Free the spans of what was not begun, so that positions wait for them."""
        offsets: dict[str, list[tuple[int, bool]]] = {}
        for is_free, groups in (False, begun()), (True, not_begun()):
            for partition, ack_ids in groups:
                offsets.setdefault(partition, []).extend((_offset(self.name, ack_id), is_free) for ack_id in ack_ids)
        if strange := offsets.keys() - self.positions.places(self.name).keys():
            raise SourceError(f"source {self.name!r}: ack_ref {min(strange)!r} is none of its partitions: mend read()")
        free = [
            Offsets(partition, run[0], run[-1] + 1)
            for partition, some in offsets.items()
            for is_free, run in _runs(some)
            if is_free
        ]
        self.positions.give_back(self.name, receive_id, free)

    def finish(self, receive_id: str) -> None:
        """Move positions over all that is acknowledged without a gap."""
        acknowledged_to = self.positions.acknowledge(self.name, receive_id)
        while acknowledged_to:
            self.commit(acknowledged_to)
            acknowledged_to = self.positions.committed(self.name, acknowledged_to)

    def holders(self) -> set[str]:
        """The receives that hold spans."""
        places = self.positions.places(self.name).values()
        return {span.holder for place in places for span in place.spans if span.holder}

    def abandon(self, receive_id: str, held: Held) -> None:
        """Free the spans of a dead receive."""
        self.positions.give_back(self.name, receive_id)

    def _look(self) -> tuple[dict[str, Place], dict[str, Extent], dict[str, Place]]:
        """What was known before the log was asked, what it holds, and what is known of each of its partitions."""
        before = self.positions.places(self.name)
        extents = self.extents()
        fresh = {partition: extent for partition, extent in extents.items() if partition not in before}
        if fresh:
            self.positions.begin(self.name, [self._begin(partition, extent, before) for partition, extent in fresh.items()])
        places = self.positions.places(self.name)
        uncommitted = {partition: places[partition].acknowledged_to for partition, extent in extents.items() if extent.committed is None}
        if uncommitted:  # or reading would begin elsewhere where this place is forgotten
            self.commit(uncommitted)
        return before, extents, places

    def _begin(self, partition: str, extent: Extent, known: Mapping[str, Place]) -> Place:
        if extent.committed is not None:
            # What somebody has read may come a second time: it is forgotten how far.
            return Place(partition, extent.committed, extent.end)
        begin = extent.low if known and self.is_younger(partition, known) else extent.begin
        return Place(partition, begin, begin)


class _Start(NamedTuple):
    """Where reading of a partition goes on, and what people have to know of it."""

    offset: int
    what: str = ""
    level: int = logging.WARNING
    is_loss: bool = False


def _start(now: Place, extent: Extent, before: Place | None) -> _Start:
    """Say where reading goes on: as it is remembered here, unless somebody has set the log to another place.

    What the log lacks of what was known before it was asked, it has lost, or went back on.
    """
    start, committed = now.acknowledged_to, extent.committed
    if committed is not None and committed > start:
        # The log is asked first: of what this source committed itself there is nothing to say.
        what = "" if extent.is_ours else f"was set forward from offset {start} to {committed}"
        found = _Start(committed, what)
    elif before and committed is not None and committed < before.acknowledged_to and not extent.is_ours:
        found = _Start(committed, f"was set back from offset {start} to {committed}")
    else:
        found = _Start(start)
    if before and extent.end < before.acknowledged_to and found.offset > extent.end:
        return found._replace(
            what=f"ends at offset {extent.end}, before {found.offset}, where reading goes on: it was cut off, or set "
            "beyond its end. Messages that come to offsets before that are not read: set the log back, to read them",
            level=logging.ERROR,
            is_loss=True,
        )
    if found.offset < extent.low:
        what = (
            f"has lost its messages from offset {found.offset} up to {extent.low}, which nobody had read: keep them "
            "there for longer, or let the pipeline run more often"
        )
        return _Start(extent.low, what, logging.ERROR, is_loss=True)
    return found


def _offset(source: str, ack_id: str) -> int:
    try:
        return int(ack_id)
    except ValueError:
        raise SourceError(f"source {source!r}: ack_id {ack_id!r} is no offset: mend read()") from None


def _runs(offsets: Iterable[tuple[int, bool]]) -> Iterator[tuple[bool, list[int]]]:
    """Offsets that follow each other and have the same mark, whatever the log lacks between them."""
    for mark, run in groupby(sorted(offsets), itemgetter(1)):
        yield mark, [offset for offset, _ in run]


def free_offsets(extent: Extent, place: Place, start: int) -> list[Offsets]:
    """What may be given out of a partition from an offset on: what nobody holds or has acknowledged."""
    free, at = [], start
    end = Offsets("", extent.end, extent.end)
    for span in (*place.spans, end):
        if at < min(span.first, extent.end):
            free.append(Offsets(place.partition, at, min(span.first, extent.end)))
        at = max(at, span.past)
    return free


def fair(free: Mapping[str, Sequence[Offsets]], demand: int) -> list[Offsets]:
    """Choose up to `demand` offsets out of free spans: of each partition as many, or all that it has."""
    sizes = {partition: sum(span.past - span.first for span in spans) for partition, spans in free.items()}
    chosen, left = [], demand
    # From the smallest: what it lacks to an equal share goes to the others.
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
