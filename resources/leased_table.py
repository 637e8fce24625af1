"""A SQL table whose rows are leased: its statements, the same on SQLite and PostgreSQL.

Three tables. The **queue** is only ever inserted into and deleted from, so that a lease never rewrites a payload and
any table with a unique id can be a queue. Beside it `<table>_leases` has one narrow row for each message that was
leased and not acknowledged: whose it is and how often it was delivered. `<table>_receives` has one row for each
receive: until when its lease lasts. Renewing the lease of a million messages is an update of one row.

A message waits when it has no lease, or when its receive is over. A receive is over once a planner finds that it ran
out, or once it is given back; it never revives. Until a planner comes by, a late driver may still renew it.

Two planners never lease one message. SQLite has one writer at a time. On PostgreSQL a planner locks the messages it
picks and skips those that others lock. It takes a lease over only if its count of deliveries is still the one it saw:
another planner may commit between what it saw and what it locked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from pipeline_platform.control.database import Database, insert
from pipeline_platform.source.contract import Share

ROWS_PER_BATCH: Final = 2_000
BYTES_PER_BATCH: Final = 8 << 20
"""A batch that is read ends at whichever comes first, so that a few of them fit beside a task's work.

Rows become columns while the processor's cache still has them, which takes half as long as 10,000 at once.
"""

READING_IDLE_S: Final = 3_600
"""A task that reads stands still inside its transaction while it writes what it read. It locks no row."""


@dataclass(frozen=True)
class LeasedTable:
    """The three tables as one process knows them. Each method is a part of the transaction that it is given.

    Attributes:
        database: Where they are.
        queue: The messages.
        leases: `id`, `receive` (NULL where it was given back), `attempts` (how often it was delivered).
        receives: `id`, `receive_id` (NULL for a delay), `leased_until` in seconds since 1970, NULL once it is over.
        kind: What an id is in Python: `int`, `str` or `UUID`.
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

    def count_waiting(self, connection: sa.Connection) -> int:
        """Count the messages that could be leased, by two counts over narrow pages."""
        count = sa.select(sa.func.count())
        all_ = count.select_from(self.queue).where(self.id.is_not(None)).scalar_subquery()
        held = count.select_from(self.leases).where(self.leases.c.receive.in_(self._live(connection))).scalar_subquery()
        # Below zero where someone deleted leased messages behind the queue's back.
        return max(0, int(connection.execute(sa.select(all_ - held)).scalar_one()))

    def oldest_waiting(self, connection: sa.Connection) -> Any:
        """Look up when the first message that could be leased came, as its column holds it."""
        if "created_column" not in self.columns:
            return None
        # Without its type: SQLite holds what it likes.
        came: sa.ColumnElement[Any] = sa.type_coerce(self.columns["created_column"], sa.types.NullType())
        return connection.execute(self._waiting(self._live(connection), came).limit(1)).scalar()

    def end_what_ran_out(self, connection: sa.Connection, receive_id: str) -> None:
        """Mark receives as over whose lease ran out, and an earlier plan of this one; forget those that left nothing.

        It needs a transaction of its own, before the lease: planners who lease for seconds do not hold each other up
        over these rows.
        """
        receives = self.receives
        over = sa.or_(receives.c.leased_until <= self._now(connection), receives.c.receive_id == receive_id)
        connection.execute(receives.update().where(over).values(leased_until=sa.null()))
        mine = receives.update().where(receives.c.receive_id == receive_id)
        connection.execute(mine.values(receive_id=sa.null()))
        connection.execute(receives.delete().where(receives.c.leased_until.is_(None), ~self._has_left()))

    def lease(
        self, connection: sa.Connection, receive_id: str, lease_s: float, demand: int, concurrency: int
    ) -> list[Share]:
        """Lease up to `demand` messages, and divide them into ranges of ids with equal counts."""
        leases, receives = self.leases, self.receives
        receive = self._new_receive(connection, receive_id, lease_s)
        attempts = (sa.func.coalesce(leases.c.attempts, 0) + 1).label("attempts")
        live = sa.select(receives.c.id).where(receives.c.leased_until.is_not(None))
        waiting = self._waiting(live, self.id.label("id"), attempts).limit(demand)
        if self.partitions_apart:
            waiting = self._of_free_partitions(connection, waiting, live)
        picked = waiting.with_for_update(of=self.queue, skip_locked=True).subquery("picked")
        # SQLite needs a WHERE here, to tell ON CONFLICT from the ON of a join.
        rows = sa.select(picked.c.id, sa.literal(receive), picked.c.attempts).where(sa.true())
        taken = insert(connection, leases).from_select(["id", "receive", "attempts"], rows)
        taken = taken.on_conflict_do_update(
            index_elements=[leases.c.id],
            set_={"receive": receive, "attempts": taken.excluded.attempts},
            where=leases.c.attempts == taken.excluded.attempts - 1,
        )
        messages = int(connection.execution_options(preserve_rowcount=True).execute(taken).rowcount)
        if not messages:
            connection.execute(receives.delete().where(receives.c.id == receive))
        return list(self._shares(connection, receive, messages, min(messages, max(1, concurrency))))

    def _shares(self, connection: sa.Connection, receive: int, messages: int, shares: int) -> Iterator[Share]:
        """Find the last id of each share, starting from the one before: one pass over the leases in all."""
        leases, after = self.leases, None
        for nth in range(shares):
            size = messages // shares + (nth < messages % shares)
            rest = sa.select(leases.c.id).where(leases.c.receive == receive)
            if after is not None:
                rest = rest.where(leases.c.id > after)
            to = connection.execute(rest.order_by(leases.c.id).limit(1).offset(size - 1)).scalar_one()
            yield Share(at={"after": _plain(after), "to": _plain(to)}, messages=size)
            after = to

    def held(self, connection: sa.Connection) -> list[tuple[str | None, float, int]]:
        """List the live receives: id (None for messages that wait for a delay), seconds that are left, messages."""
        receives, leases = self.receives, self.leases
        left = receives.c.leased_until - self._now(connection)
        rows = sa.select(receives.c.receive_id, left, sa.func.count()).join(leases, leases.c.receive == receives.c.id)
        live = rows.where(receives.c.leased_until.is_not(None)).group_by(receives.c.id).order_by(receives.c.id)
        return [(receive_id, float(seconds), int(count)) for receive_id, seconds, count in connection.execute(live)]

    def renew(self, connection: sa.Connection, receive_id: str, lease_s: float) -> bool:
        """Set a receive's lease to `lease_s` from now; False where it is over or has nothing left."""
        live = self.receives.c.leased_until.is_not(None)
        row = self.receives.update().where(self.receives.c.receive_id == receive_id, live, self._has_left())
        return connection.execute(row.values(leased_until=self._now(connection) + lease_s)).rowcount == 1

    def give_back_all(self, connection: sa.Connection, receive_id: str) -> None:
        """Mark a receive as over."""
        row = self.receives.update().where(self.receives.c.receive_id == receive_id)
        connection.execute(row.values(leased_until=sa.null()))

    def is_live(self, connection: sa.Connection, receive_id: str) -> bool:
        """Whether a receive is not over."""
        found = self._receive(receive_id).where(self.receives.c.leased_until.is_not(None))
        return connection.execute(found).scalar() is not None

    def read(self, connection: sa.Connection, share: Share, receive_id: str) -> Iterator[list[tuple[Any, ...]]]:
        """Read `(id, attempts, data[, metadata][, partition])` of a share in lists that fit a batch."""
        leases = self.leases
        columns = [leases.c.id, leases.c.attempts, self._payload()]
        if "metadata_column" in self.columns:
            columns.append(self._as_text(self.columns["metadata_column"]))
        if "partition_column" in self.columns:
            columns.append(self._as_text(self.columns["partition_column"]))
        query = (
            sa.select(*columns)
            .select_from(leases.join(self.queue, self.id == leases.c.id))
            .where(leases.c.receive == self._receive(receive_id).scalar_subquery())
            .where(leases.c.id <= self.kind(share.at["to"]))
            .order_by(leases.c.id)
            .limit(share.messages)
        )
        if share.at.get("after") is not None:
            query = query.where(leases.c.id > self.kind(share.at["after"]))
        if self.database.is_sqlite:
            yield from _by_size(connection.execute(query).cursor)
            return
        # A cursor at the server, or the driver would fetch the whole share at once; binary, for payloads are.
        compiled = query.compile(dialect=connection.dialect)
        raw: Any = connection.connection.driver_connection
        connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{READING_IDLE_S}s'")
        with raw.cursor("share", binary=True) as cursor:
            cursor.execute(str(compiled), compiled.params)
            yield from _by_size(cursor)

    def acknowledge(self, connection: sa.Connection, receive_id: str, ids: Sequence[Any]) -> list[Any]:
        """Delete messages under a receive, with their leases; return the ids that are still there."""
        among = self._held(receive_id, ids)
        # Locked: a planner may take a lease over at this moment, and only the lease shows it.
        held = sa.select(self.leases.c.id).where(among).with_for_update()
        deleted = connection.execute(sa.delete(self.queue).where(self.id.in_(held))).rowcount
        connection.execute(self.leases.delete().where(among))
        return [] if deleted == len(ids) else self._still_there(connection, ids, sa.true())

    def give_back(self, connection: sa.Connection, receive_id: str, ids: Sequence[Any], delay_s: float) -> list[Any]:
        """Free messages of a receive, or put them under a lease that nobody renews; return the ids of others."""
        leases = self.leases
        to = self._new_receive(connection, None, delay_s) if delay_s > 0 else None
        freed = connection.execute(leases.update().where(self._held(receive_id, ids)).values(receive=to)).rowcount
        return [] if freed == len(ids) else self._still_there(connection, ids, leases.c.receive.is_distinct_from(to))

    def _now(self, connection: sa.Connection) -> float:
        return self.database.now(connection) / 1_000_000

    def _new_receive(self, connection: sa.Connection, receive_id: str | None, lease_s: float) -> int:
        row = self.receives.insert().values(receive_id=receive_id, leased_until=self._now(connection) + lease_s)
        return int(connection.execute(row.returning(self.receives.c.id)).scalar_one())

    def _live(self, connection: sa.Connection) -> sa.Select[tuple[int]]:
        return sa.select(self.receives.c.id).where(self.receives.c.leased_until > self._now(connection))

    def _waiting(self, live: sa.Select[tuple[int]], *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
        """Select of messages that no receive in `live` holds, oldest first."""
        leases = self.leases
        return (
            sa.select(*columns)
            .select_from(self.queue.outerjoin(leases, leases.c.id == self.id))
            .where(sa.or_(leases.c.id.is_(None), leases.c.receive.is_(None), leases.c.receive.not_in(live)))
            .where(self.id.is_not(None))  # a column that is only unique may be NULL
            .order_by(self.id)
        )

    def _of_free_partitions(
        self, connection: sa.Connection, waiting: sa.Select[Any], live: sa.Select[tuple[int]]
    ) -> sa.Select[Any]:
        """Leave out partitions of which a receive holds a message. Planners take turns, or two could begin one."""
        if not self.database.is_sqlite:
            name = f"{self.queue.schema or ''}.{self.queue.name}"
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(name, 0))))
        partition = self.columns["partition_column"]
        queue = self.queue.alias("held")
        leased = queue.join(self.leases, self.leases.c.id == queue.c[self.id.name])
        held = sa.select(queue.c[partition.name]).select_from(leased).where(self.leases.c.receive.in_(live))
        is_held = sa.exists(held.where(queue.c[partition.name] == partition))
        return waiting.where(~is_held)

    def _has_left(self) -> sa.ColumnElement[bool]:
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
        """Condition that a column's id is one of `ids`, sorted and each once, however many they are."""
        if self.kind is int and ids[-1] - ids[0] + 1 == len(ids):  # the common case, and a quarter faster
            return column.between(ids[0], ids[-1])
        if self.database.is_sqlite:
            return column.in_(sa.select(sa.func.json_each(json.dumps(ids)).table_valued("value").c.value))
        return column == sa.any_(sa.cast(ids, postgresql.ARRAY(self.leases.c.id.type)))

    def _as_text(self, column: sa.ColumnClause[Any]) -> sa.ColumnElement[Any]:
        """A column as text, or as the bytes it holds.

        PostgreSQL's driver would parse JSON, and stop at what is nested too deep. SQLite's would stop at text that is
        not UTF-8.
        """
        if self.database.is_sqlite:
            return sa.cast(column, sa.LargeBinary)
        return column if isinstance(column.type, sa.LargeBinary) else sa.cast(column, sa.Text)

    def _payload(self) -> sa.ColumnElement[Any]:
        """The payload as bytes, made by the database, whatever the column's type is."""
        data = self.columns.get("data_column")
        if self.database.is_sqlite:
            # A column's type binds nobody there, so each value is cast.
            return sa.cast(self._row_as_json() if data is None else data, sa.LargeBinary)
        if data is not None and isinstance(data.type, sa.LargeBinary):
            return data
        if data is None:
            quoted = postgresql.dialect().identifier_preparer.quote(self.queue.name)  # type: ignore[no-untyped-call]
            text: sa.ColumnElement[Any] = sa.func.row_to_json(sa.literal_column(quoted))
        else:
            text = data
        return sa.func.convert_to(sa.cast(text, sa.Text), "UTF8")

    def _row_as_json(self) -> sa.ColumnElement[Any]:
        members: list[Any] = []
        for column in self.queue.c:
            plain = sa.type_coerce(column, sa.Text)
            digits = sa.literal("\\x").concat(sa.func.lower(sa.func.hex(plain)))  # as PostgreSQL writes it
            members += [sa.literal(column.name), sa.case((sa.func.typeof(plain) == "blob", digits), else_=plain)]
        return sa.func.json_object(*members)


def _plain(id_: Any) -> int | str | None:
    return id_ if id_ is None or isinstance(id_, int) else str(id_)


def _by_size(cursor: Any) -> Iterator[list[tuple[Any, ...]]]:
    """Fetch few rows first and more as long as they are small: what a driver fetches at once is in memory at once."""
    batch: list[tuple[Any, ...]] = []
    size, step = 0, 16
    while rows := cursor.fetchmany(min(step, ROWS_PER_BATCH - len(batch))):
        batch += rows
        fetched = sum(sum(map(len, filter(None, map(itemgetter(part), rows)))) for part in range(2, len(rows[0])))
        size += fetched
        step = max(1, min(4 * step, BYTES_PER_BATCH * len(rows) // (fetched + 1)))
        if len(batch) >= ROWS_PER_BATCH or size >= BYTES_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
