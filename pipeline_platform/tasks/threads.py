"""Work on several messages at once, in threads that each take the next one when they are done with theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from threading import Lock
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def at_once(items: Iterable[T], workers: Sequence[Callable[[Iterable[T]], list[R]]]) -> list[R]:
    """Have items dealt with by as many threads as there are workers; return the results in the order of the items.

    Args:
        items: A thread asks for the next one as it begins with it, and holds up the others that ask meanwhile: items
            that come at the pace of a rate limit are begun at that pace.
        workers: Each returns the results of what it iterates over, in order. It lets no item's error through.

    Raises:
        Exception: What `items` raised, once all that was begun is done.
    """
    numbered, lock = enumerate(items), Lock()

    def taken(numbers: list[int]) -> Iterator[T]:
        while True:
            with lock:
                one = next(numbered, None)
            if one is None:
                return
            numbers.append(one[0])
            yield one[1]

    def run(worker: Callable[[Iterable[T]], list[R]]) -> list[tuple[int, R]]:
        numbers: list[int] = []
        results = worker(taken(numbers))
        return list(zip(numbers, results, strict=True))

    with ThreadPoolExecutor(len(workers), "handle") as pool:
        futures = [pool.submit(copy_context().run, run, worker) for worker in workers]
    done = [pair for future in futures for pair in future.result()]
    return [result for _, result in sorted(done, key=lambda pair: pair[0])]
