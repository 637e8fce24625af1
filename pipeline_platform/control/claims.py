"""What is in flight: how many messages each receive may hold, and until when that counts.

Where a pipeline has several producers, each has a capacity of its own for what it pulls: what is called `pipeline` here
is then `<pipeline>/<producer>`. Backfills and replays claim for the pipeline itself, whose capacity is that of all its
producers: together with what those hold, they never hold more. While they hold something, a producer obeys both.

A claim may be `alone`, where messages keep an order over runs: it is granted nothing beside another claim of the
pipeline, and no other claim is granted anything beside it.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa

from pipeline_platform.control.database import Database
from pipeline_platform.control.limits import SECOND, TABLES, as_time, forget_stop, lock, whole

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
KEEP_ENDED = timedelta(days=30)
"""How long it is remembered of a receive that it was acknowledged."""


class Claim(NamedTuple):
    """Messages that one receive has in flight, by the run that claimed last, until when they count unless renewed.

    `alone` says that no other receive of the pipeline may hold any meanwhile.
    """

    receive_id: str
    run_id: str
    messages: int
    expires_at: datetime
    started_at: datetime
    alone: bool = False


class Ended(NamedTuple):
    """A receive that was acknowledged: by which run, how many messages, from its claim to its end."""

    receive_id: str
    run_id: str
    messages: int
    started_at: datetime
    ended_at: datetime


class Claims(Database):
    """The part of the control store that knows what is in flight."""

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
        """Claim room for a receive, before it leases anything.

        A claim of the same receive again (a re-execution) takes the place of the former one, and lifts the stop of its
        run. It may be granted less where the room went to others meanwhile. A grant of 0 is not recorded. All receives
        of the pipeline together have `capacity` messages in flight at most. A claim counts for `lease_s` seconds,
        unless `beat` renews it.

        Returns:
            Messages granted, from 0 to `wanted`.

        Raises:
            ValueError: `wanted` is negative, or the receive is another pipeline's.
            ControlStoreError: The database does not answer; nothing may be leased.
        """
        if wanted < 0:
            raise ValueError(f"wanted is {wanted}; a receive claims 0 messages or more")
        with self.writing() as connection:
            lock(connection, whole(pipeline))
            now = self.now(connection)
            owner = connection.execute(sa.select(_RECEIVES.c.pipeline).where(_is(receive_id))).scalar()
            if owner not in (None, pipeline):
                raise ValueError(f"receive {receive_id} belongs to pipeline {owner}, not {pipeline}")
            room = _room(connection, pipeline, capacity, now, but=receive_id, alone=alone)
            messages = max(0, min(wanted, room))
            connection.execute(sa.delete(_RECEIVES).where(_is(receive_id)))
            forget_stop(connection, receive_id)
            if messages:
                values = (receive_id, pipeline, run_id, messages, capacity, now, now + round(lease_s * SECOND), alone)
                connection.execute(sa.insert(_RECEIVES).values(values))
        return messages

    def adjust(self, receive_id: str, messages: int) -> None:
        """Lower a claim to what was really leased, or is still held, 0 or more; nothing raises it."""
        if messages < 0:
            raise ValueError(f"messages is {messages}; a receive holds 0 messages or more")
        with self.writing() as connection:
            lower = sa.update(_RECEIVES).where(_is(receive_id), _RECEIVES.c.messages > messages)
            connection.execute(lower.values(messages=messages))

    def beat(self, receive_id: str, lease_s: float, *, run_id: str | None = None) -> bool:
        """Renew a claim by `lease_s` seconds from now; with 0 it is over now.

        A claim that is over comes back to life while its room is free and nobody has ended it: a driver that stalled
        goes on, unless others count on its place.

        Returns:
            False where it is gone, over and its room taken, or not of the run `run_id`. The run that asks must decide
            nothing more.
        """
        with self.writing() as connection:
            pipeline = connection.execute(sa.select(_RECEIVES.c.pipeline).where(_is(receive_id))).scalar()
            if pipeline is None:
                return False
            lock(connection, whole(pipeline))
            # Only now: a clock read before the lock could find alive what another has already replaced.
            now = self.now(connection)
            mine = connection.execute(sa.select(_RECEIVES).where(_is(receive_id))).first()
            if mine is None or run_id not in (None, mine.run_id):
                return False
            is_over = mine.expires_at <= now
            if is_over:
                room = _room(connection, pipeline, mine.capacity, now, but=receive_id, alone=mine.alone)
                if mine.messages > room:
                    return False
            renewed = sa.update(_RECEIVES).where(_is(receive_id)).values(expires_at=now + round(lease_s * SECOND))
            return connection.execute(renewed).rowcount == 1

    def end(self, receive_id: str, *, if_over: bool = False) -> bool:
        """Give a claim's room back; return whether this call ended it, and no other.

        With `if_over` only if its lease is over: a run that clears up after dead ones leaves what came back to life.
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
        """End the claim of a receive that was acknowledged, and remember it for `KEEP_ENDED`."""
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
        pipeline: str,
        *,
        last: int | None = None,
        receive_ids: Sequence[str] | None = None,
        since: datetime | None = None,
    ) -> list[Ended]:
        """List receives of a pipeline, or of one of its producers, that were acknowledged; the latest first.

        Args:
            pipeline: Name of the pipeline, whose producers' are listed too, or `<pipeline>/<producer>`.
            last: How many at the most.
            receive_ids: Only these.
            since: Only those that were acknowledged since then.
        """
        query = sa.select(_ENDED).where(_is_of(pipeline, _ENDED)).order_by(_ENDED.c.ended_at.desc()).limit(last)
        if receive_ids is not None:
            query = query.where(_ENDED.c.receive_id.in_(receive_ids))
        if since is not None:
            query = query.where(_ENDED.c.ended_at >= round(since.timestamp() * SECOND))
        with self.reading() as connection:
            rows = connection.execute(query).all()
        return [Ended(r.receive_id, r.run_id, r.messages, as_time(r.started_at), as_time(r.ended_at)) for r in rows]

    def expire(self, receive_id: str) -> None:
        """End a claim's lease now, unless it is over already: since when it is over stays the same then."""
        self._expire(_is(receive_id))

    def let_go(self, run_id: str) -> None:
        """End the leases of a run that works on nothing any more.

        The next run finishes what it decided, at once. It gives up the rest, unless the run is re-executed before.
        """
        self._expire(_RECEIVES.c.run_id == run_id)

    def _expire(self, whose: sa.ColumnElement[bool]) -> None:
        with self.writing() as connection:
            now = self.now(connection)
            connection.execute(sa.update(_RECEIVES).where(whose, _RECEIVES.c.expires_at > now).values(expires_at=now))

    def in_flight(self, pipeline: str, *, of_all: bool = False) -> list[Claim]:
        """List the live claims of a pipeline, oldest first; those of its producers too if `of_all`."""
        return self._claims(_is_of(pipeline) if of_all else _RECEIVES.c.pipeline == pipeline, live=True)

    def over(self, *pipelines: str, of_all: bool = False) -> list[Claim]:
        """List the claims whose lease ran out without `end`, oldest first: their runs are dead, or stalled.

        A run that finds them stops what their runs left behind, then calls `end(receive_id, if_over=True)`.
        """
        whose = sa.or_(*map(_is_of, pipelines)) if of_all else _RECEIVES.c.pipeline.in_(pipelines)
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


