"""What receives hold of a log, and how far each of its partitions is acknowledged."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from pipeline_platform.source.readers import Reader


class Offsets(NamedTuple):
    """Offsets of a partition, from `first` to before `past`; without a `holder` they are acknowledged already."""

    partition: str
    first: int
    past: int
    holder: str | None = None


class Place(NamedTuple):
    """What is known of one partition.

    Attributes:
        partition: Its name.
        acknowledged_to: All before this offset is acknowledged, and that is committed.
        reached: No receive was ever given this offset or a later one.
        spans: What lies beyond and is held or acknowledged, by offset; spans never overlap.
    """

    partition: str
    acknowledged_to: int
    reached: int
    spans: tuple[Offsets, ...] = ()


def without(held: Iterable[Offsets], freed: Iterable[Offsets]) -> list[Offsets]:
    """What is left of held spans once others are cut out of them."""
    cuts: dict[str, list[Offsets]] = {}
    for span in sorted(freed):
        cuts.setdefault(span.partition, []).append(span)
    left = []
    for span in held:
        at = span.first
        for cut in cuts.get(span.partition, ()):
            if at < min(cut.first, span.past):
                left.append(span._replace(first=at, past=min(cut.first, span.past)))
            at = max(at, cut.past)
        if at < span.past:
            left.append(span._replace(first=at))
    return left


class Positions(Protocol):
    """The part of the control store that remembers logs, and which deployment it is of."""

    def reader(self) -> Reader:
        """Say who reads with this control store, now."""
        ...

    def places(self, source: str) -> dict[str, Place]:
        """Say what is known of each partition of a source."""
        ...

    def begin(self, source: str, places: Iterable[Place]) -> None:
        """Remember partitions that nobody knows yet, without spans; what is known of others stays."""
        ...

    def reserve(
        self,
        source: str,
        receive_id: str,
        choose: Callable[[Mapping[str, Place]], tuple[list[Offsets], dict[str, int]]],
    ) -> list[Offsets]:
        """Give spans to a receive, so that no other planner is given them; what it held before is given back.

        `choose` is called with what is known, while no other planner of the source is at work. It returns free spans,
        and the offset that each partition counts as acknowledged up to from now on.

        Returns:
            The spans, once a power cut cannot make them forgotten.
        """
        ...

    def acknowledge(self, source: str, receive_id: str) -> dict[str, int]:
        """Count all spans of a receive as acknowledged; return the offsets to which partitions are to move."""
        ...

    def committed(self, source: str, acknowledged_to: Mapping[str, int]) -> dict[str, int]:
        """Record what was committed, and forget acknowledged spans before that.

        Returns:
            The offset to commit of each partition that others have acknowledged further, or overruled, meanwhile.
        """
        ...

    def give_back(self, source: str, receive_id: str, spans: Iterable[Offsets] | None = None) -> None:
        """Free what a receive holds and has not acknowledged: these spans of it, or all."""
        ...
