"""Messages of Pub/Sub, as columns of what was received and in requests that publish them."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline_platform.model.portions import portions
from pipeline_platform.source.contract import SourceError

PUBLISH_MESSAGES = 1_000
PUBLISH_BYTES = 5 * 10**6
"""What one request publishes at the most. Pub/Sub takes 10 MB, so a larger message goes alone."""


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
    return portions(messages, lambda message: len(message["data"]), PUBLISH_BYTES, PUBLISH_MESSAGES)


def _message(n: int, data: bytes, metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    attributes, key = metadata.get("attributes") or {}, metadata.get("ordering_key") or ""
    if not all(isinstance(text, str) for text in (key, *attributes, *attributes.values())):
        raise SourceError(
            f"source {source!r}: message {n} cannot be published: its metadata must have an ordering_key that is text, "
            "and attributes that are text by name"
        )
    return {"data": data, "attributes": dict(attributes), "ordering_key": key}
