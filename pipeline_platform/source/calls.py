"""Calls of a few messages each, several at once: for sources whose server takes and gives no more in one call."""

import logging
import math
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Generic, Self, TypeVar

from pydantic import model_validator

from pipeline_platform.model.actions import LEASED, Words
from pipeline_platform.source.contract import Held, Refused
from pipeline_platform.source.leased import LeasedSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

THREADS = 8
"""Calls under way at once in one task. A call is mostly waiting: measured with 10 ms a call to SQS, one thread deletes
730 messages a second, four 2,100 and eight 4,100."""
BATCH_ROWS = 5_000
BATCH_BYTES = 16 * 2**20
"""A batch is full at whichever comes first; it may hold the messages of one round of calls more."""
FAILED_CALLS = 3
"""Whole calls failed in a row, each after the client's own retries, after which `in_groups` does not try the rest."""


class CalledSource(LeasedSource):
    """A leased source that is told of each message until when to keep it from others.

    A connector names its own option for the lease in `lease_option`, and writes `hold` in place of `release`, `extend`
    and `abandon`.
    """

    lease_option: ClassVar[str]

    @model_validator(mode="after")
    def _lease_follows_its_option(self) -> Self:
        lease_s = getattr(self, self.lease_option)
        if "lease_s" in self.model_fields_set and self.lease_s != lease_s:
            raise ValueError(
                f"lease_s is {self.lease_s}, but the lease of a message is {self.lease_option} ({lease_s} s): "
                "set that one, and leave lease_s out"
            )
        self.__dict__["lease_s"] = float(lease_s)  # the model is frozen from here on
        return self

    @property
    @abstractmethod
    def longest_delay_s(self) -> int:
        """Seconds that may follow `nack`."""

    @property
    def words(self) -> Words:
        """As of every leased source, up to the server's longest delay."""
        return {**LEASED, "nack": LEASED["nack"]._replace(longest_s=self.longest_delay_s)}

    @abstractmethod
    def hold(self, ack_ref: str, ack_ids: Sequence[str], seconds: int) -> list[Refused]:
        """Keep messages from others for so many seconds from now; return what was refused, as `ack` does."""

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Give messages back, to be delivered again after `delay_s` seconds, cut to the longest delay."""
        return self.hold(ack_ref, ack_ids, min(delay_s, self.longest_delay_s))

    def extend(self, receive_id: str, held: Held) -> bool:
        """Keep the messages for another lease. What the server refuses is another receive's, or stays as it is.

        Returns:
            False if all messages are others' by now: what another decides first is left out of what the run decides.
        """
        started, asked, left = time.monotonic(), 0, list[Refused]()
        for ack_ref, ack_ids in held():
            asked += len(ack_ids)
            left += self.hold(ack_ref, ack_ids, int(self.lease_s))
        if left:
            how_many = f"{len(left)} of {asked}"
            logger.warning("%s: %s messages cannot be kept for longer: %s", self.name, how_many, left[0].reason)
        if (took := time.monotonic() - started) > self.lease_s / 3:
            logger.warning(
                "%s: to keep %d messages for longer took %.0f s, more than a third of %s (%d s): some may come twice. "
                "Raise it, or lower the demand of a run",
                *(self.name, asked, took, self.lease_option, self.lease_s),
            )
        return not asked or sum(entry.lost for entry in left) < asked

    def abandon(self, receive_id: str, held: Held) -> None:
        """Give back at once what a dead receive wrote down; what it did not waits for its lease to end."""
        for ack_ref, ack_ids in held():
            self.release(ack_ref, ack_ids)


def receive(
    call: Callable[[int], Sequence[T]],
    wanted: int,
    *,
    per_call: int,
    empty_replies: int,
    size: Callable[[T], int],
    within_s: float | None = None,
) -> Iterator[list[T]]:
    """Call until `wanted` messages came, the queue seems empty, time is up or a call failed; yield them in batches.

    An error after the first messages is only logged: what is leased is worth handling, and a server that stays away
    fails the next receive before it leases anything.

    Args:
        call: Receives at most so many messages, `per_call` or less, in a thread.
        wanted: Messages to ask for in all.
        per_call: The most that one call asks for.
        empty_replies: Empty replies in a row after which the queue seems empty.
        size: Bytes of a message.
        within_s: Seconds after which no call is begun any more.
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
        logger.warning("ended after %d messages: %s", calls.received, calls.error)


class _Calls(Generic[T]):
    """Calls that each thread makes by itself: to be given each by one that waits for all costs half as much again."""

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
        """Call until there is nothing left to ask for."""
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
            except BaseException as error:  # the others would wait for this call for ever
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
        """Full batches as they come, and the rest."""
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
        # One by one from an empty reply on, until another is not: most calls past the end would be for nothing.
        return self._is_over or bool(self._wanted and not (self._empty and self._under_way) and not self._full)


def in_groups(
    call: Callable[[Sequence[str]], Sequence[Refused]], ack_ids: Sequence[str], per_call: int
) -> list[Refused]:
    """Acknowledge or release messages in groups; return what was refused, in order.

    A failed call refuses its group alone, with the error as the reason; the last error is raised where no call
    succeeded. Refusals are not tried again here: `tasks.acknowledge` does that for every source.
    """
    succeeded, failed_in_a_row = False, 0
    error: Exception | None = None

    def send(group: Sequence[str]) -> Sequence[Refused]:
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
    with ThreadPoolExecutor(THREADS) as pool:
        refused = [entry for group in pool.map(send, groups) for entry in group]
    if error is not None and not succeeded:
        raise error
    return refused
