"""The two sides of an AMQP channel: received messages, with their acknowledgement, and sent messages."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Self
from uuid import uuid4

from pika.spec import Basic, BasicProperties

from pipeline_platform.connectors.rabbitmq.amqp_deliveries import AmqpDelivery, metadata_by_pika
from pipeline_platform.connectors.rabbitmq.rabbitmq_connection import Channel
from pipeline_platform.model.portions import BATCH_BYTES, portions

MAILBOX_ROWS = 1_000
"""A batch ends at this limit or at `BATCH_BYTES`."""
BATCHES_AHEAD = 4
"""Full batches in the queue at which the thread stops reading from the socket."""
HELD_UP_S = 0.25
"""Maximum seconds that the thread waits for room in the queue: heartbeats must continue."""
PREFETCH_MAX = 65_535
"""Maximum of AMQP's prefetch-count, a 16-bit number."""
TOGETHER = 1_000
TOGETHER_BYTES = 16 * 2**20
"""Limits of the messages that are sent before the thread waits for their confirmations."""


class Parcel(NamedTuple):
    """A message to send."""

    exchange: str
    routing_key: str
    body: bytes
    properties: BasicProperties

    @classmethod
    def of(cls, payload: bytes, note: Mapping[str, Any], queue: str, id_header: str | None) -> Self:
        """Return a persistent message to the queue with an id of its own; `note` overrides any of these."""
        known = {"exchange": "", "routing_key": queue, "delivery_mode": 2, "message_id": uuid4().hex, **note}
        if id_header is not None:
            known["headers"] = {id_header: known["message_id"], **known.get("headers", {})}
        exchange, routing_key = known.pop("exchange"), known.pop("routing_key")
        properties = vars(BasicProperties())
        if odd := sorted(known.keys() - properties.keys()):
            allowed = ", ".join(["exchange", "routing_key", *properties])
            raise TypeError(f"the metadata of a message to send has invalid keys {odd}. Valid keys: {allowed}.")
        return cls(exchange, routing_key, payload, BasicProperties(**known))


