"""Sending messages to Kafka: each is safe, or refused by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from pipeline_platform.connectors.kafka.cluster import explained
from pipeline_platform.connectors.kafka.kafka_messages import to_bytes
from pipeline_platform.source.contract import SourceError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

    from pipeline_platform.connectors.kafka.kafka_options import KafkaOptions

_TOO_LARGE = "MSG_SIZE_TOO_LARGE"


def send(
    producer: Producer,
    source: KafkaOptions,
    payloads: Iterable[bytes],
    metadata: Iterable[Mapping[str, Any] | None] | None,
) -> tuple[int, list[SourceError]]:
    """Send messages; return how many there were, and why some of them were refused.

    Args:
        producer: Waits until all replicas have a message, and sends none twice.
        source: Whose messages they are.
        payloads: One per message.
        metadata: One per message; see `KafkaSource.send`.

    Raises:
        SourceError: It cannot be said where to send a message, or with which key or headers.
    """
    refused: list[SourceError] = []
    together: list[dict[str, Any]] = []
    """Messages of which one, or all that the client had put into one batch, are too large."""

    def answered(message: dict[str, Any], *, alone: bool, error: KafkaError | None, _: Message) -> None:
        if error is None:
            return
        if error.name() == _TOO_LARGE and not alone:
            together.append(message)
        else:
            refused.append(explained(error, source, f"topic {message['topic']!r}"))

    def produce(message: dict[str, Any], *, alone: bool) -> None:
        from confluent_kafka import KafkaException

        delivered = partial(answered, message, alone=alone)
        while True:
            try:
                producer.produce(**message, on_delivery=lambda error, sent: delivered(error=error, _=sent))
            except BufferError:  # the client holds as many as it may
                producer.poll(0.1)
                continue
            except KafkaException as error:
                refused.append(explained(error, source, f"topic {message['topic']!r}"))
            break
        producer.poll(0)

    sent = 0
    beside = repeat(None) if metadata is None else metadata
    for payload, said in zip(payloads, beside, strict=metadata is not None):
        produce(_message(source, payload, said or {}), alone=False)
        sent += 1
    producer.flush()
    for message in together:
        produce(message, alone=True)
        producer.flush()
    return sent, refused


def _message(source: KafkaOptions, payload: bytes, said: Mapping[str, Any]) -> dict[str, Any]:
    """What the client library sends of a payload and its metadata."""
    topic = said.get("topic") or source.default_topic
    if topic is None:
        raise SourceError(
            f"source {source.name!r} reads several topics, and a message says none: name `topic` in its metadata"
        )
    headers = said.get("headers") or ()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        message = {"key": to_bytes(said.get("key")), "headers": [(name, to_bytes(value)) for name, value in pairs]}
    except (ValueError, TypeError) as error:
        raise SourceError(f"source {source.name!r} cannot send a message to {topic!r}: {error}") from None
    to = {} if said.get("partition") is None else {"partition": said["partition"]}
    return {"topic": topic, "value": payload, **message, **to}
