"""Claims of runs to the capacity of a pipeline: messages in flight, each claim for a limited time.

If a pipeline has several producers, each producer has its own capacity, and the argument `pipeline` is
`<pipeline>/<producer>`. Retries and replays claim for the pipeline itself, whose capacity is the sum of its
producers' and includes their claims. While a retry or replay has a claim, a producer's claim must fit both.

A claim may be `alone`, to keep messages in order over runs: it is granted nothing while the pipeline has another claim,
and prevents other claims of the pipeline.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa

from pipeline_platform.control.limits import SECOND, TABLES, as_time, as_us, forget_stop, is_of, lock, pipeline_of_key
from pipeline_platform.sql.database import Database

_RECEIVES = sa.Table(
    "control_receives",
    TABLES,
    sa.Column("receive_id", sa.Text, primary_key=True),
    sa.Column("pipeline", sa.Text, nullable=False, index=True),
    sa.Column("run_id", sa.Text, nullable=False),
    sa.Column("messages", sa.BigInteger, nullable=False),
    sa.Column("capacity", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
    sa.Column("alone", sa.Boolean, nullable=False, server_default=sa.false()),
)

_ENDED = sa.Table(
    "control_ended",
    TABLES,
    sa.Column("receive_id", sa.Text, primary_key=True),
    sa.Column("pipeline", sa.Text, nullable=False),
    sa.Column("run_id", sa.Text, nullable=False),
    sa.Column("messages", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.BigInteger, nullable=False),
    sa.Column("ended_at", sa.BigInteger, nullable=False),
    sa.Index("ix_control_ended", "pipeline", "ended_at"),
)
_MINUTE = 60 * SECOND
KEEP_ENDED = timedelta(days=3)
"""Time for which acknowledged receives are kept: with a round per second, 260,000 rows."""


class Claim(NamedTuple):
    """Messages that one receive has in flight.

    Attributes:
        receive_id: The receive.
        run_id: The run that claimed last.
        messages: Number of messages.
        expires_at: End of the claim unless it is renewed.
        started_at: Time of the claim.
        alone: Whether it prevents other claims of the pipeline.
    """

    receive_id: str
    run_id: str
    messages: int
    expires_at: datetime
    started_at: datetime
    alone: bool = False

    @property
    def is_stand_by(self) -> bool:
        """Whether it only keeps a run active between two receives, see `Claims.stand_by`."""
        return self.receive_id == self.run_id


def count_runs(claims: Iterable[Claim]) -> int:
    """Return the number of runs with some claims: a continuous run has two."""
    return len({claim.run_id for claim in claims})


class Ended(NamedTuple):
    """An acknowledged receive: its run, its messages, and the times of its claim and its end."""

    receive_id: str
    run_id: str
    messages: int
    started_at: datetime
    ended_at: datetime


class Minute(NamedTuple):
    """Receives that were acknowledged in a minute.

    Attributes:
        at: Start of the minute.
        receives: Number of receives: rounds, or runs that receive once.
        messages: Number of messages.
        slowest_s: Longest time in seconds from the claim of a receive to its acknowledgement.
    """

    at: datetime
    receives: int
    messages: int
    slowest_s: float


class Claims(Database):
    """Claims of runs, as a part of the control store."""

    def claim(
        self,
        pipeline: str,
        receive_id: str,
        run_id: str,
        *,
        wanted: int,
        capacity: int,
        lease_s: float,
        alone: bool = False,
    ) -> int:
        """Claim capacity for a receive, before it leases messages.

        A second claim of the same receive (a re-execution) replaces the first, and removes the stop of its run. It may
        be granted less if other runs have claimed the capacity meanwhile. A grant of 0 is not stored. All receives of
        the pipeline together have at most `capacity` messages in flight. A claim expires after `lease_s` seconds unless
        `beat` renews it.

        Returns:
            Messages granted, from 0 to `wanted`.

        Raises:
            ValueError: `wanted` is negative, or the receive belongs to another pipeline.
            ControlStoreError: The control store is unavailable; no message may be leased.
        """
        if wanted < 0:
            raise ValueError(f"wanted must be at least 0, got {wanted}.")
        with self.writing() as connection:
            lock(connection, pipeline_of_key(pipeline))
            now = self.now(connection)
            owner = connection.execute(sa.select(_RECEIVES.c.pipeline).where(_is(receive_id))).scalar()
            if owner not in (None, pipeline):
                raise ValueError(f"Receive {receive_id} belongs to pipeline {owner}, not to {pipeline}.")
            room = _room(connection, pipeline, capacity, now, but=receive_id, alone=alone)
            messages = max(0, min(wanted, room))
            connection.execute(sa.delete(_RECEIVES).where(_is(receive_id)))
            forget_stop(connection, receive_id)
            if messages:
                values = (receive_id, pipeline, run_id, messages, capacity, now, now + round(lease_s * SECOND), alone)
                connection.execute(sa.insert(_RECEIVES).values(values))
        return messages

    def stand_by(self, pipeline: str, run_id: str, lease_s: float) -> None:
        """Claim no messages for a run between its rounds, or renew that claim, so that the run counts as active.

        The claim has the id of the run in place of a receive's.
        """
        with self.writing() as connection:
            now = self.now(connection)
            renewed = sa.update(_RECEIVES).where(_is(run_id)).values(expires_at=now + round(lease_s * SECOND))
            if not connection.execute(renewed).rowcount:
                values = (run_id, pipeline, run_id, 0, 0, now, now + round(lease_s * SECOND), False)
                connection.execute(sa.insert(_RECEIVES).values(values))

    def adjust(self, receive_id: str, messages: int) -> None:
        """Lower a claim to the number of messages that are leased, 0 or more; never raise it."""
        if messages < 0:
            raise ValueError(f"messages must be at least 0, got {messages}.")
        with self.writing() as connection:
            lower = sa.update(_RECEIVES).where(_is(receive_id), _RECEIVES.c.messages > messages)
            connection.execute(lower.values(messages=messages))

    def beat(self, receive_id: str, lease_s: float, *, run_id: str | None = None) -> bool:
        """Renew a claim to `lease_s` seconds from now; with 0 it expires now.

        An expired claim is restored if it has not been ended and its capacity is still free: a driver that stalled
        continues.

        Returns:
            False if the claim was ended, has expired and its capacity is used, or does not belong to the run `run_id`.
            The run must then decide nothing more.
        """
        with self.writing() as connection:
            pipeline = connection.execute(sa.select(_RECEIVES.c.pipeline).where(_is(receive_id))).scalar()
            if pipeline is None:
                return False
            lock(connection, pipeline_of_key(pipeline))
            # Read after the lock: an earlier time could show an expired claim, already replaced, as live.
            now = self.now(connection)
            mine = connection.execute(sa.select(_RECEIVES).where(_is(receive_id))).first()
            if mine is None or run_id not in (None, mine.run_id):
                return False
            if mine.expires_at <= now:
                room = _room(connection, pipeline, mine.capacity, now, but=receive_id, alone=mine.alone)
                if mine.messages > room:
                    return False
            renewed = sa.update(_RECEIVES).where(_is(receive_id)).values(expires_at=now + round(lease_s * SECOND))
            return connection.execute(renewed).rowcount == 1

    def end(self, receive_id: str, *, if_over: bool = False) -> bool:
        """End a claim and free its capacity; return whether this call, and no other, ended it.

        With `if_over`, end it only if it has expired: the claim of a crashed run may have been renewed meanwhile.
        """
        with self.writing() as connection:
            row = sa.delete(_RECEIVES).where(_is(receive_id))
            if if_over:
                row = row.where(_RECEIVES.c.expires_at <= self.now(connection))
            ended = connection.execute(row).rowcount == 1
            if ended:
                forget_stop(connection, receive_id)
            return ended

    def finish(self, receive_id: str) -> None:
        """End the claim of an acknowledged receive, and keep its record for `KEEP_ENDED`."""
        columns = [_RECEIVES.c[name] for name in _ENDED.c.keys()[:-1]]
        with self.writing() as connection:
            claim = connection.execute(sa.delete(_RECEIVES).where(_is(receive_id)).returning(*columns)).first()
            if claim is None:
                return
            forget_stop(connection, receive_id)
            now = self.now(connection)
            is_old = _ENDED.c.ended_at < now - round(KEEP_ENDED.total_seconds() * SECOND)
            is_same = _ENDED.c.receive_id == receive_id
            connection.execute(sa.delete(_ENDED).where(is_same | (_ENDED.c.pipeline == claim.pipeline) & is_old))
            connection.execute(sa.insert(_ENDED).values((*claim, now)))

    def ended(
        self,
        *pipelines: str,
        last: int | None = None,
        receive_ids: Sequence[str] | None = None,
        since: datetime | None = None,
    ) -> list[Ended]:
        """Return acknowledged receives of some keys of a pipeline, latest first.

        Args:
            pipelines: Keys of producers, or of the pipeline, which does not include its producers.
            last: Greatest number of receives to return.
            receive_ids: Return these receives only, also of the pipeline's producers.
            since: Return receives acknowledged since this time only.
        """
        query = sa.select(_ENDED).order_by(_ENDED.c.ended_at.desc()).limit(last)
        if receive_ids is None:
            # Not by a prefix, for which no database uses the index: the table has hundreds of thousands of rows.
            query = query.where(_ENDED.c.pipeline.in_(pipelines))
        else:
            query = query.where(is_of(_ENDED.c.pipeline, *pipelines), _ENDED.c.receive_id.in_(receive_ids))
        if since is not None:
            query = query.where(_ENDED.c.ended_at >= as_us(since))
        with self.reading() as connection:
            rows = connection.execute(query).all()
        return [Ended(r.receive_id, r.run_id, r.messages, as_time(r.started_at), as_time(r.ended_at)) for r in rows]

    def ended_by_minute(self, pipelines: Sequence[str], since: datetime) -> list[Minute]:
        """Return the minutes with acknowledged receives of keys of a pipeline since a time, oldest first."""
        minute, seconds = _ENDED.c.ended_at - _ENDED.c.ended_at % _MINUTE, _ENDED.c.ended_at - _ENDED.c.started_at
        figures = sa.func.count(), sa.func.sum(_ENDED.c.messages), sa.func.max(seconds)
        is_wanted = _ENDED.c.pipeline.in_(pipelines) & (_ENDED.c.ended_at >= as_us(since))
        query = sa.select(minute, *figures).where(is_wanted).group_by(minute).order_by(minute)
        with self.reading() as connection:
            rows = connection.execute(query).all()
        return [Minute(as_time(at), receives, int(sum_), slowest / SECOND) for at, receives, sum_, slowest in rows]

    def expire(self, receive_id: str) -> None:
        """Let a claim expire now; the time of an earlier expiry stays unchanged."""
        self._expire(_is(receive_id))

    def let_go(self, run_id: str) -> None:
        """Let all claims of a finished run expire, and end the claim that counted it as active between two receives.

        The next run finishes its decided receives at once, and releases the others unless the run is re-executed first.
        """
        self.end(run_id)
        self._expire(_RECEIVES.c.run_id == run_id)

    def _expire(self, whose: sa.ColumnElement[bool]) -> None:
        with self.writing() as connection:
            now = self.now(connection)
            connection.execute(sa.update(_RECEIVES).where(whose, _RECEIVES.c.expires_at > now).values(expires_at=now))

    def in_flight(self, pipeline: str, *, of_all: bool = False) -> list[Claim]:
        """Return the live claims of a pipeline, oldest first; with `of_all` its producers' claims, too."""
        return self._claims(
            is_of(_RECEIVES.c.pipeline, pipeline) if of_all else _RECEIVES.c.pipeline == pipeline, live=True
        )

    def over(self, *pipelines: str, of_all: bool = False) -> list[Claim]:
        """Return expired claims that were not ended, oldest first: their runs have crashed or stalled.

        A run that finds one stops the processes of its run, then calls `end(receive_id, if_over=True)`.
        """
        whose = is_of(_RECEIVES.c.pipeline, *pipelines) if of_all else _RECEIVES.c.pipeline.in_(pipelines)
        return self._claims(whose, live=False)

    def _claims(self, whose: sa.ColumnElement[bool], *, live: bool) -> list[Claim]:
        with self.reading() as connection:
            now = self.now(connection)
            state = _RECEIVES.c.expires_at > now if live else _RECEIVES.c.expires_at <= now
            query = sa.select(_RECEIVES).where(whose, state)
            rows = connection.execute(query.order_by(_RECEIVES.c.started_at, _RECEIVES.c.receive_id)).all()
        return [
            Claim(r.receive_id, r.run_id, r.messages, as_time(r.expires_at), as_time(r.started_at), r.alone)
            for r in rows
        ]