class Inbox:
    """Messages that a channel received and that were not taken or not acknowledged yet."""

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
        """Whether all requested messages arrived."""
        return self._left <= 0

    def consume(self, within_s: float, consumer_tag: str, exclusive: bool, arguments: Mapping[str, Any]) -> None:
        """Start the consumers; the connection counts as lost if the server does not confirm within `within_s` seconds.

        A quorum queue without a leader, as after a restart, may never confirm.
        """
        # The prefetch count is per consumer, so a larger demand needs several consumers.
        bounds = [min(PREFETCH_MAX, self._left - start) for start in range(0, self._left, PREFETCH_MAX)]

        def act(channel: Any, done: Future[Any]) -> None:
            channel.add_on_cancel_callback(self._cancelled)
            channel.add_on_close_callback(_leave)
            channel.connection.consumers[channel.channel_number] = self._arrived
            for nth, bound in enumerate(bounds[:1] if exclusive else bounds):
                channel.basic_qos(prefetch_count=bound)
                channel.basic_consume(
                    self._queue,
                    self._arrived_by_pika,
                    exclusive=exclusive,
                    consumer_tag=f"{consumer_tag}-{nth}" if consumer_tag and nth else consumer_tag or None,
                    arguments=dict(arguments),
                    # The other consumers start while messages arrive: the caller does not wait for them.
                    callback=None if nth else done.set_result,
                )

        self.channel.act(act, within_s)

    def count(self) -> Future[int]:
        """Request the number of waiting messages. Messages sent before the answer arrive before it."""

        def act(channel: Any, done: Future[int]) -> None:
            channel.queue_declare(
                self._queue, passive=True, callback=lambda answer: done.set_result(answer.method.message_count)
            )

        return self.channel.request(act)

    def take(self, quiet_s: float) -> list[AmqpDelivery]:
        """Return a full batch, or the messages so far if none arrives for `quiet_s` seconds; it may be empty.

        Raises the reason if the channel or its connection was lost, and its messages with it.
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
        """Cancel the consumers. Messages that arrived before can still be taken; later ones return to the queue."""
        if self.is_stopped or self.channel.ended:
            return
        self.is_stopped = True

        def act(channel: Any, done: Future[Any]) -> None:
            _leave(channel)  # pika returns what arrives after the cancellation
            done.set_result(channel.consumer_tags)

        for tag in self.channel.act(act):
            self.channel.ask("basic_cancel", consumer_tag=tag)

    def close(self) -> bool:
        """Close the channel, unless messages on it are unacknowledged: the server would redeliver them."""
        if self._outstanding:
            return False
        self.channel.connection.before_reading.remove(self._wait_for_room)
        self.channel.close()
        return True

    def acknowledge(
        self, tags: Collection[int], call: Callable[[Any, int, bool], None], *, multiple: bool = True
    ) -> None:
        """Acknowledge messages and wait until the server has done so. Messages already acknowledged are skipped.

        `call` is pika's method: for a single tag or, if its last argument is true, for all unacknowledged tags up to
        it. With `multiple=False` each tag gets a call of its own.
        """

        def act(channel: Any, done: Future[Any]) -> None:
            mine = self._outstanding.keys() & set(tags)
            last = 0
            for tag in self._outstanding:
                if tag not in mine or not multiple:
                    break
                last = tag
            if last:
                call(channel, last, True)
            for tag in sorted(tag for tag in mine if tag > last):
                call(channel, tag, False)
            for tag in mine:
                del self._outstanding[tag]
            # A channel's commands run in order, so this answer means that the acknowledgements are done. It fails for a
            # deleted queue, for which the server accepts acknowledgements silently.
            channel.queue_declare(self._queue, passive=True, callback=done.set_result)

        self.channel.act(act)

    def _wait_for_room(self) -> None:
        """Block the connection's thread while too many full batches wait to be taken."""
        if len(self._full) >= BATCHES_AHEAD and not self.is_stopped:
            with self._changed:
                self._changed.wait_for(lambda: len(self._full) < BATCHES_AHEAD, HELD_UP_S)

    def _arrived_by_pika(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._arrived(method.delivery_tag, metadata_by_pika(method, properties), body)

    def _arrived(self, tag: int, metadata: dict[str, Any], body: bytes) -> None:
        # Converted at once: keeping many objects in a batch would fill the processor's cache.
        delivery = AmqpDelivery.of(tag, metadata, body, self._queue, self._id_header)
        self._outstanding[tag] = None
        self._batch.append(delivery)
        self._bytes += len(body)
        self._left -= 1
        if self._left <= 0 or len(self._batch) >= MAILBOX_ROWS or self._bytes >= BATCH_BYTES:
            self._cut()

    def _cut_now(self, _channel: Any, done: Future[Any]) -> None:
        self._cut()
        done.set_result(None)

    def _cut(self) -> None:
        """End the batch. Only the connection's thread does this, so adding a message takes no lock."""
        with self._changed:
            self._full.append(self._batch)
            self._batch, self._bytes = [], 0
            self._changed.notify_all()

    def _cancelled(self, _frame: Any) -> None:
        self.is_cancelled = True


class Outbox:
    """Publishes on its own channel, and waits until the server has confirmed each message."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sent = 0
        self._unconfirmed: set[int] = set()
        self._refusals: list[str] = []
        self._done: Future[Any] = Future()
        channel.act(lambda its, done: done.set_result(its.add_on_return_callback(self._returned)))
        channel.ask("confirm_delivery", ack_nack_callback=self._confirmed)

    def publish(self, parcels: Iterable[Parcel]) -> Iterator[tuple[int, list[str]]]:
        """Publish messages; yield the number of answered messages, and a description of each refused message."""
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
        confirmed = {sent for sent in self._unconfirmed if sent <= tag} if many else {tag}
        if isinstance(frame.method, Basic.Nack):
            self._refusals += ["a queue is full or failed"] * len(confirmed)
        self._unconfirmed -= confirmed
        if not self._unconfirmed:
            self._done.set_result(None)

    def _returned(self, _channel: Any, method: Any, _properties: Any, _body: bytes) -> None:
        unrouted = f"exchange {method.exchange!r} has no queue for routing_key {method.routing_key!r}"
        self._refusals.append(f"{unrouted}: {method.reply_text}")


def _leave(channel: Any, _reason: object = None) -> None:
    """Let pika deliver the messages of a channel."""
    channel.connection.consumers.pop(channel.channel_number, None)
