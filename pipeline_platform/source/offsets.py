"""Positions of a log: the offsets that receives have leased, and how far each partition is acknowledged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pipeline_platform.source.readers import Reader


class Offsets(NamedTuple):
    """Offsets of a partition, from `first` to before `past`; without a `holder` they are already acknowledged."""

    partition: str
    first: int
    past: int
    holder: str | None = None


class Place(NamedTuple):
    """Position of one partition.

    Attributes:
        partition: Name of the partition.
        acknowledged_to: Every offset before this one is acknowledged, and that is committed.
        reached: No receive was ever given this offset or a later one.
        spans: Leased or acknowledged offsets after that, in order and without overlaps.
        mark: Text with which the log itself finds `acknowledged_to`; empty for a log that is read by offsets.
    """

    partition: str
    acknowledged_to: int
    reached: int
    spans: tuple[Offsets, ...] = ()
    mark: str = ""


class Choice(NamedTuple):
    """Changes of positions that a planner chooses.

    Attributes:
        spans: Free spans to lease.
        acknowledged_to: Offset up to which each partition counts as acknowledged from now on.
        marks: New marks of partitions.
    """

    spans: Sequence[Offsets] = ()
    acknowledged_to: Mapping[str, int] = {}
    marks: Mapping[str, str] = {}


Choose = Callable[[Mapping[str, Place]], Choice]
"""Function from the positions to the changes."""


def still_leased(held: Iterable[Offsets], freed: Iterable[Offsets]) -> list[Offsets]:
    """Return leased spans without the parts that are freed."""
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
    """The part of the control store that stores the positions of logs, and identifies the deployment."""

    def reader(self) -> Reader:
        """Return the deployment of this control store, seen now."""
        ...

    def places(self, source: str) -> dict[str, Place]:
        """Return the position of each partition of a source."""
        ...

    def begin(self, source: str, places: Iterable[Place]) -> None:
        """Add partitions that are not stored yet, without spans; stored positions stay."""
        ...

    def reserve(self, source: str, receive_id: str, choose: Choose) -> Sequence[Offsets]:
        """Lease spans to a receive, exclusively; release the spans that it had before.

        `choose` is called with the positions, while no other planner of the source is active.

        Returns:
            The spans, once they are stored durably.
        """
        ...

    def acknowledge(self, source: str, receive_id: str) -> dict[str, int]:
        """Mark all spans of a receive as acknowledged; return the offsets to which partitions advance."""
        ...

    def committed(self, source: str, acknowledged_to: Mapping[str, int]) -> dict[str, int]:
        """Record committed offsets, and remove acknowledged spans before them.

        Returns:
            The offset to commit of each partition that others have acknowledged further, or changed, meanwhile.
        """
        ...

    def give_back(self, source: str, receive_id: str, spans: Iterable[Offsets] | None = None) -> None:
        """Release the unacknowledged spans of a receive: these spans, or all."""
        ...
