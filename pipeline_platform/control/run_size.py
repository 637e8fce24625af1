"""The size of a run that takes `target_run_time`, by the speed of earlier runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeline_platform.control.claims import Ended
from pipeline_platform.model.options import WORTH_IT, Processors

_FIRST = 100
"""Messages per task of a first run: few enough for callbacks that take a second each."""
_LONG_S = 10.0
"""A shorter run may have spent much of its time on overhead, so its rate is only a lower bound."""
RATE_RUNS = 500
"""Number of runs to examine: enough to include the last busy period after an hour of small runs."""


class Rate(NamedTuple):
    """Messages that a run handled, and its seconds from claim to acknowledgement."""

    messages: int
    seconds: float

    def within(self, seconds: float) -> int:
        """Return the messages that take this time: too few after a short run, never too many."""
        return int(self.messages * seconds / max(self.seconds, 0.001))


def learn(known: Rate | None, run: Rate) -> Rate:
    """Return the known rate, updated by one more run.

    A long run replaces it. A short run, with few messages, replaces only a lower rate.
    """
    if known is None or run.seconds >= _LONG_S or run.within(1e6) > known.within(1e6):
        return run
    return known


def rate_of(ended: Iterable[Ended]) -> Rate | None:
    """Return the rate of some runs, given latest first; None if no run received messages."""
    known = None
    for run in reversed([*ended]):
        if run.messages and run.ended_at >= run.started_at:  # else the clock was set back meanwhile
            known = learn(known, Rate(run.messages, (run.ended_at - run.started_at).total_seconds()))
    return known


def run_size(processors: Processors, rate: Rate | None) -> int:
    """Return the greatest number of messages in a run; a replay may handle more.

    The rate of a run includes its overhead, so sizes approach `target_run_time` from below within a few runs.
    """
    if processors.target_run_time is None:
        return processors.per_run
    fits = rate.within(processors.target_run_time.total_seconds()) if rate else _FIRST * processors.concurrency
    return min(processors.per_run, max(processors.concurrency, fits))


def worthwhile(processors: Processors, size: int) -> int:
    """Return the number of messages that makes a run of up to `size` worth its overhead."""
    if processors.target_run_time is None:
        return processors.worthwhile
    return max(1, int(size * (WORTH_IT / processors.target_run_time)))
