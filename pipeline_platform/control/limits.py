"""Rate limits and their permits, pauses and drains in the control store.

If a pipeline has several producers, each producer has its own limits. The argument `pipeline` is then the name of the
pipeline, or `<pipeline>/<producer>`.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from pipeline_platform.model.options import RateLimiting
from pipeline_platform.model.safe_text import printable
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.sql.database import Database, insert

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
"""A row for each pipeline: its changes at run time. Claims of a pipeline lock its row."""

_INTERVALS = sa.Table(
    "control_intervals",
    TABLES,
    sa.Column("pipeline", sa.Text, primary_key=True),
    # Part of the key, so that a change of the length and back does not reset an interval.
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
"""Time after which current runs of a pipeline or producer, or the run of a receive, start no more messages."""

SECOND = 1_000_000
_KEPT_US = 60 * SECOND  # keeps used permits even if a clock is set back by less than this


class Grant(NamedTuple):
    """Permits for messages, all times counted from the start of the call.

    Attributes:
        messages: Messages that may be handled; 0 if the interval has no permit left.
        seconds: Seconds until the permits expire or, if there are none, the next interval. Infinite without a limit.
        stop_s: Seconds until no more messages may start. Infinite without a drain or a stop.
    """

    messages: int
    seconds: float
    stop_s: float = math.inf


class Throttle(Database):
    """Rate limits, pauses and drains of pipelines, as a part of the control store.

    Methods that take the rate limit of the pipeline's options prefer a limit that is set at run time.
    """

    def take(self, limits: Mapping[str, RateLimiting | None], wanted: int, stops: Sequence[str] = ()) -> Grant:
        """Take up to `wanted` permits of each limit, for messages that all limits apply to.

        Permits that are not used by the end of the interval expire. Tasks take permits when they handle messages, so a
        late or stalled run never adds its permits to those of a later interval.

        Args:
            limits: Rate limits by pipeline or producer.
            wanted: Messages to handle, 1 or more.
            stops: Pipeline, producer and receive of these messages, which `drain` or `stop` may stop.

        Raises:
            ControlStoreError: The control store is unavailable; no message may be handled.
            ValueError: `wanted` is below 1.
        """
        if wanted < 1:
            raise ValueError(f"wanted must be at least 1, got {wanted}.")
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
        """Return the permits that `take` could give now, without taking any.

        Limits with intervals below `shortest` are ignored. If no limit remains, `seconds` is infinite and `messages`
        is 0, or `sys.maxsize` if there is no limit at all.
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
        """Return the current limits in the order of their keys, the earliest stop and the time, by one statement."""
        row = _PIPELINES.c
        at_run_time = sa.select(row.pipeline, row.allowed_messages, row.interval_us).where(
            row.pipeline.in_(list(limits)), row.allowed_messages.is_not(None)
        )
        stop = sa.select(sa.null(), sa.func.min(STOPS.c.stops_at), self.clock()).where(STOPS.c.key.in_(stops))
        *found, (_, stops_at, now) = connection.execute(sa.union_all(at_run_time, stop)).all()
        held = {**limits, **{key: _rate(allowed, interval_us) for key, allowed, interval_us in found}}
        return {key: limit for key, limit in sorted(held.items()) if limit}, stops_at, now

    def spare(self, pipeline: str, rate_limiting: RateLimiting | None, horizon: timedelta) -> int | None:
        """Return the permits left in this interval and those that start within `horizon`; None without a limit.

        Nothing is reserved: messages in flight will use some of these permits.
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
        """Return the current limit: the limit set at run time, else `default`, the pipeline's option."""
        with self.reading() as connection:
            return _limit(connection, pipeline, default)

    def set_rate_limiting(self, pipeline: str, rate_limiting: RateLimiting | None) -> None:
        """Set the limit at run time; None restores the pipeline's option.

        Tasks apply it from their next permits on. Permits already taken in this interval count if its length stays.
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
        """Change a part of the current limit, like Broadway's `update_rate_limiting`; return the new limit.

        None leaves a part unchanged. Concurrent changes of the other part are kept.

        Raises:
            PipelineError: There is no limit and only a part is given, or a value is out of bounds.
        """
        with self.writing() as connection:
            lock(connection, pipeline)
            after = changed_limit(pipeline, _limit(connection, pipeline, default), allowed_messages, interval)
            _set_limit(connection, pipeline, after)
        return after

    def pause(self, pipeline: str, reason: str) -> None:
        """Pause a pipeline: its runs lease no more messages, and current runs finish.

        A pause of a pipeline applies to each of its producers. It replaces a drain.
        """
        with self.writing() as connection:
            _set(connection, pipeline, paused=printable(reason) or _NO_REASON)
            forget_stop(connection, pipeline)

    def resume(self, pipeline: str) -> None:
        """End a pause or a drain; no effect on a pipeline that is not paused."""
        with self.writing() as connection:
            _set(connection, pipeline, paused=None)
            forget_stop(connection, pipeline)

    def drain(self, pipeline: str, reason: str, within: timedelta) -> None:
        """Pause a pipeline, and let current runs start no messages after `within`; they release the others.

        A second call never postpones a drain. A task checks every five seconds, so it may detect the drain that late.
        """
        with self.writing() as connection:
            _set(connection, pipeline, paused=printable(reason) or _NO_REASON)
            _stop(connection, pipeline, self.now(connection) + _us(within))

    def stop(self, receive_id: str, within: timedelta) -> None:
        """Let the run of a receive start no messages after `within`; it releases the others."""
        with self.writing() as connection:
            _stop(connection, receive_id, self.now(connection) + _us(within))

    def draining(self, pipeline: str) -> datetime | None:
        """Return the time after which current runs start no more messages; None without a drain."""
        mine = STOPS.c.key.in_((pipeline_of_key(pipeline), pipeline))
        with self.reading() as connection:
            stops_at = connection.execute(sa.select(sa.func.min(STOPS.c.stops_at)).where(mine)).scalar()
        return None if stops_at is None else as_time(stops_at)

    def paused(self, pipeline: str) -> str | None:
        """Return the reason of the pause of a pipeline, or of a producer or its pipeline; None if it is not paused."""
        with self.reading() as connection:
            holds = _PIPELINES.c.pipeline.in_([pipeline_of_key(pipeline), pipeline]) & _PIPELINES.c.paused.is_not(None)
            query = sa.select(_PIPELINES.c.paused).where(holds).order_by(_PIPELINES.c.pipeline)
            return connection.execute(query).scalar()


def pipeline_of_key(key: str) -> str:
    """Return the pipeline of a key, `<pipeline>` or `<pipeline>/<producer>`."""
    return key.partition("/")[0]


def is_of(column: sa.ColumnElement[Any], *pipelines: str) -> sa.ColumnElement[bool]:
    """Whether a row belongs to one of some pipelines or to one of their producers, by the column of its key."""
    return sa.or_(*((column == key) | column.startswith(f"{key}/", autoescape=True) for key in pipelines))


def lock(connection: sa.Connection, pipeline: str) -> None:
    """Lock the pipeline's row until the end of the transaction; insert it first if it is missing."""
    connection.execute(insert(connection, _PIPELINES).values(pipeline=pipeline).on_conflict_do_nothing())
    connection.execute(sa.select(_PIPELINES.c.pipeline).where(_PIPELINES.c.pipeline == pipeline).with_for_update())


