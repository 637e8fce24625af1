"""Times of table files, which select the files that a search for earlier decisions reads."""

import math
from collections.abc import Iterable
from datetime import datetime

_AHEAD_MS = 86_400_000
"""Greatest lead of a file's time over this host's clock, because publishers may set any time."""


def time_of_files(now_ms: int, causes: Iterable[datetime | None]) -> int:
    """Return the time of new files in ms: now by this host's clock, or the latest of their causes if that is later.

    A file is committed after the messages that it decides were published and after the files that it replaces, even if
    the clock of this host is behind the clocks of their hosts.
    """
    latest = max((math.ceil(cause.timestamp() * 1000) for cause in causes if cause), default=0)
    return max(now_ms, min(latest, now_ms + _AHEAD_MS))
