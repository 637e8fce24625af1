"""Kinesis Data Streams as a source: shards, each leased to one receive at a time, and read after their parents."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import pyarrow as pa

from pipeline_platform.connectors.kinesis.kinesis_api import THREADS, KinesisApi, Shard
from pipeline_platform.connectors.kinesis.kinesis_messages import delivery_columns, entries_of, put, shard_name
from pipeline_platform.connectors.kinesis.kinesis_options import KinesisOptions
from pipeline_platform.connectors.kinesis.marks import Mark
from pipeline_platform.connectors.kinesis.shard_cursor import ShardCursor, ShardMessage
from pipeline_platform.connectors.kinesis.shard_looks import Looked, ShardLooks
from pipeline_platform.connectors.kinesis.shard_positions import ShardPositions
from pipeline_platform.model.portions import BATCH_BYTES, portions
from pipeline_platform.model.retry import Backoff
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.clients import per_process
from pipeline_platform.source.contract import LeasedIds, Share, SourceError
from pipeline_platform.source.metadata import with_metadata

logger = logging.getLogger(__name__)

_COUNTED = 100
"""Records of a shard that a run counts before it leases them: as many as it handles without Spark."""
_NAMED = 5
"""Maximum shards named in a description of losses."""


class KinesisSource(KinesisOptions):
    """A stream of Amazon Kinesis Data Streams.

    Credentials are found as by other AWS clients: environment, profile, container or instance role. They need
    `kinesis:DescribeStreamSummary`, `kinesis:ListShards`, `kinesis:GetShardIterator` and `kinesis:GetRecords`; `send`
    needs `kinesis:PutRecords`.

    - A shard is leased to one receive at a time. After a split or a merge, a shard is read when all messages of its
      parents are acknowledged, which keeps the order by partition key.
    - Positions are in the control store only, by the name of the source: sources with other names, and other
      deployments, each receive all messages.
    - `message_id` is `<creation time of the stream>:<shard>:<sequence number>`, with `:<number>` for a message of a
      record that the Kinesis Producer Library aggregated.
    - `metadata` contains `stream`, `shard`, `sequence_number`, `sub_sequence_number` (null in a plain record),
      `partition_key` and `timestamp` (in milliseconds).
    - `partition` is the partition key. `sequence` is a number that increases along a shard and its children.
      `published_at` is Kinesis' time of arrival.
    - `redelivered` is true for messages that arrived before the last release of messages of their shard, or before
      the first look at the stream.
    - The backlog reports whether messages wait, and the time of the oldest: Kinesis does not report their number.
    """

    leases_partitions: ClassVar[bool] = True
    poll_pauses: ClassVar[Backoff] = Backoff(first=timedelta(seconds=1), most=timedelta(seconds=1))
    """A shard allows five reads per second, over all its consumers."""

    def backlog(self) -> Backlog:
        """Report whether messages wait, since when, and whether Kinesis may have deleted messages."""
        looked = self._look(1)
        oldest = min((look.oldest for look in looked.waiting.values() if look.oldest), default=None)
        lost = [f"{name} {what}" for name, what in sorted({**looked.lost, **looked.gone}.items())]
        more = f"; and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        return Backlog(None if looked.waiting else 0, oldest, lost="; ".join(lost[:_NAMED]) + more)

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Lease the shards with messages, and divide the demand and the shards evenly; the oldest messages first.

        A few messages are counted, so that the run can receive them in its own process.
        """
        looked, shards = self._look(_COUNTED), self._shard_positions
        losses = {name: what for name, what in looked.lost.items() if name in looked.waiting}
        for name, what in {**losses, **looked.gone}.items():
            logger.error("%s: %s %s", self.name, name, what)
        if looked.gone:
            places = shards.places()
            shards.remark({name: (places[name].mark, Mark(ended=True)) for name in looked.gone})
        oldest_first = sorted(looked.waiting, key=lambda name: str(looked.waiting[name].oldest))
        wanted = [(name, looked.shards[name].parents, looked.waiting[name].messages) for name in oldest_first]
        leased = shards.lease(receive_id, wanted, demand)
        parts = [[*part, *looked.shards[part.shard].hash_keys] for part in leased]
        tasks = [parts[nth::concurrency] for nth in range(min(concurrency, len(parts)))]
        return [Share(at={"shards": some}, messages=sum(part[2] for part in some)) for some in tasks]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read each shard up to its number of messages, its end, or its newest message.

        A share that is read again starts with the same messages. If it was not full, later messages may follow.
        """
        api, error, is_empty = self._api, None, True
        readers = deque(_Reader(api, *part) for part in share.at["shards"])
        prefix = shard_name(self.stream_name, api.stream().created, "")
        if not all(reader.name.startswith(prefix) for reader in readers):
            raise self.error(
                f"stream {self.stream!r} was deleted and created again since this receive was planned. Its messages "
                "are lost. The next run reads the stream as it is now."
            )
        with ThreadPoolExecutor(min(THREADS, len(readers))) as pool:
            while readers:
                some = [readers.popleft() for _ in range(min(THREADS, len(readers)))]
                for reader, page in [(reader, pool.submit(reader.read)) for reader in some]:
                    try:
                        messages = page.result()
                    except SourceError as failure:  # it ends this shard's part; its other messages stay at the source
                        logger.warning("Ended the read of %s: %s", reader.name, failure)
                        error = error or failure
                        continue
                    for group in portions(messages, lambda message: len(message.data), BATCH_BYTES):
                        yield self.deliveries(**reader.columns(group))
                        is_empty = False
                    if not reader.is_over:
                        readers.append(reader)
        if error is not None and is_empty:
            raise error

    def give_back(self, receive_id: str, not_begun: LeasedIds, begun: LeasedIds) -> None:
        """Release the messages of each shard from its first unstarted message on.

        Started messages after it are delivered again and recognised as duplicates: positions have no gaps.
        """
        self._shard_positions.release(receive_id, not_begun)

    def abandon(self, receive_id: str, held: LeasedIds) -> None:
        """Release the shards of a crashed receive."""
        self._shard_positions.release(receive_id)

    def finish(self, receive_id: str, held: LeasedIds) -> None:
        """Move the position of each shard after the last message of the receive, and release the shards."""
        self._shard_positions.finish(receive_id, held)

    def location(self, message_id: str) -> str:
        """Describe a message by the position of its shard."""
        created, _, rest = message_id.partition(":")
        shard, _, rest = rest.partition(":")
        sequence, _, sub = rest.partition(":")
        place = self.positions.places(self.name).get(f"{self.stream_name}:{created}:{shard}")
        if place is None or not sequence.isdecimal() or not (sub.isdecimal() or not sub):
            return f"not found: {message_id!r} is not a message id of stream {self.stream}, or it was created again"
        if Mark.of(place.mark).is_before(sequence, int(sub) if sub else None):
            return f"record {sequence} of {shard} is waiting, leased by a run, or has expired"
        return f"record {sequence} of {shard} is acknowledged"

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Send messages, up to 500 per call. Messages that a busy shard refuses are sent again.

        Args:
            payloads: One per message.
            metadata: For each message None, or a mapping with `partition_key` (by default a random one) and
                `explicit_hash_key`. Other keys are ignored.

        Raises:
            SourceError: Kinesis refused messages; others may have been sent.
            ValueError: The numbers of metadata and payloads differ.
        """
        return put(self._api, entries_of(with_metadata(payloads, metadata)), self)

    def labelled(self, labels: Mapping[str, str]) -> None:
        """Return None: a record has no place for labels."""

    @per_process
    def _api(self) -> KinesisApi:
        return KinesisApi(self)

    @per_process
    def _looks(self) -> ShardLooks:
        return ShardLooks(self._api)

    @property
    def _shard_positions(self) -> ShardPositions:
        return ShardPositions(self.positions, self.name)

    def _look(self, most: int) -> Looked:
        """Look for up to `most` records in each shard; store the marks of new shards, and marks that changed."""
        positions = self._shard_positions
        listed, now = self._api.shards()
        prefix = shard_name(self.stream_name, self._api.stream().created, "")
        shards = {
            f"{prefix}{shard.id}": shard._replace(parents=tuple(f"{prefix}{parent}" for parent in shard.parents))
            for shard in listed
        }
        places = positions.places()
        if fresh := {name: shard for name, shard in shards.items() if name not in places}:
            is_first = not any(name.startswith(f"{self.stream_name}:") for name in places)
            positions.begin({name: self._first(shard, now) if is_first else Mark() for name, shard in fresh.items()})
            places = positions.places()
        mine = {name: place for name, place in places.items() if name.startswith(prefix)}
        looked = self._looks.look(shards, mine, most, now)
        positions.remark(looked.changed)
        return looked

    def _first(self, shard: Shard, now: float) -> Mark:
        """Return the mark of a shard at the first look at the stream."""
        if self.start == "LATEST":
            return Mark(ended=True) if shard.is_closed else Mark(since=now)
        since, oldest = self.start_time or 0.0, now - self._api.stream().retention_s
        # Nothing is known about earlier readers.
        return Mark(since=since if since > oldest else 0.0).released(now)


class _Reader:
    """Reads a leased part of a shard, a page at a time."""

    def __init__(self, api: KinesisApi, name: str, first: int, messages: int, mark: str, *hash_keys: str) -> None:
        self.name, self._next, self._left = name, first, messages
        position = Mark.of(mark)
        self._again_to = position.again_to
        self._cursor = ShardCursor(api, name.rpartition(":")[2], (hash_keys[0], hash_keys[1]), position)
        self.is_over = False

    def read(self) -> list[ShardMessage]:
        messages, has_more = self._cursor.read(self._left)
        self._left -= len(messages)
        self.is_over = not has_more or not self._left
        return messages

    def columns(self, messages: list[ShardMessage]) -> dict[str, Any]:
        columns = delivery_columns(self.name, self._next, messages, self._again_to)
        self._next += len(messages)
        return columns
