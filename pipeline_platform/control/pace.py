"""The pace of one task: how many messages it may handle now, and until when."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from pipeline_platform.control.store import ControlStore, ControlStoreError, Grant
from pipeline_platform.model.options import RateLimiting

T = TypeVar("T")

_LOOK_S = 5.0
"""How long a limit that is set, lifted or changed at run time may go unnoticed by a task that needs no permits."""

_FEW = 16
"""Messages between two looks at the clock where there is no limit: at each, they would cost what a message does."""

_SLICE_S = 0.25
"""Work that permits are taken for at once: few calls of the store, and little lost where an interval ends."""

_SHORTEST_S = 0.005
"""Where little is left of an interval, slices get shorter, down to this: a few calls of the store."""

_JITTER_S = 0.02
"""Tasks that wait for the same interval do not all come at its first moment."""

_OUTAGE_S = 60.0
"""A store that is away for less than this (a failover, a restart) costs time and no task."""


class Pace:
    """Hands out the right to handle messages, as the rate limit of the pipeline allows; one for each task.

    A task learns how fast it is: it takes permits for one message at first, twice as many each time it proves
    that it can use them, and never more than for a quarter of a second of its own work. So it never holds what it
    cannot use while another task could, and calls the store a few times a second at the most.

    It can be pickled; what was learnt stays behind.

    Args:
        store: Where permits come from; None where there is no limit.
        pipeline: Name of the pipeline.
        rate_limiting: The pipeline's own option; one set at run time in the store comes before it.
        sleep: Waits, in seconds; tests inject their own.
        monotonic: Seconds on the clock that deadlines are told by.
        jitter: A number from 0 to 1.

    Raises:
        ValueError: A limit without a store, which alone can hold it over all runs.
    """

    def __init__(
        self,
        store: ControlStore | None,
        pipeline: str,
        rate_limiting: RateLimiting | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if store is None and rate_limiting is not None:
            raise ValueError(
                f"{pipeline} has rate_limiting but no control store, which holds it over all runs; "
                "give the store, or None for rate_limiting"
            )
        self._store = store
        self._pipeline = pipeline
        self._rate_limiting = rate_limiting
        self._sleep = sleep
        self._monotonic = monotonic
        self._jitter = jitter
        self._most = 1
        self._last: _Slice | None = None
        self._unlimited_until = -math.inf if store else math.inf

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what it was built from: a monotonic clock means nothing to another process."""
        build = partial(Pace, sleep=self._sleep, monotonic=self._monotonic, jitter=self._jitter)
        return build, (self._store, self._pipeline, self._rate_limiting)

    @property
    def unlimited_until(self) -> float:
        """Until when no limit is looked for, on the monotonic clock: what `permitted` gives where there is none."""
        return self._unlimited_until

    def permitted(self, wanted: int, until: float = math.inf) -> tuple[int, float]:
        """Wait until messages may be handled, and say how many and until when.

        Start none of them after that; ask again for the rest. Call it when the former ones are handled, not
        before: the time between tells how fast the task is.

        Args:
            wanted: Messages at hand, 1 or more.
            until: When to give up waiting (the end of a lease, say), on the monotonic clock.

        Returns:
            How many, and the deadline on the monotonic clock, never after `until`. Where there is no limit, all of
            them until it is time to look for one; with no store either, `until`. 0 only once `until` has passed.

        Raises:
            ControlStoreError: The store has not answered for a minute.
        """
        now = self._monotonic()
        if now >= until:
            return 0, until
        if self._store is None or now < self._unlimited_until:
            return wanted, min(self._unlimited_until, until)
        self._learn(now)
        while (before := self._monotonic()) < until:
            grant = self._take(self._store, min(wanted, self._most))
            if grant.seconds == math.inf:
                self._unlimited_until = self._monotonic() + _LOOK_S
                return wanted, min(self._unlimited_until, until)
            valid_until, now = before + grant.seconds, self._monotonic()
            if not grant.messages:
                wait = valid_until - now + min(_JITTER_S, grant.seconds / 10) * self._jitter()
                self._sleep(max(0.0, min(wait, _LOOK_S, until - now)))
            elif now < valid_until:  # else the answer came too late: those permits are gone
                self._last = _Slice(grant.messages, now, valid_until)
                return grant.messages, min(valid_until, until)
        return 0, until

    def each(self, messages: Sequence[T], until: float = math.inf) -> Iterator[T]:
        """Yield messages one by one, each when it may be handled; fewer than all only once `until` has passed.

        Raises:
            ControlStoreError: The store has not answered for a minute.
        """
        # Without a limit a message costs no step of a generator of ours, a hundredth of what handling it does.
        return chain.from_iterable(self._slices(messages, until))

    def _slices(self, messages: Sequence[T], until: float) -> Iterator[Iterable[T]]:
        position, at_once = 0, _FEW

        def in_time(granted: Sequence[T], valid_until: float) -> Iterator[T]:
            nonlocal position
            for message in granted:
                if self._monotonic() >= valid_until:
                    return
                position += 1
                yield message

        while position < len(messages):
            began = self._monotonic()
            count, valid_until = self.permitted(len(messages) - position, until)
            if not count:
                return
            if valid_until == self._unlimited_until:
                few = messages[position : position + min(count, at_once)]
                yield few
                position += len(few)
                if self._monotonic() - began < _SHORTEST_S:
                    at_once *= 2
            else:
                yield in_time(messages[position : position + count], valid_until)

    def _learn(self, now: float) -> None:
        """Set how many permits to take at most, by how the last ones were used."""
        if self._last is None:
            return
        messages, since, valid_until = self._last
        self._last = None
        if now >= valid_until:  # some may have been left over, nobody knows how many
            self._most = max(1, min(self._most, messages) // 2)
            return
        work = max(_SHORTEST_S, min(_SLICE_S, (valid_until - since) / 2))
        speed = messages / max(now - since, 1e-6)
        self._most = max(1, min(2 * self._most, int(speed * work)))

    def _take(self, store: ControlStore, wanted: int) -> Grant:
        give_up, wait = self._monotonic() + _OUTAGE_S, 0.1
        while True:
            try:
                return store.take(self._pipeline, self._rate_limiting, wanted)
            except ControlStoreError:
                if self._monotonic() >= give_up:
                    raise
                self._sleep(wait * (1 + self._jitter()))
                wait = min(2 * wait, _LOOK_S)


class _Slice(NamedTuple):
    messages: int
    since: float
    valid_until: float
