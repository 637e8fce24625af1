"""Permits of PostgreSQL in one statement: many tasks ask at once, and each round trip delays the others."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from pipeline_platform.model.options import RateLimiting

_TAKE = sa.text("""
WITH held AS (
    SELECT given.key, coalesce(one.allowed_messages, given.allowed) AS allowed,
        CASE WHEN one.allowed_messages IS NULL THEN given.interval_us ELSE one.interval_us END AS interval_us
    FROM unnest(CAST(:keys AS text[]), CAST(:allowed AS bigint[]), CAST(:intervals AS bigint[]))
        AS given(key, allowed, interval_us)
    LEFT JOIN control_pipelines AS one ON one.pipeline = given.key
), clock AS (
    SELECT coalesce(CAST(:now AS bigint), CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)) AS now,
        (SELECT min(stops_at) FROM control_stops WHERE key = ANY(CAST(:stops AS text[]))) AS stops_at
), bounds AS (
    SELECT key, allowed, interval_us, now - now % interval_us AS starts_at
    FROM held, clock WHERE allowed IS NOT NULL
), locked AS (
    SELECT bounds.key, bounds.allowed - row.used AS free
    FROM control_intervals AS row JOIN bounds
        ON row.pipeline = bounds.key AND row.interval_us = bounds.interval_us AND row.starts_at = bounds.starts_at
    ORDER BY row.pipeline FOR UPDATE OF row
), granted AS (
    SELECT least(CAST(:wanted AS bigint), min(free)) AS messages FROM locked
    HAVING count(*) = (SELECT count(*) FROM bounds)
), taken AS (
    UPDATE control_intervals AS row SET used = row.used + messages FROM bounds, granted, clock
    WHERE row.pipeline = bounds.key AND row.interval_us = bounds.interval_us AND row.starts_at = bounds.starts_at
        AND messages > 0 AND (stops_at IS NULL OR stops_at > now)
)
SELECT bounds.key, bounds.allowed, bounds.interval_us, free, now, stops_at
FROM clock LEFT JOIN bounds ON true LEFT JOIN locked ON locked.key = bounds.key ORDER BY bounds.key
""")
"""Lock the row of each limit's interval, in the order of their keys, and take the same number of permits from each. If
an interval has no row yet, its `free` is NULL, and nothing is taken."""


def take_at_once(
    connection: sa.Connection,
    limits: Mapping[str, RateLimiting | None],
    wanted: int,
    stops: Sequence[str],
    now: int | None,
) -> tuple[dict[str, tuple[RateLimiting, int | None]], int | None, int]:
    """Take permits by one statement, in autocommit mode.

    Returns:
        The current limits, each with the permits that were left in its interval, None if the interval has no row yet;
        the time of the first stop; and the current time.
    """
    us = timedelta(microseconds=1)
    given: dict[str, Any] = {
        "keys": list(limits),
        "allowed": [limit and limit.allowed_messages for limit in limits.values()],
        "intervals": [limit and limit.interval // us for limit in limits.values()],
    }
    rows = connection.execute(_TAKE, given | {"wanted": wanted, "stops": list(stops), "now": now}).all()
    held = {
        row.key: (RateLimiting(allowed_messages=row.allowed, interval=row.interval_us * us), row.free)
        for row in rows
        if row.key is not None
    }
    return held, rows[0].stops_at, rows[0].now
