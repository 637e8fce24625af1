"""Retries of calls to an unavailable server."""

import logging
from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, before_sleep_log, retry_if_exception_type, stop_after_attempt, stop_after_delay

from pipeline_platform.source.contract import SourceAwayError
from pipeline_platform.source.pauses import Patience, pause_s

logger = logging.getLogger(__name__)

T = TypeVar("T")

USUAL = Patience()


def patiently(call: Callable[[], T], patience: Patience = USUAL, away: type[BaseException] = SourceAwayError) -> T:
    """Call, and retry with pauses while the call raises `away`; a failed call must have no effects."""
    is_single = patience.backoff == "stop"
    tries = Retrying(
        retry=retry_if_exception_type(away),
        wait=lambda state: pause_s(patience, state.attempt_number + 1),
        stop=stop_after_attempt(1) if is_single else stop_after_delay(patience.within_s),
        before_sleep=before_sleep_log(logger, logging.WARNING),
        reraise=True,
    )
    return tries(call)
