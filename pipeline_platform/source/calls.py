"""Calls of a few messages each, several at once: for sources whose server takes and gives no more in one call."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from pipeline_platform.source.contract import Refused

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILED_CALLS = 3
"""Whole calls failed in a row, each after the client's own retries, after which `settle` does not try the rest."""


def receive(
    call: Callable[[int], Sequence[T]],
    wanted: int,
    *,
    per_call: int,
    threads: int,
    empty_replies: int,
    batch_rows: int,
    batch_bytes: int,
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
        batch_rows: Messages that fill a batch; it may hold those of one round of calls more.
        batch_bytes: Bytes that fill a batch.
        size: Bytes of a message.
        within_s: Seconds after which no call is begun any more; None for no such bound.

    Raises:
        Exception: Whatever `call` raised, where nothing was received.
    """
    under_way: dict[Future[Sequence[T]], int] = {}
    batch: list[T] = []
    received = held = empty = 0
    until = math.inf if within_s is None else time.monotonic() + within_s
    error: BaseException | None = None
    with ThreadPoolExecutor(threads) as pool:
        while True:
            is_over = error is not None or empty >= empty_replies or time.monotonic() >= until
            # One by one from an empty reply on, until another is not: most calls past the end would be for nothing.
            while wanted and not is_over and len(under_way) < (1 if empty else threads):
                asked = min(per_call, wanted)
                wanted -= asked
                under_way[pool.submit(call, asked)] = asked
            if not under_way:
                break
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                asked = under_way.pop(done)
                if failure := done.exception():
                    error = failure
                    continue
                messages = done.result()
                wanted += asked - len(messages)
                received += len(messages)
                empty = 0 if messages else empty + 1
                batch += messages
                held += sum(map(size, messages))
            if len(batch) >= batch_rows or held >= batch_bytes:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch
    if error is not None:
        if not received:
            raise error
        logger.warning("ended after %d messages: %s", received, error)


def settle(
    call: Callable[[Sequence[str]], Sequence[Refused]], ack_ids: Sequence[str], *, per_call: int, threads: int
) -> list[Refused]:
    """Acknowledge or release messages in groups; return what was refused, in order.

    A failed call refuses its group alone, with the error as the reason. Refusals are not tried again here:
    `tasks.acknowledge` does that for every source.

    Args:
        call: Tells the server of one group, in a thread; returns what it refused.
        ack_ids: Of the messages.
        per_call: Ids in a group at the most.
        threads: Calls under way at once.

    Raises:
        Exception: Whatever `call` raised last, where no call succeeded.
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
