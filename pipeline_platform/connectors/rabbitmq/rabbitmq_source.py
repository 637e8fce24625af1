"""RabbitMQ as a source: an open connection leases messages until they are acknowledged or it closes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from pipeline_platform.connectors.rabbitmq.rabbitmq_options import AGAIN_S, STREAM, RabbitmqOptions, explained
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.clients import per_process
from pipeline_platform.source.contract import LeasedIds, Refused, Share, SourceError
from pipeline_platform.source.metadata import with_metadata

if TYPE_CHECKING:  # the code server loads this file and needs no client
    from pipeline_platform.connectors.rabbitmq.amqp_deliveries import AmqpDelivery
    from pipeline_platform.connectors.rabbitmq.mailboxes import Inbox
    from pipeline_platform.connectors.rabbitmq.rabbitmq_connection import Channel, Connection

logger = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_S = 0.1
"""Seconds without a message after which the server is asked for its count of waiting messages."""
STALLED_S = 5.0
"""Seconds that a run waits for messages that the server has but does not send: another consumer has priority."""
LOOK_S = 15.0
"""Timeout of a backlog request and of the start of a receive, in seconds. A sensor's tick has 60 s in all."""

_CALLS: Mapping[str, Callable[[Any, int, bool], None]] = {
    "ack": lambda channel, tag, multiple: channel.basic_ack(tag, multiple),
    "reject": lambda channel, tag, multiple: channel.basic_nack(tag, multiple, requeue=False),
    "reject_and_requeue": lambda channel, tag, _: channel.basic_reject(tag, requeue=True),
    "reject_and_requeue_once": lambda channel, tag, _: channel.basic_reject(tag, requeue=True),
    "release": lambda channel, tag, multiple: channel.basic_nack(tag, multiple, requeue=True),
}
_SINGLE = frozenset({"reject_and_requeue", "reject_and_requeue_once"})
"""Actions that take a frame per message: from RabbitMQ 4.3 on, only `basic.reject` counts towards a delivery limit."""

CLOSED = "the connection that received the messages is closed"
_NAMELESS = "?"
"""Suffix of the `ack_id` of a message without its own id: its redelivery is not recognised."""


