"""The control store: permits, limits, pauses and what is in flight, in one small SQL database that all runs share.

Times are microseconds since the epoch, by the server's clock where there is a server, so that machines whose
clocks disagree still agree on when an interval ends and a lease is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from pipeline_platform.control.database import ControlStoreError, Database, clock, insert_missing
from pipeline_platform.model.options import RateLimiting

__all__ = ["Claim", "ControlStore", "ControlStoreError", "Grant", "interval_end"]

_METADATA = sa.MetaData()

_PIPELINES = sa.Table(
    "control_pipelines",
    _METADATA,
    sa.Column("pipeline", sa.Text, primary_key=True),
    sa.Column("paused", sa.Text),
    sa.Column("allowed_messages", sa.BigInteger),
    sa.Column("interval_us", sa.BigInteger),
)
"""A row per pipeline: what was changed at run time, and the lock that its claims take turns by."""

_INTERVALS = sa.Table(
    "control_intervals",
    _METADATA,
    sa.Column("pipeline", sa.Text, primary_key=True),
    # Part of the key, so that going to another length and back does not open an interval anew.
    sa.Column("interval_us", sa.BigInteger, primary_key=True),
    sa.Column("starts_at", sa.BigInteger, primary_key=True),
    sa.Column("used", sa.BigInteger, nullable=False),
)

_RECEIVES = sa.Table(
    "control_receives",
    _METADATA,
    sa.Column("receive_id", sa.Text, primary_key=True),
    sa.Column("pipeline", sa.Text, nullable=False, index=True),
    sa.Column("run_id", sa.Text, nullable=False),
    sa.Column("messages", sa.BigInteger, nullable=False),
    sa.Column("capacity", sa.BigInteger, nullable=False),
    sa.Column("started_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger, nullable=False),
)

_SECOND = 1_000_000
_KEPT_US = 60 * _SECOND  # a clock set back by less than this finds its interval as it left it


class Grant(NamedTuple):
    """Permits to handle messages.

    Attributes:
        messages: How many may be handled, 0 where the interval has none left.
        seconds: For how long, counted from before the call; with 0 messages, until the next interval begins.
            Infinite where there is no limit.
    """

    messages: int
    seconds: float


class Claim(NamedTuple):
    """What one receive has in flight.

    Attributes:
        receive_id: Whose.
        run_id: Of the run that claimed last.
        messages: How many it was granted, or really leased.
        expires_at: When it stops counting, unless it is renewed.
        started_at: When it was claimed.
    """

    receive_id: str
    run_id: str
    messages: int
    expires_at: datetime
    started_at: datetime


class ControlStore:
    """What runs, tasks and sensors of all machines agree on; safe over threads and processes, and picklable.

    Connections and tables are made at the first use, in the process that uses it.

    Args:
        url: SQLAlchemy URL: `sqlite:///<file>` (one machine, a local disk: its locks do not work over network
            file systems) or `postgresql://...`.
        now: Seconds since the epoch, for tests; None takes the server's clock, or the machine's for SQLite.

    Raises:
        ControlStoreError: The URL is neither of these.
    """

    def __init__(self, url: str, now: Callable[[], float] | None = None) -> None:
        self._database = Database(url, _METADATA)
        self._now = now

    def __repr__(self) -> str:
        """Name the database, without its password."""
        return f"ControlStore({str(self)!r})"

    def __str__(self) -> str:
        """Give the database's URL, without its password."""
        return str(self._database)

    def close(self) -> None:
        """Close this process's connections; the next use opens them again."""
        self._database.close()

    # Permits

    def take(self, pipeline: str, rate_limiting: RateLimiting | None, wanted: int) -> Grant:
        """Take up to `wanted` permits of the current interval; what is not used by its end is gone.

        Taken at the moment of handling rather than ahead, so that a run which is late, or stalls, never adds its
        permits to those of an interval that others handle in.

        Args:
            pipeline: Name of the pipeline.
            rate_limiting: Its own option; what was set at run time comes before it.
            wanted: Messages that are ready to be handled now.

        Raises:
            ControlStoreError: The database does not answer; nothing may be handled.
            ValueError: `wanted` is below 1.
        """
        if wanted < 1:
            raise ValueError(f"wanted is {wanted}; ask for one permit at least")
        with self._database.writing() as connection:
            limit = self._limit(connection, pipeline, rate_limiting)
            if limit is None:
                return Grant(wanted, math.inf)
            now = self._clock(connection)
            starts_at, ends_at = _bounds(limit.interval, now)
            row = _interval(pipeline, limit, starts_at)
            used = self._locked_use(connection, pipeline, limit, starts_at, now)
            messages = max(0, min(wanted, limit.allowed_messages - used))
            if messages:
                guarded = row & (_INTERVALS.c.used + messages <= limit.allowed_messages)
                updated = sa.update(_INTERVALS).where(guarded).values(used=_INTERVALS.c.used + messages)
                if connection.execute(updated).rowcount != 1:
                    messages = 0
        return Grant(messages, (ends_at - now) / _SECOND)

    def spare(self, pipeline: str, rate_limiting: RateLimiting | None, horizon: timedelta) -> int | None:
        """Say how many permits the intervals that begin before the horizon's end would still give.

        Nothing is reserved: messages in flight will take theirs out of these.

        Args:
            pipeline: Name of the pipeline.
            rate_limiting: Its own option; what was set at run time comes before it.
            horizon: How far to look, from now.

        Returns:
            Messages; None where there is no limit.
        """
        with self._database.reading() as connection:
            limit = self._limit(connection, pipeline, rate_limiting)
            if limit is None:
                return None
            now = self._clock(connection)
            starts_at, ends_at = _bounds(limit.interval, now)
            query = sa.select(_INTERVALS.c.used).where(_interval(pipeline, limit, starts_at))
            used = connection.execute(query).scalar() or 0
        later = -(-max(0, now + _us(horizon) - ends_at) // _us(limit.interval))
        return max(0, limit.allowed_messages - used) + later * limit.allowed_messages

    def _locked_use(
        self, connection: sa.Connection, pipeline: str, limit: RateLimiting, starts_at: int, now: int
    ) -> int:
        query = sa.select(_INTERVALS.c.used).where(_interval(pipeline, limit, starts_at)).with_for_update()
        used = connection.execute(query).scalar()
        if used is None:
            over = _INTERVALS.c.starts_at + _INTERVALS.c.interval_us < now - _KEPT_US
            connection.execute(sa.delete(_INTERVALS).where((_INTERVALS.c.pipeline == pipeline) & over))
            insert_missing(
                connection,
                _INTERVALS,
                {"pipeline": pipeline, "interval_us": _us(limit.interval), "starts_at": starts_at, "used": 0},
            )
            used = connection.execute(query).scalar_one()
        return int(used)

    # Limits and pauses

    def rate_limiting(self, pipeline: str, default: RateLimiting | None) -> RateLimiting | None:
        """Look up the limit that holds: the one set at run time, else `default`, the pipeline's own."""
        with self._database.reading() as connection:
            return self._limit(connection, pipeline, default)

    def set_rate_limiting(self, pipeline: str, rate_limiting: RateLimiting | None) -> None:
        """Set the limit at run time, until it is set back by None: the pipeline's own option holds then.

        Tasks obey from their next permits on. Permits of the current interval that were taken before count if its
        length stays.
        """
        allowed = rate_limiting.allowed_messages if rate_limiting else None
        interval = _us(rate_limiting.interval) if rate_limiting else None
        self._set(pipeline, allowed_messages=allowed, interval_us=interval)

    def update_rate_limiting(
        self,
        pipeline: str,
        default: RateLimiting | None,
        *,
        allowed_messages: int | None = None,
        interval: timedelta | None = None,
    ) -> RateLimiting:
        """Change a part of the limit that holds, like Broadway's `update_rate_limiting`; return the new one.

        Args:
            pipeline: Name of the pipeline.
            default: The pipeline's own option.
            allowed_messages: Messages handled in an interval; None leaves it.
            interval: Length of an interval; None leaves it.

        Raises:
            ValueError: There is no limit to change, or a value is out of bounds (`PipelineError`).
        """
        with self._database.writing() as connection:
            self._lock(connection, pipeline)
            before = self._limit(connection, pipeline, default)
            if before is None:
                raise ValueError(f"{pipeline} has no rate_limiting to change; set the whole with set_rate_limiting")
            after = RateLimiting(
                allowed_messages=before.allowed_messages if allowed_messages is None else allowed_messages,
                interval=before.interval if interval is None else interval,
            )
            row = sa.update(_PIPELINES).where(_PIPELINES.c.pipeline == pipeline)
            connection.execute(row.values(allowed_messages=after.allowed_messages, interval_us=_us(after.interval)))
        return after

    def pause(self, pipeline: str, reason: str) -> None:
        """Ask for no more runs of this pipeline, for a reason that people will read. Runs under way finish."""
        self._set(pipeline, paused=reason or "no reason given")

    def resume(self, pipeline: str) -> None:
        """Ask for runs again; nothing happens to a pipeline that is not paused."""
        self._set(pipeline, paused=None)

    def paused(self, pipeline: str) -> str | None:
        """Look up why the pipeline is paused; None where it is not."""
        query = sa.select(_PIPELINES.c.paused).where(_PIPELINES.c.pipeline == pipeline)
        with self._database.reading() as connection:
            return connection.execute(query).scalar()

    def _limit(self, connection: sa.Connection, pipeline: str, default: RateLimiting | None) -> RateLimiting | None:
        query = sa.select(_PIPELINES.c.allowed_messages, _PIPELINES.c.interval_us)
        row = connection.execute(query.where(_PIPELINES.c.pipeline == pipeline)).first()
        if row is None or row.allowed_messages is None:
            return default
        return RateLimiting(allowed_messages=row.allowed_messages, interval=timedelta(microseconds=row.interval_us))

    def _set(self, pipeline: str, **values: str | int | None) -> None:
        with self._database.writing() as connection:
            self._lock(connection, pipeline)
            connection.execute(sa.update(_PIPELINES).where(_PIPELINES.c.pipeline == pipeline).values(**values))

    # Receives

    def claim(self, pipeline: str, receive_id: str, run_id: str, *, wanted: int, capacity: int, lease_s: float) -> int:
        """Claim room for a receive, before it leases anything.

        A claim of the same receive again (a re-execution) takes the place of the former one, and may be granted
        less where the room went to others meanwhile. A grant of 0 is not kept.

        Args:
            pipeline: Name of the pipeline.
            receive_id: Whose claim it is.
            run_id: The run that works on it.
            wanted: Messages it would lease.
            capacity: Messages of the pipeline that may be in flight at once, over all receives.
            lease_s: Seconds until the claim stops counting, unless `beat` renews it.

        Returns:
            Messages granted, from 0 to `wanted`.

        Raises:
            ValueError: `wanted` is negative, or the receive is another pipeline's.
            ControlStoreError: The database does not answer; nothing may be leased.
        """
        if wanted < 0:
            raise ValueError(f"wanted is {wanted}; a receive claims 0 messages or more")
        with self._database.writing() as connection:
            self._lock(connection, pipeline)
            now = self._clock(connection)
            owner = connection.execute(_receive(receive_id, _RECEIVES.c.pipeline)).scalar()
            if owner not in (None, pipeline):
                raise ValueError(f"receive {receive_id} belongs to pipeline {owner}, not {pipeline}")
            room = capacity - self._live(connection, pipeline, now, but=receive_id)
            messages = max(0, min(wanted, room))
            connection.execute(sa.delete(_RECEIVES).where(_RECEIVES.c.receive_id == receive_id))
            if messages:
                connection.execute(
                    sa.insert(_RECEIVES).values(
                        receive_id=receive_id,
                        pipeline=pipeline,
                        run_id=run_id,
                        messages=messages,
                        capacity=capacity,
                        started_at=now,
                        expires_at=now + round(lease_s * _SECOND),
                    )
                )
        return messages

    def adjust(self, receive_id: str, messages: int) -> None:
        """Lower a claim to what was really leased, or is still held; it is never raised.

        Raises:
            ValueError: `messages` is negative.
        """
        if messages < 0:
            raise ValueError(f"messages is {messages}; a receive holds 0 messages or more")
        lower = (_RECEIVES.c.receive_id == receive_id) & (_RECEIVES.c.messages > messages)
        with self._database.writing() as connection:
            connection.execute(sa.update(_RECEIVES).where(lower).values(messages=messages))

    def beat(self, receive_id: str, lease_s: float, *, run_id: str | None = None) -> bool:
        """Renew a claim by `lease_s` seconds from now.

        A claim that is over comes back to life as long as its room is still free and nobody has ended it: a driver
        that stalled goes on, unless others count on its place.

        Args:
            receive_id: Whose claim.
            lease_s: Seconds; with 0 it is over now.
            run_id: The run that works on it; None for whoever does.

        Returns:
            False where it is gone, another run's by now, or over and its room taken: whoever beats must decide
            nothing more.
        """
        with self._database.writing() as connection:
            pipeline = connection.execute(_receive(receive_id, _RECEIVES.c.pipeline)).scalar()
            if pipeline is None:
                return False
            self._lock(connection, pipeline)
            # Only now: a clock read before the lock could find alive what another has already replaced.
            now = self._clock(connection)
            mine = connection.execute(_receive(receive_id, *_RECEIVES.c)).first()
            if mine is None or run_id not in (None, mine.run_id):
                return False
            if mine.expires_at <= now:
                others = self._live(connection, pipeline, now, but=receive_id)
                if others + mine.messages > mine.capacity:
                    return False
            row = sa.update(_RECEIVES).where(_RECEIVES.c.receive_id == receive_id)
            renewed = connection.execute(row.values(expires_at=now + round(lease_s * _SECOND)))
            return renewed.rowcount == 1

    def end(self, receive_id: str, *, if_over: bool = False) -> bool:
        """Give a claim's room back.

        Args:
            receive_id: Whose.
            if_over: Only if its lease is over. For those who clear up after dead runs: what has come back to life
                since they looked stays.

        Returns:
            Whether this call ended it; of several that clear up, one is told so.
        """
        with self._database.writing() as connection:
            row = sa.delete(_RECEIVES).where(_RECEIVES.c.receive_id == receive_id)
            if if_over:
                row = row.where(_RECEIVES.c.expires_at <= self._clock(connection))
            return connection.execute(row).rowcount == 1

    def let_go(self, run_id: str) -> None:
        """Say that a run works on nothing any more: its live claims are over.

        What it decided is the next run's to finish, at once; the rest is given up by the next run, or goes on if the
        run is re-executed before.
        """
        with self._database.writing() as connection:
            now = self._clock(connection)
            live = (_RECEIVES.c.run_id == run_id) & (_RECEIVES.c.expires_at > now)
            connection.execute(sa.update(_RECEIVES).where(live).values(expires_at=now))

    def in_flight(self, pipeline: str) -> list[Claim]:
        """List the live claims, oldest first."""
        return self._claims(pipeline, live=True)

    def over(self, pipeline: str) -> list[Claim]:
        """List the claims whose lease ran out without `end`, oldest first: their runs are dead, or stalled.

        Whoever finds them stops what their runs left behind, then calls `end(receive_id, if_over=True)`.
        """
        return self._claims(pipeline, live=False)

    def _claims(self, pipeline: str, *, live: bool) -> list[Claim]:
        with self._database.reading() as connection:
            now = self._clock(connection)
            state = _RECEIVES.c.expires_at > now if live else _RECEIVES.c.expires_at <= now
            query = sa.select(_RECEIVES).where((_RECEIVES.c.pipeline == pipeline) & state)
            rows = connection.execute(query.order_by(_RECEIVES.c.started_at, _RECEIVES.c.receive_id)).all()
        return [Claim(r.receive_id, r.run_id, r.messages, _time(r.expires_at), _time(r.started_at)) for r in rows]

    def _live(self, connection: sa.Connection, pipeline: str, now: int, *, but: str) -> int:
        others = (_RECEIVES.c.pipeline == pipeline) & (_RECEIVES.c.receive_id != but) & (_RECEIVES.c.expires_at > now)
        total = connection.execute(sa.select(sa.func.sum(_RECEIVES.c.messages)).where(others)).scalar()
        return int(total or 0)

    # The database

    def _clock(self, connection: sa.Connection) -> int:
        """Microseconds since the epoch."""
        return clock(connection) if self._now is None else round(self._now() * _SECOND)

    def _lock(self, connection: sa.Connection, pipeline: str) -> None:
        """Hold the pipeline's row to the end of the transaction, making it first if need be."""
        query = sa.select(_PIPELINES.c.pipeline).where(_PIPELINES.c.pipeline == pipeline).with_for_update()
        if connection.execute(query).first() is None:
            insert_missing(connection, _PIPELINES, {"pipeline": pipeline})
            connection.execute(query).one()


def interval_end(rate_limiting: RateLimiting, now: datetime) -> datetime:
    """Say when the interval that `now` lies in ends, and the next begins."""
    return _time(_bounds(rate_limiting.interval, round(now.timestamp() * _SECOND))[1])


def _interval(pipeline: str, limit: RateLimiting, starts_at: int) -> sa.ColumnElement[bool]:
    row = _INTERVALS.c
    return sa.and_(row.pipeline == pipeline, row.interval_us == _us(limit.interval), row.starts_at == starts_at)


def _receive(receive_id: str, *columns: sa.Column[Any]) -> sa.Select[Any]:
    return sa.select(*columns).where(_RECEIVES.c.receive_id == receive_id)


def _bounds(interval: timedelta, now: int) -> tuple[int, int]:
    length = _us(interval)
    starts_at = now - now % length
    return starts_at, starts_at + length


def _us(span: timedelta) -> int:
    return span // timedelta(microseconds=1)


def _time(us: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=us)
