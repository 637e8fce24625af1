"""Pauses: between attempts to reach an unavailable source, and between looks for messages."""

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, Literal, NamedTuple

from pipeline_platform.model.retry import Backoff

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


PAUSES: Final = Backoff(first=timedelta(seconds=0.25), most=timedelta(seconds=1))
"""Pauses between two looks. A look costs 3 ms on SQLite, 7 to 15 ms on PostgreSQL, RabbitMQ and Kafka."""


def poll(look: Callable[[], bool], within_s: float, pauses: Backoff) -> bool:
    """Call `look` until it returns True, with growing pauses; return False after `within_s` seconds."""
    end, attempt = time.monotonic() + within_s, 1
    while not look():
        attempt += 1
        pause, left = pauses.before(attempt).total_seconds(), end - time.monotonic()
        time.sleep(max(0.0, min(pause, left)))
        if pause >= left:  # the next call starts with a look
            return False
    return True
