"""The backlog of a source."""

from datetime import datetime
from typing import NamedTuple

ENDLESS = 2**62
"""Backlog of a source without an end."""


class Backlog(NamedTuple):
    """Messages waiting at a source.

    Attributes:
        messages: Number of messages that could be received now; None if the source does not report it, `ENDLESS` or
            more without an end.
        oldest: Time of the oldest message; None if no message is waiting or the source does not report it.
        counts_held: Whether `messages` includes messages that receives have leased.
        counts_gaps: Whether `messages` includes offsets without a message, so that it is an upper bound.
        lost: Description of messages that the source lost before they were read, until a run continues after them, or
            of a partition that was truncated before its read position; empty if none.
        at_least: Whether there may be more than `messages`, because the count was limited.
        others: Description of other deployments that read the source lately; empty if none, None if unknown.
    """

    messages: int | None
    oldest: datetime | None = None
    counts_held: bool = False
    counts_gaps: bool = False
    lost: str = ""
    at_least: bool = False
    others: str | None = None

    def age(self, now: datetime) -> float | None:
        """Return the age of the oldest message in seconds; 0 if none is waiting, None if it is unknown."""
        if self.oldest is None:
            return 0.0 if self.messages == 0 else None
        return max(0.0, (now - self.oldest).total_seconds())

    @property
    def is_endless(self) -> bool:
        """Whether the source has no end. Runs may have leased some of its messages."""
        return self.messages is not None and self.messages >= ENDLESS // 2

    @property
    def counted(self) -> int | None:
        """The number of messages for plots and metrics; None if unknown or without an end."""
        return None if self.is_endless else self.messages

    def __str__(self) -> str:
        """Return the backlog as text."""
        if self.messages is None:
            return "this source does not report its backlog"
        if self.is_endless:
            return "an endless number of messages"
        most = "up to " if self.counts_gaps and self.messages else ""
        noun = "message" if self.messages == 1 else "messages"
        return f"{most}{self.messages:,} {noun}{' or more' if self.at_least else ''}"
