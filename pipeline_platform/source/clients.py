"""Clients of a source: one per process, and clients of asyncio libraries in methods that are not async."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


CLIENTS = "per_process()"
"""Attribute of a source with its clients, by process and by name."""


class per_process(Generic[T]):  # noqa: N801 - a decorator, like cached_property
    """Decorator of a method that creates a client. Each process creates its own at the first use; threads share it.

    `Source.close` closes it if it has a method `close`. The next use creates another client.
    """

    def __init__(self, create: Callable[[Any], T]) -> None:
        self._create, self._creating = create, Lock()
        self.__doc__ = create.__doc__
        os.register_at_fork(after_in_child=self._unlock)

    def __get__(self, source: object, owner: type) -> T:
        """Return the client of this process."""
        if source is None:
            return self  # type: ignore[return-value]  # of the class
        # A fork keeps its parent's clients: to discard one could end the connection that both share.
        clients: dict[str, T] = vars(source).setdefault(CLIENTS, {}).setdefault(os.getpid(), {})
        name = self._create.__name__
        if name not in clients:
            with self._creating:
                if name not in clients:
                    clients[name] = self._create(source)
        return clients[name]

    def _unlock(self) -> None:
        """Replace the lock in a fork: a thread of the parent process may have held it."""
        self._creating = Lock()


def close_clients(source: object) -> None:
    """Close the `per_process` clients of this process, the newest first."""
    clients = vars(source).get(CLIENTS, {}).pop(os.getpid(), {})
    for client in reversed(clients.values()):
        if hasattr(client, "close"):
            client.close()


class AsyncClient(Generic[T]):
    """A client of an asyncio library, for methods that are not async. Its event loop runs in a thread.

    Args:
        connect: Function that connects the client.
        within_s: Seconds after which a call raises `TimeoutError`, which is an `OSError`.
    """

    def __init__(self, connect: Callable[[], Awaitable[T]], within_s: float) -> None:
        self._loop, self._within_s = asyncio.new_event_loop(), within_s
        Thread(target=self._loop.run_forever, daemon=True).start()
        try:
            self._client: Any = self._run(connect())
        except BaseException:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            raise

    def call(self, use: Callable[[T], Coroutine[Any, Any, R]]) -> R:
        """Call a function with the client, and return the result of its coroutine.

        Raises:
            TimeoutError: It took too long, or the client is closed.
            ConnectionError: Another thread has closed the client.
        """
        return self._run(use(self._client))

    def close(self) -> None:
        """Close the client, cancel the calls of other threads, and end the thread."""
        with suppress(Exception):  # the connection may be lost already
            self._run(self._client.close())
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._within_s)
        self._loop.stop()

    def _run(self, result: Awaitable[R]) -> R:
        call = asyncio.run_coroutine_threadsafe(asyncio.wait_for(result, self._within_s), self._loop)
        try:
            return call.result(self._within_s + 1)  # the loop may have stopped
        except CancelledError:
            raise ConnectionAbortedError("another thread has closed the client") from None