def _is(receive_id: str) -> sa.ColumnElement[bool]:
    return _RECEIVES.c.receive_id == receive_id


def _room(connection: sa.Connection, pipeline: str, capacity: int, now: int, *, but: str, alone: bool) -> int:
    """Return the capacity that live claims, except the claim of the receive `but`, leave for a claim."""
    of_all, is_live = is_of(_RECEIVES.c.pipeline, pipeline_of_key(pipeline)), _RECEIVES.c.expires_at > now
    live = sa.and_(of_all, _RECEIVES.c.receive_id != but, is_live)
    in_the_way = sa.select(_RECEIVES.c.receive_id).where(live, _RECEIVES.c.messages > 0)
    if not alone:
        in_the_way = in_the_way.where(_RECEIVES.c.alone)
    if connection.execute(in_the_way.limit(1)).first():
        return 0
    columns = _RECEIVES.c.pipeline, sa.func.sum(_RECEIVES.c.messages), sa.func.max(_RECEIVES.c.capacity)
    others = connection.execute(sa.select(*columns).where(live).group_by(_RECEIVES.c.pipeline)).all()
    held = {key: int(messages) for key, messages, _ in others}
    if pipeline == pipeline_of_key(pipeline):
        return capacity - sum(held.values())
    room = capacity - held.get(pipeline, 0)
    # The claim of a run that stands by between two receives has a capacity of 0, which limits nothing.
    capacity_of_all = next((int(most) for key, _, most in others if most and key == pipeline_of_key(pipeline)), None)
    return room if capacity_of_all is None else min(room, capacity_of_all - sum(held.values()))
