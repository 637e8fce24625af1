"""Requests to a Kafka cluster other than messages (topics, offsets, groups), and explanations of its errors."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pipeline_platform.connectors.kafka.kafka_options import KafkaOptions
from pipeline_platform.source.contract import SourceError
from pipeline_platform.source.readers import Reader, as_text, of_text

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, TopicPartition
    from confluent_kafka.admin import AdminClient

logger = logging.getLogger(__name__)
client_logger = logging.getLogger(f"{__name__}.client")
"""Receives the log of the client library."""

OURS = "pipeline-platform"
"""Prefix of the metadata of offsets that this connector commits; marks of deployments follow. Tools that reset offsets
write other metadata, or none."""

_NO_ID = "A" * 22
"""Topic id of all topics of a cluster without topic ids: Event Hubs, or Kafka before 2.8."""
_LATE_S = 2.0
_AWAY = "_(TRANSPORT|TIMED_OUT|ALL_BROKERS_DOWN|RESOLVE|MSG_TIMED_OUT|WAIT_COORD|TIMED_OUT_QUEUE|DESTROY)"
_BUSY = (
    ".*COORDINATOR.*|REQUEST_TIMED_OUT|NETWORK_EXCEPTION|.*NOT_AVAILABLE|.*LEADER.*|NOT_CONTROLLER|KAFKA_STORAGE_ERROR"
    "|NOT_ENOUGH_REPLICAS.*|THROTTLING_QUOTA_EXCEEDED|UNKNOWN_TOPIC_ID"
)
_HAS_MEMBERS = "UNKNOWN_MEMBER_ID|NON_EMPTY_GROUP|ILLEGAL_GENERATION|REBALANCE_IN_PROGRESS|.*MEMBER_EPOCH"
_REFUSED = "_AUTHENTICATION|_SSL|.*SASL.*"
_EXPLANATIONS = {
    # The server's text about rejected credentials is left out: it may quote them.
    _REFUSED: "{servers} rejected this client ({code}; security_protocol {protocol}). Correct sasl_mechanism, "
    "sasl_username and sasl_password, or the ssl_ options.",
    "_?UNKNOWN_TOPIC(_OR_PART)?": "{what} does not exist at {servers}. Create the topic, or correct topics or "
    "topic_pattern.",
    "TOPIC_AUTHORIZATION_FAILED": "permission denied for {what}. Grant this user READ and DESCRIBE on the topic, and "
    "WRITE to send.",
    "GROUP_AUTHORIZATION_FAILED": "permission denied for group_id {group!r}. Grant this user READ and DESCRIBE on the "
    "group.",
    _HAS_MEMBERS: "group_id {group!r} has active members: other consumers use it. Stop them, or set a group_id that "
    "only this source uses.",
    "_INVALID_ARG|_CONFLICT|_NOT_CONFIGURED": "the client library rejected an option: {text}. Correct that option, or "
    "client_options.",
    "MSG_SIZE_TOO_LARGE": "a message exceeds the size limit of {what}: {text}. Raise the topic's max.message.bytes.",
    _BUSY: "the brokers at {servers} are not ready: {text}. The call is retried; check the brokers if this continues.",
    _AWAY: "bootstrap_servers {servers!r} does not answer: {text}. Correct it, or check the network and the brokers.",
}  # fmt: skip
"""Descriptions of errors, by patterns of their codes."""


def explained(error: BaseException | KafkaError, source: KafkaOptions, what: str = "a topic") -> SourceError:
    """Return an error that names the option at fault and the fix, without secrets."""
    cause = kafka_error(error)
    code = cause.name() if cause else type(error).__name__
    text = cause.str() if cause else str(error)
    servers, protocol = source.bootstrap_servers, source.security_protocol
    found = (explanation for codes, explanation in _EXPLANATIONS.items() if re.fullmatch(codes, code))
    explanation = next(found, "{what} at {servers} failed with {code}: {text}").format(
        servers=servers, group=source.group_id, protocol=protocol, code=code, text=text, what=what
    )
    return source.error(explanation, away=bool(re.fullmatch(f"{_AWAY}|{_BUSY}", code)))


def kafka_error(error: BaseException | KafkaError) -> KafkaError | None:
    """Return the client library's description of an error; None for an error of another kind."""
    from confluent_kafka import KafkaError

    if isinstance(error, KafkaError):
        return error
    found = error.args[0] if error.args else None
    return found if isinstance(found, KafkaError) else None


def is_refusal(error: KafkaError) -> bool:
    """Return whether the cluster rejected this client, so that a retry is useless."""
    return re.fullmatch(_REFUSED, error.name()) is not None


def _noted(metadata: str) -> tuple[bool, list[Reader]]:
    is_ours = metadata.startswith(OURS)
    return is_ours, of_text(metadata.removeprefix(OURS)) if is_ours else []


