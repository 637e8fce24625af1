"""The two sides of an AMQP channel: messages that it was given, to take and acknowledge, and messages that it sends."""

import base64
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Self
from uuid import uuid4

from pika.spec import Basic, BasicProperties
from pydantic_core import to_json

from pipeline_platform.connectors.rabbitmq.rabbitmq_connection import Channel
from pipeline_platform.model.portions import portions

BATCH_ROWS = 1_000
BATCH_BYTES = 16 * 2**20
"""A batch is full at whichever comes first."""
BATCHES_AHEAD = 4
"""Full batches that wait to be taken, at which the thread stops reading from the socket."""
HELD_UP_S = 0.25
"""How long the thread waits for room before it looks after its heartbeats again."""
PREFETCH_MAX = 65_535
"""What the two bytes of AMQP's prefetch-count hold."""
TOGETHER = 1_000
TOGETHER_BYTES = 16 * 2**20
"""What is sent before its confirmations are waited for."""


_TO_JSON = partial(to_json, inf_nan_mode="null", fallback=str)


class AmqpDelivery(NamedTuple):
    """One message as it came; `id` is empty if the publisher gave none."""

    tag: int
    id: str
    data: bytes
    metadata: bytes
    redelivered: bool

    @classmethod
    def of(cls, method: Any, properties: Any, body: bytes, queue: str, id_header: str | None) -> Self:
        """Read a message of a queue; its id is in that header, or a property."""
        known = {"exchange": method.exchange, "routing_key": method.routing_key, "redelivered": method.redelivered}
        known |= {name: value for name, value in vars(properties).items() if value is not None}
        headers = properties.headers
        id_ = properties.message_id if id_header is None else (headers or {}).get(id_header)
        if not isinstance(id_, str):
            id_ = "" if id_ is None else id_.hex() if isinstance(id_, bytes) else str(id_)
        again = method.redelivered or (bool(headers) and _was_in(queue, headers))
        return cls(method.delivery_tag, id_, body, _json(known), again)


class Parcel(NamedTuple):
    """One message to send."""

    exchange: str
    routing_key: str
    body: bytes
    properties: BasicProperties

    @classmethod
    def of(cls, payload: bytes, note: Mapping[str, Any], queue: str, id_header: str | None) -> Self:
        """Address a payload: to the queue, unless the note says otherwise; persistent, and with an id of its own."""
        if not isinstance(payload, bytes):
            raise TypeError(f"a payload is bytes, not {type(payload).__name__}; encode it")
        known = {"exchange": "", "routing_key": queue, "delivery_mode": 2, "message_id": uuid4().hex, **note}
        if id_header is not None:
            known["headers"] = {id_header: known["message_id"], **known.get("headers", {})}
        exchange, routing_key = known.pop("exchange"), known.pop("routing_key")
        properties = vars(BasicProperties())
        if odd := sorted(known.keys() - properties.keys()):
            allowed = ", ".join(["exchange", "routing_key", *properties])
            raise TypeError(f"the metadata of a message that is sent has no {odd}; it may have {allowed}")
        return cls(exchange, routing_key, payload, BasicProperties(**known))


