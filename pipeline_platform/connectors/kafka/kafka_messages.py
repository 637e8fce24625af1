"""Conversion of Kafka messages to columns of deliveries, and sending."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from json.encoder import encode_basestring
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline_platform.connectors.kafka.cluster import explained
from pipeline_platform.connectors.kafka.offset_ranges import partition_name
from pipeline_platform.model.portions import BATCH_BYTES, portions
from pipeline_platform.source.contract import SourceError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

    from pipeline_platform.connectors.kafka.kafka_options import KafkaOptions
    from pipeline_platform.connectors.kafka.offset_ranges import Piece


_APPENDED = 2
"""Type of a timestamp set by the broker, in the client library; 1 is a timestamp set by the sender."""
_KINDS = {0: '"none"', 1: '"create"', _APPENDED: '"log_append"'}
_QUEUED_BYTES = 8 * 2**20
"""Bytes in the client's queue above which no message is added to it. It is not `queue.buffering.max.kbytes`, with which
the client never accepts a larger message."""


def bounded(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Divide pieces into groups within `BATCH_BYTES`."""
    each = ((range_, message) for range_, messages in pieces for message in messages)
    for group in portions(each, lambda pair: len(pair[1]), BATCH_BYTES):
        yield [(range_, [message for _, message in some]) for range_, some in groupby(group, itemgetter(0))]


def delivery_columns(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the columns for `Source.deliveries`. JSON is built as text: `json.dumps` takes longer than the receive."""
    made: dict[str, list[Any]] = defaultdict(list)
    for range_, messages in pieces:
        begin, place = f"{range_.topic_id}:{range_.partition}:", f"{range_.topic}:{range_.partition}"
        name = partition_name(range_.topic, range_.topic_id, range_.partition)
        head = f'{{"topic": "{range_.topic}", "partition": {range_.partition}, "offset": '
        offsets = [message.offset() or 0 for message in messages]
        payloads = [message.value() for message in messages]
        keys = [_text(message.key()) for message in messages]
        headers = [_headers(message) for message in messages]
        times = [message.timestamp() for message in messages]
        made["message_id"] += [f"{begin}{offset}" for offset in offsets]
        made["data"] += [b"" if payload is None else payload for payload in payloads]
        made["ack_id"] += map(str, offsets)
        made["ack_ref"] += [name] * len(offsets)
        made["metadata"] += [
            f'{head}{offset}, "key": {key}, "headers": {pairs}, "timestamp": {ms if kind else "null"}, '
            f'"timestamp_type": {_KINDS[kind]}{TOMBSTONE if payload is None else "}"}'
            for offset, key, pairs, (kind, ms), payload in zip(offsets, keys, headers, times, payloads, strict=True)
        ]
        made["redelivered"] += [offset < range_.reached for offset in offsets]
        made["published_at"] += [ms if kind == _APPENDED else None for kind, ms in times]
        made["partition"] += [place] * len(offsets)
        made["sequence"] += offsets
    types = {"metadata": pa.string(), "published_at": pa.timestamp("ms", "UTC")}
    return {**made, **{name: pa.array(made[name], type_) for name, type_ in types.items()}}


TOMBSTONE = ', "tombstone": true}'
"""End of the metadata of a message without a payload: in a compacted topic it deletes the key."""


def to_bytes(value: Any) -> bytes | None:
    """Return a key or header value as bytes, from bytes or from its form in metadata; raise `ValueError` otherwise."""
    if isinstance(value, str):
        return value.encode()
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, Mapping) and value.keys() == {"base64"}:
        return base64.b64decode(value["base64"], validate=True)
    raise ValueError(f"a key or header value must be text, bytes, {{'base64': ...}} or None, got {value!r}")


def _text(value: bytes | None) -> str:
    """Return bytes as JSON: text if they are UTF-8, else base64."""
    if value is None:
        return "null"
    try:
        return encode_basestring(value.decode())
    except UnicodeDecodeError:
        return f'{{"base64": "{base64.b64encode(value).decode()}"}}'


_HEADERS_OF = methodcaller("headers")
"""A call that Python checks for errors. `message.headers()`, once specialised by Python, is not checked, and returns
an invalid value."""


def _headers(message: Message) -> str:
    try:
        pairs = _HEADERS_OF(message)
    except (SystemError, UnicodeDecodeError):  # a name is not UTF-8: the client library then returns no headers at all
        return "null"
    if not pairs:
        return "[]"
    return f"[{', '.join(f'[{encode_basestring(name)}, {_text(value)}]' for name, value in pairs)}]"


def produce(
    producer: Producer, source: KafkaOptions, messages: Iterable[tuple[bytes, Mapping[str, Any]]]
) -> tuple[int, list[SourceError]]:
    """Send messages as `KafkaSource.send` does; return their number and the errors of refused messages.

    The producer waits until all replicas have a message, and sends no message twice.
    """
    refused: list[SourceError] = []
    queued = 0
    together: list[dict[str, Any]] = []
    """Messages that are too large, or that the client put into a batch that is too large."""

    def produce(message: dict[str, Any], *, alone: bool) -> None:
        from confluent_kafka import KafkaException

        nonlocal queued
        size = len(message["value"] or b"")

        def answered(error: KafkaError | None, _: Message) -> None:
            nonlocal queued
            queued -= size
            if error is not None and error.name() == "MSG_SIZE_TOO_LARGE" and not alone:
                together.append(message)
            elif error is not None:
                refused.append(explained(error, source, f"topic {message['topic']!r}"))

        while True:
            try:
                producer.produce(**message, on_delivery=answered)
                queued += size
            except BufferError:  # the client's queue is full
                producer.poll(0.1)
                continue
            except KafkaException as error:
                refused.append(explained(error, source, f"topic {message['topic']!r}"))
            break
        producer.poll(0)
        # message.timeout.ms includes the time in the queue. With an unavailable broker, all messages time out together.
        while queued > _QUEUED_BYTES and not refused:
            producer.poll(0.1)

    sent = 0
    for message in messages:
        produce(_message(source, *message), alone=False)
        sent += 1
    producer.flush()
    for too_large in together:
        produce(too_large, alone=True)
        producer.flush()
    return sent, refused


def _message(source: KafkaOptions, payload: bytes, note: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client library's arguments for a payload and its metadata."""
    topic = note.get("topic") or source.default_topic
    if topic is None:
        raise source.error(
            "the metadata of a message names no topic, and the source reads several. Set `topic` in the metadata."
        )
    headers = note.get("headers") or ()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        message = {"key": to_bytes(note.get("key")), "headers": [(name, to_bytes(value)) for name, value in pairs]}
    except (ValueError, TypeError) as error:
        raise source.error(f"cannot send a message to {topic!r}: {error}.") from None
    to = {} if note.get("partition") is None else {"partition": note["partition"]}
    value = None if note.get("tombstone") and not payload else payload
    return {"topic": topic, "value": value, **message, **to}
