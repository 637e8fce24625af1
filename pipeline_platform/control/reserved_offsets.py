"""Ranges of log offsets reserved by receives, so that each offset is reserved once."""

from collections.abc import Iterable, Mapping, Sequence

import sqlalchemy as sa

from pipeline_platform.control.limits import TABLES
from pipeline_platform.source.offsets import Choose, Offsets, Place, still_leased
from pipeline_platform.sql.database import Database, insert

_LOGS = sa.Table("control_logs", TABLES, sa.Column("source", sa.Text, primary_key=True))
"""A row for each log, which its planners lock."""

_PLACES = sa.Table(
    "control_places",
    TABLES,
    sa.Column("source", sa.Text, primary_key=True),
    sa.Column("partition", sa.Text, primary_key=True),
    sa.Column("settled_to", sa.BigInteger, nullable=False),
    sa.Column("reached", sa.BigInteger, nullable=False),
)

_SPANS = sa.Table(
    "control_spans",
    TABLES,
    sa.Column("source", sa.Text, primary_key=True),
    sa.Column("partition", sa.Text, primary_key=True),
    sa.Column("first", sa.BigInteger, primary_key=True),
    sa.Column("past", sa.BigInteger, nullable=False),
    sa.Column("holder", sa.Text, index=True),
)
"""Reserved ranges and, without a holder, acknowledged ranges beyond the acknowledged position."""

_MARKS = sa.Table(
    "control_marks",
    TABLES,
    sa.Column("source", sa.Text, primary_key=True),
    sa.Column("partition", sa.Text, primary_key=True),
    sa.Column("mark", sa.Text, nullable=False),
)
"""Marks of acknowledged positions, for logs that are not read by offsets."""


class LogPositions(Database):
    """Positions in logs, as a part of the control store; see `source.offsets.Positions`."""

    def places(self, source: str) -> dict[str, Place]:
        """Return the place of each partition of a source."""
        with self.reading() as connection:
            return _places(connection, source)

    def begin(self, source: str, places: Iterable[Place]) -> None:
        """Add new partitions, without reserved ranges; known partitions stay unchanged."""
        places = [*places]
        rows = [dict(zip(_PLACES.c.keys(), (source, *place[:3]), strict=True)) for place in places]
        marks = [{"source": source, "partition": place.partition, "mark": place.mark} for place in places if place.mark]
        if rows:
            with self.writing() as connection:
                connection.execute(insert(connection, _PLACES).on_conflict_do_nothing(), rows)
                if marks:
                    connection.execute(insert(connection, _MARKS).on_conflict_do_nothing(), marks)

    def reserve(self, source: str, receive_id: str, choose: Choose) -> Sequence[Offsets]:
        """Reserve ranges for a receive, so that no other planner gets them, and release the ranges that it had before.

        `choose` returns the ranges, the new acknowledged positions and the new marks for the current places.
        """
        with self.writing() as connection:
            _lock(connection, source)
            _free(connection, source, receive_id)
            now = _places(connection, source)
            spans, acknowledged_to, marks = choose(now)
            _move_to(connection, now, source, acknowledged_to)
            for partition, mark in marks.items():
                new = insert(connection, _MARKS).values(source=source, partition=partition, mark=mark)
                connection.execute(new.on_conflict_do_update(index_elements=_MARKS.primary_key, set_={"mark": mark}))
            if spans:
                held = [span._asdict() | {"source": source, "holder": receive_id} for span in spans]
                connection.execute(sa.insert(_SPANS), held)
                past: sa.BindParameter[int] = sa.bindparam("at")
                mine = _of(_PLACES, source, sa.bindparam("name"))
                further = sa.update(_PLACES).where(mine, _PLACES.c.reached < past)
                connection.execute(further.values(reached=past), [{"name": s.partition, "at": s.past} for s in spans])
        self.sync()  # otherwise a power cut could lead to a second reservation of these offsets
        return spans

    def acknowledge(self, source: str, receive_id: str) -> dict[str, int]:
        """Mark all ranges of a receive as acknowledged; return the new positions by partition."""
        with self.writing() as connection:
            _lock(connection, source)
            mine = sa.and_(_SPANS.c.source == source, _SPANS.c.holder == receive_id)
            partitions = set(connection.execute(sa.select(_SPANS.c.partition).where(mine)).scalars())
            connection.execute(sa.update(_SPANS).where(mine).values(holder=None))
            now = _places(connection, source)
            for partition in partitions & now.keys():
                _join(connection, source, now[partition].spans)
            return {
                partition: offset
                for partition, place in now.items()
                if (offset := _gapless(place)) > place.acknowledged_to
            }

    def committed(self, source: str, acknowledged_to: Mapping[str, int]) -> dict[str, int]:
        """Store committed positions; return the positions that other receives have acknowledged beyond them."""
        with self.writing() as connection:
            _lock(connection, source)
            now = _places(connection, source)
            known = {name: offset for name, offset in acknowledged_to.items() if name in now}
            forward = {name: max(offset, now[name].acknowledged_to) for name, offset in known.items()}
            _move_to(connection, now, source, forward)
            return {name: further for name, offset in known.items() if (further := _gapless(now[name])) > offset}

    def give_back(self, source: str, receive_id: str, spans: Iterable[Offsets] | None = None) -> None:
        """Release ranges that a receive has reserved and not acknowledged: the given ranges, or all."""
        with self.writing() as connection:
            _lock(connection, source)
            mine = sa.select(_SPANS).where(_SPANS.c.source == source, _SPANS.c.holder == receive_id)
            held = [Offsets(row.partition, row.first, row.past, row.holder) for row in connection.execute(mine)]
            _free(connection, source, receive_id)
            if spans is not None and (left := still_leased(held, spans)):
                connection.execute(sa.insert(_SPANS), [span._asdict() | {"source": source} for span in left])


