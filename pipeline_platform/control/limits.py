"""What a pipeline may do at this moment: its rate limit and the permits of it, its pause, and its drain.

Where it has several producers, each has limits of its own: what is called `pipeline` here is then its name, and for a
producer `<pipeline>/<producer>`.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import sqlalchemy as sa

from pipeline_platform.control.database import Database, insert
from pipeline_platform.control.permits import take_at_once
from pipeline_platform.model.options import RateLimiting
from pipeline_platform.model.safe_text import printable

_NO_REASON = "no reason given"

TABLES = sa.MetaData()
"""All tables of the control store. Times are microseconds since the epoch, by the clock of the database."""

_PIPELINES = sa.Table(
    "control_pipelines",
    TABLES,
    sa.Column("pipeline", sa.Text, primary_key=True),
    sa.Column("paused", sa.Text),
    sa.Column("allowed_messages", sa.BigInteger),
    sa.Column("interval_us", sa.BigInteger),
)
"""A row for each pipeline: what was changed at run time, and the lock that its claims take turns by."""

_INTERVALS = sa.Table(
    "control_intervals",
    TABLES,
    sa.Column("pipeline", sa.Text, primary_key=True),
    # Part of the key, so that going to another length and back does not open an interval anew.
    sa.Column("interval_us", sa.BigInteger, primary_key=True),
    sa.Column("starts_at", sa.BigInteger, primary_key=True),
    sa.Column("used", sa.BigInteger, nullable=False),
)

STOPS = sa.Table(
    "control_stops",
    TABLES,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("stops_at", sa.BigInteger, nullable=False),
)
"""When runs under way begin no message any more: those of a pipeline or a producer, or the run of a receive."""

SECOND = 1_000_000
_KEPT_US = 60 * SECOND  # a clock set back by less than this finds its interval as it left it


class Grant(NamedTuple):
    """How many messages may be handled, and for how many seconds from before the call, infinite without a limit.

    Where the interval has no permit left, 0 messages, and the seconds until the next one begins. No message may begin
    once `stop_s` seconds are over, infinite where nobody drains.
    """

    messages: int
    seconds: float
    stop_s: float = math.inf


class Throttle(Database):
    """The part of the control store that says how fast a pipeline may go.

    Where a method takes the pipeline's own option of a rate limit, one that is set at run time comes before it.
    """

    def take(self, limits: Mapping[str, RateLimiting | None], wanted: int, stops: Sequence[str] = ()) -> Grant:
        """Take up to `wanted` permits of each limit, by what it limits: for messages that all of them hold for.

        What is not used by the end of the interval is gone. Tasks take permits when they handle: a run that is late, or
        stalls, never adds its permits to those of an interval that others handle in.

        `stops` are what may be stopped, by `drain` or `stop`, for these messages not to begin.

        Raises:
            ControlStoreError: The database does not answer; nothing may be handled.
            ValueError: `wanted` is below 1.
        """
        if wanted < 1:
            raise ValueError(f"wanted is {wanted}; ask for one permit at least")
        if not self.is_sqlite:
            with self.alone() as connection:
                held, stops_at, now = take_at_once(connection, limits, wanted, stops, self.fixed_now)
            left = {key: free for key, (_, free) in held.items() if free is not None}
            if len(left) == len(held):  # else an interval has no row yet
                return _granted({key: limit for key, (limit, _) in held.items()}, left, wanted, stops_at, now)
        with self.writing() as connection:
            hold, stops_at, now = self._look(connection, limits, stops)
            if not hold or (stops_at is not None and stops_at <= now):
                return _granted(hold, {}, wanted, stops_at, now)
            # In order, so that no two takers wait for each other's rows.
            left = {key: limit.allowed_messages - _used(connection, key, limit, now) for key, limit in hold.items()}
            grant = _granted(hold, left, wanted, stops_at, now)
            for key, limit in hold.items():
                taken = sa.update(_INTERVALS).where(_interval(key, limit, _bounds(limit, now)[0]))
                connection.execute(taken.values(used=_INTERVALS.c.used + grant.messages))
        return grant

    def left_of_each(
        self, limits: Mapping[str, RateLimiting | None], stops: Sequence[str] = (), shortest: timedelta = timedelta(0)
    ) -> Grant:
        """Say what `take` could give now, and take nothing; limits of intervals below `shortest` do not count.

        Returns:
            Its `seconds` are infinite where no limit counts; `messages` are 0 then, or without end where none holds.
        """
        with self.reading() as connection:
            hold, stops_at, now = self._look(connection, limits, stops)
            counted = {key: limit for key, limit in hold.items() if limit.interval >= shortest}
            left = {key: _left(connection, key, limit, now) for key, limit in counted.items()}
        stop_s = math.inf if stops_at is None else (stops_at - now) / SECOND
        if not counted:
            return Grant(0 if hold else sys.maxsize, math.inf, stop_s)
        messages = min(left.values())
        return Grant(messages, (_next_at(counted, left, now) - now) / SECOND, stop_s)

    def _look(
        self, connection: sa.Connection, limits: Mapping[str, RateLimiting | None], stops: Sequence[str]
    ) -> tuple[dict[str, RateLimiting], int | None, int]:
        """In one statement: the limits that hold, in the order of their keys, the first of the stops, and the time."""
        row = _PIPELINES.c
        at_run_time = sa.select(row.pipeline, row.allowed_messages, row.interval_us).where(
            row.pipeline.in_(list(limits)), row.allowed_messages.is_not(None)
        )
        stop = sa.select(sa.null(), sa.func.min(STOPS.c.stops_at), self.clock()).where(STOPS.c.key.in_(stops))
        *found, (_, stops_at, now) = connection.execute(sa.union_all(at_run_time, stop)).all()
        held = {**limits, **{key: _rate(allowed, interval_us) for key, allowed, interval_us in found}}
        return {key: limit for key, limit in sorted(held.items()) if limit}, stops_at, now

    def spare(self, pipeline: str, rate_limiting: RateLimiting | None, horizon: timedelta) -> int | None:
        """Count the permits that the intervals which begin within `horizon` from now would still give.

        Nothing is reserved: messages in flight take theirs out of these. None where there is no limit.
        """
        with self.reading() as connection:
            limit = _limit(connection, pipeline, rate_limiting)
            if limit is None:
                return None
            now = self.now(connection)
            left = _left(connection, pipeline, limit, now)
        later = -(-max(0, now + _us(horizon) - _bounds(limit, now)[1]) // _us(limit.interval))
        return left + later * limit.allowed_messages

    def rate_limiting(self, pipeline: str, default: RateLimiting | None) -> RateLimiting | None:
        """Return the limit that holds: the one set at run time, else `default`, the pipeline's own."""
        with self.reading() as connection:
            return _limit(connection, pipeline, default)

    def set_rate_limiting(self, pipeline: str, rate_limiting: RateLimiting | None) -> None:
        """Set the limit at run time; None sets it back to the pipeline's own option.

        Tasks obey from their next permits on. Permits of this interval that are taken count if its length stays.
        """
        with self.writing() as connection:
            _set_limit(connection, pipeline, rate_limiting)

    def update_rate_limiting(
        self,
        pipeline: str,
        default: RateLimiting | None,
        *,
        allowed_messages: int | None = None,
        interval: timedelta | None = None,
    ) -> RateLimiting:
        """Change a part of the limit that holds, like Broadway's `update_rate_limiting`; return the new one.

        None leaves a part as it is. What others change meanwhile stays.

        Raises:
            ValueError: There is no limit to change a part of, or a value is out of bounds (`PipelineError`).
        """
        given = {"allowed_messages": allowed_messages, "interval": interval}
        changed = {name: value for name, value in given.items() if value is not None}
        with self.writing() as connection:
            lock(connection, pipeline)
            before = _limit(connection, pipeline, default)
            if before is None and len(changed) < len(given):
                raise ValueError(f"{pipeline} has no rate_limiting to change; set the whole with set_rate_limiting")
            after = RateLimiting(**{**(before.model_dump() if before else {}), **changed})
            _set_limit(connection, pipeline, after)
        return after

    def pause(self, pipeline: str, reason: str) -> None:
        """Let no more runs of this pipeline take on messages, for a reason that people read. Runs under way finish.

        A pause of a pipeline holds for each of its producers. It takes the place of a drain.
        """
        with self.writing() as connection:
            _set(connection, pipeline, paused=printable(reason) or _NO_REASON)
            forget_stop(connection, pipeline)

    def resume(self, pipeline: str) -> None:
        """Ask for runs again; nothing happens to a pipeline that is not paused."""
        with self.writing() as connection:
            _set(connection, pipeline, paused=None)
            forget_stop(connection, pipeline)

    def drain(self, pipeline: str, reason: str, within: timedelta) -> None:
        """Pause, and have runs under way begin no message once `within` is over; they give back the rest.

        A drain that is under way already is not postponed. Runs that find out late begin none from then on: a task
        looks every five seconds.
        """
        with self.writing() as connection:
            _set(connection, pipeline, paused=printable(reason) or _NO_REASON)
            _stop(connection, pipeline, self.now(connection) + _us(within))

    def stop(self, receive_id: str, within: timedelta) -> None:
        """Have one run begin no message of what it received once `within` is over; it gives back the rest."""
        with self.writing() as connection:
            _stop(connection, receive_id, self.now(connection) + _us(within))

    def draining(self, pipeline: str) -> datetime | None:
        """Return when runs under way begin no message any more; None where nobody drains the pipeline or producer."""
        with self.reading() as connection:
            stops_at = _stops_at(connection, (whole(pipeline), pipeline))
        return None if stops_at is None else as_time(stops_at)

    def paused(self, pipeline: str) -> str | None:
        """Return why the pipeline is paused, or of a producer why it or its pipeline is; None where it is not."""
        with self.reading() as connection:
            holds = _PIPELINES.c.pipeline.in_([whole(pipeline), pipeline]) & _PIPELINES.c.paused.is_not(None)
            query = sa.select(_PIPELINES.c.paused).where(holds).order_by(_PIPELINES.c.pipeline)
            return connection.execute(query).scalar()


