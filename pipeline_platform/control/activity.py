"""Recent activity of a pipeline, by the acknowledged receives in the control store."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import sqlalchemy as sa

from pipeline_platform.control.claims import Ended
from pipeline_platform.control.limits import SECOND, TABLES, as_time
from pipeline_platform.control.store import ControlStore

_ENDED = TABLES.tables["control_ended"]
_MINUTE = 60 * SECOND


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


def by_minute(control: ControlStore, keys: Sequence[str], since: datetime) -> list[Minute]:
    """Return the minutes with acknowledged receives, oldest first. `keys` are pipelines or producers."""
    minute = _ENDED.c.ended_at - _ENDED.c.ended_at % _MINUTE
    figures = sa.func.count(), sa.func.sum(_ENDED.c.messages), sa.func.max(_ENDED.c.ended_at - _ENDED.c.started_at)
    query = sa.select(minute, *figures).where(_since(keys, since)).group_by(minute).order_by(minute)
    with control.reading() as connection:
        rows = connection.execute(query).all()
    return [Minute(as_time(at), receives, int(sum_), slowest / SECOND) for at, receives, sum_, slowest in rows]


def latest(control: ControlStore, keys: Sequence[str], since: datetime, most: int) -> list[Ended]:
    """Return the latest acknowledged receives, at most `most`, latest first."""
    columns = [_ENDED.c[name] for name in ("receive_id", "run_id", "messages", "started_at", "ended_at")]
    query = sa.select(*columns).where(_since(keys, since)).order_by(_ENDED.c.ended_at.desc()).limit(most)
    with control.reading() as connection:
        rows = connection.execute(query).all()
    return [Ended(r.receive_id, r.run_id, r.messages, as_time(r.started_at), as_time(r.ended_at)) for r in rows]


def _since(keys: Sequence[str], since: datetime) -> sa.ColumnElement[bool]:
    return _ENDED.c.pipeline.in_(keys) & (_ENDED.c.ended_at >= round(since.timestamp() * SECOND))
