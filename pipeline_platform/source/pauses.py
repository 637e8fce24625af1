"""Pauses between attempts to reach an unavailable source."""

import random
from datetime import timedelta
from typing import Literal, NamedTuple

from pipeline_platform.model.options import Backoff

BackoffType = Literal["exp", "rand", "rand_exp", "stop"]
"""Growth of pauses: `exp` doubles, `rand` is random, `rand_exp` is random up to a doubling limit, `stop` means none."""


class Patience(NamedTuple):
    """Retries of a run while a source is unavailable.

    Attributes:
        backoff: Growth of the pauses between attempts.
        least_s: Shortest pause in seconds.
        most_s: Longest pause in seconds.
        within_s: Seconds from the first attempt until the run stops retrying. A server restarts in less than 30 s, and
            the run's claim and leases stay valid for this time.
    """

    backoff: BackoffType = "rand_exp"
    least_s: float = 0.5
    most_s: float = 5.0
    within_s: float = 30.0


def pause_s(patience: Patience, attempt: int) -> float:
    """Return the pause before an attempt, from the second, in seconds."""
    if patience.backoff == "rand":
        return random.uniform(patience.least_s, patience.most_s)  # noqa: S311 - no secret
    # A connector may set 0, or a least above the most.
    first = timedelta(seconds=max(patience.least_s, 0.001))
    backoff = Backoff(first=first, most=max(first, timedelta(seconds=patience.most_s)))
    longest = backoff.before(attempt).total_seconds()
    return longest if patience.backoff == "exp" else random.uniform(patience.least_s, longest)  # noqa: S311