def whole(key: str) -> str:
    """The pipeline that a producer is of, by what the control store knows them by; a pipeline is its own."""
    return key.partition("/")[0]


def lock(connection: sa.Connection, pipeline: str) -> None:
    """Hold the pipeline's row to the end of the transaction; make it first where it is missing."""
    connection.execute(insert(connection, _PIPELINES).values(pipeline=pipeline).on_conflict_do_nothing())
    connection.execute(sa.select(_PIPELINES.c.pipeline).where(_PIPELINES.c.pipeline == pipeline).with_for_update())


def interval_end(rate_limiting: RateLimiting, now: datetime) -> datetime:
    """Return when the interval that `now` lies in ends, and the next begins."""
    return as_time(_bounds(rate_limiting, round(now.timestamp() * SECOND))[1])


def as_time(us: int) -> datetime:
    """Read a time of the control store."""
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=us)


def _limit(connection: sa.Connection, pipeline: str, default: RateLimiting | None) -> RateLimiting | None:
    query = sa.select(_PIPELINES.c.allowed_messages, _PIPELINES.c.interval_us)
    row = connection.execute(query.where(_PIPELINES.c.pipeline == pipeline)).first()
    if row is None or row.allowed_messages is None:
        return default
    return _rate(row.allowed_messages, row.interval_us)


