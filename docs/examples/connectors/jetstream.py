"""A stream of NATS JetStream as a source. It needs the package `nats-py`.

A lease is the acknowledgement deadline of a durable pull consumer, which all runs share.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import repeat
from threading import Thread
from typing import Any, NamedTuple

import nats
import pyarrow as pa
from nats.errors import NoServersError
from nats.js.errors import APIError
from pydantic import Field

from pipeline_platform import Backlog, LeasedIds, LeasedSource, Refused, Share, SourceAwayError, SourceError

FETCH, ANSWER_S = 500, 5.0
"""Messages of a request, and seconds to wait for an answer."""


class Connection(NamedTuple):
    """A connection, and the event loop of its thread."""

    client: nats.NATS
    loop: asyncio.AbstractEventLoop


class JetStream(LeasedSource):
    """A durable pull consumer with explicit acknowledgement. `lease_s` must be its `ack_wait`.

    Its `max_ack_pending`, 1,000 by default, must be the capacity of all runs.

    JetStream lets a receive acknowledge a message that another receive leases: that receive finds it already decided.
    """

    url: str = Field(repr=False, description="nats://user:password@host:4222")
    stream: str = Field(description="Name of the stream.")
    durable: str = Field(description="Name of the consumer. Other applications have other consumers.")
    subject: str | None = Field(None, description="Subject for send().")
    fetch_s: float = Field(1.0, gt=0, description="Seconds that a request waits for messages.")

    @property
    def places(self) -> frozenset[str]:
        """The consumer of the stream."""
        return frozenset({f"stream {self.stream}, consumer {self.durable} at {self.url.rpartition('@')[2]}"})

    def backlog(self) -> Backlog:
        """Count the messages that were never delivered, and the unacknowledged messages."""
        found = self._do(lambda to: to.client.jetstream().consumer_info(self.stream, self.durable))
        if found.config.ack_wait != self.lease_s:
            raise SourceError(
                f"source {self.name!r}: lease_s must be ack_wait of the consumer ({found.config.ack_wait:g} s), got "
                f"{self.lease_s:g}. Correct one of them."
            )
        return Backlog((found.num_pending or 0) + (found.num_ack_pending or 0), counts_held=True)

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Fetch until the share is complete or the stream is empty."""
        left = share.messages
        while left and (messages := self._do(partial(self._fetch, min(left, FETCH)))):
            facts = [message.metadata for message in messages]
            yield self.deliveries(
                # With the time, because a stream that is deleted and created again counts from 1.
                message_id=[f"{fact.sequence.stream}-{fact.timestamp.timestamp():.6f}" for fact in facts],
                data=[message.data for message in messages],
                metadata=[{**(message.headers or {}), "subject": message.subject} for message in messages],
                ack_id=[message.reply for message in messages],
                ack_ref=receive_id,
                redelivered=[(fact.num_delivered or 0) > 1 for fact in facts],
                published_at=[fact.timestamp for fact in facts],
            )
            left -= len(messages)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Acknowledge messages, and wait for the server's confirmations."""
        return self._answer(ack_ids, b"+ACK")

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Release messages."""
        return self._answer(ack_ids, b"-NAK " + json.dumps({"delay": delay_s * 10**9}).encode())

    def extend(self, receive_id: str, held: LeasedIds) -> bool:
        """Restart the deadlines of the recorded messages. JetStream does not confirm it."""

        async def restart(to: Connection) -> None:
            for _, ids in held():
                for subject in ids:
                    await to.client.publish(subject, b"+WPI")
            await to.client.flush()

        self._do(restart)
        return True

    def abandon(self, receive_id: str, held: LeasedIds) -> None:
        """Release the recorded messages; the others wait for their deadline."""
        for ack_ref, ids in held():
            self.release(ack_ref, ids)

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Publish to `subject`; metadata become headers."""

        async def publish(to: Connection) -> int:
            stream, sent = to.client.jetstream(), 0
            for payload, fields in zip(payloads, metadata or repeat(None), strict=False):
                headers = {name: str(value) for name, value in (fields or {}).items() if name != "subject"}
                await stream.publish(self.subject or "", payload, stream=self.stream, headers=headers or None)
                sent += 1
            return sent

        return int(self._do(publish))

    def close(self) -> None:
        """Close the connection and end its thread."""
        if to := self.__dict__.pop("_connection", None):
            asyncio.run_coroutine_threadsafe(to.client.close(), to.loop).result(ANSWER_S)
            to.loop.call_soon_threadsafe(to.loop.stop)

    async def _fetch(self, most: int, to: Connection) -> list[Any]:
        pull = await to.client.jetstream().pull_subscribe_bind(consumer=self.durable, stream=self.stream)
        try:
            return await pull.fetch(most, timeout=self.fetch_s)
        except TimeoutError:
            return []
        finally:
            await pull.unsubscribe()

    def _answer(self, ack_ids: Sequence[str], answer: bytes) -> list[Refused]:
        async def confirmed(to: Connection) -> None:
            await asyncio.gather(*(to.client.request(subject, answer, timeout=ANSWER_S) for subject in ack_ids))

        self._do(confirmed)
        return []

    @cached_property
    def _connection(self) -> Connection:
        loop = asyncio.new_event_loop()
        Thread(target=loop.run_forever, daemon=True).start()
        connecting = nats.connect(self.url, **_BRIEF)
        return Connection(asyncio.run_coroutine_threadsafe(connecting, loop).result(ANSWER_S), loop)

    def _do(self, call: Callable[[Connection], Coroutine[Any, Any, Any]]) -> Any:
        try:
            to = self._connection
            return asyncio.run_coroutine_threadsafe(call(to), to.loop).result(3 * ANSWER_S)
        except APIError as error:
            raise SourceError(self._described(f"{error.description}. Create it, or correct its name")) from None
        except (nats.errors.Error, NoServersError, TimeoutError, OSError) as error:
            self.__dict__.pop("_connection", None)  # the next call connects again
            raise SourceAwayError(self._described(f"{type(error).__name__} {error}".strip())) from None

    def _described(self, problem: str) -> str:
        return f"source {self.name!r}: {'; '.join(self.places)}: {problem}."


async def _ignored(_: Exception) -> None:
    """Leave an error to the call that fails; the client would log it with a traceback."""


_BRIEF: dict[str, Any] = {
    "connect_timeout": 2,
    "allow_reconnect": False,
    "max_reconnect_attempts": 1,
    "reconnect_time_wait": 0,
    "error_cb": _ignored,
}