@dataclass
class _Opened:
    """Open connection and channels of a source in this process; the newest connection may be lost already."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    inboxes: dict[str, tuple[str, Inbox]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    no_stream: Connection | None = None

    def close(self) -> None:
        """Close the connection. Unacknowledged messages return to the queue."""
        if self.connection is not None:
            self.connection.close()


class RabbitmqSource(RabbitmqOptions):
    """A classic or quorum queue of RabbitMQ, or of another server that speaks AMQP 0-9-1.

    A run leases its messages through an open connection. If the connection is lost, the server redelivers them.

    - A message's id is its property `message_id`, or a header. A message without an id is handled at least once.
    - If two messages of a receive have the same id and different payloads, the second gets an id of its own, which
      starts with the shared id. It is handled at least once, like a message without an id.
    - A message that a publisher sends twice is handled twice, unless `deduplicate_publishes` is set.
    - `redelivered` is the server's flag, which is true for every message that may have been delivered before; or the
      queue's own entry in `x-death`, for a message that returned through a dead-letter exchange.
    - `published_at` is empty: the property `timestamp` is by the publisher's clock.
    - `metadata` contains `exchange`, `routing_key`, `redelivered` and the properties that are set, including `headers`,
      with AMQP's names. A binary value is `{"base64": ...}`.
    - Failed messages are acknowledged unless `on_failure` is set otherwise: they are in the failed-message table.
    - A stream is refused: it is a log, which delivers every message to every consumer.
    """

    def after_connect(self, channel: Channel) -> None:
        """Prepare the server before the queue is declared and bound. A hook for subclasses.

        Args:
            channel: Calls pika's methods by name, as in `channel.ask("exchange_declare", exchange="flights")`.
        """

    @classmethod
    def without_partitions(cls, options: Mapping[str, Any]) -> str | None:
        """Return the reason: queues have no partitions."""
        return "whose queues have no partitions: leave it out"

    def backlog(self) -> Backlog:
        """Return the number of waiting messages, without the ones that runs have leased."""

        def look(connection: Connection) -> int:
            channel = connection.channel(LOOK_S)
            try:
                waiting = self._waiting(channel)
            finally:
                channel.close()
            if not waiting:
                self._expect_no_stream(connection)
            return waiting

        return Backlog(self._on_connection(look))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Return one share: the connection receives alone, whatever the concurrency. Nothing is reserved yet."""
        messages = min(demand, self.prefetch_count or demand)
        return [Share(messages=messages)] if messages else []

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Receive the waiting messages, up to the share; with `wait_time_s` also messages that arrive meanwhile."""
        begun = self._on_connection(lambda connection: self._begin(connection, share.messages, receive_id))
        if begun is None:
            return
        inbox, batch = begun
        owners: dict[str, int] = {}
        with self._explaining():
            try:
                while batch:
                    yield self._batch(inbox.channel.ref, batch, owners)
                    batch = self._next(inbox)
            finally:
                inbox.stop()

    def acknowledge(self, action: str, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge messages on the channel that received them. If it was lost, they are `lost` and redelivered."""
        if action == "noop":
            return []
        _, inbox = self._opened.inboxes.get(ack_ref, ("", None))
        lost = "" if inbox else CLOSED
        if inbox is not None:
            try:
                with self._explaining():
                    tags = [int(ack_id.removesuffix(_NAMELESS)) for ack_id in ack_ids]
                    inbox.acknowledge(tags, _CALLS[action], multiple=action not in _SINGLE)
            except SourceError as error:
                lost = str(error)
        if lost and ack_ref not in self._opened.lost:
            self._opened.lost.add(ack_ref)
            logger.warning("Not acknowledged to %s, so the server redelivers the messages: %s", self.name, lost)
        return [Refused(ack_id, lost, lost=True) for ack_id in ack_ids] if lost else []

    def finish(self, receive_id: str, held: LeasedIds = list) -> None:
        """Close the channel of a receive: a connection has a limited number of channels. See `Inbox.close`."""
        for ref, (owner, inbox) in list(self._opened.inboxes.items()):
            if owner == receive_id and inbox.close():
                del self._opened.inboxes[ref]

    def extend(self, receive_id: str, held: LeasedIds) -> bool:
        """Return whether a receive may be decided: its connection is open, or redeliveries can be recognised.

        Raises:
            SourceError: A message without its own id would be handled twice. The text says why the channel was closed.
        """
        mine = [inbox for owner, inbox in self._opened.inboxes.values() if owner == receive_id]
        ended = [inbox.channel.ended for inbox in mine if inbox.channel.ended]
        if mine and not ended:
            return True
        if not any(ack_id.endswith(_NAMELESS) for _, ack_ids in held() for ack_id in ack_ids):
            return True
        why = str(explained(ended[0], self)) if ended else f"source {self.name!r}: {CLOSED}."
        raise SourceError(
            f"{why} The server redelivers these messages. Some of them have no id of their own, so this run does not "
            "decide the receive: they would be handled twice. Give each message a unique id (message_id, or "
            "message_id_header)."
        )

    def labelled(self, labels: Mapping[str, str]) -> Mapping[str, Any]:
        """Return labels as headers."""
        return {"headers": dict(labels)}

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Publish messages; return their number once the server has confirmed each one.

        Args:
            payloads: One per message.
            metadata: For each message: `exchange` (default: the default exchange), `routing_key` (default: the queue's
                name), and AMQP's properties, such as `headers`, `message_id` and `priority`. By default a message is
                persistent and has a generated id.

        Raises:
            SourceError: The server is unavailable or refuses, or no queue accepts a message. Others may have been sent.
        """
        from pipeline_platform.connectors.rabbitmq.mailboxes import Outbox, Parcel

        messages = with_metadata(payloads, metadata)
        parcels = (Parcel.of(*message, self.queue, self.message_id_header) for message in messages)
        sent = 0
        with self._explaining():
            channel = self._connected().channel()
            try:
                for count, refusals in Outbox(channel).publish(parcels):
                    if refusals:
                        raise self.error(
                            f"{len(refusals)} of {count} messages were not accepted by a queue: {refusals[0]}. Correct "
                            "queue, or exchange and routing_key in the metadata."
                        )
                    sent += count
            finally:
                channel.close()
        return sent

    @per_process
    def _opened(self) -> _Opened:
        return _Opened()

    def _on_connection(self, act: Callable[[Connection], T]) -> T:
        """Act on the connection; retry once on a new connection if the existing one turns out to be lost."""
        with self._explaining():
            kept, connection = self._opened.connection, self._connected()
            try:
                return act(connection)
            except Exception:
                if connection is not kept or connection.is_open:
                    raise
            return act(self._connected())

    def _connected(self) -> Connection:
        """Return this process's connection; open a new one if it is lost."""
        import pika

        from pipeline_platform.connectors.rabbitmq.rabbitmq_connection import Connection

        with self._opened.lock:
            if self._opened.connection is None or not self._opened.connection.is_open:
                parameters = pika.URLParameters(self.url)
                named = {"connection_name": self.connection_name or self.name}
                parameters.client_properties = {**(parameters.client_properties or {}), **named}
                if parameters.blocked_connection_timeout is None:
                    parameters.blocked_connection_timeout = AGAIN_S
                connection = Connection(parameters)
                try:
                    self._prepare(connection)
                except BaseException:
                    connection.close()
                    raise
                self._opened.connection = connection
            return self._opened.connection

    def _prepare(self, connection: Connection) -> None:
        channel = connection.channel(LOOK_S)
        self.after_connect(channel)
        if self.declare is not None:
            options = self.declare.model_dump(include={"passive", "durable", "arguments"})
            channel.ask("queue_declare", LOOK_S, queue=self.queue, **options)
        for binding in self.bindings:
            channel.ask("queue_bind", LOOK_S, queue=self.queue, **binding.model_dump())
        channel.close()

    def _waiting(self, channel: Channel) -> int:
        answer = channel.ask("queue_declare", LOOK_S, queue=self.queue, passive=True)
        return int(answer.method.message_count)

    def _expect_no_stream(self, connection: Connection) -> None:
        """Raise `SourceError` if the queue is a stream. Checked once per connection: an empty queue looks the same."""
        if self._opened.no_stream is connection or connection.product != "RabbitMQ":
            return
        from pika.exceptions import ChannelClosedByBroker

        self._opened.no_stream = connection
        probe = connection.channel(LOOK_S)
        try:
            probe.ask("basic_qos", LOOK_S, prefetch_count=1)
            only_of_streams = {"x-stream-offset": "next"}  # refused by every other type of queue
            consumer: dict[str, Any] = {"on_message_callback": lambda *_: None, "arguments": only_of_streams}
            probe.ask("basic_consume", LOOK_S, queue=self.queue, **consumer)
        except ChannelClosedByBroker:
            return
        probe.close()
        self._opened.no_stream = None
        raise self.error(f"queue {self.queue!r} {STREAM}")

    def _begin(self, connection: Connection, messages: int, receive_id: str) -> tuple[Inbox, list[AmqpDelivery]] | None:
        """Start to receive; return the first batch, or None if no message is waiting."""
        from pipeline_platform.connectors.rabbitmq.mailboxes import Inbox

        channel = connection.channel()
        if not self.wait_time_s:
            # Otherwise a queue that is filled as fast as it is read would keep the run busy up to its full demand.
            messages = min(messages, self._waiting(channel))
        if messages:
            inbox = Inbox(channel, self.queue, messages, self.message_id_header)
            inbox.consume(LOOK_S, **self.consume_options.model_dump())
            if batch := self._next(inbox):
                self._opened.inboxes[channel.ref] = (receive_id, inbox)
                return inbox, batch
            inbox.stop()
            if inbox.is_cancelled:
                raise self.error(
                    f"queue {self.queue!r} was deleted or moved during the receive. Create it if it is missing."
                )
        channel.close()
        self._expect_no_stream(connection)
        return None

    def _next(self, inbox: Inbox) -> list[AmqpDelivery]:
        """Return the next batch; empty once the share is full or the end of the queue is reached."""
        started, count = time.monotonic(), None
        while not inbox.is_stopped:
            if (batch := inbox.take(QUIET_S)) or inbox.is_full:
                return batch
            if inbox.is_cancelled:
                logger.warning("Ended the receive of %s: queue %r was deleted or moved", self.name, self.queue)
                return []
            # Not awaited: the answer arrives after the messages in transit, for which there may be no room yet.
            count = count or inbox.count()
            if count.done():
                waiting, count = count.result(), None
                if time.monotonic() - started >= max(self.wait_time_s, STALLED_S if waiting else 0.0):
                    if waiting:
                        stalled = "Ended the receive of %s: the server has %d more messages for consumers with priority"
                        logger.warning(stalled, self.name, waiting)
                    inbox.stop()
        return inbox.take(0)

    def _batch(self, ack_ref: str, deliveries: Sequence[AmqpDelivery], owners: dict[str, int]) -> pa.RecordBatch:
        tags, ids, data, metadata, again = zip(*deliveries, strict=True)
        # An id belongs to the first message of the receive that has it, identified by a hash of its payload.
        named = [
            bool(id_) and (self.deduplicate_publishes or owners.setdefault(id_, hash(body)) == hash(body))
            for id_, body in zip(ids, data, strict=True)
        ]
        own = [f"{id_}/{ack_ref}/{tag}".removeprefix("/") for id_, tag in zip(ids, tags, strict=True)]
        return self.deliveries(
            message_id=[id_ if is_named else other for id_, is_named, other in zip(ids, named, own, strict=True)],
            data=data,
            ack_id=[f"{tag}" if is_named else f"{tag}{_NAMELESS}" for tag, is_named in zip(tags, named, strict=True)],
            ack_ref=ack_ref,
            metadata=pa.array(metadata, pa.string()),
            redelivered=self.deduplicate_publishes or again,
        )

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        from pika.exceptions import AMQPError

        try:
            yield
        except (AMQPError, OSError) as error:
            raise explained(error, self) from None  # the cause may contain secrets
