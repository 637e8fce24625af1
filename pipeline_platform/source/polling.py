"""Waiting for messages by repeated looks."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from pipeline_platform.model.options import Backoff

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
