"""How many messages a run takes on to last as long as it should, by how fast the last runs were."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeline_platform.control.claims import Ended
from pipeline_platform.model.options import WORTH_IT, Processors

_FIRST = 100
"""Messages for each task of a first run: few enough for callbacks that take a second, and the second run has more."""
_LONG_S = 10.0
"""A shorter run may have spent a good part of its time on what every run costs: it could have taken on more."""
LOOK_BACK = 500
"""Runs that are looked at: what was learnt in busy times is known after an hour of small runs, too."""


class Rate(NamedTuple):
    """How many messages a run handled, and in how many seconds, from its claim to its acknowledgement."""

    messages: int
    seconds: float

    def within(self, seconds: float) -> int:
        """How many take so long; too few where this run was short, never too many."""
        return int(self.messages * seconds / max(self.seconds, 0.001))


def learn(known: Rate | None, run: Rate) -> Rate:
    """What is known of the rate after one more run.

    A long run tells how fast runs are now. A short one, as of a trickle, tells only that they are at least that fast.
    """
    if known is None or run.seconds >= _LONG_S or run.within(1e6) > known.within(1e6):
        return run
    return known


def rate_of(ended: Iterable[Ended]) -> Rate | None:
    """What some runs tell, the latest first; None if none received anything."""
    known = None
    for one in reversed([*ended]):
        if one.messages and one.ended_at >= one.started_at:  # else the clock was set back meanwhile
            known = learn(known, Rate(one.messages, (one.ended_at - one.started_at).total_seconds()))
    return known


def run_size(processors: Processors, rate: Rate | None) -> int:
    """Messages that a run takes on at most; a replay may take on more.

    No factor is needed for what a run costs beside its work: the rate of a run includes it, so that sizes come nearer
    to `target_run_time` from below, and within a few runs.
    """
    if processors.target_run_time is None:
        return processors.per_run
    fits = rate.within(processors.target_run_time.total_seconds()) if rate else _FIRST * processors.concurrency
    return min(processors.per_run, max(processors.concurrency, fits))


def worthwhile(processors: Processors, size: int) -> int:
    """Messages that make a run of up to `size` worth what it costs beside its work."""
    if processors.target_run_time is None:
        return processors.worthwhile
    return max(1, int(size * (WORTH_IT / processors.target_run_time)))
