"""Reading one shard by iterators, which expire after five minutes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from itertools import dropwhile
from typing import Any, NamedTuple

from pipeline_platform.connectors.kinesis.aggregated_records import parts_of
from pipeline_platform.connectors.kinesis.kinesis_api import (
    ExpiredIteratorError,
    ExpiredSequenceError,
    KinesisApi,
    Page,
)
from pipeline_platform.connectors.kinesis.marks import Mark

_PAGE = 10_000
"""Maximum records of a request (Kinesis API, GetRecords)."""
_LOOKS = 20
"""Maximum requests of a look: a shard may return empty pages before its next record."""
_OLDEST = {"ShardIteratorType": "TRIM_HORIZON"}


class ShardMessage(NamedTuple):
    """A message of a shard; `sub` is its number in an aggregated record, None in a plain record."""

    sequence: str
    sub: int | None
    key: str
    data: bytes
    arrived: datetime


class Look(NamedTuple):
    """Result of a look at a shard.

    Attributes:
        is_waiting: Whether messages wait.
        oldest: Time of the oldest message; None if none waits, or if it is unknown.
        messages: Number of messages that wait; None if it is unknown.
        has_ended: Whether the shard is closed, and no message waits.
    """

    is_waiting: bool
    oldest: datetime | None = None
    messages: int | None = 0
    has_ended: bool = False


class ShardCursor:
    """Reads a shard from a position on.

    Messages of an aggregated record whose hash key is outside the shard's range are left out, as AWS's client library
    does: after a split or a merge, the producer library sends them again to their own shard.
    """

    def __init__(self, api: KinesisApi, shard: str, hash_keys: tuple[str, str], mark: Mark) -> None:
        self._api, self._shard, self._mark = api, shard, mark
        self._first, self._last = (int(key) for key in hash_keys)
        self._iterator: str | None = None

    def look(self, most: int) -> Look:
        """Look for up to `most` records, without moving past them."""
        for _ in range(_LOOKS):
            page = self._page(most)
            if messages := self._messages(page):
                return Look(True, messages[0].arrived, None if page.has_more else len(messages))
            if page.next is None:
                return Look(is_waiting=False, has_ended=True)
            self._iterator = page.next
            if not page.has_more:
                return Look(is_waiting=False)
        return Look(is_waiting=True, messages=None)  # it has not been read to its end

    def read(self, limit: int) -> tuple[list[ShardMessage], bool]:
        """Return up to `limit` next messages, and whether more may follow now."""
        page = self._page(min(limit, _PAGE))
        messages = self._messages(page)[:limit]
        if messages:
            last = messages[-1]
            times = {"arrived": last.arrived.timestamp(), "since": last.arrived.timestamp()}
            self._mark = self._mark.model_copy(update={"sequence": last.sequence, "sub": last.sub, **times})
        self._iterator = page.next
        return messages, page.has_more

    def _page(self, limit: int) -> Page:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._start()
            try:
                return self._api.records(self._iterator, limit)
            except ExpiredIteratorError:
                self._iterator = None
        return self._api.records(self._start(), limit)

    def _start(self) -> str:
        try:
            how = self._mark.iterator(time.time(), self._api.stream().retention_s)
            return self._api.iterator(self._shard, how)
        except ExpiredSequenceError:
            return self._api.iterator(self._shard, _OLDEST)

    def _messages(self, page: Page) -> list[ShardMessage]:
        """Return the messages of a page that are after the position."""
        each = (message for record in page.records for message in self._messages_of(record))
        return [*dropwhile(lambda message: not self._mark.is_before(message.sequence, message.sub), each)]

    def _messages_of(self, record: Mapping[str, Any]) -> list[ShardMessage]:
        sequence, data, arrived = record["SequenceNumber"], record["Data"], record["ApproximateArrivalTimestamp"]
        if (parts := parts_of(data)) is None:
            return [ShardMessage(sequence, None, record["PartitionKey"], data, arrived)]
        return [
            ShardMessage(sequence, sub, part.key, part.data, arrived)
            for sub, part in enumerate(parts)
            if self._first <= part.hash_key <= self._last
        ]
