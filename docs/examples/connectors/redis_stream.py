"""A Redis stream as a source. It needs Redis 7 and the package `redis`.

A receive is a consumer of a group: its pending entries are its leases, and their idle time is the age of the lease.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pyarrow as pa
import redis
from pydantic import Field

from pipeline_platform import Backlog, LeasedIds, LeasedSource, Refused, Share, calls, per_process, with_metadata

PAGE, RELEASED = 1_000, "released"
"""Entries of a command, and consumer of released entries."""

GIVE = """
local lost = {}
for i = 5, #ARGV do
  local entry = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if not entry or entry[2] ~= ARGV[2] then table.insert(lost, ARGV[i])
  elseif ARGV[3] == '' then redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  else redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[i], 'IDLE', ARGV[4], 'JUSTID') end
end
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
return lost"""
"""Moves entries of a consumer to another with an idle time, or acknowledges them; returns the entries that it lost.

Then it removes the consumer, unless it has pending entries, which would be lost with it."""


class RedisStream(LeasedSource):
    """A stream with a consumer group, which `XGROUP CREATE` created."""

    dates_by_own_clock: ClassVar[bool] = False  # clients may choose the ids, which contain the time

    url: str = Field(repr=False, description="redis://user:password@host:6379/0")
    stream: str = Field(description="Key of the stream.")
    group: str = Field(description="Consumer group. Other applications use other groups.")
    field: str = Field("data", description="Field of an entry with the payload; the other fields are metadata.")

    @property
    def places(self) -> frozenset[str]:
        url = urlsplit(self.url)
        return frozenset({f"stream {self.stream}, group {self.group} at {url.hostname}:{url.port or 6379}{url.path}"})

    @property
    def longest_delay_s(self) -> int:
        return int(self.lease_s)  # a delay is a shorter lease

    def backlog(self) -> Backlog:
        """Count the entries that were never delivered, and the pending entries."""
        for group in self._do("xinfo_groups", self.stream):
            if group["name"] == self.group.encode():
                undelivered = group["lag"]  # None after XDEL: Redis does not count then
                return Backlog(None if undelivered is None else undelivered + group["pending"], counts_held=True)
        raise self.error(f"no group {self.group}. Create it: XGROUP CREATE {self.stream} {self.group} 0 MKSTREAM.")

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Lease entries whose lease has expired, then entries that were never delivered."""
        left, cursor, lease_ms = share.messages, b"", int(self.lease_s * 1_000)
        while left and cursor != b"0-0":  # the end
            page = {"start_id": cursor or b"0-0", "count": min(left, PAGE)}
            cursor, entries, _ = self._do("xautoclaim", self.stream, self.group, receive_id, lease_ms, **page)
            yield self._rows(entries, receive_id)
            left -= len(entries)
        new = {self.stream: ">"}
        while left and (found := self._do("xreadgroup", self.group, receive_id, new, count=min(left, PAGE))):
            ((_, entries),) = found
            yield self._rows(entries, receive_id)
            left -= len(entries)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        return self._give(ack_ref, ack_ids, "", 0)

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        return self._give(ack_ref, ack_ids, RELEASED, max(int((self.lease_s - delay_s) * 1_000), 0))

    def renew(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        return self._give(ack_ref, ack_ids, ack_ref, 0)

    def leased(self, receive_id: str, held: LeasedIds) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield the pending entries of the receive, recorded or not."""
        after = "-"
        while page := self._do("xpending_range", self.stream, self.group, after, "+", PAGE, receive_id):
            yield receive_id, (ids := [entry["message_id"].decode() for entry in page])
            after = f"({ids[-1]}"

    def finish(self, receive_id: str, held: LeasedIds) -> None:
        self._do("eval", GIVE, 1, self.stream, self.group, receive_id)  # removes the consumer

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Add entries to the stream; metadata become fields."""
        entries = (
            {**{name: str(value) for name, value in fields.items()}, self.field: payload}
            for payload, fields in with_metadata(payloads, metadata)
        )
        return len([self._do("xadd", self.stream, entry) for entry in entries])

    def _give(self, receive_id: str, ids: Sequence[str], to: str, idle_ms: int) -> list[Refused]:
        def give(page: Sequence[str]) -> list[Refused]:
            lost = self._do("eval", GIVE, 1, self.stream, self.group, receive_id, to, idle_ms, *page)
            return [Refused(entry.decode(), "acknowledged, or leased by another receive", lost=True) for entry in lost]

        return calls.in_groups(give, ids, PAGE)

    def _rows(self, entries: Sequence[Any], receive_id: str) -> pa.RecordBatch:
        ids = [entry.decode() for entry, _ in entries]
        fields = [{name.decode(errors="replace"): value for name, value in each.items()} for _, each in entries]
        data = [each.pop(self.field, b"") for each in fields]
        return self.deliveries(message_id=ids, data=data, metadata=fields, ack_ref=receive_id)

    @per_process
    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=10, socket_connect_timeout=5, protocol=2)

    def _do(self, command: str, *arguments: Any, **options: Any) -> Any:
        fix = "Correct url, stream or group, or start the server."
        refused = redis.AuthenticationError, redis.ResponseError, redis.DataError, ValueError
        with self.explaining(fix, refused=refused, away=(redis.RedisError,)):
            return getattr(self._client, command)(*arguments, **options)
