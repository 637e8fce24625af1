"""A stream of NATS JetStream as a source. It needs the package `nats-py`.

A lease is the acknowledgement deadline of a durable pull consumer, which all runs share.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import nats
import pyarrow as pa
from nats.js.errors import APIError
from pydantic import Field

from pipeline_platform import AsyncClient, Backlog, LeasedSource, Refused, Share, calls, per_process, with_metadata

FETCH, ANSWER_S = 500, 5.0
"""Messages of a request or a group, and seconds to wait for an answer."""


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
        return frozenset({f"stream {self.stream}, consumer {self.durable} at {self.url.rpartition('@')[2]}"})

    def backlog(self) -> Backlog:
        """Count the messages that were never delivered, and the unacknowledged messages."""
        found = self._do(lambda client: client.jetstream().consumer_info(self.stream, self.durable))
        if (wait := found.config.ack_wait) != self.lease_s:
            raise self.error(
                f"lease_s must be ack_wait of the consumer ({wait:g} s), got {self.lease_s:g}. Correct it."
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
                published_at=[fact.timestamp for fact in facts],
            )
            left -= len(messages)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        return self._answer(ack_ids, b"+ACK")

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        return self._answer(ack_ids, b"-NAK " + json.dumps({"delay": delay_s * 10**9}).encode())

    def renew(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Restart the deadlines. JetStream does not confirm it."""

        async def restart(client: nats.NATS) -> None:
            await asyncio.gather(*(client.publish(subject, b"+WPI") for subject in ack_ids))
            await client.flush()

        self._do(restart)
        return []

    def send(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Publish to `subject`; metadata become headers."""

        async def publish(client: nats.NATS) -> int:
            stream, messages = client.jetstream(), [*with_metadata(payloads, metadata)]
            for payload, fields in messages:
                headers = {name: str(value) for name, value in fields.items() if name != "subject"}
                await stream.publish(self.subject or "", payload, stream=self.stream, headers=headers or None)
            return len(messages)

        return int(self._do(publish))

    async def _fetch(self, most: int, client: nats.NATS) -> list[Any]:
        pull = await client.jetstream().pull_subscribe_bind(consumer=self.durable, stream=self.stream)
        try:
            return await pull.fetch(most, timeout=self.fetch_s)
        except TimeoutError:
            return []
        finally:
            await pull.unsubscribe()

    def _answer(self, ack_ids: Sequence[str], answer: bytes) -> list[Refused]:
        def confirm(group: Sequence[str]) -> list[Refused]:
            async def confirmed(client: nats.NATS) -> None:
                await asyncio.gather(*(client.request(subject, answer, timeout=ANSWER_S) for subject in group))

            self._do(confirmed)
            return []

        return calls.in_groups(confirm, ack_ids, FETCH)

    @per_process
    def _client(self) -> AsyncClient[nats.NATS]:
        async def ignore(_: Exception) -> None:
            """Leave an error to the call that fails; the client would log it with a traceback."""

        tries = {"connect_timeout": 2, "allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
        return AsyncClient(lambda: nats.connect(self.url, error_cb=ignore, **tries), within_s=3 * ANSWER_S)

    def _do(self, call: Callable[[nats.NATS], Coroutine[Any, Any, Any]]) -> Any:
        fix = "Create stream and durable, correct their names or url, or start the server."
        with self.explaining(fix, refused=(APIError,), away=(nats.errors.Error, OSError)):
            return self._client.call(call)
