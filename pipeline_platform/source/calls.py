"""Concurrent calls of a few messages each, for sources whose server accepts only a few messages per call."""

import logging
import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import ClassVar, Generic, Self, TypeVar

from pydantic import model_validator

from pipeline_platform.model.portions import BATCH_BYTES
from pipeline_platform.model.retry import Backoff
from pipeline_platform.source.contract import Refused
from pipeline_platform.source.leased import LeasedSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 8
"""Concurrent calls of a task. A call is mostly waiting: with 10 ms per call to SQS, one thread deletes 730 messages a
second, four delete 2,100 and eight delete 4,100."""
BATCH_ROWS = 5_000
"""A batch is full at this limit or at `BATCH_BYTES`; it may exceed it by the messages of the calls in progress."""
FAILED_CALLS = 3
"""Consecutive failed calls, each after the client's own retries, after which `in_groups` does not try the others."""


class CalledSource(LeasedSource):
    """A leased source that sets the lease of each message separately.

    A connector names its own option for the lease in `lease_option`, and implements `hold` instead of `release` and
    `renew`.
    """

    poll_pauses: ClassVar[Backoff] = Backoff(first=timedelta(seconds=1), most=timedelta(seconds=4))
    """Longer than of other sources: a look is a request, which may cost money."""

    @model_validator(mode="after")
    def _lease_follows_its_option(self) -> Self:
        lease_s = getattr(self, self.lease_option)
        if "lease_s" in self.model_fields_set and self.lease_s != lease_s:
            raise ValueError(
                f"lease_s must equal {self.lease_option} ({lease_s} s), got {self.lease_s:g} s. Set "
                f"{self.lease_option}, and remove lease_s."
            )
        self.__dict__["lease_s"] = float(lease_s)  # the model is frozen from here on
        return self

    @abstractmethod
    def hold(self, ack_ref: str, ack_ids: Sequence[str], seconds: int) -> list[Refused]:
        """Extend the lease of messages to `seconds` from now; return the refused messages, as `ack` does."""

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Release messages, to be redelivered after `delay_s` seconds, limited to the longest delay."""
        return self.hold(ack_ref, ack_ids, min(delay_s, self.longest_delay_s))

    def renew(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Renew the leases of messages."""
        return self.hold(ack_ref, ack_ids, int(self.lease_s))


def receive(
    call: Callable[[int], Sequence[T]],
    wanted: int,
    *,
    per_call: int,
    empty_replies: int,
    size: Callable[[T], int],
    within_s: float | None = None,
) -> Iterator[list[T]]:
    """Call until `wanted` messages arrive, the queue seems empty, time is up or a call fails; yield them in batches.

    An error after the first messages is only logged: leased messages are worth handling, and if the server stays
    unavailable, the next receive fails before it leases anything.

    Args:
        call: Receives at most the given number of messages, `per_call` or less, in a thread.
        wanted: Messages to request in all.
        per_call: Maximum messages of one call.
        empty_replies: Consecutive empty replies after which the queue counts as empty.
        size: Bytes of a message.
        within_s: Seconds after which no call is started.
    """
    calls = _Calls(call, wanted, per_call, empty_replies, size)
    calls.until = math.inf if within_s is None else time.monotonic() + within_s
    threads = min(THREADS, -(-wanted // per_call))
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for _ in range(threads):
            pool.submit(calls.make)
        try:
            yield from calls.batches()
        finally:
            calls.end()
    if calls.error is not None:
        if not calls.received:
            raise calls.error
        logger.warning("Ended a receive after %d messages: %s", calls.received, calls.error)


class _Calls(Generic[T]):
    """Calls made by each thread independently: a thread that distributes them costs half as much again."""

    def __init__(
        self,
        call: Callable[[int], Sequence[T]],
        wanted: int,
        per_call: int,
        empty_replies: int,
        size: Callable[[T], int],
    ) -> None:
        self._call, self._wanted, self._per_call, self._size = call, wanted, per_call, size
        self._empty_replies, self.until = empty_replies, math.inf
        self.received = self._under_way = self._empty = self._bytes = 0
        self.error: BaseException | None = None
        self._batch, self._full = list[T](), deque[list[T]]()
        self._changed = threading.Condition()

    def make(self) -> None:
        """Call until no more messages are needed."""
        while True:
            with self._changed:
                self._changed.wait_for(self._may_go_on)
                self._changed.notify_all()
                if self._is_over:
                    return
                asked = min(self._per_call, self._wanted)
                self._wanted -= asked
                self._under_way += 1
            messages, bytes_ = list[T](), 0
            try:
                messages += self._call(asked)
                bytes_ = sum(map(self._size, messages))
            except BaseException as error:  # otherwise the other threads would wait for this call forever
                self.error = error
            with self._changed:
                self._under_way -= 1
                self._wanted += asked - len(messages)
                self._empty = 0 if messages else self._empty + 1
                self.received += len(messages)
                self._batch += messages
                self._bytes += bytes_
                if len(self._batch) >= BATCH_ROWS or self._bytes >= BATCH_BYTES:
                    self._full.append(self._batch)
                    self._batch, self._bytes = [], 0
                self._changed.notify_all()

    def end(self) -> None:
        """Make no more calls."""
        with self._changed:
            self.until = -math.inf
            self._changed.notify_all()

    def batches(self) -> Iterator[list[T]]:
        """Yield full batches as they are completed, and the last batch."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._full or (self._is_over and not self._under_way))
                if not self._full:
                    break
                batch = self._full.popleft()
                self._changed.notify_all()
            yield batch
        if self._batch:
            yield self._batch

    @property
    def _is_over(self) -> bool:
        ended = self.error is not None or self._empty >= self._empty_replies or time.monotonic() >= self.until
        return ended or not (self._wanted or self._under_way)

    def _may_go_on(self) -> bool:
        # After an empty reply one call at a time, until a reply has messages: most calls at the end would be wasted.
        return self._is_over or bool(self._wanted and not (self._empty and self._under_way) and not self._full)


def in_groups(
    call: Callable[[Sequence[str]], Sequence[Refused]], ack_ids: Sequence[str], per_call: int
) -> list[Refused]:
    """Acknowledge or release messages in groups; return the refused messages, in order.

    A failed call refuses only its own group, with the error as the reason; the last error is raised if no call
    succeeded. Refusals are not retried here: `tasks.acknowledge` does that for every source.
    """
    succeeded, failed_in_a_row = False, 0
    error: Exception | None = None

    def call_group(group: Sequence[str]) -> Sequence[Refused]:
        nonlocal succeeded, failed_in_a_row, error
        if failed_in_a_row >= FAILED_CALLS:
            reason = f"not tried after {FAILED_CALLS} failed calls: {error}"
            return [Refused(ack_id, reason) for ack_id in group]
        try:
            refused = call(group)
        except Exception as failure:  # affects only this group, unless every call fails
            error, failed_in_a_row = failure, failed_in_a_row + 1
            return [Refused(ack_id, str(failure)) for ack_id in group]
        succeeded, failed_in_a_row = True, 0
        return refused

    groups = [ack_ids[start : start + per_call] for start in range(0, len(ack_ids), per_call)]
    with ThreadPoolExecutor(THREADS) as pool:
        refused = [entry for group in pool.map(call_group, groups) for entry in group]
    if error is not None and not succeeded:
        raise error
    return refused
