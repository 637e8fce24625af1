"""The pace of one task: how many messages it may handle now, and until when."""

import logging
import math
import mmap
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from tenacity import Retrying, retry_if_exception_type, wait_exponential, wait_random

from pipeline_platform.control.store import ControlStore, ControlStoreError, Grant
from pipeline_platform.model.options import RateLimiting

P = ParamSpec("P")
T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_LOOK_S = 5.0
"""How long a limit that is set, lifted or changed at run time may go unnoticed by a task that needs no permits."""

_SLICE_S = 0.25
"""Work that permits are taken for at once: few calls of the store, and little lost where an interval ends."""

_SHORTEST_S = 0.005
"""Where little is left of an interval, slices get shorter, down to this: a few calls of the store."""

_JITTER_S = 0.02
"""Tasks that wait for the same interval do not all come at its first moment."""

_SHORTEST_INTERVAL = timedelta(seconds=1)
"""Of shorter ones some would pass between two steps: tasks wait for these."""

_OUTAGE_S = 60.0
"""A store that is away for less than this (a failover, a restart) costs time and no task."""


class Pace:
    """Hands out the right to handle messages, as the rate limit of the pipeline allows; one for each task.

    A task learns how fast it is. It takes permits for one message at first, then twice as many each time it proves
    that it can use them, and never more than for a quarter of a second of its own work. So it never holds what it
    cannot use while another task could, and calls the store a few times a second at the most. What it has learnt is
    not pickled.

    It raises `ControlStoreError` where the store has not answered for a minute.

    Args:
        store: Gives permits; None where there is no limit.
        pipeline: Name of the pipeline.
        rate_limiting: The pipeline's own option; one that is set at run time in the store comes before it.
        beside: Other limits that the same messages take permits of, by what they limit.
        stops: What may be stopped for its messages not to begin any more: its pipeline, its producer, its receive.
        is_over: Whether that is so already.
        looked_at: When it was seen that neither a limit nor a stop holds, in seconds since the epoch.
        sleep: Waits, in seconds; with `monotonic`, the clock of all deadlines, and `jitter`, from 0 to 1, for tests.
    """

    def __init__(
        self,
        store: ControlStore | None,
        pipeline: str,
        rate_limiting: RateLimiting | None = None,
        beside: Mapping[str, RateLimiting | None] | None = None,
        stops: Sequence[str] = (),
        is_over: bool = False,
        looked_at: float = -math.inf,
        *,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._store, self._pipeline, self._rate_limiting = store, pipeline, rate_limiting
        self._beside, self._stops = beside, tuple(stops)
        self._stop_at = -math.inf if is_over else math.inf
        self._sleep, self._monotonic, self._jitter = sleep, monotonic, jitter
        self._most = 1
        self._granted: tuple[int, float, float] | None = None  # messages, since, until
        self.waited = 0.0
        """Seconds spent waiting for permits."""
        self._looked_at = looked_at
        self._unlimited = memoryview(mmap.mmap(-1, 8)).cast("d")  # forks of this process share it: one looks for all
        self._unlimited[0] = monotonic() + min(_LOOK_S, looked_at + _LOOK_S - time.time()) if store else math.inf

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy what it was built from: a monotonic clock means nothing to another process."""
        is_over = self._stop_at == -math.inf
        given = (self._store, self._pipeline, self._rate_limiting, self._beside, self._stops)
        return Pace, (*given, is_over, self._looked_at)

    @property
    def unlimited_until(self) -> float:
        """No limit is looked for before then, on the monotonic clock: `permitted` returns it where there is none."""
        return self._unlimited[0]

    def end(self) -> None:
        """Let no message begin any more, here and in all copies made from now on, even if the stop is lifted."""
        self._stop_at = -math.inf

    def permitted(self, wanted: int, until: float = math.inf) -> tuple[int, float]:
        """Wait until messages may be handled, and return how many and until when.

        Start none of them after that; ask again for the rest. Call it when the former ones are handled, not
        before: the time between tells how fast the task is.

        Returns:
            How many of those `wanted`, 1 or more, and the deadline on the monotonic clock, never after `until`, when it
            gives up waiting. Where there is no limit, all of them until it is time to look for one; with no store
            either, `until`. 0 only once `until` has passed, or where no message may begin any more: then it stays so.
        """
        self._learn(self._monotonic())
        while (before := self._monotonic()) < (until := min(until, self._stop_at)):
            if self._store is None or before < self.unlimited_until:
                return wanted, min(self.unlimited_until, until)
            grant = self._patiently(self._store.take, self._limits, min(wanted, self._most), self._stops)
            now, self._stop_at = self._monotonic(), before + grant.stop_s
            until = min(until, self._stop_at)
            if grant.stop_s <= 0:
                break
            if grant.seconds == math.inf:
                self._unlimited[0] = min(now + _LOOK_S, self._stop_at)
                return wanted, min(self.unlimited_until, until)
            valid_until = before + grant.seconds
            if not grant.messages:
                wait = valid_until - now + min(_JITTER_S, grant.seconds / 10) * self._jitter()
                self._wait(min(wait, _LOOK_S, until - now))
            elif now < valid_until:  # else the answer came too late: those permits are gone
                self._granted = (grant.messages, now, valid_until)
                return grant.messages, min(valid_until, until)
        return 0, until

    def portion(self, wanted: int) -> int:
        """Wait until messages may begin, as `permitted` does, but take no permits; return for how many there are some.

        It is for a step that others wait behind: who begins it with so many messages hardly waits in it. Where neither
        limit nor stop holds, copies made from now on know.

        Returns:
            How many of those `wanted`, 1 or more; all where no limit holds, where one has intervals of less than a
            second, or where none may begin any more.
        """
        is_logged = False
        while self._store is not None and self._stop_at > -math.inf:
            left = self._patiently(self._store.left_of_each, self._limits, self._stops, _SHORTEST_INTERVAL)
            # Tasks that begin soon need not look again.
            self._looked_at = time.time() if (left.messages, left.stop_s) == (sys.maxsize, math.inf) else -math.inf
            if left.seconds == math.inf or left.stop_s <= 0:
                break
            if left.messages:
                return min(wanted, left.messages)
            if left.seconds >= _LOOK_S and not is_logged:
                is_logged = True
                _LOG.info("%s: %d messages wait %.0f s for permits", self._pipeline, wanted, left.seconds)
            self._wait(min(left.seconds, left.stop_s, _LOOK_S))
        return wanted

    def each(self, messages: Sequence[T], until: float = math.inf) -> Iterator[T]:
        """Yield messages one by one, each when it may be handled; fewer than all where `permitted` gives 0."""
        position = 0
        while position < len(messages):
            count, valid_until = self.permitted(len(messages) - position, until)
            if not count:
                return
            for message in messages[position : position + count]:
                if self._monotonic() >= valid_until:
                    break
                position += 1
                yield message

    def _learn(self, now: float) -> None:
        """Set how many permits to take at most, by how the last ones were used."""
        if self._granted is None:
            return
        (messages, since, valid_until), self._granted = self._granted, None
        if now >= valid_until:  # some may be left over, nobody knows how many
            self._most = max(1, min(self._most, messages) // 2)
            return
        work = max(_SHORTEST_S, min(_SLICE_S, (valid_until - since) / 2))
        speed = messages / max(now - since, 1e-6)
        self._most = max(1, min(2 * self._most, int(speed * work)))

    def _wait(self, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self._sleep(seconds)
        self.waited += seconds

    @property
    def _limits(self) -> dict[str, RateLimiting | None]:
        return {self._pipeline: self._rate_limiting, **(self._beside or {})}

    def _patiently(self, ask: Callable[P, Grant], *args: P.args, **kwargs: P.kwargs) -> Grant:
        give_up = self._monotonic() + _OUTAGE_S
        again = Retrying(
            retry=retry_if_exception_type(ControlStoreError),
            wait=wait_exponential(multiplier=0.1, max=_LOOK_S) + wait_random(0, 0.1),
            stop=lambda _: self._monotonic() >= give_up,
            sleep=self._sleep,
            reraise=True,
        )
        return again(ask, *args, **kwargs)