def changed_limit(
    pipeline: str, before: RateLimiting | None, allowed_messages: int | None, interval: timedelta | None
) -> RateLimiting:
    """Return a limit with the given parts changed. Raises as `Throttle.update_rate_limiting` does."""
    given = {"allowed_messages": allowed_messages, "interval": interval}
    changed = {name: value for name, value in given.items() if value is not None}
    if before is None and len(changed) < len(given):
        raise PipelineError(f"{pipeline} has no rate limit. Set both allowed_messages and interval")
    return RateLimiting(**{**(before.model_dump() if before else {}), **changed})


def interval_end(rate_limiting: RateLimiting, now: datetime) -> datetime:
    """Return the end of the interval that contains `now`."""
    return as_time(_bounds(rate_limiting, as_us(now))[1])


def as_time(us: int) -> datetime:
    """Convert a time of the control store."""
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=us)


def as_us(time: datetime) -> int:
    """Convert a time to a time of the control store."""
    return round(time.timestamp() * SECOND)


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
    """Remove a stop, if there is one."""
    connection.execute(sa.delete(STOPS).where(STOPS.c.key == key))


def _set(connection: sa.Connection, pipeline: str, **values: str | int | None) -> None:
    upsert = insert(connection, _PIPELINES).values(pipeline=pipeline, **values)
    connection.execute(upsert.on_conflict_do_update(index_elements=["pipeline"], set_=values))


def _used(connection: sa.Connection, pipeline: str, limit: RateLimiting, now: int) -> int:
    """Return the used permits of the current interval, and lock its row."""
    starts_at, _ = _bounds(limit, now)
    locked = sa.select(_INTERVALS.c.used).where(_interval(pipeline, limit, starts_at)).with_for_update()
    used = connection.execute(locked).scalar()
    if used is None:
        is_old = _INTERVALS.c.starts_at + _INTERVALS.c.interval_us < now - _KEPT_US
        connection.execute(sa.delete(_INTERVALS).where(_INTERVALS.c.pipeline == pipeline, is_old))
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
    """Return the free permits of the current interval, without a lock."""
    query = sa.select(_INTERVALS.c.used).where(_interval(pipeline, limit, _bounds(limit, now)[0]))
    return max(0, limit.allowed_messages - (connection.execute(query).scalar() or 0))


def _next_at(limits: Mapping[str, RateLimiting], left: Mapping[str, int], now: int) -> int:
    """Return the first end of an interval or, if a limit has no permits left, the time when all may have some."""
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
