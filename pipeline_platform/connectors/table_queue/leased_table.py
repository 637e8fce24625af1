"""A SQL table whose rows are leased: its statements, the same on SQLite and PostgreSQL.

The **queue** is only inserted into and deleted from: a lease rewrites no payload, and any table with a unique id can be
a queue. `<table>_receives` has a row for each receive, with its deadline and the spans of consecutive ids that it
leased first: leasing or renewing a million messages writes a single row. `<table>_leases` has a row for each message
that was leased in another way (a redelivery, scattered ids, ids that are not integers, or by partition); it takes
precedence over any span.

A receive ends when a planner finds that its lease expired, or when it is released; it never becomes active again. The
planner writes a row for each message left in its spans. Until another receive leases such a message, a late
acknowledgement counts. Planners take turns (SQLite's single writer, an advisory lock on PostgreSQL), skip messages that
an acknowledgement locks, and lease a row again only if its count of deliveries is unchanged.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from pipeline_platform.connectors.table_queue import id_spans, ids_on_sqlite
from pipeline_platform.connectors.table_queue.id_spans import HOLE, IdSpan
from pipeline_platform.source.contract import Share
from pipeline_platform.sql.database import Database, insert


@dataclass(frozen=True)
class LeasedTable:
    """The three tables in one process. Each method is part of the transaction that it is given.

    Attributes:
        leases: Columns `id`, `receive` (NULL if released) and `attempts` (number of deliveries).
        receives: Columns `id`, `receive_id` (NULL for a delay), `leased_until` in seconds since 1970 (NULL once ended),
            and `spans`, a JSON list of first and last ids.
        columns: Columns of `queue` by the names of the options.
        partitions_apart: Whether the messages of a partition are leased to one receive at a time.
    """

    database: Database
    queue: sa.TableClause
    leases: sa.Table
    receives: sa.Table
    kind: type[int] | type[str] | type[UUID]
    columns: Mapping[str, sa.ColumnClause[Any]]
    partitions_apart: bool = False

    @property
    def id(self) -> sa.ColumnClause[Any]:
        """The id column of the queue."""
        return self.columns["id_column"]

    @property
    def created(self) -> sa.ColumnElement[Any] | None:
        """The time of a message as stored in its column; None without such a column."""
        if "created_column" not in self.columns:
            return None
        # Without its type: SQLite does not enforce it.
        column = self.columns["created_column"]
        created: sa.ColumnElement[Any] = sa.type_coerce(column, sa.types.NullType())
        if not self.database.is_sqlite and isinstance(column.type, sa.DateTime | sa.Date):
            # Python has no infinite time, and one such row must not fail the others.
            is_known = created.between(sa.literal_column("'0001-01-02'"), sa.literal_column("'9999-12-30'"))
            created = sa.case((is_known, created))
        return created

    def count_waiting(self, connection: sa.Connection, most: int | None = None) -> int:
        """Return the number of messages that could be leased, counting never-leased ones no further than `most`."""
        live = self.leases.c.receive.in_(self._live(connection))
        held = id_spans.merged(self._spans(connection, self.receives.c.leased_until > self._now(connection)))
        after: sa.ColumnElement[bool] = self.id.is_not(None)
        leased: sa.ColumnElement[bool] = sa.true()
        between = again = 0
        if held:
            after, leased = self.id > held[-1][1], self.leases.c.id > held[-1][1]
            between = self._count(connection, id_spans.gaps(held), self.id)
            between -= self._count(connection, id_spans.gaps(held), self.leases.c.id, live)
            again = self._count(connection, held, self.leases.c.id, self.leases.c.receive.is_(None) | ~live)
        count = sa.select(sa.func.count())
        taken = count.select_from(self.leases).where(live, leased).scalar_subquery()
        new = count.select_from(self.queue).where(after)
        if most is not None:
            new = count.select_from(sa.select(self.id).where(after).limit(most + taken).subquery())
        # Negative if leased messages were deleted by other means.
        waiting = int(connection.execute(sa.select(new.scalar_subquery() - taken)).scalar_one())
        return max(0, waiting + between + again)

    def oldest_waiting(self, connection: sa.Connection) -> Any:
        """Return the time of the message that is leased next, as stored in its column."""
        if (created := self.created) is None:
            return None
        held = id_spans.merged(self._spans(connection, self.receives.c.leased_until > self._now(connection)))
        for waiting in (self._again(self._live(connection)), *self._fresh(held)):
            if row := connection.execute(waiting.add_columns(created).limit(1)).first():
                return row[-1]
        return None

    def end_what_ran_out(self, connection: sa.Connection, receive_id: str) -> None:
        """End expired receives, and an earlier plan of this receive; delete receives without messages.

        This runs in its own transaction before the lease: planners that lease for seconds do not wait for each other's
        rows.
        """
        receives = self.receives
        over = sa.or_(receives.c.leased_until <= self._now(connection), receives.c.receive_id == receive_id)
        connection.execute(receives.update().where(over).values(leased_until=sa.null()))
        connection.execute(receives.update().where(receives.c.receive_id == receive_id).values(receive_id=sa.null()))
        ended = receives.c.leased_until.is_(None)  # the next planner handles a receive that is acknowledging now
        in_spans = sa.select(receives.c.id, receives.c.spans).where(ended, receives.c.spans.is_not(None))
        for receive, spans in connection.execute(in_spans.with_for_update(skip_locked=True)).all():
            within = self._joined(id_spans.parse_spans(spans), self.id)
            self._give_rows(connection, receive, sa.select(self.id).select_from(within))
            connection.execute(receives.update().where(receives.c.id == receive).values(spans=sa.null()))
        connection.execute(receives.delete().where(ended, receives.c.spans.is_(None), ~self._has_rows()))

    def lease(
        self, connection: sa.Connection, receive_id: str, lease_s: float, demand: int, concurrency: int
    ) -> list[Share]:
        """Lease up to `demand` messages, and divide them into at most `concurrency` shares of equal counts."""
        self._take_turns(connection)
        receives = self.receives
        held = id_spans.merged(self._spans(connection, receives.c.spans.is_not(None)))
        receive = self._new_receive(connection, receive_id, lease_s)
        live = sa.select(receives.c.id).where(receives.c.leased_until.is_not(None))
        rows, spans = 0, list[IdSpan]()
        if self.kind is int and not self.partitions_apart:
            rows = self._take_rows(connection, receive, self._again(live).limit(demand))
            for fresh in self._fresh(held):
                left = demand - rows - id_spans.size(spans)
                found = id_spans.islands(connection, fresh.limit(left)) if left else []
                if len(found) <= max(100, id_spans.size(found) // 10):
                    spans += found
                else:  # scattered ids: a row for each is shorter than spans
                    rows += self._take_rows(connection, receive, fresh.add_columns(sa.literal(1)).limit(left))
            if spans:
                mine = receives.update().where(receives.c.id == receive)
                connection.execute(mine.values(spans=json.dumps(spans)))
        else:
            waiting = self._waiting(live, held)
            if self.partitions_apart:
                waiting = self._of_free_partitions(waiting, live)
            rows = self._take_rows(connection, receive, waiting.limit(demand))
        if not rows and not spans:
            connection.execute(receives.delete().where(receives.c.id == receive))
        return list(self._shares(connection, receive, rows, id_spans.merged(spans), max(1, concurrency)))

    def _take_rows(self, connection: sa.Connection, receive: int, waiting: sa.Select[Any]) -> int:
        """Lease messages with a row for each; return their number."""
        leases = self.leases
        picked = waiting.with_for_update(of=self.queue, skip_locked=True).subquery("picked")
        # SQLite needs a WHERE here to distinguish ON CONFLICT from the ON of a join.
        rows = sa.select(picked.c[0], sa.literal(receive), picked.c[1]).where(sa.true())
        taken = insert(connection, leases).from_select(["id", "receive", "attempts"], rows)
        taken = taken.on_conflict_do_update(
            index_elements=[leases.c.id],
            set_={"receive": receive, "attempts": taken.excluded.attempts},
            where=leases.c.attempts == taken.excluded.attempts - 1,
        )
        return int(connection.execution_options(preserve_rowcount=True).execute(taken).rowcount)

    def _give_rows(self, connection: sa.Connection, receive: int | None, ids: sa.Select[Any]) -> int:
        """Write a row for each selected message without one. It relies on the conflict, which PostgreSQL plans best."""
        holder = sa.cast(sa.literal(receive), self.leases.c.receive.type)
        once = ids.add_columns(holder, sa.literal(1)).where(sa.true())
        new = insert(connection, self.leases).from_select(["id", "receive", "attempts"], once)
        return int(connection.execute(new.on_conflict_do_nothing()).rowcount)

    def _shares(
        self, connection: sa.Connection, receive: int, rows: int, spans: Sequence[IdSpan], concurrency: int
    ) -> Iterator[Share]:
        """Divide the leased messages into shares: rows first, whose last id per share is looked up."""
        leases, after, left = self.leases, None, spans
        messages = rows + id_spans.size(spans)
        shares = min(messages, concurrency)
        for nth in range(shares):
            size = messages // shares + (nth < messages % shares)
            at: dict[str, Any] = {}
            by_row = min(size, rows)
            if by_row:
                rest = sa.select(leases.c.id).where(leases.c.receive == receive)
                if after is not None:
                    rest = rest.where(leases.c.id > after)
                to = connection.execute(rest.order_by(leases.c.id).limit(1).offset(by_row - 1)).scalar_one()
                ends = {"after": after, "to": to}
                at |= {end: id_ if id_ is None or self.kind is int else str(id_) for end, id_ in ends.items()}
                after, rows = to, rows - by_row
            if size > by_row:
                mine, left = id_spans.cut_spans(left, size - by_row)
                at["spans"] = mine
            yield Share(at=at, messages=size)

    def held(self, connection: sa.Connection) -> list[tuple[str | None, float, int]]:
        """Return the active receives: id (None for messages with a delay), seconds left, number of messages."""
        receives, leases = self.receives, self.leases
        by_row = sa.select(leases.c.receive, sa.func.count()).group_by(leases.c.receive)
        rows = {receive: int(count) for receive, count in connection.execute(by_row)}
        left = receives.c.leased_until - self._now(connection)
        live = sa.select(receives.c.id, receives.c.receive_id, left, receives.c.spans).order_by(receives.c.id)
        listed = [
            (receive_id, float(seconds), rows.get(id_, 0) + self._count_new(connection, id_spans.parse_spans(spans)))
            for id_, receive_id, seconds, spans in connection.execute(live.where(receives.c.leased_until.is_not(None)))
        ]
        return [receive for receive in listed if receive[2]]

    def look_up(self, connection: sa.Connection, id_: int | str | UUID) -> tuple[str | None, float] | None:
        """Return a message's receive (or None) and the seconds until it is available; None if it does not exist."""
        if connection.execute(sa.select(self.id).where(self.id == id_)).first() is None:
            return None
        receives, leases = self.receives, self.leases
        left = receives.c.leased_until - self._now(connection)
        live = sa.select(receives.c.id, receives.c.receive_id, left, receives.c.spans).where(left > 0)
        row = connection.execute(sa.select(leases.c.receive).where(leases.c.id == id_)).first()
        for receive, receive_id, seconds, spans in connection.execute(live):
            within = isinstance(id_, int) and id_spans.inside([id_], id_spans.parse_spans(spans))[0]
            if receive == row.receive if row else within:
                return receive_id, float(seconds)
        return None, 0.0

    def renew(self, connection: sa.Connection, receive_id: str, lease_s: float) -> bool:
        """Set a receive's lease to `lease_s` from now; return False if it has ended or has no messages left."""
        receives = self.receives
        mine = sa.and_(receives.c.receive_id == receive_id, receives.c.leased_until.is_not(None))
        left = self._has_rows()
        for near in id_spans.near(self._spans(connection, mine), HOLE):
            within = sa.select(self.id).where(self.id.between(near[0][0], near[-1][1])).limit(1)
            if connection.execute(within).first():
                left = sa.true()
                break
        row = receives.update().where(mine, left).values(leased_until=self._now(connection) + lease_s)
        return connection.execute(row).rowcount == 1

    def give_back_all(self, connection: sa.Connection, receive_id: str) -> None:
        """End a receive."""
        row = self.receives.c.receive_id == receive_id
        connection.execute(self.receives.update().where(row).values(leased_until=sa.null()))

    def is_live(self, connection: sa.Connection, receive_id: str) -> bool:
        """Return whether a receive has not ended."""
        live = self._receive(receive_id).where(self.receives.c.leased_until.is_not(None))
        return connection.execute(live).scalar() is not None

    def acknowledge(self, connection: sa.Connection, receive_id: str, ids: Sequence[Any]) -> list[Any]:
        """Delete messages of a receive, with their leases; return the ids that remain."""
        in_spans, by_row = self._of(connection, receive_id, ids)
        deleted = 0
        if in_spans:
            mine = sa.delete(self.queue).where(self._among(self.id, in_spans))
            bounds = sa.select(self.leases.c.id).where(self.leases.c.id.between(in_spans[0], in_spans[-1])).limit(1)
            if connection.execute(bounds).first():
                mine = mine.where(~sa.exists().where(self.leases.c.id == self.id))
            deleted += connection.execute(mine).rowcount
        if by_row:
            among = self._held(receive_id, by_row)
            # Locked: a planner may lease a message again at this moment, which only its row in leases shows.
            held = sa.select(self.leases.c.id).where(among).with_for_update()
            deleted += connection.execute(sa.delete(self.queue).where(self.id.in_(held))).rowcount
            connection.execute(self.leases.delete().where(among))
        return [] if deleted == len(ids) else self._still_there(connection, ids, sa.true())

    def give_back(self, connection: sa.Connection, receive_id: str, ids: Sequence[Any], delay_s: float) -> list[Any]:
        """Release messages of a receive, after a delay if there is one; return the ids that it had not leased."""
        leases = self.leases
        to = self._new_receive(connection, None, delay_s) if delay_s > 0 else None
        in_spans, by_row = self._of(connection, receive_id, ids)
        freed = 0
        if in_spans:
            freed = self._give_rows(connection, to, sa.select(self.id).where(self._among(self.id, in_spans)))
        if by_row:
            rows = leases.update().where(self._held(receive_id, by_row)).values(receive=to)
            freed += connection.execute(rows).rowcount
        others = sa.or_(leases.c.id.is_(None), leases.c.receive.is_distinct_from(to))
        return [] if freed == len(ids) else self._still_there(connection, ids, others)

    def _now(self, connection: sa.Connection) -> float:
        return self.database.now(connection) / 1_000_000

    def _new_receive(self, connection: sa.Connection, receive_id: str | None, lease_s: float) -> int:
        row = self.receives.insert().values(receive_id=receive_id, leased_until=self._now(connection) + lease_s)
        return int(connection.execute(row.returning(self.receives.c.id)).scalar_one())

    def _live(self, connection: sa.Connection) -> sa.Select[tuple[int]]:
        return sa.select(self.receives.c.id).where(self.receives.c.leased_until > self._now(connection))

    def _again(self, live: sa.Select[tuple[int]]) -> sa.Select[Any]:
        """Select ids, in order, and deliveries of messages with a row that no receive in `live` has leased."""
        leases = self.leases
        return (
            sa.select(leases.c.id, leases.c.attempts + 1)
            .select_from(leases.join(self.queue, self.id == leases.c.id))
            .where(leases.c.receive.is_(None) | leases.c.receive.not_in(live))
            .order_by(leases.c.id)
        )

    def _waiting(self, live: sa.Select[tuple[int]], held: Sequence[IdSpan]) -> sa.Select[Any]:
        """Select ids, in order, and deliveries of messages that no receive in `live` and no span in `held` contains."""
        leases = self.leases
        new: sa.ColumnElement[bool] = leases.c.id.is_(None)
        if held:
            spans = self._rows(held)
            new &= ~sa.exists().select_from(spans).where(self.id.between(spans.c.first, spans.c.last))
        again = leases.c.id.is_not(None) & (leases.c.receive.is_(None) | leases.c.receive.not_in(live))
        return (
            sa.select(self.id, sa.func.coalesce(leases.c.attempts, 0) + 1)
            .select_from(self.queue.outerjoin(leases, leases.c.id == self.id))
            .where(new | again)
            .where(self.id.is_not(None))  # a unique column may contain NULL
            .order_by(self.id)
        )

    def _fresh(self, held: Sequence[IdSpan]) -> Iterator[sa.Select[Any]]:
        """Select ids, in order, of messages that were never leased: between the spans in `held`, then after them."""
        leases = self.leases
        after: sa.ColumnElement[bool] = self.id.is_not(None)
        same: sa.ColumnElement[bool] = leases.c.id == self.id
        if held:
            between = self._joined(id_spans.gaps(held), self.id).outerjoin(leases, same)
            # Not in the index's order: PostgreSQL would search for a gap around every message.
            in_gaps = sa.select(self.id).select_from(between).order_by(self.id + 0)
            yield in_gaps.where(leases.c.id.is_(None))
            last = held[-1][1]
            after, same = self.id > last, sa.and_(same, leases.c.id > last)
        both = self.queue.outerjoin(leases, same)
        yield sa.select(self.id).select_from(both).where(leases.c.id.is_(None), after).order_by(self.id)

    def _rows(self, spans: Sequence[IdSpan]) -> sa.FromClause:
        return id_spans.rows(spans, is_sqlite=self.database.is_sqlite)

    def _joined(self, spans: Sequence[IdSpan], id_: sa.ColumnElement[Any]) -> sa.Join:
        """Return spans joined with the rows of the queue or of the leases whose ids lie in them."""
        rows = self._rows(spans)
        return rows.join(self.leases if id_ is self.leases.c.id else self.queue, id_.between(rows.c.first, rows.c.last))

    def _count(
        self, connection: sa.Connection, spans: Sequence[IdSpan], id_: Any, *such: sa.ColumnElement[bool]
    ) -> int:
        """Count the rows of the queue or of the leases in spans, by conditions."""
        count = sa.select(sa.func.count()).select_from(self._joined(spans, id_)).where(*such)
        return int(connection.execute(count).scalar_one()) if spans else 0

    def _count_new(self, connection: sa.Connection, spans: Sequence[IdSpan]) -> int:
        """Count the messages in spans that have no row of their own."""
        has_message = sa.exists().where(self.id == self.leases.c.id)
        rows = self._count(connection, spans, self.leases.c.id, has_message)
        return self._count(connection, spans, self.id) - rows

    def _spans(self, connection: sa.Connection, of: sa.ColumnElement[bool]) -> list[IdSpan]:
        spans = self.receives.c.spans
        found = connection.execute(sa.select(spans).where(of, spans.is_not(None))).scalars()
        return [span for text in found for span in id_spans.parse_spans(text)]

    def _of(self, connection: sa.Connection, receive_id: str, ids: Sequence[Any]) -> tuple[list[int], Sequence[Any]]:
        """Divide ids into the ids in the spans of a receive, which is locked against planners, and the others."""
        row = self._receive(receive_id).add_columns(self.receives.c.spans).with_for_update(read=True, key_share=True)
        found = connection.execute(row).first()
        return id_spans.inside(ids, id_spans.parse_spans(found.spans)) if found and found.spans else ([], ids)

    def _take_turns(self, connection: sa.Connection) -> None:
        """Wait for other planners of this table: a lease by spans locks no message."""
        if not self.database.is_sqlite:
            name = f"{self.queue.schema or ''}.{self.queue.name}"
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(name, 0))))

    def _of_free_partitions(self, waiting: sa.Select[Any], live: sa.Select[tuple[int]]) -> sa.Select[Any]:
        """Exclude partitions of which a receive has leased a message."""
        partition = self.columns["partition_column"]
        queue = self.queue.alias("held")
        leased = queue.join(self.leases, self.leases.c.id == queue.c[self.id.name])
        held = sa.select(queue.c[partition.name]).select_from(leased).where(self.leases.c.receive.in_(live))
        return waiting.where(~sa.exists(held.where(queue.c[partition.name] == partition)))

    def _has_rows(self) -> sa.ColumnElement[bool]:
        return sa.exists().where(self.leases.c.receive == self.receives.c.id)

    def _receive(self, receive_id: str) -> sa.Select[tuple[int]]:
        return sa.select(self.receives.c.id).where(self.receives.c.receive_id == receive_id)

    def _held(self, receive_id: str, ids: Sequence[Any]) -> sa.ColumnElement[bool]:
        mine = self.leases.c.receive == self._receive(receive_id).scalar_subquery()
        return sa.and_(mine, self._among(self.leases.c.id, ids))

    def _still_there(
        self, connection: sa.Connection, ids: Sequence[Any], condition: sa.ColumnElement[bool]
    ) -> list[Any]:
        both = self.queue.outerjoin(self.leases, self.leases.c.id == self.id)
        there = sa.select(self.id).select_from(both).where(self._among(self.id, ids), condition)
        return list(connection.execute(there).scalars())

    def _among(self, column: sa.ColumnElement[Any], ids: Sequence[Any]) -> sa.ColumnElement[bool]:
        """Return the condition that a column is one of `ids`, which are sorted and unique."""
        if self.kind is int and ids[-1] - ids[0] + 1 == len(ids):  # the common case, and faster by a quarter
            return column.between(ids[0], ids[-1])
        if self.database.is_sqlite:
            return column.in_(ids_on_sqlite.selected_ids(ids))
        return column == sa.any_(sa.cast(ids, postgresql.ARRAY(self.leases.c.id.type)))
