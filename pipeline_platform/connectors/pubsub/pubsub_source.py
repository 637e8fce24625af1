"""Google Cloud Pub/Sub as a source: messages are pulled by the thousand and acknowledged once published."""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, ClassVar, Self

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from pipeline_platform.connectors.pubsub.google_cloud import code, connected, explained, last, tries
from pipeline_platform.model.portions import portions
from pipeline_platform.source import calls
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.clients import per_process
from pipeline_platform.source.contract import Refused, Share, SourceError
from pipeline_platform.source.metadata import with_metadata

logger = logging.getLogger(__name__)

_LONGEST_S = 600
"""Longest acknowledgement deadline of Pub/Sub in seconds, which is also the longest delay."""
ACK_IDS = 2_500
ACK_BYTES = 500 * 1024
"""Limits of an acknowledge request: Pub/Sub accepts 512 KiB, and an id has about 200 bytes."""
_EMPTY_REPLIES = 2
"""Consecutive empty pulls that end a share: a single pull may be empty although messages are waiting."""


class PubsubSource(calls.CalledSource):
    """A pull subscription of Google Cloud Pub/Sub, or of a server that speaks its protocol.

    - The lease is the acknowledgement deadline of each message. A run renews it after a third, once it has recorded the
      messages.
    - `redelivered` is always true: Pub/Sub counts deliveries only with a dead-letter policy, and only approximately.
    - `published_at` is Pub/Sub's own time: ids are looked up in the decisions since then.
    - `metadata` contains `publish_time` and, if the message has them, `attributes`, `ordering_key` and
      `delivery_attempt`.
    - `partition` is the ordering key. Pub/Sub does not number messages: the messages of a key are in delivery order,
      and their `sequence` is null.
    - Only a subscription with exactly-once delivery refuses an acknowledgement after the deadline. Any other
      subscription may remove a message that another receive has leased meanwhile. That receive finds it already
      decided.
    """

    lease_option: ClassVar[str] = "ack_deadline_s"

    subscription: str = Field(description="projects/<project>/subscriptions/<name>, or its name together with project.")
    project: str | None = Field(
        None, description="Google Cloud project of a subscription or topic that is given by name."
    )
    topic: str | None = Field(
        None,
        description="Topic for send(): projects/<project>/topics/<name>, or its name together with project.",
    )
    ack_deadline_s: int = Field(
        _LONGEST_S,
        ge=10,
        le=_LONGEST_S,
        description="Acknowledgement deadline in seconds, 10 to 600: the lease of a message, which its run renews. "
        "lease_s has the same value and cannot be set separately.",
    )
    max_number_of_messages: int = Field(
        1_000, ge=1, le=1_000, description="Maximum messages of a pull, 1 to 1,000. Lower it for large messages."
    )
    pull_timeout_s: float = Field(
        2.0,
        ge=0.1,
        le=60,
        description="Seconds that a pull waits for a message, 0.1 to 60. Raise it if pulls return nothing although "
        "messages are waiting: messages sent to a pull that has timed out wait for their deadline.",
    )
    timeout_s: float = Field(
        10.0, ge=1, le=20, description="Timeout of any other call with its retries in seconds, 1 to 20."
    )
    credentials_file: str | None = Field(
        None,
        description="JSON file of credentials, on every machine that runs tasks; by default the environment's.",
    )
    emulator_host: str | None = Field(
        None,
        description="host:port of a server without TLS and credentials; by default PUBSUB_EMULATOR_HOST, or Google.",
    )
    api_endpoint: str | None = Field(
        None,
        description="Host of Pub/Sub in a region, such as europe-west1-pubsub.googleapis.com; by default global.",
    )

    @field_validator("credentials_file")
    @classmethod
    def _is_a_path(cls, file: str | None) -> str | None:
        if file and ("{" in file or "\n" in file or max(map(len, file.split("/"))) > _FILE_NAME):
            raise ValueError("must be the path of a JSON file, not its content. Write the content to a file.")
        return file

    @field_validator("emulator_host", "api_endpoint")
    @classmethod
    def _is_a_host(cls, host: str | None) -> str | None:
        if host and not _HOST.fullmatch(host):
            raise ValueError("must be host or host:port, without scheme, user and password. Correct it.")
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
        """The longest deadline: a delay is set as a deadline."""
        return _LONGEST_S

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
            raise ValueError(
                f"{option} must be projects/<project>/{option}s/<name> or a name, got {name!r}. Correct it."
            )
        if not self.project or "/" in self.project:
            raise ValueError(
                f"{option} {name!r} is only a name, and project is {self.project!r}. Set project to the Google Cloud "
                f"project's id, or {option} to projects/<project>/{option}s/{name}."
            )
        return f"projects/{self.project}/{option}s/{name}"

    def backlog(self) -> Backlog:
        """Check that the subscription exists and can be read; Pub/Sub's API does not report a backlog."""
        found = self._subscription()
        if found is None:
            self._expect_rights()
        elif found.push_config.push_endpoint or found.detached:
            state = "is detached from its topic" if found.detached else "is a push subscription"
            raise self.error(f"subscription {self._path!r} {state}. Set subscription to a pull subscription.")
        return Backlog(None)

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Divide the demand into equal shares of at least one full pull. Nothing is leased yet."""
        return Share.equal(demand, min(concurrency, -(-demand // self.max_number_of_messages)))

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Pull until the demand is met, the subscription seems empty, a call fails or a third of the lease has passed.

        After a longer time the first messages could expire before the run has recorded them and renews their lease.
        """
        found = self._subscription()
        is_held = found is not None and found.ack_deadline_seconds == self.ack_deadline_s
        for messages in calls.receive(
            partial(self._pull, is_held=is_held),
            share.messages,
            per_call=self.max_number_of_messages,
            empty_replies=_EMPTY_REPLIES,
            size=lambda received: len(received.message.data),
            within_s=self.extend_every_s,
        ):
            yield self.deliveries(**_columns_of(messages), ack_ref=self._path)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge messages, 2,500 per call; all are lost if the subscription `ack_ref` was deleted."""
        return self._in_groups("acknowledge", ack_ref, ack_ids)

    def hold(self, ack_ref: str, ack_ids: Sequence[str], seconds: int) -> list[Refused]:
        """Set the deadline of messages to `seconds` from now, 2,500 per call; 0 follows the retry policy.

        Only a subscription with exactly-once delivery reports the messages that another receive has leased.
        """
        return self._in_groups(_HOLD, ack_ref, ack_ids, ack_deadline_seconds=seconds)

    def labelled(self, labels: Mapping[str, str]) -> Mapping[str, Any]:
        """Return labels as attributes, each truncated to Pub/Sub's limit."""
        return {"attributes": {name: text.encode()[:VALUE].decode(errors="ignore") for name, text in labels.items()}}

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Publish to `topic`, in order; return the number of messages once Pub/Sub has stored them.

        A request that is retried may publish its messages twice, with different ids.

        Args:
            payloads: One per message.
            metadata: For each message, `attributes` (text by name) and `ordering_key`; other keys are ignored.
        """
        from google.pubsub_v1 import PublisherClient

        topic, sent = self._topic, 0
        if not topic:
            raise self.error("topic is not set, so send() cannot publish. Set topic.")
        with self._connected(PublisherClient) as publisher:
            for messages in requests_of(with_metadata(payloads, metadata), self):
                try:
                    publisher.publish(
                        topic=topic, messages=messages, timeout=self.timeout_s, retry=tries(self.timeout_s)
                    )
                except Exception as error:
                    raise self._explained(last(error), f"topic {topic!r} (after {sent:,} messages)") from None
                sent += len(messages)
        return sent

    @per_process
    def _client(self) -> Any:
        from google.pubsub_v1 import SubscriberClient

        client = self._connected(SubscriberClient)
        client.close = client.transport.close
        return client

    def _connected(self, service: Any) -> Any:
        if self._emulator and not _HOST.fullmatch(self._emulator):
            raise self.error(
                "PUBSUB_EMULATOR_HOST must be host:port, without scheme, user and password. Correct it, or unset it to "
                "use Google's servers."
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
            raise self._explained(last(error)) from None  # Google may quote the rejected credentials

    def _subscription(self) -> Any:
        """Return the subscription's configuration, or None without the permission to read it."""
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
            raise self.error(
                f"subscription {self._path!r} does not exist, or permission {_CONSUME} is not granted. Create it, "
                "correct subscription or project, or grant roles/pubsub.subscriber."
            )

    def _pull(self, most: int, *, is_held: bool) -> list[Any]:
        try:
            reply = self._ask("pull", self.pull_timeout_s, subscription=self._path, max_messages=most)
        except SourceError as error:
            if code(last(error.__context__)) not in {"DeadlineExceeded", "Cancelled"}:  # an empty pull may time out
                raise
            return []
        messages = list(type(reply).pb(reply).received_messages)  # wrapped messages take four times as long to read
        if is_held or not messages:
            return messages
        # An exactly-once subscription refuses the messages that another receive has leased meanwhile: leave them out.
        ids = [received.ack_id for received in messages]
        refused = self._request(_HOLD, self._path, ids, ack_deadline_seconds=self.ack_deadline_s)
        lost = {entry.ack_id for entry in refused if entry.lost}
        return [received for received in messages if received.ack_id not in lost]

    def _in_groups(self, operation: str, subscription: str, ack_ids: Sequence[str], **options: Any) -> list[Refused]:
        if not ack_ids:
            return []
        per_call = min(ACK_IDS, ACK_BYTES // max(map(len, ack_ids)))
        return calls.in_groups(
            lambda group: self._request(operation, subscription, group, **options), ack_ids, per_call
        )

    def _request(self, operation: str, subscription: str, ack_ids: Sequence[str], **options: Any) -> list[Refused]:
        try:
            self._ask(operation, subscription=subscription, ack_ids=ack_ids, **options)
        except SourceError as error:
            if subscription != self._path and code(last(error.__context__)) == "NotFound":
                return [Refused(ack_id, f"{subscription} was deleted", lost=True) for ack_id in ack_ids]
            if refused := _refused_by_name(ack_ids, error):
                return refused
            raise
        return []

    def _explained(self, error: BaseException | None, what: str | None = None) -> SourceError:
        host = self._emulator
        place = f"emulator_host {host}" if host else f"api_endpoint {self.api_endpoint or 'not set, so Google'}"
        subscription, credentials = f"subscription {self._path!r}", f"credentials_file {self.credentials_file}"
        return explained(error, self, what or subscription, place, credentials)

    @property
    def _emulator(self) -> str | None:
        return self.emulator_host or os.environ.get("PUBSUB_EMULATOR_HOST")


_HOST = re.compile(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?")
_FILE_NAME = 255
"""Longest name of a file in characters. Longer text is the content of a key file."""
_HOLD = "modify_ack_deadline"
_CONSUME = "pubsub.subscriptions.consume"


def _refused_by_name(ack_ids: Sequence[str], error: SourceError) -> list[Refused]:
    """Return the refused messages if an exactly-once subscription names any; the messages it does not name included."""
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
"""Limits of a publish request. Pub/Sub accepts 10 MB, so a larger message is sent alone."""
VALUE = 1_024
"""Maximum bytes of an attribute's value."""


def _columns_of(received: Sequence[Any]) -> dict[str, Any]:
    messages = [delivery.message for delivery in received]
    published = [message.publish_time for message in messages]
    return {
        "message_id": [message.message_id for message in messages],
        "data": [message.data for message in messages],
        "ack_id": [delivery.ack_id for delivery in received],
        "metadata": [_metadata(delivery) for delivery in received],
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
    pairs: Iterable[tuple[bytes, Mapping[str, Any]]], source: PubsubSource
) -> Iterator[list[dict[str, Any]]]:
    """Divide messages into publish requests, in order; raise `SourceError` if metadata cannot be published.

    A request has one ordering key: Pub/Sub refuses several keys.
    """
    messages = (_message(n, *pair, source) for n, pair in enumerate(pairs))
    for _, of_key in groupby(messages, itemgetter("ordering_key")):
        yield from portions(of_key, _bytes, PUBLISH_BYTES, PUBLISH_MESSAGES)


def _bytes(message: Mapping[str, Any]) -> int:
    texts = [message["ordering_key"], *message["attributes"], *message["attributes"].values()]
    return len(message["data"]) + sum(len(text.encode()) for text in texts)


def _message(n: int, data: bytes, metadata: Mapping[str, Any], source: PubsubSource) -> dict[str, Any]:
    attributes, key = metadata.get("attributes") or {}, metadata.get("ordering_key") or ""
    if not all(isinstance(text, str) for text in (key, *attributes, *attributes.values())):
        raise source.error(
            f"message {n} has invalid metadata. ordering_key must be text, and attributes must be text by name."
        )
    return {"data": data, "attributes": dict(attributes), "ordering_key": key}
