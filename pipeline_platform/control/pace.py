"""The pace of one task: the number of messages that it may handle now, and until when."""

import logging
import math
import mmap
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from tenacity import Retrying, retry_if_exception_type

from pipeline_platform.control.store import ControlStore, ControlStoreError, Grant
from pipeline_platform.model.options import RateLimiting
from pipeline_platform.model.retry import JITTER, Backoff

P = ParamSpec("P")
T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_LOOK_S = 5.0
"""Longest time after which a task without a limit detects a limit or a stop set at run time."""

_SLICE_S = 0.25
"""Handling time that one request covers: few calls of the store, and few permits lost at the end of an interval."""

_SHORTEST_S = 0.005
"""Shortest slice, used near the end of an interval, so that calls of the store stay few."""

_JITTER_S = 0.02
"""Random delay, so that tasks that wait for the same interval do not call at the same moment."""

_SHORTEST_INTERVAL = timedelta(seconds=1)
"""Shorter intervals may pass between two steps, so only tasks wait for them."""

_OUTAGE_S = 60.0
"""Longest outage of the store (a failover, a restart) that a task survives by waiting."""
_BACKOFF = Backoff(first=timedelta(milliseconds=100), most=timedelta(seconds=_LOOK_S))


class Pace:
    """Permits of one task to handle messages, under the rate limit of its pipeline.

    A task measures its speed. It first takes a permit for one message, and then up to twice as many each time that it
    used the previous permits in time. It never takes more than it can use in a quarter of a second, so it keeps no
    permits from other tasks, and calls the store at most a few times a second. The measured speed is not pickled.

    Args:
        store: Source of the permits; None without a limit.
        pipeline: Name of the pipeline.
        rate_limiting: The pipeline's option. A limit set at run time in the store takes precedence.
        beside: Other limits that apply to the same messages, by pipeline or producer.
        stops: Pipeline, producer and receive of the messages, which `drain` or `stop` may stop.
        is_over: Whether no more messages may start.
        looked_at: Time when neither a limit nor a stop was found, in seconds since the epoch.
        sleep: Waits, in seconds; for tests.
        monotonic: Clock of all deadlines; for tests.
        jitter: Returns a random number from 0 to 1; for tests.

    Raises:
        ControlStoreError: In any method, if the store is unavailable for a minute.
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
        self._unlimited = memoryview(mmap.mmap(-1, 8)).cast("d")  # shared with forks, so that one check serves all
        self._unlimited[0] = monotonic() + min(_LOOK_S, looked_at + _LOOK_S - time.time()) if store else math.inf

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments only: a monotonic time is meaningless in another process."""
        given = (self._store, self._pipeline, self._rate_limiting, self._beside, self._stops)
        return Pace, (*given, self.is_over, self._looked_at)

    @property
    def unlimited_until(self) -> float:
        """Time of the next check for a limit, on the monotonic clock, if there is none now."""
        return self._unlimited[0]

    @property
    def is_over(self) -> bool:
        """Whether `end` was called: no more messages may start."""
        return self._stop_at == -math.inf

    def end(self) -> None:
        """Start no more messages, in this object and in copies made from now on, even if the stop is removed."""
        self._stop_at = -math.inf

    def permitted(self, wanted: int, until: float = math.inf) -> tuple[int, float]:
        """Wait until messages may be handled, and return their number and the deadline to start them.

        Call it again for the remaining messages, after the permitted messages are handled: the time between two calls
        measures the speed of the task.

        Args:
            wanted: Messages to handle.
            until: Time on the monotonic clock at which to stop waiting.

        Returns:
            The number of messages, from 1 to `wanted`, and the deadline on the monotonic clock, never after `until`.
            Without a limit, `wanted` and the time of the next check for a limit. The number is 0 only once `until` has
            passed, or if no more messages may start; then further calls return 0, too.
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
            elif now < valid_until:  # else the answer came too late, and the permits have expired
                self._granted = (grant.messages, now, valid_until)
                return grant.messages, min(valid_until, until)
        return 0, until

    def portion(self, wanted: int) -> int:
        """Wait until messages may start, as `permitted` does, and return their number without taking permits.

        Use it before a step that blocks others: with this number of messages, the step hardly waits for permits. If
        there is neither a limit nor a stop, copies made from now on skip their first check.

        Returns:
            The number of messages, from 1 to `wanted`. It is `wanted` without a limit, for limits with intervals below
            a second, and if no more messages may start.
        """
        is_logged = False
        while self._store is not None and self._stop_at > -math.inf:
            left = self._patiently(self._store.left_of_each, self._limits, self._stops, _SHORTEST_INTERVAL)
            # Tasks that start soon can skip the check.
            self._looked_at = time.time() if (left.messages, left.stop_s) == (sys.maxsize, math.inf) else -math.inf
            if left.seconds == math.inf or left.stop_s <= 0:
                break
            if left.messages:
                return min(wanted, left.messages)
            if left.seconds >= _LOOK_S and not is_logged:
                is_logged = True
                _LOG.info("Waiting %.0f s for permits of %s: messages=%d", left.seconds, self._pipeline, wanted)
            self._wait(min(left.seconds, left.stop_s, _LOOK_S))
        return wanted

    def each(self, messages: Sequence[T], until: float = math.inf) -> Iterator[T]:
        """Yield each message when it may be handled; stop early if `permitted` returns 0."""
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
        """Set the size of the next request for permits by the use of the last."""
        if self._granted is None:
            return
        (messages, since, valid_until), self._granted = self._granted, None
        if now >= valid_until:  # an unknown number may be unused
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
            wait=lambda state: _BACKOFF.before(state.attempt_number + 1, JITTER).total_seconds(),
            stop=lambda _: self._monotonic() >= give_up,
            sleep=self._sleep,
            reraise=True,
        )
        return again(ask, *args, **kwargs)
