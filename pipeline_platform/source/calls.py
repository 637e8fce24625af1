"""Calls of a few messages each, several at once: for sources whose server takes and gives no more in one call."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from pipeline_platform.source.contract import Refused

logger = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_ROWS = 5_000
BATCH_BYTES = 16 * 2**20
"""A batch is full at whichever comes first; it may hold the messages of one round of calls more."""
FAILED_CALLS = 3
"""Whole calls failed in a row, each after the client's own retries, after which `in_groups` does not try the rest."""


def receive(
    call: Callable[[int], Sequence[T]],
    wanted: int,
    *,
    per_call: int,
    threads: int,
    empty_replies: int,
    size: Callable[[T], int],
    within_s: float | None = None,
) -> Iterator[list[T]]:
    """Call until `wanted` messages came, the queue seems empty, time is up or a call failed; yield them in batches.

    An error after the first messages is only logged: what is leased is worth handling, and a server that stays away
    fails the next receive before it leases anything.

    Args:
        call: Receives at most so many messages, in a thread.
        wanted: Messages to ask for in all.
        per_call: The most that one call asks for.
        threads: Calls under way at once.
        empty_replies: Empty replies in a row after which the queue seems empty.
        size: Bytes of a message.
        within_s: Seconds after which no call is begun any more; None for no such bound.

    Raises:
        Exception: Whatever `call` raised, where nothing was received.
    """
    until = math.inf if within_s is None else time.monotonic() + within_s
    given: _Given[T] = _Given(wanted, empty_replies, until)

    def work() -> None:
        for asked in given.asks(per_call):
            try:
                messages = call(asked)
            except BaseException as error:  # the others would wait for this call for ever
                given.fail(error)
            else:
                given.take(asked, messages, sum(map(size, messages)))

    threads = min(threads, -(-wanted // per_call))
    with ThreadPoolExecutor(max(1, threads)) as pool:
        working = [pool.submit(work) for _ in range(threads)]
        try:
            yield from given.batches()
        finally:
            given.end()
        for one in working:
            one.result()
    if given.error is not None:
        if not given.received:
            raise given.error
        logger.warning("ended after %d messages: %s", given.received, given.error)


class _Given(Generic[T]):
    """What threads received and nobody was given yet, and how much is to come.

    The threads ask for work by themselves: to be given each call by one that waits for all takes half as much of the
    processor again.
    """

    def __init__(self, wanted: int, empty_replies: int, until: float) -> None:
        self.received = 0
        self.error: BaseException | None = None
        self._wanted, self._empty_replies, self._until = wanted, empty_replies, until
        self._under_way = self._empty = self._bytes = 0
        self._batch, self._full = list[T](), list[list[T]]()
        self._is_over = wanted == 0
        lock = threading.Lock()
        self._asking, self._yielding = threading.Condition(lock), threading.Condition(lock)

    def asks(self, per_call: int) -> Iterator[int]:
        """How many messages a thread is to ask for, until there is nothing left to ask for."""
        while True:
            with self._asking:
                self._asking.wait_for(self._may_go_on)
                if self._may_end():
                    self._is_over = True
                    self._asking.notify_all()
                    self._yielding.notify()
                    return
                asked = min(per_call, self._wanted)
                self._wanted -= asked
                self._under_way += 1
            yield asked

    def take(self, asked: int, messages: Sequence[T], bytes_: int) -> None:
        """Keep what a call gave."""
        with self._asking:
            self._under_way -= 1
            self._wanted += asked - len(messages)
            self._empty = 0 if messages else self._empty + 1
            self.received += len(messages)
            self._batch += messages
            self._bytes += bytes_
            if len(self._batch) >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
                self._full.append(self._batch)
                self._batch, self._bytes = [], 0
                self._yielding.notify()
            self._asking.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ask for nothing more."""
        with self._asking:
            self._under_way -= 1
            self.error = error
            self._asking.notify_all()

    def end(self) -> None:
        """Ask for nothing more: nobody takes it."""
        with self._asking:
            self._is_over = True
            self._asking.notify_all()

    def batches(self) -> Iterator[list[T]]:
        """Full batches as they come, and the rest."""
        while True:
            with self._yielding:
                self._yielding.wait_for(lambda: self._full or (self._is_over and not self._under_way))
                batch = self._full.pop(0) if self._full else self._batch
                is_last = batch is self._batch
                self._asking.notify_all()
            if batch:
                yield batch
            if is_last:
                return

    def _may_end(self) -> bool:
        """Whether no call is to be begun, now or when those under way are back."""
        ended = self._is_over or self.error is not None or self._empty >= self._empty_replies
        return ended or time.monotonic() >= self._until or not (self._wanted or self._under_way)

    def _may_go_on(self) -> bool:
        # One by one from an empty reply on, until another is not: most calls past the end would be for nothing.
        return self._may_end() or bool(self._wanted and not (self._empty and self._under_way) and not self._full)


def in_groups(
    call: Callable[[Sequence[str]], Sequence[Refused]], ack_ids: Sequence[str], *, per_call: int, threads: int
) -> list[Refused]:
    """Acknowledge or release messages in groups; return what was refused, in order.

    A failed call refuses its group alone, with the error as the reason. Refusals are not tried again here:
    `tasks.acknowledge` does that for every source.

    Raises:
        Exception: Whatever `call`, in one of so many threads, raised last, where no call succeeded.
    """
    succeeded, failed_in_a_row = False, 0
    error: Exception | None = None

    def one(group: Sequence[str]) -> Sequence[Refused]:
        nonlocal succeeded, failed_in_a_row, error
        if failed_in_a_row >= FAILED_CALLS:
            reason = f"not tried after {FAILED_CALLS} failed calls: {error}"
            return [Refused(ack_id, reason) for ack_id in group]
        try:
            refused = call(group)
        except Exception as failure:  # this group's alone, until it proves to be everybody's
            error, failed_in_a_row = failure, failed_in_a_row + 1
            return [Refused(ack_id, str(failure)) for ack_id in group]
        succeeded, failed_in_a_row = True, 0
        return refused

    groups = [ack_ids[start : start + per_call] for start in range(0, len(ack_ids), per_call)]
    with ThreadPoolExecutor(threads) as pool:
        refused = [entry for group in pool.map(one, groups) for entry in group]
    if error is not None and not succeeded:
        raise error
    return refused
