"""Processing several messages at once in threads. A free thread takes the next message."""

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from heapq import heappop, heappush
from threading import Condition
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def followers(lanes: Iterable[Hashable]) -> dict[int, int]:
    """Return the next item in the lane of each item, both by number. Lane None: the item has no lane."""
    last, after = dict[Hashable, int](), dict[int, int]()
    for number, lane in enumerate(lanes):
        if lane is not None:
            if lane in last:
                after[last[lane]] = number
            last[lane] = number
    return after


def at_once(
    items: Sequence[T],
    workers: Sequence[Callable[[Iterable[T]], list[R]]],
    permits: Iterable[object],
    after: Mapping[int, int],
) -> list[R]:
    """Process items in as many threads as there are workers. Return the results in the order of the items.

    A free thread takes the first item that may start.

    Args:
        items: Items to process.
        workers: Functions that return the results of the items that they iterate over, in order. They must catch the
            exceptions of items.
        permits: Yields a value for each item that may start. Threads take permits one at a time, so that items start at
            the pace of a rate limit. If it ends early, the remaining items have no result.
        after: Item that must not start before another item has ended, by the number of that other item.

    Raises:
        Exception: Exception of `permits`, after all started items have ended.
    """
    ready = sorted({*range(len(items))} - {*after.values()})  # a heap, as every sorted list is
    left, asked, turn = len(items), iter(permits), Condition()

    def begun() -> int | None:
        nonlocal left
        with turn:
            while left and not ready:
                turn.wait()  # all remaining items follow items in progress
            if not left or next(asked, turn) is turn:
                return None
            left -= 1
            if not left:
                turn.notify_all()
            number: int = heappop(ready)
            return number

    def taken(numbers: list[int]) -> Generator[T]:
        while (number := begun()) is not None:
            numbers.append(number)
            try:
                yield items[number]
            finally:
                if number in after:
                    with turn:
                        heappush(ready, after[number])
                        turn.notify_all()

    def run(worker: Callable[[Iterable[T]], list[R]]) -> list[tuple[int, R]]:
        numbers: list[int] = []
        mine = taken(numbers)
        try:
            results = worker(mine)
        finally:
            mine.close()  # otherwise, if a worker raised, other threads would wait for ever for the item's followers
        return list(zip(numbers, results, strict=True))

    with ThreadPoolExecutor(len(workers), "handle") as pool:
        futures = [pool.submit(copy_context().run, run, worker) for worker in workers]
    done = [pair for future in futures for pair in future.result()]
    return [result for _, result in sorted(done, key=lambda pair: pair[0])]
