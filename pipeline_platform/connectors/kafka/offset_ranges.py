"""Ranges of offsets, each read once and to its end by a consumer that joins no group."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline_platform.connectors.kafka.cluster import is_refusal

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

_ROWS = 10_000
"""Maximum messages taken from the client at once."""
WAIT_S = 0.1
"""Maximum seconds of one poll: the extra time for a range whose last offsets are gaps."""


class OffsetRange(NamedTuple):
    """Offsets of one partition. Messages before `reached` may have been read before."""

    topic: str
    topic_id: str
    partition: int
    first: int
    past: int
    reached: int

    @classmethod
    def of(cls, span: Sequence[Any]) -> OffsetRange:
        """Return the range for a span of a share."""
        partition, first, past, reached = span
        return cls(*parted(partition), first, past, reached)

    def __str__(self) -> str:
        """Return a description for errors."""
        return f"{self.topic} [{self.partition}] from offset {self.first} up to {self.past}"


PartitionKey = tuple[str, int]
"""Topic and partition."""

Piece = tuple[OffsetRange, Sequence["Message"]]
"""Messages of one range, in order."""


class ReadError(Exception):
    """A range cannot be read to its end: because of the client's `error`, or because no message arrives."""

    def __init__(self, range_: OffsetRange, error: KafkaError | None = None) -> None:
        super().__init__(str(range_))
        self.range, self.error = range_, error


def partition_name(topic: str, topic_id: str, partition: int) -> str:
    """Return the permanent name of a partition. No part of it can contain a colon."""
    return f"{topic}:{topic_id}:{partition}"


def parted(name: str) -> tuple[str, str, int]:
    """Return the topic, topic id and partition number of a partition's name."""
    topic, topic_id, partition = name.split(":")
    return topic, topic_id, int(partition)


class Reading:
    """Reads ranges by a consumer in no group, until no message arrives for `patience_s` seconds.

    The client appends its errors that belong to no partition to `errors`.
    """

    def __init__(
        self, consumer: Consumer, ranges: Iterable[OffsetRange], patience_s: float, errors: Sequence[KafkaError] = ()
    ) -> None:
        self._consumer, self._patience_s, self._errors = consumer, patience_s, errors
        self._left: dict[PartitionKey, deque[OffsetRange]] = {}
        for range_ in sorted(ranges):
            self._left.setdefault((range_.topic, range_.partition), deque()).append(range_)
        self._next = {place: ranges[0].first for place, ranges in self._left.items()}

    def __iter__(self) -> Iterator[list[Piece]]:
        """Yield messages until all ranges are read to their ends; raise `ReadError` if a range cannot be."""
        from confluent_kafka import TopicPartition

        self._consumer.assign([TopicPartition(*place, at) for place, at in self._next.items()])
        last = time.monotonic()
        while self._left:
            messages = self._consumer.consume(min(_ROWS, self._most()), WAIT_S)
            if messages:
                last = time.monotonic()
            elif (refusal := next(filter(is_refusal, self._errors), None)) is not None:
                raise ReadError(self._any(), refusal)
            elif time.monotonic() - last > self._patience_s:
                raise ReadError(self._any(), self._errors[-1] if self._errors else None)
            places = groupby(messages, lambda message: (message.topic(), message.partition()))
            if pieces := [piece for place, some in places for piece in self._pieces(place, some)]:
                yield pieces

    def _most(self) -> int:
        """Return the maximum number of remaining messages, plus an end event for each partition."""
        return sum(ranges[-1].past - self._next[place] + 1 for place, ranges in self._left.items())

    def _any(self) -> OffsetRange:
        return next(iter(self._left.values()))[0]

    def _pieces(self, place: Any, some: Iterable[Message]) -> Iterator[Piece]:
        """Divide a partition's messages by its ranges. Messages between ranges or read before are left out."""
        from confluent_kafka import KafkaError, TopicPartition

        ranges, messages, past = self._left.get(place), [*some], -1
        for event in [message for message in messages if message.error() is not None]:
            messages.remove(event)
            if (error := event.error()).code() == KafkaError._PARTITION_EOF:
                past = event.offset() or 0
            elif ranges or place not in self._next:
                raise ReadError(ranges[0] if ranges else self._any(), error)
        offsets = [message.offset() or 0 for message in messages]
        past = max(past, offsets[-1] + 1 if offsets else -1)
        while ranges:
            first = max(ranges[0].first, self._next[place])
            inside = slice(bisect_left(offsets, first), bisect_left(offsets, ranges[0].past))
            if inside.start < inside.stop:
                yield ranges[0], messages[inside]
            if past < ranges[0].past:
                self._next[place] = max(past, self._next[place])
                return
            ranges.popleft()
            if ranges and ranges[0].first > past:
                self._next[place] = ranges[0].first
                self._consumer.seek(TopicPartition(*place, ranges[0].first))
                return
        if ranges is not None:
            del self._left[place]
            self._consumer.pause([TopicPartition(*place)])  # otherwise the client fetches messages that are not needed