def _of(table: sa.Table, source: str, partition: str | sa.BindParameter[str]) -> sa.ColumnElement[bool]:
    return sa.and_(table.c.source == source, table.c.partition == partition)


def _lock(connection: sa.Connection, source: str) -> None:
    connection.execute(insert(connection, _LOGS).values(source=source).on_conflict_do_nothing())
    connection.execute(sa.select(_LOGS).where(_LOGS.c.source == source).with_for_update())


def _places(connection: sa.Connection, source: str) -> dict[str, Place]:
    spans: dict[str, list[Offsets]] = {}
    found = connection.execute(sa.select(_SPANS).where(_SPANS.c.source == source).order_by(_SPANS.c.first))
    for row in found:
        spans.setdefault(row.partition, []).append(Offsets(row.partition, row.first, row.past, row.holder))
    places = connection.execute(sa.select(_PLACES).where(_PLACES.c.source == source)).all()
    marks = dict(
        connection.execute(sa.select(_MARKS.c.partition, _MARKS.c.mark).where(_MARKS.c.source == source)).all()
    )
    return {
        name: Place(name, settled_to, reached, tuple(spans.get(name, ())), marks.get(name, ""))
        for _, name, settled_to, reached in places
    }


def _free(connection: sa.Connection, source: str, receive_id: str) -> None:
    connection.execute(sa.delete(_SPANS).where(_SPANS.c.source == source, _SPANS.c.holder == receive_id))


def _move_to(
    connection: sa.Connection, now: Mapping[str, Place], source: str, acknowledged_to: Mapping[str, int]
) -> None:
    moved = [{"name": name, "to": to} for name, to in acknowledged_to.items() if to != now[name].acknowledged_to]
    if moved:
        places = sa.update(_PLACES).where(_of(_PLACES, source, sa.bindparam("name")))
        connection.execute(places.values(settled_to=sa.bindparam("to")), moved)
    mine = sa.and_(_PLACES.c.source == _SPANS.c.source, _PLACES.c.partition == _SPANS.c.partition)
    to = sa.select(_PLACES.c.settled_to).where(mine).scalar_subquery()
    over = sa.delete(_SPANS).where(_SPANS.c.source == source, _SPANS.c.holder.is_(None), _SPANS.c.past <= to)
    connection.execute(over)


def _join(connection: sa.Connection, source: str, spans: Iterable[Offsets]) -> None:
    """Merge adjacent acknowledged ranges, so that there are never more ranges than gaps."""
    last: Offsets | None = None
    for span in spans:
        if span.holder is not None or last is None or last.past != span.first:
            last = None if span.holder is not None else span
            continue
        last = last._replace(past=span.past)
        connection.execute(sa.delete(_SPANS).where(_of(_SPANS, source, span.partition), _SPANS.c.first == span.first))
        joined = sa.update(_SPANS).where(_of(_SPANS, source, span.partition), _SPANS.c.first == last.first)
        connection.execute(joined.values(past=last.past))


def _gapless(place: Place) -> int:
    """Return the offset up to which all messages are acknowledged."""
    offset = place.acknowledged_to
    for span in place.spans:
        if span.past <= offset:  # the position was moved beyond it
            continue
        if span.holder is not None or span.first > offset:
            break
        offset = span.past
    return offset
