"""What waits at a source."""

from datetime import datetime
from typing import NamedTuple

ENDLESS = 2**62
"""What a source counts that has no end."""


class Backlog(NamedTuple):
    """What waits at a source.

    Attributes:
        messages: How many could be received now; None where the source cannot tell, `ENDLESS` or more without an end.
        oldest: When the oldest of them came; None where no message waits or the source cannot tell.
        counts_held: Whether `messages` counts those that receives hold, too.
        counts_gaps: Whether `messages` counts numbers that no message has, too: then no more than so many wait.
        lost: Which messages the source lost before anybody read them, until a run goes on behind them, or where it was
            cut off before what was read; empty if none.
        at_least: Whether there may be more than `messages`: they were counted no further.
        others: Which deployments read it lately besides this one, in words; empty if none, None where nothing can be
            known of that.
    """

    messages: int | None
    oldest: datetime | None = None
    counts_held: bool = False
    counts_gaps: bool = False
    lost: str = ""
    at_least: bool = False
    others: str | None = None

    @property
    def counted(self) -> int | None:
        """How many; None where the source cannot tell or has no end: what is plotted and measured."""
        return None if self.messages is None or self.messages >= ENDLESS else self.messages

    def __str__(self) -> str:
        """How many, for people."""
        if self.messages is None:
            return "the source cannot tell"
        if self.messages >= ENDLESS:
            return "messages without end"
        most = "up to " if self.counts_gaps and self.messages else ""
        return f"{most}{self.messages:,} messages{' or more' if self.at_least else ''}"
