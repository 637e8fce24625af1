"""Google Cloud Pub/Sub as a source: pulled by the thousand, acknowledged once decided and published."""

import itertools
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from pipeline_platform.connectors.pubsub.google_cloud import code, connected, explained, last, tries
from pipeline_platform.model.portions import portions
from pipeline_platform.source import calls
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Refused, Share, SourceError

logger = logging.getLogger(__name__)

LONGEST_S = 600
"""The longest deadline that Pub/Sub gives a message, and so the longest delay."""
ACK_IDS = 2_500
ACK_BYTES = 500 * 1024
"""What one request acknowledges at the most: Pub/Sub takes 512 KiB, and an id has some 200 bytes."""
EMPTY_REPLIES = 2
"""Pulls in a row without a message that end a share: one alone may be empty although messages wait."""


class PubsubSource(calls.CalledSource):
    """A pull subscription of Google Cloud Pub/Sub, or of a server that speaks its protocol.

    - The lease is the deadline of each message. A run extends it after a third, once it has written messages down.
    - `redelivered` is always true: Pub/Sub counts deliveries only with a dead-letter policy, and only about right.
    - `published_at` is Pub/Sub's own time: ids are looked up in what was decided since.
    - `metadata` holds `publish_time` and, where a message has them, `attributes`, `ordering_key` and
      `delivery_attempt`.
    - `partition` is the ordering key. Pub/Sub numbers no messages: those of a key are in the order in which it gave
      them, and their `sequence` is null.
    - Only a subscription with exactly-once delivery refuses an acknowledgement that comes after the deadline. Any other
      may end a message that another receive holds by then. That receive finds it decided.
    """

    lease_option: ClassVar[str] = "ack_deadline_s"

    subscription: str = Field(description="projects/<project>/subscriptions/<name>, or its name alone beside project.")
    project: str | None = Field(None, description="Google Cloud project of subscription and topic given by name.")
    topic: str | None = Field(
        None,
        description="Where send() publishes: projects/<project>/topics/<name>, or its name alone beside project.",
    )
    ack_deadline_s: int = Field(
        LONGEST_S,
        ge=10,
        le=LONGEST_S,
        description="Seconds that a received message is kept from others, 10 to 600, while its run does not extend "
        "that. It is the lease: lease_s follows it, and is not set by itself.",
    )
    max_number_of_messages: int = Field(
        1_000, ge=1, le=1_000, description="Messages asked for in one pull, 1 to 1,000. Lower it for large messages."
    )
    pull_timeout_s: float = Field(
        2.0,
        ge=0.1,
        le=60,
        description="Seconds that a pull waits for a message, 0.1 to 60. Raise it where pulls come back empty although "
        "messages wait: what Pub/Sub gives to a pull that has ended waits for its deadline.",
    )
    timeout_s: float = Field(
        10.0, ge=1, le=20, description="Seconds that any other call may take with its retries, 1 to 20."
    )
    credentials_file: str | None = Field(
        None, description="JSON file of credentials, on every machine that runs tasks; if unset the environment's own."
    )
    emulator_host: str | None = Field(
        None, description="host:port of a server without TLS and credentials; if unset PUBSUB_EMULATOR_HOST, or Google."
    )
    api_endpoint: str | None = Field(
        None, description="host of Pub/Sub in one region, as europe-west1-pubsub.googleapis.com; if unset the global."
    )

    @field_validator("credentials_file")
    @classmethod
    def _is_a_path(cls, file: str | None) -> str | None:
        if file and ("{" in file or "\n" in file or max(map(len, file.split("/"))) > _FILE_NAME):
            raise ValueError("must be the path of a JSON file, not its content. Write the content to a file")
        return file

    @field_validator("emulator_host", "api_endpoint")
    @classmethod
    def _is_a_host(cls, host: str | None) -> str | None:
        if host and not _HOST.fullmatch(host):
            raise ValueError("must be host or host:port, without scheme, user and password")
        return host

    @model_validator(mode="after")
    def _has_full_names(self) -> Self:
        _ = self._path, self._topic
        return self

    @property
    def places(self) -> frozenset[str]:
        """The subscription, at Google or at an emulator."""
        return frozenset({f"{self._path} at {self._emulator or 'Google'}"})

    @property
    def longest_delay_s(self) -> int:
        """A delay is a deadline."""
        return LONGEST_S

    @property
    def _path(self) -> str:
        return self._full_name("subscription", self.subscription)

    @property
    def _topic(self) -> str | None:
        return self.topic and self._full_name("topic", self.topic)

    def _full_name(self, option: str, name: str) -> str:
        if re.fullmatch(rf"projects/[^/]+/{option}s/[^/]+", name):
            return name
        if "/" in name or not name:
            raise ValueError(f"{option} must be projects/<project>/{option}s/<name>, or a name alone; got {name!r}")
        if not self.project or "/" in self.project:
            raise ValueError(
                f"{option} {name!r} is a name alone and project is {self.project!r}: set project to the Google Cloud "
                f"project's id, or {option} to projects/<project>/{option}s/{name}"
            )
        return f"projects/{self.project}/{option}s/{name}"

    def backlog(self) -> Backlog:
        """Look whether the subscription is there, with a subscriber's rights; Pub/Sub's API does not say what waits."""
        found = self._subscription()
        if found is None:
            self._expect_rights()
        elif found.push_config.push_endpoint or found.detached:
            state = "is detached from its topic" if found.detached else "pushes its messages to an address"
            raise SourceError(f"source {self.name!r}: subscription {self._path!r} {state}: name one to pull from")
        return Backlog(None)

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide the demand into equal shares, each worth a full pull at least. Nothing is leased yet."""
        shares = min(concurrency, -(-demand // self.max_number_of_messages))
        return [Share(messages=demand // shares + (i < demand % shares)) for i in range(shares)]

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Pull until the demand is met, the subscription seems empty, a call fails or a third of the lease is over.

        What takes longer could be given to another before the run has written it down and extends it.
        """
        found = self._subscription()  # connects, too, before the threads do
        is_held = found is not None and found.ack_deadline_seconds == self.ack_deadline_s
        for messages in calls.receive(
            partial(self._pull, is_held=is_held),
            share.messages,
            per_call=self.max_number_of_messages,
            empty_replies=EMPTY_REPLIES,
            size=lambda received: len(received.message.data),
            within_s=self.extend_every_s,
        ):
            yield self.deliveries(**columns_of(messages), ack_ref=self._path)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge messages, 2,500 a call; all are lost where the subscription `ack_ref` is gone."""
        return self._in_groups("acknowledge", ack_ref, ack_ids)

    def hold(self, ack_ref: str, ack_ids: Sequence[str], seconds: int) -> list[Refused]:
        """Set the deadline of messages to so many seconds from now, 2,500 a call; 0 follows the retry policy.

        Only a subscription with exactly-once delivery says which it gave to another receive.
        """
        return self._in_groups(_HOLD, ack_ref, ack_ids, ack_deadline_seconds=seconds)

    def labelled(self, labels: Mapping[str, str]) -> Mapping[str, Any]:
        """As attributes, each cut to what Pub/Sub takes."""
        return {"attributes": {name: text.encode()[:VALUE].decode(errors="ignore") for name, text in labels.items()}}

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Publish to `topic`, in order; return how many, once Pub/Sub has them.

        A request that is tried again may publish its messages twice, under other ids.

        Args:
            payloads: One per message.
            metadata: Of each, `attributes` (text by name) and `ordering_key`; other keys are passed over.
        """
        from google.pubsub_v1 import PublisherClient

        topic, sent = self._topic, 0
        if not topic:
            raise SourceError(f"source {self.name!r}: topic is unset, so send() cannot publish: set it")
        with self._connected(PublisherClient) as publisher:
            for messages in requests_of(payloads, metadata, self.name):
                try:
                    publisher.publish(
                        topic=topic, messages=messages, timeout=self.timeout_s, retry=tries(self.timeout_s)
                    )
                except Exception as error:
                    raise self._explained(last(error), f"topic {topic!r} (took {sent:,} messages before)") from None
                sent += len(messages)
        return sent

    def close(self) -> None:
        """Close the connection that this process opened."""
        if client := self._clients.pop(os.getpid(), None):
            client.transport.close()

    @cached_property
    def _clients(self) -> dict[int, Any]:
        """By process: gRPC does not promise that a fork can use its parent's connection."""
        return {}

    @property
    def _client(self) -> Any:
        client = self._clients.get(os.getpid())
        if client is None:
            from google.pubsub_v1 import SubscriberClient

            client = self._clients[os.getpid()] = self._connected(SubscriberClient)
        return client

    def _connected(self, service: Any) -> Any:
        if self._emulator and not _HOST.fullmatch(self._emulator):
            raise SourceError(
                f"source {self.name!r}: PUBSUB_EMULATOR_HOST must be host:port, without scheme, user and password. "
                "Correct it, or unset it to use Google's servers"
            )
        try:
            return connected(
                service, self._emulator, credentials_file=self.credentials_file, api_endpoint=self.api_endpoint
            )
        except Exception as error:
            raise self._explained(error) from None

    def _ask(self, operation: str, timeout_s: float | None = None, **parameters: Any) -> Any:
        call = getattr(self._client, operation)
        try:
            return call(**parameters, timeout=timeout_s or self.timeout_s, retry=tries(self.timeout_s))
        except Exception as error:
            raise self._explained(last(error)) from None  # Google may quote credentials that it refuses

    def _subscription(self) -> Any:
        """What Pub/Sub says of the subscription, or None where looking at it is not allowed."""
        try:
            return self._ask("get_subscription", subscription=self._path)
        except SourceError as error:
            if code(last(error.__context__)) != "PermissionDenied":
                raise
            return None

    def _expect_rights(self) -> None:
        asked = {"resource": self._path, "permissions": [_CONSUME]}
        try:
            granted = self._client.test_iam_permissions(request=asked, timeout=self.timeout_s).permissions
        except Exception as error:
            raise self._explained(error) from None
        if _CONSUME not in granted:
            raise SourceError(
                f"source {self.name!r}: subscription {self._path!r} is not there, or {_CONSUME} on it is not granted. "
                "Create it, correct subscription or project, or grant roles/pubsub.subscriber"
            )

    def _pull(self, most: int, *, is_held: bool) -> list[Any]:
        try:
            reply = self._ask("pull", self.pull_timeout_s, subscription=self._path, max_messages=most)
        except SourceError as error:
            if code(last(error.__context__)) not in {"DeadlineExceeded", "Cancelled"}:  # the server may give up first
                raise
            return []
        messages = list(type(reply).pb(reply).received_messages)  # wrapped ones take four times as long to read
        if is_held or not messages:
            return messages
        # What is another's by now, as an exactly-once subscription says, is not received here.
        ids = [received.ack_id for received in messages]
        refused = self._request(_HOLD, self._path, ids, ack_deadline_seconds=self.ack_deadline_s)
        lost = {one.ack_id for one in refused if one.lost}
        return [received for received in messages if received.ack_id not in lost]

    def _in_groups(self, operation: str, subscription: str, ack_ids: Sequence[str], **options: Any) -> list[Refused]:
        if not ack_ids:
            return []
        _ = self._client  # made once, before the threads ask for it
        per_call = min(ACK_IDS, ACK_BYTES // max(map(len, ack_ids)))
        return calls.in_groups(
            lambda group: self._request(operation, subscription, group, **options), ack_ids, per_call
        )

    def _request(self, operation: str, subscription: str, ack_ids: Sequence[str], **options: Any) -> list[Refused]:
        """Make one request; return what it refused."""
        try:
            self._ask(operation, subscription=subscription, ack_ids=ack_ids, **options)
        except SourceError as error:
            if subscription != self._path and code(last(error.__context__)) == "NotFound":
                return [Refused(ack_id, f"{subscription} is no subscription any more", lost=True) for ack_id in ack_ids]
            if refused := _refused_by_name(ack_ids, error):
                return refused
            raise
        return []

    def _explained(self, error: BaseException | None, what: str | None = None) -> SourceError:
        host = self._emulator
        place = f"emulator_host {host}" if host else f"api_endpoint {self.api_endpoint or 'unset, so Google'}"
        return explained(
            error, self.name, what or f"subscription {self._path!r}", place, f"credentials_file {self.credentials_file}"
        )

    @property
    def _emulator(self) -> str | None:
        return self.emulator_host or os.environ.get("PUBSUB_EMULATOR_HOST")


_HOST = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?")
_FILE_NAME = 255
"""Characters of the longest name of a file. Text that is longer is a key."""
_HOLD = "modify_ack_deadline"
_CONSUME = "pubsub.subscriptions.consume"


def _refused_by_name(ack_ids: Sequence[str], error: SourceError) -> list[Refused]:
    """What an exactly-once subscription says of single ids; empty if it names none. The others are refused, too."""
    metadata = [getattr(detail, "metadata", {}) for detail in getattr(last(error.__context__), "details", ())]
    answers = {ack_id: words for each in metadata for ack_id, words in each.items()}
    if answers.keys().isdisjoint(ack_ids):
        return []
    return [
        Refused(ack_id, answers.get(ack_id, str(error)), lost=answers.get(ack_id) == "PERMANENT_FAILURE_INVALID_ACK_ID")
        for ack_id in ack_ids
    ]


PUBLISH_MESSAGES = 1_000
PUBLISH_BYTES = 5 * 10**6
"""What one request publishes at the most. Pub/Sub takes 10 MB, so a larger message goes alone."""
VALUE = 1_024
"""Bytes that the value of an attribute has at the most."""


def columns_of(received: Sequence[Any]) -> dict[str, Any]:
    """Say what was received, in the columns of `Source.deliveries`."""
    messages = [one.message for one in received]
    published = [message.publish_time for message in messages]
    return {
        "message_id": [message.message_id for message in messages],
        "data": [message.data for message in messages],
        "ack_id": [one.ack_id for one in received],
        "metadata": [_metadata(one) for one in received],
        "published_at": pa.array(
            [time.seconds * 1_000_000 + time.nanos // 1_000 for time in published], pa.timestamp("us", "UTC")
        ),
        "partition": [message.ordering_key or None for message in messages],
    }


def _metadata(received: Any) -> dict[str, Any]:
    message = received.message
    metadata: dict[str, Any] = {"publish_time": message.publish_time.ToJsonString()}
    if message.attributes:
        metadata["attributes"] = dict(message.attributes)
    if message.ordering_key:
        metadata["ordering_key"] = message.ordering_key
    if received.delivery_attempt:
        metadata["delivery_attempt"] = received.delivery_attempt
    return metadata


def requests_of(
    payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None, source: str
) -> Iterator[list[dict[str, Any]]]:
    """Group messages into what one request publishes, in order; a `SourceError` where metadata cannot be published."""
    pairs = zip(payloads, itertools.repeat(None) if metadata is None else metadata, strict=metadata is not None)
    messages = (_message(n, data, meant or {}, source) for n, (data, meant) in enumerate(pairs))
    return portions(messages, _bytes, PUBLISH_BYTES, PUBLISH_MESSAGES)


def _bytes(message: Mapping[str, Any]) -> int:
    texts = [message["ordering_key"], *message["attributes"], *message["attributes"].values()]
    return len(message["data"]) + sum(len(text.encode()) for text in texts)


def _message(n: int, data: bytes, metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    attributes, key = metadata.get("attributes") or {}, metadata.get("ordering_key") or ""
    if not all(isinstance(text, str) for text in (key, *attributes, *attributes.values())):
        raise SourceError(
            f"source {source!r}: message {n} cannot be published: its metadata must have an ordering_key that is text, "
            "and attributes that are text by name"
        )
    return {"data": data, "attributes": dict(attributes), "ordering_key": key}
