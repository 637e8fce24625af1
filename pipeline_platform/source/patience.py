"""Retries of calls to an unavailable server."""

import logging
from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, before_sleep_log, retry_if_exception_type, stop_after_attempt, stop_after_delay
from tenacity.wait import wait_base, wait_exponential, wait_none, wait_random, wait_random_exponential

from pipeline_platform.source.contract import BackoffType, Patience, SourceAwayError

logger = logging.getLogger(__name__)

T = TypeVar("T")

USUAL = Patience()


def patiently(call: Callable[[], T], patience: Patience = USUAL) -> T:
    """Call, and retry with pauses while the call raises `SourceAwayError`; a failed call must have no effects."""
    is_single = patience.backoff == "stop"
    tries = Retrying(
        retry=retry_if_exception_type(SourceAwayError),
        wait=pauses(patience),
        stop=stop_after_attempt(1) if is_single else stop_after_delay(patience.within_s),
        before_sleep=before_sleep_log(logger, logging.WARNING),
        reraise=True,
    )
    return tries(call)


def pauses(patience: Patience) -> wait_base:
    """Return the lengths of pauses."""
    least, most = patience.least_s, patience.most_s
    of: dict[BackoffType, wait_base] = {
        "exp": wait_exponential(multiplier=least, min=least, max=most),
        "rand": wait_random(least, most),
        "rand_exp": wait_random_exponential(multiplier=least, min=least, max=most),
        "stop": wait_none(),
    }
    return of[patience.backoff]