class Cluster:
    """Sends requests to a cluster through one client, which stays connected while the cluster answers.

    A client that has lost its brokers is replaced: librdkafka 2.16 never finds a group's coordinator again after the
    coordinator was restarted, and loops meanwhile.
    """

    def __init__(self, source: KafkaOptions) -> None:
        self._source, self._timeout_s = source, source.request_timeout_s
        self._error: KafkaError | None = None
        self._answered: tuple[KafkaError | None, list[TopicPartition]] | None = None

    def topic_ids(self, topics: Iterable[str]) -> dict[str, tuple[str, list[int]]]:
        """Return the id and the partitions of each of these topics that exists. A topic without an id has its name."""
        from confluent_kafka import TopicCollection

        names = TopicCollection([*topics])
        found = self._ask("describe_topics", names, none="UNKNOWN_TOPIC_OR_PART")
        return {
            topic: (topic if id_ == _NO_ID else id_, sorted(partition.id for partition in description.partitions))
            for topic, description in found.items()
            if description is not None
            for id_ in [str(description.topic_id)]
        }

    def matching(self, pattern: str) -> list[str]:
        """Return the topics whose whole names match a pattern, without Kafka's internal topics."""
        try:
            names = self.admin.list_topics(timeout=self._timeout_s).topics
        except Exception as error:
            raise self._explained(error) from None
        return sorted(name for name in names if re.fullmatch(pattern, name) and not name.startswith("__"))

    def offsets(
        self, partitions: Iterable[TopicPartition], at: int, *, read_committed: bool
    ) -> Callable[[], dict[TopicPartition, int]]:
        """Request offsets of partitions, by a mark or a time in milliseconds; return a function that waits for them."""
        from confluent_kafka import IsolationLevel
        from confluent_kafka.admin import OffsetSpec

        wanted = dict.fromkeys(partitions, OffsetSpec(at))
        level = IsolationLevel.READ_COMMITTED if read_committed else IsolationLevel.READ_UNCOMMITTED
        ask = self._begin("list_offsets", wanted, none=_BUSY, isolation_level=level)
        return lambda: {partition: answer.offset for partition, answer in ask().items() if answer is not None}

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, bool, list[Reader]]]:
        """Return what the group has committed for each partition: offset, whether we committed it, and its readers."""
        from confluent_kafka import TopicPartition

        try:
            found = self.member.committed([*partitions], timeout=self._timeout_s)
        except Exception as error:
            self.member.poll(0)
            raise self._explained(error) from None
        return {
            TopicPartition(partition.topic, partition.partition): (partition.offset, *_noted(partition.metadata or ""))
            for partition in self._accepted(found)
            if partition.offset >= 0
        }

    def commit(self, offsets: Mapping[tuple[str, int], int], me: Reader | None = None) -> None:
        """Commit an offset of each partition, with marks of the deployments that committed lately."""
        from confluent_kafka import KafkaError, TopicPartition

        note = OURS
        if me:
            found = self.committed([TopicPartition(*partition) for partition in offsets]).values()
            readers = {reader.id: reader for _, _, marks in found for reader in marks if not reader.is_late} | {
                me.id: me
            }
            note += as_text(readers.values())
        wanted = [TopicPartition(topic, partition, at, note) for (topic, partition), at in offsets.items()]
        end, self._answered = time.monotonic() + self._timeout_s, None
        # Not a synchronous commit: without a broker it blocks for longer than request_timeout_s.
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
        """Return the number of consumers in the group."""
        found = self._ask("describe_consumer_groups", [self._source.group_id], none="GROUP_ID_NOT_FOUND")
        return sum(len(group.members) for group in found.values() if group is not None)

    @cached_property
    def member(self) -> Consumer:
        """Client that uses the group's offsets and never joins the group.

        librdkafka up to 2.16 aborts the process when a broker that is no longer the coordinator answers an admin
        client.
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
        """Admin client."""
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
        if self._error is None or not is_refusal(self._error):  # a rejection says more than the disconnect that follows
            self._error = error

    def _explained(self, error: BaseException | KafkaError, what: str = "a topic") -> SourceError:
        """Explain an error; if a call timed out, by the error that the client met meanwhile."""
        cause = kafka_error(error)
        timed_out = cause is not None and cause.name() == "_TIMED_OUT"
        return explained(self._error if timed_out and self._error is not None else error, self._source, what)

    def _accepted(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return a group's answers about partitions; raise `SourceError` if it refused one."""
        for partition in partitions:
            if partition.error is not None:
                raise explained(partition.error, self._source, f"{partition.topic} [{partition.partition}]")
        return partitions

    def _ask(self, method: str, what: object, *, none: str) -> dict[Any, Any]:
        """Call and wait. No other call is pending here, so a client that lost its brokers can be replaced first."""
        self.admin.poll(0)  # delivers its errors and its log
        if self._error is not None:
            self._renew()
        return self._begin(method, what, none=none)()

    def _begin(self, method: str, what: object, *, none: str, **options: object) -> Callable[[], dict[Any, Any]]:
        """Start a call; return a function that waits for its answers. An error that matches `none` counts as None."""
        asked = getattr(self.admin, method)(what, request_timeout=self._timeout_s, **options)

        def answers() -> dict[Any, Any]:
            self._wait(asked.values())
            found: dict[Any, Any] = {}
            for key, answer in asked.items():
                error = answer.exception()
                cause = kafka_error(error) if error is not None else None
                if error is not None and (cause is None or not re.fullmatch(none, cause.name())):
                    explained = self._explained(error, str(key))
                    self._renew()
                    raise explained
                found[key] = None if error is not None else answer.result()
            return found

        return answers

    def _wait(self, asked: Iterable[Future[Any]]) -> None:
        from confluent_kafka import KafkaError

        # The client ends each call in time; a call to a client that another thread replaced never ends.
        waiting, end = {*asked}, time.monotonic() + self._timeout_s + _LATE_S
        while waiting:
            waiting = wait(waiting, timeout=0.05).not_done
            self.admin.poll(0)
            if waiting and self._error is not None and is_refusal(self._error):
                raise explained(self._error, self._source)
            if waiting and time.monotonic() > end:
                raise explained(KafkaError(KafkaError._TIMED_OUT), self._source)
