"""Trying again what a server that is away did not answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from pipeline_platform.source.contract import SourceAwayError

logger = logging.getLogger(__name__)

T = TypeVar("T")

AWAY_S = 30.0
"""Seconds that a run waits for a server: a restart takes less, and its claim and leases live on meanwhile."""


def patiently(call: Callable[[], T], within_s: float = AWAY_S) -> T:
    """Call, and again after growing pauses while the source is away.

    Args:
        call: What changes nothing where it fails.
        within_s: Seconds after which there is no other try.

    Raises:
        SourceAwayError: It was away for longer.
        Exception: Whatever else `call` raised, at once.
    """
    tries = Retrying(
        retry=retry_if_exception_type(SourceAwayError),
        wait=wait_random_exponential(multiplier=0.5, max=5),
        stop=stop_after_delay(within_s),
        before_sleep=before_sleep_log(logger, logging.WARNING),
        reraise=True,
    )
    return tries(call)
