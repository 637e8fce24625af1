"""Trying again while a server is away: the pauses, and when to give up."""

from __future__ import annotations

import logging
from typing import Literal

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, stop_before_delay
from tenacity.wait import wait_base, wait_exponential, wait_random, wait_random_exponential

from pipeline_platform.source.contract import SourceAwayError

logger = logging.getLogger(__name__)

Backoff = Literal["exp", "rand", "rand_exp", "stop"]
"""How pauses grow: doubled, at random, at random below a bound that is doubled, or not at all: one try."""


def retrying(source: str, backoff: Backoff, min_s: float, max_s: float, within_s: float) -> Retrying:
    """Build what calls a function until it raises no `SourceAwayError`; each call of it begins with the shortest pause.

    Args:
        source: Its name, for the log.
        backoff: How pauses grow.
        min_s: Seconds of the shortest pause.
        max_s: Seconds of the longest.
        within_s: Seconds in which it tries. The last error is raised then.
    """
    waits: dict[Backoff, wait_base] = {
        "exp": wait_exponential(multiplier=min_s, min=min_s, max=max_s),
        "rand": wait_random(min_s, max_s),
        "rand_exp": wait_random_exponential(multiplier=min_s, min=min_s, max=max_s),
        "stop": wait_random(),
    }

    def say(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        logger.warning("%s: trying again in %.1f s: %s", source, state.upcoming_sleep, error)

    return Retrying(
        retry=retry_if_exception_type(SourceAwayError),
        wait=waits[backoff],
        stop=stop_after_attempt(1) if backoff == "stop" else stop_before_delay(within_s),
        before_sleep=say,
        reraise=True,
    )