def _is_of(pipeline: str, table: sa.Table = _RECEIVES) -> sa.ColumnElement[bool]:
    """Whether a row is the pipeline's, or a producer's of it."""
    return (table.c.pipeline == pipeline) | table.c.pipeline.startswith(f"{pipeline}/", autoescape=True)


def _room(connection: sa.Connection, pipeline: str, capacity: int, now: int, *, but: str, alone: bool) -> int:
    """Count the messages that a claim may hold beside the live ones, but for one."""
    live = sa.and_(_is_of(whole(pipeline)), _RECEIVES.c.receive_id != but, _RECEIVES.c.expires_at > now)
    in_the_way = sa.select(_RECEIVES.c.receive_id).where(live if alone else live & _RECEIVES.c.alone)
    if connection.execute(in_the_way.limit(1)).first():
        return 0
    columns = _RECEIVES.c.pipeline, sa.func.sum(_RECEIVES.c.messages), sa.func.max(_RECEIVES.c.capacity)
    others = connection.execute(sa.select(*columns).where(live).group_by(_RECEIVES.c.pipeline)).all()
    held = {key: int(messages) for key, messages, _ in others}
    if pipeline == whole(pipeline):
        return capacity - sum(held.values())
    room = capacity - held.get(pipeline, 0)
    capacity_of_all = next((int(most) for key, _, most in others if key == whole(pipeline)), None)
    return room if capacity_of_all is None else min(room, capacity_of_all - sum(held.values()))