def _rate(allowed_messages: int, interval_us: int) -> RateLimiting:
    return RateLimiting(allowed_messages=allowed_messages, interval=timedelta(microseconds=interval_us))


def _set_limit(connection: sa.Connection, pipeline: str, limit: RateLimiting | None) -> None:
    interval = _us(limit.interval) if limit else None
    _set(connection, pipeline, allowed_messages=limit.allowed_messages if limit else None, interval_us=interval)


def _stop(connection: sa.Connection, key: str, at: int) -> None:
    upsert = insert(connection, STOPS).values(key=key, stops_at=at)
    earlier = sa.case((STOPS.c.stops_at < at, STOPS.c.stops_at), else_=at)
    connection.execute(upsert.on_conflict_do_update(index_elements=["key"], set_={"stops_at": earlier}))


def forget_stop(connection: sa.Connection, key: str) -> None:
    """Lift a stop, if there is one."""
    connection.execute(sa.delete(STOPS).where(STOPS.c.key == key))


def _stops_at(connection: sa.Connection, keys: Sequence[str]) -> int | None:
    if not keys:
        return None
    query = sa.select(sa.func.min(STOPS.c.stops_at)).where(STOPS.c.key.in_(keys))
    stops_at: int | None = connection.execute(query).scalar()
    return stops_at


