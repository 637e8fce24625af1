"""A connection to an AMQP 0-9-1 server with a thread that keeps it alive. Variables called `channel` are pika's."""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pika.data
from pika.adapters.select_connection import IOLoop
from pika.exceptions import AMQPConnectionError

from pipeline_platform.connectors.rabbitmq.amqp_deliveries import DeliveryStream

# pika logs errors, with stack traces, that are also raised and explained here.
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)

CLOSED_S = 10.0
"""Seconds to wait for the server to confirm the end of a connection."""


class Connection:
    """An open connection; once it is closed, `ended` is the reason.

    The thread calls `before_reading` before it reads from the socket, except while a caller waits for an answer.
    """

    def __init__(self, parameters: Any, within_s: float = 30.0) -> None:
        """Connect; raise the error of pika, the socket or TLS if that fails."""
        self.ended: BaseException | None = None
        self._promised: set[Future[Any]] = set()
        self._waiting = 0
        self._lock = threading.Lock()
        self.before_reading: list[Callable[[], object]] = []
        self._loop = IOLoop()
        opened = self._promise()
        self._pika = DeliveryStream(
            parameters,
            on_open_callback=opened.set_result,
            on_open_error_callback=lambda _, error: self._end(_innermost(error)),
            on_close_callback=lambda _, error: self._end(error),
            custom_ioloop=self._loop,
        )
        self._thread = threading.Thread(target=self._run, name="amqp", daemon=True)
        self._thread.start()
        self._wait(opened, within_s)

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used. A forked process does not inherit its thread, so it cannot."""
        return self.ended is None and self._thread.is_alive()

    @property
    def product(self) -> str:
        """The server's product name."""
        return str((self._pika.server_properties or {}).get("product"))

    def channel(self, within_s: float | None = None) -> Channel:
        """Open a channel."""

        def act(done: Future[Any]) -> None:
            self._pika.channel(on_open_callback=lambda channel: done.set_result(Channel(self, channel)))

        opened: Channel = self.ask(act, within_s)
        return opened

    def ask(self, act: Callable[[Future[Any]], object], within_s: float | None = None) -> Any:
        """Run `act` in the thread, and wait for its result; raise its error, or the reason why the connection ended.

        After `within_s` seconds the connection counts as lost; None waits as long as heartbeats arrive.
        """
        return self._wait(self.request(act), within_s)

    def request(self, act: Callable[[Future[Any]], object]) -> Future[Any]:
        """Run `act` in the thread, and return a future of its result."""
        done = self._promise()

        def run() -> None:
            try:
                act(done)
            except Exception as error:
                _fail([done], error)

        with self._lock:
            if self.is_open:
                self._loop.add_callback_threadsafe(run)
            else:
                _fail([done], self.ended or AMQPConnectionError("the connection belongs to another process"))
        return done

    def close(self) -> None:
        """Close the connection. The server returns unacknowledged messages to their queue."""
        with suppress(Exception):
            self.ask(lambda _: self._pika.close(), CLOSED_S)

    def _promise(self) -> Future[Any]:
        done: Future[Any] = Future()
        self._promised.add(done)
        done.add_done_callback(self._promised.discard)
        return done

    def _wait(self, done: Future[Any], within_s: float | None) -> Any:
        with self._lock:
            self._waiting += 1
        try:
            return done.result(within_s)
        except TimeoutError:
            if done.done():  # the result is itself a TimeoutError
                raise
            error = AMQPConnectionError(f"no answer within {within_s:g} s")
            self._end(error)
            with suppress(Exception):  # wakes the thread, which then ends; the server closes the silent connection
                self._loop.add_callback_threadsafe(lambda: None)
            raise error from None
        finally:
            with self._lock:
                self._waiting -= 1

    def _run(self) -> None:
        self._loop.activate_poller()
        try:
            while self.ended is None:
                for wait in () if self._waiting else self.before_reading:
                    wait()
                self._loop.poll()
                self._loop.process_timeouts()
        except Exception as error:
            self._end(error)
        finally:
            self._loop.deactivate_poller()
            with suppress(Exception):
                self._loop.close()

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self.ended = self.ended or error
            promised = list(self._promised)
        _fail(promised, error)


class Channel:
    """A channel with a unique `ref`. Once the server has closed it because of an error, it cannot be used."""

    def __init__(self, connection: Connection, channel: Any) -> None:
        self.ref = uuid4().hex
        self.connection, self._channel = connection, channel
        self._closed: BaseException | None = None
        self._promised: set[Future[Any]] = set()
        channel.add_on_close_callback(self._on_close)

    @property
    def ended(self) -> BaseException | None:
        """The reason why the channel cannot be used any more; None while it can."""
        return self._closed or self.connection.ended

    def ask(self, method: str, within_s: float | None = None, **arguments: Any) -> Any:
        """Call a method of pika's channel that the server answers, such as `queue_declare`; return the answer."""
        return self.act(lambda channel, done: getattr(channel, method)(callback=done.set_result, **arguments), within_s)

    def act(self, act: Callable[[Any, Future[Any]], object], within_s: float | None = None) -> Any:
        """Run `act` on pika's channel in the thread, and wait for its result."""
        return self.connection.ask(lambda done: self._run(act, done), within_s)

    def request(self, act: Callable[[Any, Future[Any]], object]) -> Future[Any]:
        """Run `act` on pika's channel in the thread, and return a future of its result."""
        return self.connection.request(lambda done: self._run(act, done))

    def _run(self, act: Callable[[Any, Future[Any]], object], done: Future[Any]) -> None:
        if self._closed:
            raise self._closed
        self._promised.add(done)
        done.add_done_callback(self._promised.discard)
        act(self._channel, done)

    def close(self) -> None:
        """Close the channel. The server returns unacknowledged messages to their queue."""
        with suppress(Exception):
            self.act(lambda channel, _: channel.close(), CLOSED_S)

    def _on_close(self, _channel: Any, reason: BaseException) -> None:
        self._closed = reason
        _fail(list(self._promised), reason)


def _fail(promises: Collection[Future[Any]], error: BaseException) -> None:
    for done in promises:
        with suppress(InvalidStateError):
            done.set_exception(error)


_BY_PIKA = pika.data.decode_value
_FLOATS = {b"f": struct.Struct(">f"), b"d": struct.Struct(">d")}


def _decode_value(encoded: bytes, offset: int) -> tuple[Any, int]:
    """Decode a value of a table; return it with the offset of the next value.

    pika truncates a float to a whole number. It raises at a time after the year 9999, such as one in milliseconds, and
    at deeply nested tables: that ends the connection, and the next connection receives the same message.
    """
    kind, past = encoded[offset : offset + 1], offset + 1
    if form := _FLOATS.get(kind):
        return form.unpack_from(encoded, past)[0], past + form.size
    try:
        read: tuple[Any, int] = pika.data.decode_table(encoded, past) if kind == b"F" else _BY_PIKA(encoded, offset)
        return read
    except (ValueError, OverflowError, OSError, RecursionError):
        if kind == b"T":
            return struct.unpack_from(">Q", encoded, past)[0], past + 8
        if kind not in b"FA":
            raise
        return "nested too deeply", past + 4 + struct.unpack_from(">I", encoded, past)[0]


pika.data.decode_value = _decode_value  # pika has no hook for it


def _innermost(error: BaseException) -> BaseException:
    """Return the original error: pika wraps it in the phase and in the failed attempts."""
    inner = [*getattr(error, "exceptions", ()), getattr(error, "exception", None), *error.args]
    inner = [cause for cause in inner if isinstance(cause, BaseException)]
    return _innermost(inner[-1]) if inner else error
