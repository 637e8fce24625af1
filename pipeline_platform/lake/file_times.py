"""The time of a table's files, by which a look-up of earlier decisions chooses the files that it reads."""

import math
from collections.abc import Iterable
from datetime import datetime

_AHEAD_MS = 86_400_000
"""How far a file's time may be ahead of this host's clock: a producer may publish with any time."""


def time_of_files(now_ms: int, causes: Iterable[datetime | None]) -> int:
    """Return the time of new files in ms: now by this host's clock, or the latest of their causes if that is later.

    A file is committed after the messages that it decides were published and after the files that it replaces, even if
    the clock of this host is behind the clocks of their hosts.
    """
    latest = max((math.ceil(cause.timestamp() * 1000) for cause in causes if cause), default=0)
    return max(now_ms, min(latest, now_ms + _AHEAD_MS))
