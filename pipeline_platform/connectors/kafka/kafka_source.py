"""Kafka as a source: ranges of offsets, read by assignment, committed once all before them is acknowledged."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from pipeline_platform.connectors.kafka.cluster import Cluster, client_logger, explained
from pipeline_platform.connectors.kafka.kafka_messages import bounded, columns, send
from pipeline_platform.connectors.kafka.kafka_options import KafkaOptions
from pipeline_platform.connectors.kafka.offset_ranges import OffsetRange, ReadError, Reading, named, parted
from pipeline_platform.source.contract import Share, SourceAwayError, SourceError
from pipeline_platform.source.log import Extent
from pipeline_platform.source.patience import patiently

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

logger = logging.getLogger(__name__)


class KafkaSource(KafkaOptions):
    """Topics of Kafka, read in ranges of offsets.

    Nothing joins the consumer group. It remembers how far all is acknowledged, so that Kafka's tools show the lag. A
    user needs READ and DESCRIBE on the topics and the group, and WRITE on a topic for `send`.

    - `message_id` is `<topic id>:<partition>:<offset>`: a topic that is deleted and made again has other messages.
    - `metadata` holds `topic`, `partition`, `offset`, `key`, `headers` (pairs, in order), `timestamp` (in milliseconds)
      and `timestamp_type` (`create`, `log_append` or `none`). A key or the value of a header is text where its bytes
      are UTF-8, else `{"base64": ...}`; null where there is none. `headers` is null where the name of one is not
      UTF-8. `"tombstone": true` marks a message without a payload, whose `data` is empty.
    - `partition` is `<topic>:<partition>`, `sequence` the offset, `published_at` the time that the broker took the
      message, where the topic keeps that one (`message.timestamp.type=LogAppendTime`).
    - `redelivered` is true below the highest offset that a receive was ever given.
    """

    has_gaps: ClassVar[bool] = True

    def extents(self) -> dict[str, Extent]:
        """Ask for the ends of all partitions and for what the group remembers of them, in four calls."""
        from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, TopicPartition

        cluster = self._cluster
        found = cluster.topic_ids(self.topics or cluster.matching(str(self.topic_pattern)))
        for topic in self.topics:
            if topic not in found:
                raise SourceError(
                    f"source {self.name!r}: topic {topic!r} is not at {self.bootstrap_servers}: create it, or correct "
                    "topics"
                )
        names = {TopicPartition(topic, n): named(topic, id_, n) for topic, (id_, ns) in found.items() for n in ns}
        if not names:
            return {}
        only = {"read_committed": self.isolation_level == "read_committed"}
        asked = [cluster.offsets(names, at, **only) for at in (OFFSET_BEGINNING, OFFSET_END)]
        committed = cluster.committed(names)
        low, past = (ask() for ask in asked)
        ready = [one for one in names if one in low and one in past]
        if len(ready) < len(names):
            unready = f"{self.name}: {len(names) - len(ready)} of {len(names)} partitions have no leader that answers"
            if not ready:
                raise SourceAwayError(f"source {unready}")
            logger.warning("%s; this look leaves them out", unready)
        begin = past if self.offset_reset_policy == "latest" else low
        fresh = [one for one in ready if one not in committed]
        if fresh and self.since_ms is not None:
            later = cluster.offsets(fresh, self.since_ms, **only)()
            begin = {**low, **{one: past[one] if offset < 0 else offset for one, offset in later.items()}}
        extents = {}
        for one in ready:
            offset, is_ours, readers = committed.get(one, (None, False, []))
            extents[names[one]] = Extent(low[one], past[one], offset, begin[one], is_ours, readers)
        return extents

    def whereabouts(self, message_id: str) -> str:
        """Say what a message's offset means, between the ends of its partition and what the group has committed."""
        found = {name.partition(":")[2]: (name, extent) for name, extent in self.extents().items()}
        partition, _, number = message_id.rpartition(":")
        if partition not in found or not number.isdecimal():
            return f"not there: {message_id!r} is no id of a message in these topics, or its topic was made again"
        name, extent = found[partition]
        offset, committed = int(number), extent.begin if extent.committed is None else extent.committed
        topic, _, n = parted(name)
        place = f"offset {offset} of {topic} [{n}]"
        if not extent.low <= offset < extent.end:
            return f"not there: {topic} [{n}] has offsets from {extent.low}, before {extent.end}"
        if offset < committed:
            return f"{place} is acknowledged: group {self.group_id} has committed {committed}"
        return f"{place} waits, or a run holds it: group {self.group_id} has committed {committed}"

    def is_younger(self, partition: str, known: Iterable[str]) -> bool:
        """Whether its topic was known before, and grew or was made again. By a pattern, what is found later is new."""
        topic, _, _ = parted(partition)
        return self.topic_pattern is not None or any(parted(one)[0] == topic for one in known)

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read exactly the ranges of a share, and end where they do, whatever is missing in them."""
        ranges = [OffsetRange.of(span) for span in share.at["spans"]]
        errors: list[KafkaError] = []
        self._expect_same_topics(ranges)
        with closing(self._client("Consumer", {**self.to_read(), "error_cb": errors.append})) as consumer:
            try:
                for pieces in Reading(consumer, ranges, self.patience.within_s, errors):
                    for group in bounded(pieces):
                        yield self.deliveries(**columns(group))
            except ReadError as failure:
                raise self._explained(failure, ranges) from None
        # Reading goes by the name of a topic, and another may bear it by now.
        patiently(lambda: self._expect_same_topics(ranges), self.patience)

    def commit(self, acknowledged_to: Mapping[str, int]) -> None:
        """Have the group remember offsets; those of topics that are gone, nobody needs any more."""
        wanted = {parted(name): offset for name, offset in acknowledged_to.items()}
        ids = self._cluster.topic_ids({topic for topic, _, _ in wanted})
        there = {
            (topic, number): offset
            for (topic, topic_id, number), offset in wanted.items()
            if topic in ids and ids[topic][0] == topic_id
        }
        if len(there) < len(wanted):
            logger.warning("%s: %d partitions are gone with their topics", self.name, len(wanted) - len(there))
        if there:
            self._cluster.commit(there, self.deployment)

    def check_ready(self) -> None:
        """Raise `SourceError` also where others read in the group, which would not let its offsets be committed."""
        super().check_ready()
        if members := self._cluster.members():
            raise SourceError(
                f"source {self.name!r}: group_id {self.group_id!r} has {members} active members: other consumers read "
                "in it. Stop them, or give this source a group of its own"
            )

    def labelled(self, labels: Mapping[str, str]) -> Mapping[str, Any]:
        """As headers, with the message's id as key."""
        return {"headers": dict(labels), "key": labels.get("message_id")}

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Put messages into a topic; return how many, once all replicas that have to have them do.

        Args:
            payloads: One per message.
            metadata: Of each: `topic` (if unset the source's, where it has one), `partition` (if unset by the key),
                `key` and `headers` (pairs or a mapping), whose values are bytes or as a delivery's metadata holds them.
                With `"tombstone": true` an empty payload is sent as null. All other metadata is left out.

        Raises:
            SourceError: Some were refused; the others are sent.
        """
        client = self._client("Producer", self.to_send())
        sent, refused = send(client, self, payloads, metadata)
        if refused:
            raise SourceError(f"{len(refused)} of {sent} messages were refused; the first: {refused[0]}")
        return sent

    def close(self) -> None:
        """Let go of the client that this process asked by."""
        self.__dict__.pop("_cluster", None)

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self)

    def _client(self, kind: str, settings: Mapping[str, Any]) -> Any:
        """Make a consumer or a producer, whose log is Python's."""
        import confluent_kafka  # here: the code server loads this file and needs no client

        try:
            return getattr(confluent_kafka, kind)(settings, logger=client_logger)
        except Exception as error:
            raise explained(error, self) from None

    def _expect_same_topics(self, ranges: Iterable[OffsetRange]) -> None:
        """Refuse what was read by the name of a topic that is gone, or another one by now."""
        ids = self._cluster.topic_ids({one.topic for one in ranges})
        for one in ranges:
            found, _ = ids.get(one.topic, ("", []))
            if found != one.topic_id:
                now = " and made again" if found else ""
                raise SourceError(
                    f"source {self.name!r}: topic {one.topic!r} was deleted{now} since this receive was planned. Its "
                    "messages are lost; the next run reads what is there"
                )

    def _explained(self, failure: ReadError, ranges: Iterable[OffsetRange]) -> SourceError:
        """Say why a range cannot be read to its end, and what to do."""
        error, name = failure.error, f"source {self.name!r}"
        if error is None:
            self._expect_same_topics(ranges)
            return SourceAwayError(
                f"{name}: {failure} gives nothing for {self.patience.within_s:g} s: has its partition a leader?"
            )
        if error.name() not in _GONE:
            return explained(error, self, str(failure))
        self._expect_same_topics(ranges)
        return SourceError(
            f"{name}: {failure} lost messages before they were read: retention or an operator removed them. The next "
            "run goes on with what is there, and logs which offsets are lost. Keep messages for longer (retention.ms, "
            "retention.bytes of the topic), or let the pipeline run more often"
        )


_GONE = {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE", "UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "_UNKNOWN_TOPIC"}
"""Errors of offsets that are not there, or of a topic that is not."""