def _set(connection: sa.Connection, pipeline: str, **values: str | int | None) -> None:
    upsert = insert(connection, _PIPELINES).values(pipeline=pipeline, **values)
    connection.execute(upsert.on_conflict_do_update(index_elements=["pipeline"], set_=values))


def _used(connection: sa.Connection, pipeline: str, limit: RateLimiting, now: int) -> int:
    """How many permits of the current interval are used; its row is locked from here on."""
    starts_at, _ = _bounds(limit, now)
    locked = sa.select(_INTERVALS.c.used).where(_interval(pipeline, limit, starts_at)).with_for_update()
    used = connection.execute(locked).scalar()
    if used is None:
        over = _INTERVALS.c.starts_at + _INTERVALS.c.interval_us < now - _KEPT_US
        connection.execute(sa.delete(_INTERVALS).where(_INTERVALS.c.pipeline == pipeline, over))
        new = insert(connection, _INTERVALS).values((pipeline, _us(limit.interval), starts_at, 0))
        connection.execute(new.on_conflict_do_nothing())
        used = connection.execute(locked).scalar_one()
    return int(used)


def _granted(
    limits: Mapping[str, RateLimiting], left: Mapping[str, int], wanted: int, stops_at: int | None, now: int
) -> Grant:
    stop_s = math.inf if stops_at is None else (stops_at - now) / SECOND
    if not limits or stop_s <= 0:
        return Grant(wanted if stop_s > 0 else 0, math.inf, stop_s)
    messages = max(0, min(wanted, *left.values()))
    return Grant(messages, (_next_at(limits, left, now) - now) / SECOND, stop_s)


def _left(connection: sa.Connection, pipeline: str, limit: RateLimiting, now: int) -> int:
    """How many permits of the current interval are left; nothing is locked."""
    query = sa.select(_INTERVALS.c.used).where(_interval(pipeline, limit, _bounds(limit, now)[0]))
    return max(0, limit.allowed_messages - (connection.execute(query).scalar() or 0))


def _next_at(limits: Mapping[str, RateLimiting], left: Mapping[str, int], now: int) -> int:
    """When what is left of each limit is over; where one has nothing left, when all may have some."""
    ends = {key: _bounds(limit, now)[1] for key, limit in limits.items()}
    return max((ends[key] for key in limits if left[key] <= 0), default=min(ends.values()))


def _interval(pipeline: str, limit: RateLimiting, starts_at: int) -> sa.ColumnElement[bool]:
    row = _INTERVALS.c
    return sa.and_(row.pipeline == pipeline, row.interval_us == _us(limit.interval), row.starts_at == starts_at)


def _bounds(limit: RateLimiting, now: int) -> tuple[int, int]:
    starts_at = now - now % _us(limit.interval)
    return starts_at, starts_at + _us(limit.interval)


def _us(span: timedelta) -> int:
    return span // timedelta(microseconds=1)
