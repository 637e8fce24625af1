"""Breakers: a producer pauses while most messages fail, then tries a few messages, until an attempt succeeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import sqlalchemy as sa

from pipeline_platform.control.limits import TABLES, as_time, as_us, is_of, lock, pipeline_of_key
from pipeline_platform.model.options import Breaker
from pipeline_platform.sql.database import Database, insert

TRIAL = 10
"""Messages of an attempt after a pause."""

_BREAKERS = sa.Table(
    "control_breakers",
    TABLES,
    sa.Column("pipeline", sa.Text, primary_key=True),
    sa.Column("messages", sa.BigInteger, nullable=False),
    sa.Column("failed", sa.Double, nullable=False),
    sa.Column("pauses", sa.BigInteger, nullable=False),
    sa.Column("until", sa.BigInteger),
)


@dataclass(frozen=True)
class BreakerState:
    """Recent messages of a producer, and its pause.

    Attributes:
        messages: Recent messages, at most `of_last` or the messages of one receive.
        failed: Number of these that failed and may be retried. Older messages count less.
        pauses: Pauses since the last success.
        until: End of the pause; None if the producer is not paused. After it, an attempt decides.
    """

    messages: int = 0
    failed: float = 0
    pauses: int = 0
    until: datetime | None = None

    def after(self, breaker: Breaker, messages: int, failed: int, now: datetime) -> BreakerState:
        """Return the state after a receive."""
        if self.until is not None:
            if now < self.until:  # a receive that started before the pause
                return self
            if failed < breaker.share * messages:
                return BreakerState(messages, failed)
            return replace(self, pauses=self.pauses + 1, until=now + breaker.pause.before(self.pauses + 2))
        recent, bad = self.messages + messages, self.failed + failed
        if recent < breaker.of_last:
            return BreakerState(recent, bad)
        if bad >= breaker.share * recent:
            return BreakerState(recent, bad, 1, now + breaker.pause.before(2))
        return BreakerState(breaker.of_last, bad * breaker.of_last / recent)

    def paused(self, now: datetime) -> str | None:
        """Return the reason of the current pause, or None."""
        if self.until is None or now >= self.until:
            return None
        return (
            f"{self.failed:,.0f} of the last {self.messages:,} messages failed; next attempt at "
            f"{self.until.astimezone(UTC):%H:%M:%S} UTC"
        )


class Breakers(Database):
    """Breakers of producers, as a part of the control store."""

    def breaker(self, key: str) -> BreakerState:
        """Return the state of a producer's breaker."""
        with self.reading() as connection:
            return _state(connection, key)

    def judge(self, key: str, breaker: Breaker, messages: int, failed: int) -> None:
        """Record the messages of an acknowledged receive, and how many of them failed and may be retried."""
        with self.writing() as connection:
            lock(connection, pipeline_of_key(key))  # another run may judge at the same time
            now = as_time(self.now(connection))
            state = _state(connection, key).after(breaker, messages, failed, now)
            until = None if state.until is None else as_us(state.until)
            values = {"messages": state.messages, "failed": state.failed, "pauses": state.pauses, "until": until}
            row = insert(connection, _BREAKERS).values(pipeline=key, **values)
            connection.execute(row.on_conflict_do_update(index_elements=["pipeline"], set_=values))


def forget_breaker(connection: sa.Connection, key: str) -> None:
    """Reset the breaker of a producer, or of each producer of a pipeline."""
    connection.execute(sa.delete(_BREAKERS).where(is_of(_BREAKERS.c.pipeline, key)))


def _state(connection: sa.Connection, key: str) -> BreakerState:
    row = connection.execute(sa.select(_BREAKERS).where(_BREAKERS.c.pipeline == key)).first()
    if row is None:
        return BreakerState()
    return BreakerState(row.messages, row.failed, row.pauses, None if row.until is None else as_time(row.until))
