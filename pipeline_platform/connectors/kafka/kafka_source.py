"""Kafka as a source: ranges of offsets, read by assignment and committed once all before them is acknowledged."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from pipeline_platform.connectors.kafka.cluster import Cluster, client_logger, explained
from pipeline_platform.connectors.kafka.kafka_messages import bounded, delivery_columns, produce
from pipeline_platform.connectors.kafka.kafka_options import KafkaOptions
from pipeline_platform.connectors.kafka.offset_ranges import OffsetRange, ReadError, Reading, parted, partition_name
from pipeline_platform.source.clients import per_process
from pipeline_platform.source.contract import Share, SourceError
from pipeline_platform.source.log import Extent
from pipeline_platform.source.metadata import with_metadata
from pipeline_platform.source.patience import patiently

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

logger = logging.getLogger(__name__)


class KafkaSource(KafkaOptions):
    """Topics of Kafka, read in ranges of offsets.

    The source never joins the consumer group. It commits how far all messages are acknowledged, so Kafka's tools show
    the lag. The user needs READ and DESCRIBE on the topics and the group, and WRITE on a topic for `send`.

    - `message_id` is `<topic id>:<partition>:<offset>`. A topic that is deleted and recreated has another topic id. If
      the cluster has no topic ids, the topic id is the topic's name.
    - `metadata` contains `topic`, `partition`, `offset`, `key`, `headers` (pairs, in order), `timestamp` (in
      milliseconds) and `timestamp_type` (`create`, `log_append` or `none`). A key or header value is text if its bytes
      are UTF-8, else `{"base64": ...}`; null if it is missing. `headers` is null if a header name is not UTF-8.
      `"tombstone": true` marks a message without a payload, whose `data` is empty.
    - `partition` is `<topic>:<partition>` and `sequence` is the offset. `published_at` is the broker's time, if the
      topic stores it (`message.timestamp.type=LogAppendTime`).
    - `redelivered` is true for offsets that were given to a receive before.
    """

    has_gaps: ClassVar[bool] = True

    def extents(self) -> dict[str, Extent]:
        """Return the ends and the committed offset of each partition, in four requests."""
        from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, TopicPartition

        cluster = self._cluster
        found = cluster.topic_ids(self.topics or cluster.matching(str(self.topic_pattern)))
        for topic in self.topics:
            if topic not in found:
                raise self.error(
                    f"topic {topic!r} does not exist at {self.bootstrap_servers}. Create it, or correct topics."
                )
        names = {
            TopicPartition(topic, n): partition_name(topic, id_, n) for topic, (id_, ns) in found.items() for n in ns
        }
        if not names:
            return {}
        only = {"read_committed": self.isolation_level == "read_committed"}
        asked = [cluster.offsets(names, at, **only) for at in (OFFSET_BEGINNING, OFFSET_END)]
        committed = cluster.committed(names)
        low, past = (ask() for ask in asked)
        ready = [partition for partition in names if partition in low and partition in past]
        begin = past if self.offset_reset_policy == "latest" else low
        fresh = [partition for partition in ready if partition not in committed]
        if fresh and self.since_ms is not None:
            later = cluster.offsets(fresh, self.since_ms, **only)()
            begin = {
                **low,
                **{partition: past[partition] if offset < 0 else offset for partition, offset in later.items()},
            }
            ready = [partition for partition in ready if partition in committed or partition in later]
        if len(ready) < len(names):
            unready = f"{len(names) - len(ready)} of {len(names)} partitions have no leader that answers"
            if not ready:
                raise self.error(f"{unready}. Check the brokers.", away=True)
            logger.warning("Skipped partitions of %s: %s", self.name, unready)
        extents = {}
        for partition in ready:
            offset, is_ours, readers = committed.get(partition, (None, False, []))
            extents[names[partition]] = Extent(
                low[partition], past[partition], offset, begin[partition], is_ours, readers
            )
        return extents

    def location(self, message_id: str) -> str:
        """Describe a message by its offset, the ends of its partition and the committed offset of the group."""
        found = {name.partition(":")[2]: (name, extent) for name, extent in self.extents().items()}
        partition, _, number = message_id.rpartition(":")
        if partition not in found or not number.isdecimal():
            return f"not found: {message_id!r} is not a message id of these topics, or its topic was recreated"
        name, extent = found[partition]
        offset, committed = int(number), extent.begin if extent.committed is None else extent.committed
        topic, _, n = parted(name)
        place = f"offset {offset} of {topic} [{n}]"
        if not extent.low <= offset < extent.end:
            return f"not found: {topic} [{n}] has offsets from {extent.low} to before {extent.end}"
        if offset < committed:
            return f"{place} is acknowledged: group {self.group_id} has committed {committed}"
        return f"{place} is waiting or leased by a run: group {self.group_id} has committed {committed}"

    def is_younger(self, partition: str, known: Iterable[str]) -> bool:
        """Whether the topic was known before: it grew or was recreated. By a pattern, any topic found later counts."""
        topic, _, _ = parted(partition)
        return self.topic_pattern is not None or any(parted(name)[0] == topic for name in known)

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read exactly the ranges of a share, and stop at their ends, whatever offsets are missing."""
        ranges = [OffsetRange.of(span) for span in share.at["spans"]]
        errors: list[KafkaError] = []
        self._expect_same_topics(ranges)
        with closing(self._client("Consumer", {**self.to_read(), "error_cb": errors.append})) as consumer:
            try:
                for pieces in Reading(consumer, ranges, self.patience.within_s, errors):
                    for group in bounded(pieces):
                        yield self.deliveries(**delivery_columns(group))
            except ReadError as failure:
                raise self._explained(failure, ranges) from None
        # Kafka reads by the topic's name: the topic may have been recreated meanwhile.
        patiently(lambda: self._expect_same_topics(ranges), self.patience)

    def commit(self, acknowledged_to: Mapping[str, int]) -> None:
        """Commit offsets in the group; offsets of deleted topics are skipped."""
        wanted = {parted(name): offset for name, offset in acknowledged_to.items()}
        ids = self._cluster.topic_ids({topic for topic, _, _ in wanted})
        there = {
            (topic, number): offset
            for (topic, topic_id, number), offset in wanted.items()
            if topic in ids and ids[topic][0] == topic_id
        }
        if len(there) < len(wanted):
            logger.warning(
                "%s: skipped %d partitions of deleted topics in a commit", self.name, len(wanted) - len(there)
            )
        if there:
            self._cluster.commit(there, self.deployment)

    def check_ready(self) -> None:
        """Raise `SourceError` also if the group has active members, which would prevent commits."""
        super().check_ready()
        if members := self._cluster.members():
            raise self.error(
                f"group_id {self.group_id!r} has {members} active member{'s' if members > 1 else ''}: other consumers "
                "use it. Stop them, or set a group_id that only this source uses."
            )

    def labelled(self, labels: Mapping[str, str]) -> Mapping[str, Any]:
        """Return labels as headers, with the message's id as key."""
        return {"headers": dict(labels), "key": labels.get("message_id")}

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Send messages to a topic; return their number once all required replicas have them.

        Args:
            payloads: One per message.
            metadata: For each message: `topic` (default: the source's topic, if it has only one), `partition` (default:
                by the key), `key` and `headers` (pairs or a mapping), with values as bytes or as in a delivery's
                metadata. With `"tombstone": true` an empty payload is sent as null. Other metadata is ignored.

        Raises:
            SourceError: Some messages were refused; the others are sent.
        """
        client = self._client("Producer", self.to_send())
        sent, refused = produce(client, self, with_metadata(payloads, metadata))
        if refused:
            raise self.error(f"{len(refused)} of {sent} messages were refused. First error: {refused[0]}")
        return sent

    @per_process
    def _cluster(self) -> Cluster:
        return Cluster(self)

    def _client(self, kind: str, settings: Mapping[str, Any]) -> Any:
        """Make a consumer or a producer that logs through Python's logging."""
        import confluent_kafka  # here: the code server loads this file and needs no client

        try:
            return getattr(confluent_kafka, kind)(settings, logger=client_logger)
        except Exception as error:
            raise explained(error, self) from None

    def _expect_same_topics(self, ranges: Iterable[OffsetRange]) -> None:
        """Raise `SourceError` if a topic of these ranges was deleted or recreated."""
        ids = self._cluster.topic_ids({range_.topic for range_ in ranges})
        for range_ in ranges:
            found, _ = ids.get(range_.topic, ("", []))
            if found != range_.topic_id:
                now = " and recreated" if found else ""
                raise self.error(
                    f"topic {range_.topic!r} was deleted{now} since this receive was planned. Its messages are lost. "
                    "The next run reads the topic as it is now."
                )

    def _explained(self, failure: ReadError, ranges: Iterable[OffsetRange]) -> SourceError:
        error = failure.error
        if error is None:
            self._expect_same_topics(ranges)
            waited = f"{self.patience.within_s:g} s"
            return self.error(
                f"{failure} returned nothing for {waited}. Check that the partition has a leader.", away=True
            )
        if error.name() not in _GONE:
            return explained(error, self, str(failure))
        self._expect_same_topics(ranges)
        return self.error(
            f"{failure} lost messages before they were read: retention or an operator removed them. The next "
            "run reads the remaining messages and logs the lost offsets. Raise retention.ms and retention.bytes of the "
            "topic, or run the pipeline more often."
        )


_GONE = {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE", "UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "_UNKNOWN_TOPIC"}
"""Errors for a missing offset or topic."""
