"""Sources that remember nothing of what they give out: Kafka. Which offsets a receive holds is for us to know."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from pydantic import Field, PrivateAttr

from pipeline_platform.model.settling import Word, Words
from pipeline_platform.source.contract import Backlog, Held, Refused, Share, Source, SourceError
from pipeline_platform.source.positions import Place, Positions, Span

logger = logging.getLogger(__name__)


class Extent(NamedTuple):
    """What a partition of a log holds.

    Attributes:
        low: Offset of the oldest message that is still there.
        past: Offset after the newest one.
        committed: Where its readers go on, as the log remembers it; None if it was never told.
        begin: Where reading begins if nobody ever read it.
    """

    low: int
    past: int
    committed: int | None
    begin: int


class LogSource(Source):
    """A source of partitions, each a sequence of messages by offset.

    A connector writes `extents`, `read` and `commit`. A receive gets spans of offsets, which no other receive is given
    until it is abandoned; a position moves over all that is settled without a gap. So neither a message that takes long
    nor one that fails holds another back. Failed messages are acknowledged: the failed-message table holds them.

    The `at` of its shares is `{"spans": [[partition, first, past, reached], ...]}`: a message at an offset below
    `reached` may have been delivered before.
    """

    reads_again: ClassVar[bool] = True
    settles_by_id: ClassVar[bool] = False

    one_receive_per_partition: bool = Field(
        False, description="Whether a partition is given to one receive at a time, which keeps its order."
    )
    _positions: Positions | None = PrivateAttr(default=None)

    @property
    def words(self) -> Words:
        """An offset is settled or not, so all is acknowledged."""
        return {"ack": Word(ends=True)}

    def open(self, positions: Positions) -> None:
        """Remember who knows what receives hold."""
        self._positions = positions

    @property
    def positions(self) -> Positions:
        """Who knows what receives hold.

        Raises:
            SourceError: `open` was not called.
        """
        if self._positions is None:
            raise SourceError(f"source {self.name!r} is not open: call open() with a control store first")
        return self._positions

    @abstractmethod
    def extents(self) -> dict[str, Extent]:
        """Say what each partition holds. Sensors call it: it is quick.

        A partition's name is the same for ever, and no other log's: it names the topic's own id, where there is one.

        Raises:
            SourceError: It cannot be reached, or is not there.
        """

    @abstractmethod
    def commit(self, settled_to: Mapping[str, int]) -> None:
        """Tell the log how far partitions are settled.

        Raises:
            SourceError: It would not take that.
        """

    def backlog(self) -> Backlog:
        """Count the offsets that no receive was given; gaps in a compacted log count, too."""
        extents = self.extents()
        places = self._places(extents)
        free = (
            free_spans(extent, places[one], self._start(one, extent, places, places)) for one, extent in extents.items()
        )
        return Backlog(sum(span.past - span.first for spans in free for span in spans))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Reserve spans, fair over the partitions, and divide them evenly."""
        # Before the log is asked: a place that was known by then and is beyond what the log says, the log went back on.
        before = self.positions.places(self.name)
        extents = self.extents()
        self._places(extents)
        reached: dict[str, int] = {}

        def choose(now: Mapping[str, Place]) -> tuple[list[Span], dict[str, int]]:
            reached.update({partition: place.reached for partition, place in now.items()})
            starts = {one: self._start(one, extent, before, now) for one, extent in extents.items()}
            free = {
                one: free_spans(extent, now[one], starts[one])
                for one, extent in extents.items()
                if not (self.one_receive_per_partition and any(span.holder for span in now[one].spans))
            }
            return fair(free, demand), starts

        return divided(self.positions.reserve(self.name, receive_id, choose), reached, concurrency)

    def settle(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Do nothing: positions move once for a whole receive, in `finish`."""
        del action, ack_ref, ack_ids
        return []

    def finish(self, receive_id: str) -> None:
        """Move positions over all that is settled without a gap."""
        told: dict[str, int] = {}
        # Again until nobody has settled more meanwhile: of two runs that tell the log at once, the later one is right.
        while (settled_to := self.positions.settled(self.name, receive_id)) != told:
            self.commit(settled_to)
            told = settled_to
        self.positions.told(self.name, told)

    def abandon(self, receive_id: str, held: Held) -> None:
        """Free the spans of a dead receive."""
        del held
        self.positions.give_back(self.name, receive_id)

    def _places(self, extents: Mapping[str, Extent]) -> dict[str, Place]:
        """What is known of each partition; from now on also of those that are seen for the first time."""
        known = self.positions.places(self.name)
        fresh = {partition: extent for partition, extent in extents.items() if partition not in known}
        if not fresh:
            return known
        never_read = {partition: extent.begin for partition, extent in fresh.items() if extent.committed is None}
        if never_read:  # by the log, too: whoever forgets the place would begin elsewhere
            self.commit(never_read)
        for partition, extent in fresh.items():
            # What somebody read before may come a second time: who remembered it is gone.
            start = extent.begin if extent.committed is None else extent.committed
            self.positions.begin(self.name, partition, start, start if extent.committed is None else extent.past)
        return self.positions.places(self.name)

    def _start(self, partition: str, extent: Extent, before: Mapping[str, Place], now: Mapping[str, Place]) -> int:
        """Where reading of a partition goes on: as we remember it, unless the log was set to another place."""
        start = now[partition].settled_to
        known, committed = before.get(partition), extent.committed
        if committed is not None and committed > start:
            start = committed
        elif committed is not None and known is not None and committed < known.settled_to:
            logger.warning("%s: %s was set back from %d to %d", self.name, partition, start, committed)
            start = committed
        if start < extent.low:
            logger.error(
                "%s: %s has lost its messages from offset %d up to %d, which nobody had read: keep them there for "
                "longer, or let the pipeline run more often", self.name, partition, start, extent.low,
            )  # fmt: skip
        return max(start, extent.low)


def free_spans(extent: Extent, place: Place, start: int) -> list[Span]:
    """What may be given out of a partition from an offset on: what nobody holds or has settled."""
    free, at = [], start
    end = Span("", extent.past, extent.past)
    for span in (*place.spans, end):
        if at < min(span.first, extent.past):
            free.append(Span(place.partition, at, min(span.first, extent.past)))
        at = max(at, span.past)
    return free


def fair(free: Mapping[str, Sequence[Span]], demand: int) -> list[Span]:
    """Choose up to `demand` offsets out of free spans: of each partition as many, or all that it has."""
    sizes = {partition: sum(span.past - span.first for span in spans) for partition, spans in free.items()}
    chosen, left = [], demand
    # From the smallest: what it lacks to an equal share goes to the others.
    for nth, partition in enumerate(sorted(sizes, key=lambda one: (sizes[one], one))):
        wanted = -(-left // (len(sizes) - nth))
        for span in free[partition]:
            size = min(span.past - span.first, wanted)
            if size:
                chosen.append(span._replace(past=span.first + size))
                wanted, left = wanted - size, left - size
    return chosen


def divided(spans: Sequence[Span], reached: Mapping[str, int], concurrency: int) -> list[Share]:
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
