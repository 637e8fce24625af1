"""A connection to an AMQP 0-9-1 server with a thread that keeps it alive; what is called `channel` there is pika's."""

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

# What pika logs, with stacks, is raised as well, and explained.
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)

CLOSED_S = 10.0
"""Seconds to wait for the server to say goodbye."""


class Connection:
    """An open connection, until it has `ended` for a reason.

    The thread calls `before_reading` before it reads from the socket, but not while somebody waits for an answer.
    """

    def __init__(self, parameters: Any, within_s: float = 30.0) -> None:
        """Connect, or raise pika's, the socket's or TLS's reason why not."""
        self.ended: BaseException | None = None
        self._promised: set[Future[Any]] = set()
        self._waiting = 0
        self._lock = threading.Lock()
        self.before_reading: list[Callable[[], object]] = []
        self._loop = IOLoop()
        opened = self._promise()
        self._pika = pika.SelectConnection(
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
        """Whether it is of use; a forked process has not inherited its thread."""
        return self.ended is None and self._thread.is_alive()

    @property
    def product(self) -> str:
        """What the server calls itself."""
        return str((self._pika.server_properties or {}).get("product"))

    def channel(self, within_s: float | None = None) -> Channel:
        """Open a channel."""

        def act(done: Future[Any]) -> None:
            self._pika.channel(on_open_callback=lambda channel: done.set_result(Channel(self, channel)))

        opened: Channel = self.ask(act, within_s)
        return opened

    def ask(self, act: Callable[[Future[Any]], object], within_s: float | None = None) -> Any:
        """Have the thread act, and wait for the result that it promises; raise what it raised, or why all ended.

        After `within_s` seconds the connection counts as lost; None waits for as long as there are heartbeats.
        """
        return self._wait(self.request(act), within_s)

    def request(self, act: Callable[[Future[Any]], object]) -> Future[Any]:
        """Have the thread act, and return what it promises."""
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
                _fail([done], self.ended or AMQPConnectionError("the connection is another process's"))
        return done

    def close(self) -> None:
        """Close the connection. Messages that are not acknowledged come back to their queue."""
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
            if done.done():  # what was waited for timed out itself
                raise
            error = AMQPConnectionError(f"no answer within {within_s:g} s")
            self._end(error)
            with suppress(Exception):  # wakes the thread; not heard from any more, the server ends the connection
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
    """A channel, by a `ref` of its own. Once the server closes it, over an error of its user, it is of no use."""

    def __init__(self, connection: Connection, channel: Any) -> None:
        self.ref = uuid4().hex
        self.connection, self._channel = connection, channel
        self._closed: BaseException | None = None
        self._promised: set[Future[Any]] = set()
        channel.add_on_close_callback(self._on_close)

    @property
    def ended(self) -> BaseException | None:
        """Why nothing can be asked here any more; None while it can."""
        return self._closed or self.connection.ended

    def ask(self, method: str, within_s: float | None = None, **arguments: Any) -> Any:
        """Call a method of pika's channel that the server answers, as `queue_declare`; return the answer."""
        return self.act(lambda channel, done: getattr(channel, method)(callback=done.set_result, **arguments), within_s)

    def act(self, act: Callable[[Any, Future[Any]], object], within_s: float | None = None) -> Any:
        """Have the thread act on pika's channel, and wait for the result that it promises."""
        return self.connection.ask(lambda done: self._run(act, done), within_s)

    def request(self, act: Callable[[Any, Future[Any]], object]) -> Future[Any]:
        """Have the thread act on pika's channel, and return what it promises."""
        return self.connection.request(lambda done: self._run(act, done))

    def _run(self, act: Callable[[Any, Future[Any]], object], done: Future[Any]) -> None:
        if self._closed:
            raise self._closed
        self._promised.add(done)
        done.add_done_callback(self._promised.discard)
        act(self._channel, done)

    def close(self) -> None:
        """Close it. Messages that are not acknowledged come back to their queue."""
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
    """Read a value of a table, and return where the next one begins.

    pika cuts a float to a whole number. It raises at a time after the year 9999, as one in milliseconds, and at tables
    in too many tables: that ends the connection, and the next one gets the same message.
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
        return "tables in too many tables", past + 4 + struct.unpack_from(">I", encoded, past)[0]


pika.data.decode_value = _decode_value  # pika has no other place for it


def _innermost(error: BaseException) -> BaseException:
    """The reason itself: pika wraps it in the phase and in the attempts that failed."""
    inner = [*getattr(error, "exceptions", ()), getattr(error, "exception", None), *error.args]
    inner = [one for one in inner if isinstance(one, BaseException)]
    return _innermost(inner[-1]) if inner else error
