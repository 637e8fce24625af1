"""Retries of calls to an unavailable server."""

import logging
import random
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from tenacity import Retrying, before_sleep_log, retry_if_exception_type, stop_after_attempt, stop_after_delay

from pipeline_platform.model.options import Backoff
from pipeline_platform.source.contract import Patience, SourceAwayError

logger = logging.getLogger(__name__)

T = TypeVar("T")

USUAL = Patience()


def patiently(call: Callable[[], T], patience: Patience = USUAL) -> T:
    """Call, and retry with pauses while the call raises `SourceAwayError`; a failed call must have no effects."""
    is_single = patience.backoff == "stop"
    tries = Retrying(
        retry=retry_if_exception_type(SourceAwayError),
        wait=lambda state: pause_s(patience, state.attempt_number + 1),
        stop=stop_after_attempt(1) if is_single else stop_after_delay(patience.within_s),
        before_sleep=before_sleep_log(logger, logging.WARNING),
        reraise=True,
    )
    return tries(call)


def pause_s(patience: Patience, attempt: int) -> float:
    """Return the pause before an attempt, from the second, in seconds."""
    if patience.backoff == "rand":
        return random.uniform(patience.least_s, patience.most_s)  # noqa: S311 - no secret
    # A connector may set 0, or a least above the most.
    first = timedelta(seconds=max(patience.least_s, 0.001))
    backoff = Backoff(first=first, most=max(first, timedelta(seconds=patience.most_s)))
    longest = backoff.before(attempt).total_seconds()
    return longest if patience.backoff == "exp" else random.uniform(patience.least_s, longest)  # noqa: S311
