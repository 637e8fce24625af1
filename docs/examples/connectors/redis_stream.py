"""A Redis stream as a source. It needs Redis 7 and the package `redis`.

A receive is a consumer of a group: its pending entries are its leases, and their idle time is the age of the lease.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pyarrow as pa
import redis
from pydantic import Field

from pipeline_platform import Backlog, LeasedIds, LeasedSource, Refused, Share, SourceAwayError, SourceError

RELEASED, PAGE = "released", 1_000
"""Consumer of released entries, and entries of a command."""

MINE = """
local lost = {}
for i = 5, #ARGV do
  local entry = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if not entry or entry[2] ~= ARGV[2] then table.insert(lost, ARGV[i])
  elseif ARGV[3] == '' then redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  else redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[i], 'IDLE', ARGV[4], 'JUSTID') end
end
return lost"""
"""Moves entries of a consumer to another with an idle time, or acknowledges them; returns the entries that it lost."""

REMOVE = """
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end"""


class RedisStream(LeasedSource):
    """A stream with a consumer group, which `XGROUP CREATE` created."""

    dates_by_own_clock: ClassVar[bool] = False  # clients may choose the ids, which contain the time

    url: str = Field(repr=False, description="redis://user:password@host:6379/0")
    stream: str = Field(description="Key of the stream.")
    group: str = Field(description="Consumer group. Other applications use other groups.")
    field: str = Field("data", description="Field of an entry with the payload; the other fields are metadata.")

    @property
    def places(self) -> frozenset[str]:
        """The group of the stream."""
        url = urlsplit(self.url)
        return frozenset({f"stream {self.stream}, group {self.group} at {url.hostname}:{url.port or 6379}{url.path}"})

    @property
    def longest_delay_s(self) -> int:
        """The lease: a delay is a shorter lease."""
        return int(self.lease_s)

    def backlog(self) -> Backlog:
        """Count the entries that were never delivered, and the pending entries."""
        for group in self._do("xinfo_groups", self.stream):
            if group["name"] == self.group.encode():
                undelivered = group["lag"]  # None after XDEL: Redis does not count then
                messages = None if undelivered is None else undelivered + group["pending"]
                return Backlog(messages, counts_held=True)
        raise SourceError(
            f"source {self.name!r}: stream {self.stream!r} has no group {self.group!r}. Create it: "
            f"XGROUP CREATE {self.stream} {self.group} 0 MKSTREAM."
        )

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Lease entries whose lease has expired, then entries that were never delivered."""
        left, cursor, me = share.messages, b"0-0", (self.group, receive_id)
        while left and cursor is not None:
            expired = {"min_idle_time": self._lease_ms, "start_id": cursor, "count": min(left, PAGE)}
            cursor, entries, _ = self._do("xautoclaim", self.stream, *me, **expired)
            cursor = None if cursor == b"0-0" else cursor  # the end
            yield self._rows(entries, receive_id, redelivered=True)
            left -= len(entries)
        while left and (new := self._do("xreadgroup", *me, {self.stream: ">"}, count=min(left, PAGE))):
            ((_, entries),) = new.items() if isinstance(new, dict) else new
            yield self._rows(entries, receive_id, redelivered=False)
            left -= len(entries)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge entries that the receive still leases."""
        return self._give(ack_ref, ack_ids, "", 0)

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """End leases after `delay_s` seconds."""
        return self._give(ack_ref, ack_ids, RELEASED, max(self._lease_ms - delay_s * 1_000, 0))

    def extend(self, receive_id: str, held: LeasedIds) -> bool:
        """Reset the idle time of the receive's entries."""
        leased = [(len(ids), self._give(receive_id, ids, receive_id, 0)) for ids in self._leased(receive_id)]
        return sum(ids - len(lost) for ids, lost in leased) > 0 or not any(ids for _, ids in held())

    def abandon(self, receive_id: str, held: LeasedIds) -> None:
        """Release all entries of the receive, recorded or not."""
        for ids in self._leased(receive_id):
            self.release(receive_id, ids)
        self.finish(receive_id, held)

    def finish(self, receive_id: str, held: LeasedIds) -> None:
        """Remove the consumer unless it has pending entries, which would be lost with it."""
        self._do("eval", REMOVE, 1, self.stream, self.group, receive_id)

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Add entries to the stream; metadata become fields."""
        sent = 0
        for payload, fields in zip(payloads, metadata or repeat(None), strict=False):
            others = {name: str(value) for name, value in (fields or {}).items()}
            self._do("xadd", self.stream, {**others, self.field: payload})
            sent += 1
        return sent

    def close(self) -> None:
        """Close the connections."""
        if client := self.__dict__.pop("_client", None):
            client.close()

    @property
    def _lease_ms(self) -> int:
        return int(self.lease_s * 1_000)

    def _leased(self, receive_id: str) -> Iterator[list[str]]:
        after = "-"
        while page := self._do("xpending_range", self.stream, self.group, after, "+", PAGE, receive_id):
            yield (ids := [entry["message_id"].decode() for entry in page])
            after = f"({ids[-1]}"

    def _give(self, receive_id: str, ids: Sequence[str], to: str, idle_ms: int) -> list[Refused]:
        lost = [
            entry
            for start in range(0, len(ids), PAGE)
            for entry in self._do(
                *("eval", MINE, 1, self.stream, self.group, receive_id, to, idle_ms), *ids[start : start + PAGE]
            )
        ]
        return [Refused(entry.decode(), "acknowledged, or leased by another receive", lost=True) for entry in lost]

    def _rows(self, entries: Sequence[Any], receive_id: str, *, redelivered: bool) -> pa.RecordBatch:
        ids, payload = [entry.decode() for entry, _ in entries], self.field.encode()
        texts = [{k: v.decode(errors="replace") for k, v in fields.items() if k != payload} for _, fields in entries]
        return self.deliveries(
            message_id=ids,
            data=[fields.get(payload, b"") for _, fields in entries],
            metadata=[{name.decode(errors="replace"): text for name, text in each.items()} for each in texts],
            ack_id=ids,
            ack_ref=receive_id,
            redelivered=redelivered,
        )

    @cached_property
    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=10, socket_connect_timeout=5)

    def _do(self, command: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(self._client, command)(*arguments, **options)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            away = SourceAwayError if not isinstance(error, redis.AuthenticationError) else SourceError
            raise away(self._described(error)) from None
        except (redis.RedisError, ValueError) as error:
            raise SourceError(self._described(error)) from None

    def _described(self, error: Exception) -> str:
        place = "; ".join(self.places)
        return f"source {self.name!r}: {place}: {error}. Correct url, stream or group, or start the server."
