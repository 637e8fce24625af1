"""History of operators' acts: who changed a pipeline, when, with which options and why."""

import json
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa

from pipeline_platform.control.limits import SECOND, TABLES, as_time, as_us, is_of
from pipeline_platform.model.safe_text import printable
from pipeline_platform.sql.database import Database

_HISTORY = sa.Table(
    "control_history",
    TABLES,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("at", sa.BigInteger, nullable=False, index=True),
    sa.Column("pipeline", sa.Text, nullable=False),
    sa.Column("act", sa.Text, nullable=False),
    sa.Column("who", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("options", sa.Text, nullable=False),
)
KEEP_ACTS = timedelta(days=400)
"""Time for which acts are kept: a year and a month, for a yearly audit."""
MOST_ACTS = 10_000
"""Most acts that are kept, in case a program changes limits all the time."""
_LONGEST = 1_000
"""Most characters of a text."""


class Act(NamedTuple):
    """An act of an operator.

    Attributes:
        at: Time of the act.
        key: The pipeline, or `<pipeline>/<producer>`.
        name: Name of the command, such as `pause`.
        who: User and host of the command line, or the Dagster run.
        reason: Reason that the operator gave; may be empty.
        options: Options that were set, and counts.
    """

    at: datetime
    key: str
    name: str
    who: str
    reason: str
    options: dict[str, Any]


class History(Database):
    """Acts of operators, as a part of the control store."""

    def record_act(self, key: str, name: str, who: str, reason: str = "", **options: Any) -> None:
        """Record an act on a pipeline or a producer, and remove old acts. Unset options are left out.

        Options and the reason must contain no secrets and no personal data: every operator can read them.
        """
        given = {option: value for option, value in options.items() if value or (value == 0 and value is not False)}
        given = {option: value[:_LONGEST] if isinstance(value, str) else value for option, value in given.items()}
        texts = {"who": who, "reason": reason}
        values = {column: printable(text)[:_LONGEST] for column, text in texts.items()}
        with self.writing() as connection:
            now = self.now(connection)
            values |= {"pipeline": key, "act": name, "options": json.dumps(given, default=str)}
            connection.execute(sa.insert(_HISTORY).values(at=now, **values))
            most = sa.select(_HISTORY.c.id).order_by(_HISTORY.c.id.desc()).offset(MOST_ACTS).limit(1).scalar_subquery()
            is_old = _HISTORY.c.at < now - round(KEEP_ACTS.total_seconds() * SECOND)
            connection.execute(sa.delete(_HISTORY).where(is_old | (_HISTORY.c.id <= most)))

    def acts(self, pipeline: str | None = None, since: datetime | None = None) -> list[Act]:
        """Return the acts on a pipeline and its producers, or on all pipelines, oldest first."""
        query = sa.select(_HISTORY).order_by(_HISTORY.c.id)
        if pipeline is not None:
            query = query.where(is_of(_HISTORY.c.pipeline, pipeline))
        if since is not None:
            query = query.where(_HISTORY.c.at >= as_us(since))
        with self.reading() as connection:
            rows = connection.execute(query).all()
        return [Act(as_time(r.at), r.pipeline, r.act, r.who, r.reason, json.loads(r.options)) for r in rows]
