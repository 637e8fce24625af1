"""What is asked of a Kafka cluster beside messages: topics, offsets and groups, and what its errors mean."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline_platform.connectors.kafka.kafka_options import KafkaOptions
from pipeline_platform.model.safe_text import redacted
from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.source.readers import Reader, as_text, of_text

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, TopicPartition
    from confluent_kafka.admin import AdminClient

logger = logging.getLogger(__name__)
client_logger = logging.getLogger(f"{__name__}.client")
"""Hears what the client library says."""

OURS = "pipeline-platform"
"""The metadata of offsets that this connector commits begin so; marks of deployments follow. Tools that reset offsets
leave others, or none."""

_LATE_S = 2.0
_AWAY = "_(TRANSPORT|TIMED_OUT|ALL_BROKERS_DOWN|RESOLVE|MSG_TIMED_OUT|WAIT_COORD|TIMED_OUT_QUEUE|DESTROY)"
_BUSY = (
    ".*COORDINATOR.*|REQUEST_TIMED_OUT|NETWORK_EXCEPTION|.*NOT_AVAILABLE|.*LEADER.*|NOT_CONTROLLER|KAFKA_STORAGE_ERROR"
    "|NOT_ENOUGH_REPLICAS.*|THROTTLING_QUOTA_EXCEEDED|UNKNOWN_TOPIC_ID"
)
_HAS_MEMBERS = "UNKNOWN_MEMBER_ID|NON_EMPTY_GROUP|ILLEGAL_GENERATION|REBALANCE_IN_PROGRESS|.*MEMBER_EPOCH"
_REFUSED = "_AUTHENTICATION|_SSL|.*SASL.*"
_EXPLANATIONS = {
    # What the server says of refused credentials is left out: it may quote them.
    _REFUSED: "{servers} refuses to talk to this client ({code}; security_protocol {protocol}): correct "
    "sasl_mechanism, sasl_username and sasl_password, or the ssl_ options",
    "_?UNKNOWN_TOPIC(_OR_PART)?": "{what} is not at {servers}: create the topic, or correct topics or topic_pattern",
    "TOPIC_AUTHORIZATION_FAILED": "not allowed on {what}: let this user READ and DESCRIBE the topic, and WRITE to send",
    "GROUP_AUTHORIZATION_FAILED": "not allowed on group_id {group!r}: let this user READ and DESCRIBE the group",
    _HAS_MEMBERS: "group_id {group!r} has active members: other consumers read in it. Stop "
    "them, or give this source a group of its own",
    "_INVALID_ARG|_CONFLICT|_NOT_CONFIGURED": "the client library refuses an option: {text}. "
    "Correct it, or client_options",
    "MSG_SIZE_TOO_LARGE": "a message is larger than {what} takes: {text}. Raise the topic's max.message.bytes",
    _BUSY: "the brokers at {servers} are not ready for that yet ({text}): it is tried again",
    _AWAY: "bootstrap_servers {servers!r} does not answer: {text}. Correct it, or see to the network or the brokers",
}  # fmt: skip
"""What to do about an error, by its code."""


def explained(error: BaseException | KafkaError, source: KafkaOptions, what: str = "a topic") -> SourceError:
    """Say which option of a source is to blame and what to do, and quote none of its secrets."""
    cause = kafka_error(error)
    code = cause.name() if cause else type(error).__name__
    text = cause.str() if cause else str(error)
    servers, protocol = source.bootstrap_servers, source.security_protocol
    found = (way_out for codes, way_out in _EXPLANATIONS.items() if re.fullmatch(codes, code))
    way_out = next(found, "{what} at {servers} failed with {code}: {text}").format(
        servers=servers, group=source.group_id, protocol=protocol, code=code, text=text, what=what
    )
    kind = SourceAwayError if re.fullmatch(f"{_AWAY}|{_BUSY}", code) else SourceError
    return kind(redacted(f"source {source.name!r}: {way_out}", source.secrets))


def kafka_error(error: BaseException | KafkaError) -> KafkaError | None:
    """The library's own words for an error; None where it is not the library's."""
    from confluent_kafka import KafkaError

    if isinstance(error, KafkaError):
        return error
    found = error.args[0] if error.args else None
    return found if isinstance(found, KafkaError) else None


def is_refusal(error: KafkaError) -> bool:
    """Whether the cluster refuses this client, so that there is no use in trying again."""
    return re.fullmatch(_REFUSED, error.name()) is not None


def _noted(metadata: str) -> tuple[bool, list[Reader]]:
    is_ours = metadata.startswith(OURS)
    return is_ours, of_text(metadata.removeprefix(OURS)) if is_ours else []


class Cluster:
    """Asks a cluster by one client, which stays connected while the cluster answers.

    One that has lost its brokers gives way to another: librdkafka 2.16 never finds a group's coordinator again after it
    was restarted, and turns in circles meanwhile.
    """

    def __init__(self, source: KafkaOptions) -> None:
        self._source, self._timeout_s = source, source.request_timeout_s
        self._error: KafkaError | None = None
        self._answered: tuple[KafkaError | None, list[TopicPartition]] | None = None

    def topic_ids(self, topics: Iterable[str]) -> dict[str, tuple[str, list[int]]]:
        """The id and the partitions of each of these topics that is there."""
        from confluent_kafka import TopicCollection

        names = TopicCollection([*topics])
        found = self._ask("describe_topics", names, none="UNKNOWN_TOPIC_OR_PART")
        return {
            topic: (str(one.topic_id), sorted(partition.id for partition in one.partitions))
            for topic, one in found.items()
            if one is not None
        }

    def matching(self, pattern: str) -> list[str]:
        """The topics whose whole names match a pattern, but for those that Kafka keeps for itself."""
        try:
            names = self.admin.list_topics(timeout=self._timeout_s).topics
        except Exception as error:
            raise self._explained(error) from None
        return sorted(one for one in names if re.fullmatch(pattern, one) and not one.startswith("__"))

    def offsets(
        self, partitions: Iterable[TopicPartition], at: int, *, read_committed: bool
    ) -> Callable[[], dict[TopicPartition, int]]:
        """Begin to ask for offsets of partitions, by a mark or a time in milliseconds; return what waits for them."""
        from confluent_kafka import IsolationLevel
        from confluent_kafka.admin import OffsetSpec

        wanted = dict.fromkeys(partitions, OffsetSpec(at))
        level = IsolationLevel.READ_COMMITTED if read_committed else IsolationLevel.READ_UNCOMMITTED
        ask = self._begin("list_offsets", wanted, none=_BUSY, isolation_level=level)
        return lambda: {partition: answer.offset for partition, answer in ask().items() if answer is not None}

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, bool, list[Reader]]]:
        """What the group remembers of each partition of which it does: offset, whether it is ours, and who reads."""
        from confluent_kafka import TopicPartition

        try:
            found = self.member.committed([*partitions], timeout=self._timeout_s)
        except Exception as error:
            self.member.poll(0)
            raise self._explained(error) from None
        return {
            TopicPartition(one.topic, one.partition): (one.offset, *_noted(one.metadata or ""))
            for one in self._accepted(found)
            if one.offset >= 0
        }

    def commit(self, offsets: Mapping[tuple[str, int], int], me: Reader | None = None) -> None:
        """Have the group remember an offset of each partition, and who committed lately: me, and others."""
        from confluent_kafka import KafkaError, TopicPartition

        note = OURS
        if me:
            found = self.committed([TopicPartition(*partition) for partition in offsets]).values()
            readers = {one.id: one for _, _, marks in found for one in marks if not one.is_late} | {me.id: me}
            note += as_text(readers.values())
        wanted = [TopicPartition(topic, partition, at, note) for (topic, partition), at in offsets.items()]
        end, self._answered = time.monotonic() + self._timeout_s, None
        # Not by a call that waits: without a broker it does so for longer than anybody chose.
        self.member.commit(offsets=wanted, asynchronous=True)
        while self._answered is None:
            self.member.poll(0.05)
            if self._error is not None and is_refusal(self._error):
                raise explained(self._error, self._source)
            if time.monotonic() > end:
                raise self._explained(KafkaError(KafkaError._TIMED_OUT))
        error, partitions = self._answered
        if error is not None:
            raise self._explained(error)
        self._accepted(partitions)

    def members(self) -> int:
        """How many consumers are in the group."""
        found = self._ask("describe_consumer_groups", [self._source.group_id], none="GROUP_ID_NOT_FOUND")
        return sum(len(one.members) for one in found.values() if one is not None)

    @cached_property
    def member(self) -> Consumer:
        """A client that knows the group, and never joins it.

        librdkafka up to 2.16 ends the process where what is no coordinator any more answers an admin client.
        """
        from confluent_kafka import Consumer

        settings = {**self._source.settings(), "group.id": self._source.group_id, "enable.auto.commit": False}
        callbacks = {"error_cb": self._take_error, "on_commit": self._answer}
        try:
            return Consumer({**settings, **callbacks}, logger=client_logger)
        except Exception as error:
            raise explained(error, self._source) from None

    def _answer(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        self._answered = error, partitions

    @cached_property
    def admin(self) -> AdminClient:
        """The client."""
        from confluent_kafka.admin import AdminClient

        try:
            settings: dict[str, Any] = {**self._source.settings(), "error_cb": self._take_error}
            return AdminClient(settings, logger=client_logger)
        except Exception as error:
            raise explained(error, self._source) from None

    def _renew(self) -> None:
        self.__dict__.pop("admin", None)
        self._error = None

    def _take_error(self, error: KafkaError) -> None:
        if self._error is None or not is_refusal(self._error):  # that says more than that no broker is left then
            self._error = error

    def _explained(self, error: BaseException | KafkaError, what: str = "a topic") -> SourceError:
        """Explain an error; of a call that only took too long, by what the client met meanwhile."""
        cause = kafka_error(error)
        timed_out = cause is not None and cause.name() == "_TIMED_OUT"
        return explained(self._error if timed_out and self._error is not None else error, self._source, what)

    def _accepted(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return what a group answered of partitions; raise `SourceError` where it refused one."""
        for one in partitions:
            if one.error is not None:
                raise explained(one.error, self._source, f"{one.topic} [{one.partition}]")
        return partitions

    def _ask(self, method: str, what: object, *, none: str) -> dict[Any, Any]:
        """Call, and wait; nothing else is under way here, so what the client lost since can be seen to."""
        self.admin.poll(0)  # hands over its errors, and its log
        if self._error is not None:
            self._renew()
        return self._begin(method, what, none=none)()

    def _begin(self, method: str, what: object, *, none: str, **options: object) -> Callable[[], dict[Any, Any]]:
        """Begin a call; return what waits for its answers. Errors of a code in `none` mean that there is nothing."""
        asked = getattr(self.admin, method)(what, request_timeout=self._timeout_s, **options)

        def answers() -> dict[Any, Any]:
            self._wait(asked.values())
            found: dict[Any, Any] = {}
            for key, one in asked.items():
                error = one.exception()
                cause = kafka_error(error) if error is not None else None
                if error is not None and (cause is None or not re.fullmatch(none, cause.name())):
                    explained = self._explained(error, str(key))
                    self._renew()
                    raise explained
                found[key] = None if error is not None else one.result()
            return found

        return answers

    def _wait(self, asked: Iterable[Future[Any]]) -> None:
        from confluent_kafka import KafkaError

        # The client ends each call within its time; what a client was asked that another thread renewed never ends.
        waiting, end = {*asked}, time.monotonic() + self._timeout_s + _LATE_S
        while waiting:
            waiting = wait(waiting, timeout=0.05).not_done
            self.admin.poll(0)
            if waiting and self._error is not None and is_refusal(self._error):
                raise explained(self._error, self._source)
            if waiting and time.monotonic() > end:
                raise explained(KafkaError(KafkaError._TIMED_OUT), self._source)
