"""Positions in a shard. Sequence numbers cannot be offsets: they have gaps, and exceed 64 bits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

_MARGIN_S = 900.0
"""Maximum lag of this machine's clock behind Kinesis' clock (docs/understand/guarantees.md)."""
_RENEW_S = 1_800.0
"""Age at which the start of a shard without new messages is renewed."""


class Mark(BaseModel, frozen=True):
    """Position in a shard, after its last acknowledged message. Times are seconds since the epoch.

    Attributes:
        sequence: Sequence number of that message's record; empty if no message is acknowledged.
        sub: Number of the message in an aggregated record; None in a plain record.
        arrived: Time when that record arrived.
        since: All messages that arrived earlier are acknowledged, or are before the start of reading; 0 if unknown.
        again_to: Messages that arrived earlier may have been delivered before.
        ended: Whether the shard is closed, and all its messages are acknowledged.
    """

    sequence: str = ""
    sub: int | None = None
    arrived: float = 0.0
    since: float = 0.0
    again_to: float = 0.0
    ended: bool = False

    @classmethod
    def of(cls, text: str) -> Mark:
        """Return the mark with this text."""
        return cls.model_validate_json(text or "{}")

    def __str__(self) -> str:
        """Return its text for the control store."""
        return self.model_dump_json(exclude_defaults=True)

    def is_before(self, sequence: str, sub: int | None) -> bool:
        """Whether a message is after this position."""
        if not self.sequence or sequence != self.sequence:
            return not self.sequence or int(sequence) > int(self.sequence)
        return sub is not None and self.sub is not None and sub > self.sub

    def iterator(self, now: float, retention_s: float) -> dict[str, Any]:
        """Return the arguments of an iterator that starts at or before this position.

        The latest start is used: from an old position, AWS returns empty pages for a long time, as if messages waited.
        It refuses the sequence number of an expired record.
        """
        oldest = now - retention_s + _MARGIN_S
        if self.sequence and self.arrived > oldest and self.arrived >= self.since:
            kind = "AFTER_SEQUENCE_NUMBER" if self.sub is None else "AT_SEQUENCE_NUMBER"
            return {"ShardIteratorType": kind, "StartingSequenceNumber": self.sequence}
        if self.since > oldest:
            return {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": datetime.fromtimestamp(self.since, UTC)}
        return {"ShardIteratorType": "TRIM_HORIZON"}

    def lost(self, now: float, retention_s: float) -> str:
        """Return a description of messages that Kinesis may have deleted before they were read; empty if none."""
        if not 0 < self.since < now - retention_s:
            return ""
        first, last = (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}" for at in (self.since, now - retention_s))
        return (
            f"may have lost messages that arrived between {first} and {last} UTC: they are older than the retention of "
            "the stream, and were not read. Raise the retention, or run the pipeline more often"
        )

    def caught_up(self, now: float) -> Mark:
        """Return the mark after no message was waiting at `now`, by the server's clock."""
        return self.model_copy(update={"since": now - _MARGIN_S})

    def is_late(self, now: float) -> bool:
        """Whether `since` is to be renewed while no message waits: otherwise reading would start far in the past."""
        return self.since < now - _RENEW_S

    def released(self, now: float) -> Mark:
        """Return the mark after a receive released messages at `now`."""
        return self.model_copy(update={"again_to": now + _MARGIN_S})