class Inbox:
    """The messages that one channel was given: those that nobody took yet, and those that are not acknowledged."""

    def __init__(self, channel: Channel, queue: str, messages: int, id_header: str | None) -> None:
        self.channel, self._queue, self._id_header = channel, queue, id_header
        self.is_cancelled = self.is_stopped = False
        self._left = messages
        self._outstanding: dict[int, None] = {}  # delivery tags, ascending
        self._full: deque[list[AmqpDelivery]] = deque()
        self._batch: list[AmqpDelivery] = []
        self._bytes = 0
        self._changed = threading.Condition()
        channel.connection.before_reading.append(self._wait_for_room)

    @property
    def is_full(self) -> bool:
        """Whether all came that were asked for."""
        return self._left <= 0

    def consume(self, within_s: float, consumer_tag: str, exclusive: bool, arguments: Mapping[str, Any]) -> None:
        """Have the server send messages; the connection counts as lost if it does not say within so long that it will.

        A quorum queue that has no leader yet, as after a restart, may never say so.
        """
        # A bound holds for each consumer, so what is more than one can ask for needs several.
        bounds = [min(PREFETCH_MAX, self._left - start) for start in range(0, self._left, PREFETCH_MAX)]

        def act(channel: Any, done: Future[Any]) -> None:
            channel.add_on_cancel_callback(self._cancelled)
            for nth, bound in enumerate(bounds[:1] if exclusive else bounds):
                channel.basic_qos(prefetch_count=bound)
                channel.basic_consume(
                    self._queue,
                    self._arrived,
                    exclusive=exclusive,
                    consumer_tag=f"{consumer_tag}-{nth}" if consumer_tag and nth else consumer_tag or None,
                    arguments=dict(arguments),
                    # The others begin one after the other, while messages come: nobody waits for them.
                    callback=None if nth else done.set_result,
                )

        self.channel.act(act, within_s)

    def count(self) -> Future[int]:
        """Ask how many messages wait; what came before the answer was sent before it."""

        def act(channel: Any, done: Future[int]) -> None:
            channel.queue_declare(
                self._queue, passive=True, callback=lambda answer: done.set_result(answer.method.message_count)
            )

        return self.channel.request(act)

    def take(self, quiet_s: float) -> list[AmqpDelivery]:
        """Wait for a full batch, or for what has come once nothing more does for `quiet_s` seconds: maybe nothing.

        It raises where the channel or its connection was lost, and with it what came by it.
        """
        before = -1
        while not self._full:
            if ended := self.channel.ended:
                raise ended
            if self.is_full or len(self._batch) == before:
                self.channel.act(self._cut_now)
                break
            before = len(self._batch)
            with self._changed:
                self._changed.wait_for(lambda: self._full, quiet_s)
        with self._changed:
            batch = self._full.popleft()
            self._changed.notify_all()
            return batch

    def stop(self) -> None:
        """End the consumers. What came before can still be taken, what comes now goes back to the queue."""
        if self.is_stopped or self.channel.ended:
            return
        self.is_stopped = True
        tags = self.channel.act(lambda channel, done: done.set_result(channel.consumer_tags))
        for tag in tags:
            self.channel.ask("basic_cancel", consumer_tag=tag)

    def acknowledge(self, tags: Collection[int], call: Callable[[Any, int, bool], None]) -> None:
        """Acknowledge messages; when this returns, the server has done so. Those that are acknowledged already stay so.

        `call` is pika's: for one tag; or, where true, for all up to it that are not acknowledged.
        """

        def act(channel: Any, done: Future[Any]) -> None:
            mine = self._outstanding.keys() & set(tags)
            last = 0
            for tag in self._outstanding:
                if tag not in mine:
                    break
                last = tag
            if last:
                call(channel, last, True)
            for tag in sorted(tag for tag in mine if tag > last):
                call(channel, tag, False)
            for tag in mine:
                del self._outstanding[tag]
            # The server does one thing after the other on a channel: its answer to this means that the rest is done. A
            # queue that is gone, for which it would take everything without a word, it refuses.
            channel.queue_declare(self._queue, passive=True, callback=done.set_result)

        self.channel.act(act)

    def _wait_for_room(self) -> None:
        """Hold the connection's thread up while full batches wait to be taken."""
        if len(self._full) >= BATCHES_AHEAD and not self.is_stopped:
            with self._changed:
                self._changed.wait_for(lambda: len(self._full) < BATCHES_AHEAD, HELD_UP_S)

    def _arrived(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        # Read here, where it is at hand: of what waits in a batch, pika's objects would fill the processor's cache.
        delivery = AmqpDelivery.of(method, properties, body, self._queue, self._id_header)
        self._outstanding[delivery.tag] = None
        self._batch.append(delivery)
        self._bytes += len(body)
        self._left -= 1
        if self._left <= 0 or len(self._batch) >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
            self._cut()

    def _cut_now(self, _channel: Any, done: Future[Any]) -> None:
        self._cut()
        done.set_result(None)

    def _cut(self) -> None:
        """End the batch; the connection's thread alone does it, so that to add a message takes no lock."""
        with self._changed:
            self._full.append(self._batch)
            self._batch, self._bytes = [], 0
            self._changed.notify_all()

    def _cancelled(self, _frame: Any) -> None:
        self.is_cancelled = True


class Outbox:
    """Publishes on a channel of its own, and waits until the server has confirmed each message."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sent = 0
        self._unconfirmed: set[int] = set()
        self._refusals: list[str] = []
        self._done: Future[Any] = Future()
        channel.act(lambda its, done: done.set_result(its.add_on_return_callback(self._returned)))
        channel.ask("confirm_delivery", ack_nack_callback=self._confirmed)

    def publish(self, parcels: Iterable[Parcel]) -> Iterator[tuple[int, list[str]]]:
        """Publish messages; yield how many were confirmed or refused, and in words those that no queue took."""
        for together in portions(parcels, lambda parcel: len(parcel.body), TOGETHER_BYTES, TOGETHER):

            def act(channel: Any, done: Future[Any], together: list[Parcel] = together) -> None:
                self._done = done
                for parcel in together:
                    self._sent += 1
                    self._unconfirmed.add(self._sent)
                    channel.basic_publish(*parcel, mandatory=True)

            self._channel.act(act)
            refusals, self._refusals = self._refusals, []
            yield len(together), refusals

    def _confirmed(self, frame: Any) -> None:
        tag, many = frame.method.delivery_tag, frame.method.multiple
        confirmed = {one for one in self._unconfirmed if one <= tag} if many else {tag}
        if isinstance(frame.method, Basic.Nack):
            self._refusals += ["a queue is full or failed"] * len(confirmed)
        self._unconfirmed -= confirmed
        if not self._unconfirmed:
            self._done.set_result(None)

    def _returned(self, _channel: Any, method: Any, _properties: Any, _body: bytes) -> None:
        lost = f"exchange {method.exchange!r} has no queue for routing_key {method.routing_key!r}"
        self._refusals.append(f"{lost}: {method.reply_text}")


def _was_in(queue: str, headers: Mapping[str, Any]) -> bool:
    """Whether the server's own headers say that a message was in a queue before."""
    deaths = headers.get("x-death")
    died = isinstance(deaths, list) and any(isinstance(death, dict) and death.get("queue") == queue for death in deaths)
    return died or bool(headers.get("x-delivery-count"))


def _json(known: dict[str, Any]) -> bytes:
    """Metadata as JSON, whatever a publisher put there: one message must not end the connection of all."""
    try:
        return _TO_JSON({**known, "headers": _plain(known["headers"])} if "headers" in known else known)
    except ValueError:  # binary where AMQP wants text
        pass
    except RecursionError:
        known = {**known, "headers": "tables in too many tables"}
    try:
        return _TO_JSON(_plain(known))
    except ValueError as error:
        return _TO_JSON(_plain({**known, "headers": str(error)}))


def _plain(value: Any) -> Any:
    """A value for JSON, which has no binary values and no NaN."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
