"""Received messages, read from the bytes of a connection: pika's objects for each frame take most of the time."""

import base64
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import pika
import pika.data
from pika.adapters.utils import io_services_utils
from pydantic_core import to_json

io_services_utils._AsyncTransportBase._MAX_RECV_BYTES = 2**16  # pika reads 4 kB at once, and has no option for it

_METHOD, _HEADER, _BODY, _HEARTBEAT, _FRAME_END = 1, 2, 3, 8, 0xCE
_FRAME = struct.Struct(">BHI")
"""Kind, channel and size of a frame, which ends with `_FRAME_END` (AMQP 0-9-1, 4.2.3)."""
_DELIVER = struct.pack(">HH", 60, 60)
"""The method `basic.deliver`: consumer tag, delivery tag, redelivered, exchange and routing key."""
_TAG = struct.Struct(">QB")
_CONTENT = struct.Struct(">BHI4xQH")
"""A frame with the header of a message: the size of its payload, and flags of the properties that follow."""
_TIME = struct.Struct(">Q")
_TO_JSON = partial(to_json, inf_nan_mode="null", fallback=str)

Arrived = Callable[[int, dict[str, Any], bytes], object]
"""Called with the delivery tag, the metadata and the payload of a message."""


class AmqpDelivery(NamedTuple):
    """A received message; `id` is empty if the publisher set none."""

    tag: int
    id: str
    data: bytes
    metadata: bytes
    redelivered: bool

    @classmethod
    def of(cls, tag: int, metadata: dict[str, Any], body: bytes, queue: str, id_header: str | None) -> Self:
        """Return a message of a queue, with its id from a header or a property."""
        headers = metadata.get("headers") or {}
        id_ = metadata.get("message_id") if id_header is None else headers.get(id_header)
        if not isinstance(id_, str):
            id_ = "" if id_ is None else id_.hex() if isinstance(id_, bytes) else str(id_)
        again = metadata["redelivered"] or (bool(headers) and _was_in(queue, headers))
        return cls(tag, id_, body, _json(metadata), again)


def metadata_by_pika(method: Any, properties: Any) -> dict[str, Any]:
    """Return the metadata of a message that pika decoded."""
    known = {"exchange": method.exchange, "routing_key": method.routing_key, "redelivered": method.redelivered}
    return known | {name: value for name, value in vars(properties).items() if value is not None}


class DeliveryStream(pika.SelectConnection):  # type: ignore[misc]  # an untyped class
    """A connection that reads most messages without pika.

    The function of a channel in `consumers` receives its messages, except those with an empty payload, with a payload
    of several frames, or with properties that are not UTF-8. pika receives their frames and all others, one at a time.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.consumers: dict[int, Arrived] = {}
        self._unread = b""
        super().__init__(*args, **options)

    def _on_data_available(self, data_in: bytes) -> None:
        data, at = self._unread + data_in, 0
        arrived = len(data)
        while at + _FRAME.size < arrived:
            kind, channel, size = _FRAME.unpack_from(data, at)
            # Anything else is the reply of a server that refuses the version of the protocol.
            end = at + size + 8 if kind <= _HEARTBEAT else arrived
            if end > arrived:
                break
            if kind == _METHOD and channel in self.consumers and data.startswith(_DELIVER, at + 7):
                last, message = _message(data, at, end, channel)
                if last > arrived:
                    break
                if message is not None:
                    self.consumers[channel](*message)
                    self.bytes_received += last - at  # heartbeats depend on it
                    at = last
                    continue
            super()._on_data_available(data[at:end])
            at = end
        self._unread = data[at:]


def _message(data: bytes, at: int, past: int, channel: int) -> tuple[int, tuple[int, dict[str, Any], bytes] | None]:
    """Return the end of a message, which may not have arrived yet, and its tag, metadata and payload.

    Without the latter, pika reads the frame from `at` to `past`, which is the method `basic.deliver` of a channel.
    """
    arrived, by_pika = len(data), (past, None)
    if past + _CONTENT.size > arrived:
        return arrived + 1, None
    kind, its_channel, size, length, flags = _CONTENT.unpack_from(data, past)
    body = past + size + 8
    if (kind, its_channel) != (_HEADER, channel) or not length or flags & 1:
        return by_pika
    if body + _FRAME.size > arrived:
        return arrived + 1, None
    kind, its_channel, size = _FRAME.unpack_from(data, body)
    end = body + size + 8
    if (kind, its_channel, size) != (_BODY, channel, length):
        return by_pika
    if end > arrived:
        return end, None
    if not data[past - 1] == data[body - 1] == data[end - 1] == _FRAME_END:
        return by_pika
    tag_at = at + 12 + data[at + 11]
    tag, again = _TAG.unpack_from(data, tag_at)
    try:
        metadata = {**_route(data[tag_at + _TAG.size : past - 1]), "redelivered": again & 1 == 1}
        _add_properties(metadata, data, past + _CONTENT.size, flags)
    except UnicodeDecodeError:
        return by_pika
    return end, (tag, metadata, data[body + 7 : end - 1])


@lru_cache(1_000)
def _route(encoded: bytes) -> Mapping[str, str]:
    """Return the exchange and the routing key of a message, usually those of the message before."""
    middle = 1 + encoded[0]
    return {"exchange": encoded[1:middle].decode(), "routing_key": encoded[middle + 1 :].decode()}


_PROPERTIES: Mapping[str, Any] = {
    "content_type": str, "content_encoding": str, "headers": dict, "delivery_mode": int, "priority": int,
    "correlation_id": str, "reply_to": str, "expiration": str, "message_id": str, "timestamp": _TIME, "type": str,
    "user_id": str, "app_id": str, "cluster_id": str,
}  # fmt: skip
"""Properties with their encodings, from the highest flag, 2**15, downwards (AMQP 0-9-1, 1.8)."""


@lru_cache(1_000)
def _flagged(flags: int) -> tuple[tuple[str, Any], ...]:
    return tuple(each for nth, each in enumerate(_PROPERTIES.items()) if flags & 1 << 15 - nth)


def _add_properties(metadata: dict[str, Any], data: bytes, at: int, flags: int) -> None:
    for name, kind in _flagged(flags):
        if kind is str:
            past = at + 1 + data[at]
            metadata[name] = data[at + 1 : past].decode()
            at = past
        elif kind is int:
            metadata[name] = data[at]
            at += 1
        elif kind is dict:
            metadata[name], at = pika.data.decode_table(data, at)
        else:
            (metadata[name],) = _TIME.unpack_from(data, at)
            at += _TIME.size


def _was_in(queue: str, headers: Mapping[str, Any]) -> bool:
    """Return whether the server's own headers show that a message was in a queue before."""
    deaths = headers.get("x-death")
    died = isinstance(deaths, list) and any(isinstance(death, dict) and death.get("queue") == queue for death in deaths)
    return died or bool(headers.get("x-delivery-count"))


def _json(known: dict[str, Any]) -> bytes:
    """Return metadata as JSON, with a fallback for any value: one message must not end the connection."""
    try:
        return _TO_JSON({**known, "headers": _plain(known["headers"])} if "headers" in known else known)
    except ValueError:  # binary data in a text property
        pass
    except RecursionError:
        known = {**known, "headers": "nested too deeply"}
    try:
        return _TO_JSON(_plain(known))
    except ValueError as error:
        return _TO_JSON(_plain({**known, "headers": str(error)}))


def _plain(value: Any) -> Any:
    """Return a value for JSON, with binary values as base64."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
