"""Work on several messages at once, in threads that each take the next one when they are done with theirs."""

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from heapq import heappop, heappush
from threading import Condition
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_NONE: Mapping[int, int] = MappingProxyType({})


def followers(lanes: Iterable[Hashable]) -> dict[int, int]:
    """By the number of each item that has one: the item that comes next in its lane. None is no lane."""
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
    after: Mapping[int, int] = _NONE,
) -> list[R]:
    """Have items dealt with by as many threads as there are workers; return the results in the order of the items.

    A thread that is free takes the first item that may begin.

    Args:
        items: What there is to do.
        workers: Each returns the results of what it iterates over, in order. It lets no item's error through.
        permits: One for each item that may begin; a thread asks for it as it begins with one, and holds up the others
            that ask meanwhile. So items begin at the pace of a rate limit. Where there are too few, the items that are
            left have no result.
        after: Which item must not begin before another one is done with, by the number of that one.

    Raises:
        Exception: What `permits` raised, once all that was begun is done.
    """
    ready = sorted({*range(len(items))} - {*after.values()})  # a heap, as every sorted list is
    left, asked, turn = len(items), iter(permits), Condition()

    def begun() -> int | None:
        nonlocal left
        with turn:
            while left and not ready:
                turn.wait()  # what is left follows items that are at work
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
            mine.close()  # or what follows an item that a worker raised at would be waited for, for ever
        return list(zip(numbers, results, strict=True))

    with ThreadPoolExecutor(len(workers), "handle") as pool:
        futures = [pool.submit(copy_context().run, run, worker) for worker in workers]
    done = [pair for future in futures for pair in future.result()]
    return [result for _, result in sorted(done, key=lambda pair: pair[0])]
