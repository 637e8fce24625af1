"""The three tables of a table queue, and the statements that lease, give back and delete, on SQLite and PostgreSQL.

Here is what holds the queue's promises; `table_queue` has its options and words.

Two planners never lease one message. SQLite has one writer at a time. On PostgreSQL a planner locks the messages it
picks and skips those that others lock; and it takes a lease over only if its count of deliveries is still the one it
saw, for another planner may have committed between what it saw and what it locked.
"""

from __future__ import annotations

import functools
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from pipeline_platform.source.contract import Share

ROWS_PER_BATCH: Final = 2_000
BYTES_PER_BATCH: Final = 8 << 20
"""A batch that is read ends at whichever comes first, so that a few of them fit beside a task's work.

Rows are turned into columns while the processor's cache still has them, which takes half as long as 10,000 at once.
"""

BUSY_S: Final = 60
"""How long a SQLite connection waits for the write lock; leasing a million messages holds it for about 1 s."""

IDLE_S: Final = 30
LOCK_S: Final = 60
"""PostgreSQL ends a session that stands still inside a transaction for IDLE_S, as one whose host is gone does, and a
wait for a lock after LOCK_S: longer, so that what waits for such a session is served. Neither ends a statement that
merely takes long, as leasing a million messages does."""

READING_IDLE_S: Final = 3_600
"""A task that reads stands still while it writes what it read. It locks no row."""

PAGE_BYTES: Final = 8192
"""Of a SQLite file that is made here: deleting from it is a fifth faster than with pages of 4,096, the default."""

LOG_BYTES: Final = 32 << 20
"""SQLite's log is copied into the file when it is as long: about what 100,000 messages make, not the usual 4 MB."""

COLUMNS_AS_JSON: Final = 60
"""SQLite takes 127 arguments to a function, two for each member of an object."""


class UnfitError(Exception):
    """What an option names is not there, or cannot serve; the queue adds its own name and place."""


@dataclass(frozen=True)
class Tables:
    """The three tables as one process knows them.

    Attributes:
        engine: Keeps no connection.
        queue: The messages.
        leases: A row per message that was leased and not acknowledged: `id`, `receive` (NULL where it was given
            back), `attempts` (how often it was delivered).
        receives: A row per receive: `id`, `receive_id` (NULL for a delay), `leased_until` in seconds since 1970,
            NULL once it is over.
        kind: What an id is in Python: `int`, `str` or `UUID`.
        has_id: Conditions that leave out rows without an id.
        id: The id column of `queue`.
        data: Its payload column, None for the whole row.
        metadata: Its column of metadata, where there is one.
        created: Its column of when a message came, where there is one.
    """

    engine: sa.Engine
    queue: sa.TableClause
    leases: sa.Table
    receives: sa.Table
    kind: type[int] | type[str] | type[UUID]
    has_id: Sequence[sa.ColumnElement[bool]]
    id: sa.ColumnClause[Any]
    data: sa.ColumnClause[Any] | None
    metadata: sa.ColumnClause[Any] | None
    created: sa.ColumnClause[Any] | None

    @property
    def is_sqlite(self) -> bool:
        """Whether it is SQLite, else PostgreSQL."""
        return is_sqlite(self.engine)

    def now(self) -> sa.ColumnElement[float]:
        """Seconds since 1970 by the clock that all who share the queue share: the server's, or this machine's."""
        if self.is_sqlite:
            return sa.literal(time.time(), sa.Double)
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double)


def is_sqlite(engine: sa.Engine) -> bool:
    """Whether it is SQLite, else PostgreSQL."""
    return engine.dialect.name == "sqlite"


def engine_of(url: str, *, create: bool = False) -> sa.Engine:
    """Make an engine that keeps no connection: each use is one bulk statement, and it may be forked and forgotten."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        arguments: dict[str, Any] = {"connect_timeout": 10, "application_name": "pipeline-platform"}
        if "options" not in parsed.query:
            limits = f"-c idle_in_transaction_session_timeout={IDLE_S}s -c lock_timeout={LOCK_S}s"
            # UTC: what PostgreSQL writes into a column without a zone, or into JSON, is by the session's.
            arguments["options"] = f"{limits} -c timezone=UTC"
        return sa.create_engine(
            parsed,
            poolclass=sa.NullPool,
            hide_parameters=True,  # payloads are nobody's business in an error
            connect_args=arguments,
        )
    path = Path(str(parsed.database)).absolute()
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    # By its address, for a plain path would make an empty file where reading has to fail.
    address = f"file:{quote(str(path))}?mode={'rwc' if create else 'rw'}"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        # Some builds overwrite what is deleted, which costs as much again; FAST does so where it is free.
        connection.execute("PRAGMA secure_delete=FAST")
        if create:
            connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode=WAL")
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA wal_autocheckpoint={LOG_BYTES // page_bytes}")
        return connection

    return sa.create_engine(
        parsed, creator=connect, poolclass=sa.NullPool, hide_parameters=True, isolation_level="AUTOCOMMIT"
    )


def row_id(*, of_sqlite: bool) -> sa.types.TypeEngine[int]:
    """Type of an id that the database gives: 64 bits on both, but SQLite's row id must be called INTEGER."""
    return sa.Integer() if of_sqlite else sa.BigInteger()


@functools.lru_cache(maxsize=32)
def open_tables(
    url: str, schema: str | None, name: str, id_: str, data: str | None, metadata: str | None, created: str | None
) -> Tables:
    """Look the tables up, once per process: a queue is pickled and copied, so it keeps nothing itself.

    Raises:
        UnfitError: The queue's table or a column is not there, or its id cannot be one.
    """
    engine = engine_of(url)
    with engine.connect() as connection:
        inspector = sa.inspect(connection)
        if not inspector.has_table(name, schema=schema):
            raise UnfitError(f"there is no table {name!r}; correct table, or call create()")
        found = {column["name"]: column["type"] for column in inspector.get_columns(name, schema=schema)}
        options = {"id_column": id_, "data_column": data, "metadata_column": metadata, "created_column": created}
        for option, column in options.items():
            if column is not None and column not in found:
                raise UnfitError(f"{option} is {column!r}, and table {name!r} has only {', '.join(sorted(found))}")
        is_key = _is_key(inspector, schema, name, id_)
    kind = _kind(id_, found[id_])
    if data is None and is_sqlite(engine) and len(found) > COLUMNS_AS_JSON:
        raise UnfitError(
            f"data_column is None, and SQLite makes objects of up to {COLUMNS_AS_JSON} columns; name a column"
        )
    # Lightweight, for whatever else is in a table of one's own is left alone.
    queue = sa.table(name, *(sa.column(*column) for column in found.items()), schema=schema)
    leases, receives = _beside(schema, name, found[id_], kind, of_sqlite=is_sqlite(engine))
    return Tables(
        engine=engine,
        queue=queue,
        leases=leases,
        receives=receives,
        kind=kind,
        # A column that is only unique may be NULL, and so may a text key on SQLite.
        has_id=[] if is_key and (kind is int or not is_sqlite(engine)) else [queue.c[id_].is_not(None)],
        id=queue.c[id_],
        data=None if data is None else queue.c[data],
        metadata=None if metadata is None else queue.c[metadata],
        created=None if created is None else queue.c[created],
    )


def _is_key(inspector: sa.Inspector, schema: str | None, name: str, id_: str) -> bool:
    if inspector.get_pk_constraint(name, schema=schema)["constrained_columns"] == [id_]:
        return True
    constraints = inspector.get_unique_constraints(name, schema=schema)
    indexes = [index for index in inspector.get_indexes(name, schema=schema) if index["unique"]]
    if [id_] not in [unique["column_names"] for unique in constraints] + [index["column_names"] for index in indexes]:
        raise UnfitError(f"id_column is {id_!r}, which is not unique; name a primary key or a unique column")
    return False


def _kind(id_: str, type_: sa.types.TypeEngine[Any]) -> type[int] | type[str] | type[UUID]:
    try:
        found = type_.python_type
    except NotImplementedError:
        found = type(None)
    for kind in (int, str, UUID):
        if found is kind:
            return kind
    raise UnfitError(f"id_column is {id_!r}, of type {type_!r}; name a column of integers, texts or UUIDs")


def _beside(
    schema: str | None, name: str, id_type: sa.types.TypeEngine[Any], kind: type, *, of_sqlite: bool
) -> tuple[sa.Table, sa.Table]:
    if of_sqlite:
        id_type = sa.Integer() if kind is int else sa.Text()
    tables = sa.MetaData(schema=schema)
    leases = sa.Table(
        f"{name}_leases",
        tables,
        sa.Column("id", id_type, primary_key=True, autoincrement=False),
        sa.Column("receive", row_id(of_sqlite=of_sqlite)),
        sa.Column("attempts", sa.Integer, nullable=False),
        sqlite_with_rowid=kind is int,
    )
    receives = sa.Table(
        f"{name}_receives",
        tables,
        # An identity: who inserts needs rights on a serial's sequence as well, and on an identity's none.
        sa.Column("id", row_id(of_sqlite=of_sqlite), sa.Identity(), primary_key=True),
        sa.Column("receive_id", sa.Text, unique=True),
        sa.Column("leased_until", sa.Double),
        sqlite_autoincrement=True,
    )
    return leases, receives


def copy_in(
    connection: sa.Connection,
    queue: sa.TableClause,
    columns: Sequence[sa.ColumnClause[Any]],
    rows: Iterable[tuple[Any, ...]],
) -> None:
    """Insert rows as they come, by the driver: with SQLAlchemy's dict for each it would take three times as long."""
    raw: Any = connection.connection.driver_connection
    names = [column.name for column in columns]
    if connection.dialect.name == "sqlite":
        insert = queue.insert().values({name: sa.bindparam(name) for name in names})
        raw.executemany(str(insert.compile(dialect=connection.dialect)), rows)
        return
    preparer = postgresql.dialect().identifier_preparer  # type: ignore[no-untyped-call]
    into = ".".join(preparer.quote(part) for part in (queue.schema, queue.name) if part)
    copying = f"COPY {into} ({', '.join(preparer.quote(name) for name in names)}) FROM STDIN"
    with raw.cursor() as cursor, cursor.copy(copying) as copy:
        for row in rows:
            copy.write_row(row)


def count_waiting(connection: sa.Connection, tables: Tables) -> int:
    """Count the messages that could be leased, by two counts over narrow pages."""
    count = sa.select(sa.func.count())
    everything = count.select_from(tables.queue).where(*tables.has_id).scalar_subquery()
    held = count.select_from(tables.leases).where(tables.leases.c.receive.in_(_live(tables))).scalar_subquery()
    # Below zero where someone deleted leased messages behind the queue's back.
    return max(0, int(connection.execute(sa.select(everything - held)).scalar_one()))


def oldest_waiting(connection: sa.Connection, tables: Tables) -> Any:
    """Look up when the first message that could be leased came, as its column holds it."""
    if tables.created is None:
        return None
    came: sa.ColumnElement[Any] = sa.type_coerce(tables.created, sa.types.NullType())  # SQLite holds what it likes
    return connection.execute(_waiting(tables, _live(tables), came).limit(1)).scalar()


def _live(tables: Tables) -> sa.Select[tuple[int]]:
    return sa.select(tables.receives.c.id).where(tables.receives.c.leased_until > tables.now())


def _waiting(tables: Tables, live: sa.Select[tuple[int]], *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    """Select of messages that no receive in `live` holds, oldest first; the few receives are looked up as a set."""
    leases = tables.leases
    return (
        sa.select(*columns)
        .select_from(tables.queue.outerjoin(leases, leases.c.id == tables.id))
        .where(sa.or_(leases.c.id.is_(None), leases.c.receive.is_(None), leases.c.receive.not_in(live)))
        .where(*tables.has_id)
        .order_by(tables.id)
    )


def end_what_ran_out(connection: sa.Connection, tables: Tables, receive_id: str) -> None:
    """Mark receives as over whose lease ran out, and an earlier plan of this one; forget those that left nothing.

    A transaction of its own, before leasing: whoever renews a lease after it finds it over, and planners who lease
    for seconds do not hold each other up over these rows.
    """
    receives, leases = tables.receives, tables.leases
    connection.execute(receives.update().where(receives.c.leased_until <= tables.now()).values(leased_until=sa.null()))
    connection.execute(
        receives.update()
        .where(receives.c.receive_id == receive_id)
        .values(leased_until=sa.null(), receive_id=sa.null())
    )
    left = sa.exists().where(leases.c.receive == receives.c.id)
    connection.execute(receives.delete().where(receives.c.leased_until.is_(None), ~left))


def lease(
    connection: sa.Connection, tables: Tables, receive_id: str, lease_s: float, demand: int, concurrency: int
) -> list[Share]:
    """Lease up to `demand` messages and divide them."""
    receives = tables.receives
    receive = _new_receive(connection, tables, receive_id, lease_s)
    messages = _take(connection, tables, receive, demand)
    if not messages:
        connection.execute(receives.delete().where(receives.c.id == receive))
        return []
    return list(_shares(connection, tables, receive, messages, concurrency))


def _new_receive(connection: sa.Connection, tables: Tables, receive_id: str | None, lease_s: float) -> int:
    insert = tables.receives.insert().values(receive_id=receive_id, leased_until=tables.now() + lease_s)
    return int(connection.execute(insert.returning(tables.receives.c.id)).scalar_one())


def _take(connection: sa.Connection, tables: Tables, receive: int, demand: int) -> int:
    if not tables.is_sqlite or tables.kind is not int:
        return _take_waiting(connection, tables, receive, demand)
    # Past the last lease nobody holds anything: to insert without looking at each lease takes half as long.
    last = connection.execute(sa.select(sa.func.max(tables.leases.c.id))).scalar()
    taken = 0 if last is None else _take_waiting(connection, tables, receive, demand, tables.id <= last)
    new = sa.select(tables.id, sa.literal(receive), sa.literal(1)).where(*tables.has_id).order_by(tables.id)
    if last is not None:
        new = new.where(tables.id > last)
    insert = tables.leases.insert().from_select(["id", "receive", "attempts"], new.limit(demand - taken))
    return taken + _rows_written(connection, insert)


def _take_waiting(
    connection: sa.Connection, tables: Tables, receive: int, demand: int, *among: sa.ColumnElement[bool]
) -> int:
    leases, receives = tables.leases, tables.receives
    live = sa.select(receives.c.id).where(receives.c.leased_until.is_not(None))
    attempts = (sa.func.coalesce(leases.c.attempts, 0) + 1).label("attempts")
    waiting = _waiting(tables, live, tables.id.label("id"), attempts).where(*among).limit(demand)
    taken = {"receive": receive}
    if tables.is_sqlite:
        picked = waiting.with_only_columns(tables.id, sa.literal(receive), attempts)
        insert: Any = sqlite.insert(leases).from_select(["id", "receive", "attempts"], picked)
        insert = insert.on_conflict_do_update(
            index_elements=[leases.c.id], set_=taken | {"attempts": insert.excluded.attempts}
        )
    else:
        rows = waiting.with_for_update(of=tables.queue, skip_locked=True).cte("picked")
        picked = sa.select(rows.c.id, sa.literal(receive), rows.c.attempts)
        insert = postgresql.insert(leases).from_select(["id", "receive", "attempts"], picked)
        insert = insert.on_conflict_do_update(
            index_elements=[leases.c.id],
            set_=taken | {"attempts": insert.excluded.attempts},
            where=leases.c.attempts == insert.excluded.attempts - 1,
        )
    return _rows_written(connection, insert)


def _rows_written(connection: sa.Connection, insert: Any) -> int:
    return int(connection.execution_options(preserve_rowcount=True).execute(insert).rowcount)


def _shares(
    connection: sa.Connection, tables: Tables, receive: int, messages: int, concurrency: int
) -> Iterator[Share]:
    """Find the last id of each share, starting from the one before: one pass over the leases in all."""
    leases = tables.leases
    shares = min(messages, max(1, concurrency))
    after = None
    for nth in range(shares):
        size = messages // shares + (nth < messages % shares)
        rest = sa.select(leases.c.id).where(leases.c.receive == receive)
        if after is not None:
            rest = rest.where(leases.c.id > after)
        to = connection.execute(rest.order_by(leases.c.id).limit(1).offset(size - 1)).scalar_one()
        yield Share(at={"after": _plain(after), "to": _plain(to)}, messages=size)
        after = to


def _plain(id_: Any) -> int | str | None:
    return id_ if id_ is None or isinstance(id_, int) else str(id_)


def renew(connection: sa.Connection, tables: Tables, receive_id: str, lease_s: float) -> bool:
    """Set a receive's lease to `lease_s` from now; False where it is over or has nothing left."""
    receives = tables.receives
    left = sa.exists().where(tables.leases.c.receive == receives.c.id)
    renewed = connection.execute(
        receives.update()
        .where(receives.c.receive_id == receive_id, receives.c.leased_until.is_not(None), left)
        .values(leased_until=tables.now() + lease_s)
    )
    return renewed.rowcount == 1


def give_back_all(connection: sa.Connection, tables: Tables, receive_id: str) -> None:
    """Mark a receive as over."""
    receives = tables.receives
    connection.execute(receives.update().where(receives.c.receive_id == receive_id).values(leased_until=sa.null()))


def is_live(connection: sa.Connection, tables: Tables, receive_id: str) -> bool:
    """Whether a receive is not over."""
    receives = tables.receives
    found = sa.select(receives.c.id).where(receives.c.receive_id == receive_id, receives.c.leased_until.is_not(None))
    return connection.execute(found).scalar() is not None


def read_share(
    connection: sa.Connection, tables: Tables, share: Share, receive_id: str
) -> Iterator[list[tuple[Any, ...]]]:
    """Read `(id, attempts, data[, metadata])` of a share in lists that fit a batch, as the driver gives them."""
    leases, receives = tables.leases, tables.receives
    columns = [leases.c.id, leases.c.attempts, _payload(tables)]
    if tables.metadata is not None:
        columns.append(_as_text(tables, tables.metadata))
    receive = sa.select(receives.c.id).where(receives.c.receive_id == receive_id).scalar_subquery()
    query = (
        sa.select(*columns)
        .select_from(leases.join(tables.queue, tables.id == leases.c.id))
        .where(leases.c.receive == receive, leases.c.id <= tables.kind(share.at["to"]))
        .order_by(leases.c.id)
        .limit(share.messages)
    )
    if share.at.get("after") is not None:
        query = query.where(leases.c.id > tables.kind(share.at["after"]))
    if tables.is_sqlite:
        yield from _by_size(connection.execute(query).cursor)
        return
    # A cursor at the server, or the driver would fetch the whole share at once; binary, for payloads are.
    compiled = query.compile(dialect=connection.dialect)
    raw: Any = connection.connection.driver_connection
    connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{READING_IDLE_S}s'")
    with raw.cursor("share", binary=True) as cursor:
        cursor.execute(str(compiled), compiled.params)
        yield from _by_size(cursor)


def _by_size(cursor: Any) -> Iterator[list[tuple[Any, ...]]]:
    """Fetch few rows first and more as long as they are small: what a driver fetches at once is in memory at once."""
    batch: list[tuple[Any, ...]] = []
    size = 0
    step = 16
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


def _as_text(tables: Tables, column: sa.ColumnClause[Any]) -> sa.ColumnElement[Any]:
    """A column as text, or as the bytes it holds.

    PostgreSQL's driver would parse JSON, and stop at what is nested too deep; SQLite's would stop at text that is none.
    """
    if tables.is_sqlite:
        return sa.cast(column, sa.LargeBinary)
    return column if isinstance(column.type, sa.LargeBinary) else sa.cast(column, sa.Text)


def _payload(tables: Tables) -> sa.ColumnElement[Any]:
    """The payload as bytes, made by the database, whatever the column's type is."""
    if tables.data is not None:
        if tables.is_sqlite:  # a column's type binds nobody there, so each value is cast
            return sa.cast(tables.data, sa.LargeBinary)
        if isinstance(tables.data.type, sa.LargeBinary):
            return tables.data
        return sa.func.convert_to(sa.cast(tables.data, sa.Text), "UTF8")
    if not tables.is_sqlite:
        row = sa.func.row_to_json(sa.literal_column(_quoted(tables)))
        return sa.func.convert_to(sa.cast(row, sa.Text), "UTF8")
    members: list[Any] = []
    for column in tables.queue.c:
        plain = sa.type_coerce(column, sa.Text)
        digits = sa.literal("\\x").concat(sa.func.lower(sa.func.hex(plain)))  # as PostgreSQL writes it
        members += [sa.literal(column.name), sa.case((sa.func.typeof(plain) == "blob", digits), else_=plain)]
    return sa.cast(sa.func.json_object(*members), sa.LargeBinary)


def _quoted(tables: Tables) -> str:
    return str(tables.engine.dialect.identifier_preparer.quote(tables.queue.name))


def acknowledge(connection: sa.Connection, tables: Tables, receive_id: str, ids: pa.Array) -> list[Any]:
    """Delete messages under a receive, with their leases; return the ids that are still there."""
    deleted = (_delete_ranges if tables.is_sqlite else _delete_at_once)(connection, tables, receive_id, ids)
    return [] if deleted == len(ids) else _still_there(connection, tables, ids)


def _delete_ranges(connection: sa.Connection, tables: Tables, receive_id: str, ids: pa.Array) -> int:
    """Delete one range after the other; where all the leases are the receive's, without a look at each."""
    leases = tables.leases
    mine = leases.c.receive == _receive(tables, receive_id)
    all_mine = connection.execute(_in_ranges(tables, leases.c.id, ids, sa.func.count()).where(mine)).scalar_one()
    low: sa.BindParameter[Any] = sa.bindparam("low")
    high: sa.BindParameter[Any] = sa.bindparam("high")
    messages = sa.delete(tables.queue).where(tables.id.between(low, high))
    rows = leases.delete().where(leases.c.id.between(low, high))
    if all_mine < len(ids):
        messages = messages.where(tables.id.in_(sa.select(leases.c.id).where(leases.c.id.between(low, high), mine)))
        rows = rows.where(mine)
    ranges = [{"low": first, "high": last} for first, last in _ranges(tables, ids)]
    deleted = connection.execute(messages, ranges).rowcount
    connection.execute(rows, ranges)
    return deleted


def _delete_at_once(connection: sa.Connection, tables: Tables, receive_id: str, ids: pa.Array) -> int:
    """Delete the leases and then their messages: it is in the lease that a planner who took it over is seen."""
    leases = tables.leases
    mine = leases.c.receive == _receive(tables, receive_id)
    gone = leases.delete().where(mine, _is_among(tables, leases.c.id, ids)).returning(leases.c.id).cte("gone")
    return connection.execute(sa.delete(tables.queue).where(tables.id.in_(sa.select(gone.c.id)))).rowcount


def give_back(connection: sa.Connection, tables: Tables, receive_id: str, ids: pa.Array, delay_s: float) -> list[Any]:
    """Free messages of a receive, or put them under a lease that nobody renews; return the ids that were not its."""
    leases = tables.leases
    to = _new_receive(connection, tables, None, delay_s) if delay_s > 0 else None
    mine = leases.c.receive == _receive(tables, receive_id)
    update = leases.update().where(mine, _is_among(tables, leases.c.id, ids)).values(receive=to)
    if connection.execute(update).rowcount == len(ids):
        return []
    return _still_there(connection, tables, ids, leases.c.receive.is_distinct_from(to))


def _receive(tables: Tables, receive_id: str) -> sa.ScalarSelect[int]:
    receives = tables.receives
    return sa.select(receives.c.id).where(receives.c.receive_id == receive_id).scalar_subquery()


def _still_there(
    connection: sa.Connection, tables: Tables, ids: pa.Array, *conditions: sa.ColumnElement[bool]
) -> list[Any]:
    leases = tables.leases
    there = (
        sa.select(tables.id)
        .select_from(tables.queue.outerjoin(leases, leases.c.id == tables.id))
        .where(_is_among(tables, tables.id, ids), *conditions)
    )
    return list(connection.execute(there).scalars())


def _is_among(tables: Tables, column: sa.ColumnElement[Any], ids: pa.Array) -> sa.ColumnElement[bool]:
    """Condition that a column's id is one of `ids`, in one parameter however many they are.

    PostgreSQL gets all of them: joined with ranges it took minutes, for it cannot guess how many a range holds.
    """
    if tables.is_sqlite:
        return column.in_(_in_ranges(tables, column, ids, column))
    type_ = sa.Uuid(as_uuid=False) if tables.kind is UUID else tables.leases.c.id.type
    return column == sa.any_(sa.cast(ids.to_pylist(), postgresql.ARRAY(type_)))


def _in_ranges(tables: Tables, column: Any, ids: pa.Array, result: sa.ColumnElement[Any]) -> sa.Select[Any]:
    text = json.dumps(list(_ranges(tables, ids)))
    chosen = sa.func.json_each(text).table_valued("value", name="chosen")
    first, last = (sa.func.json_extract(chosen.c.value, path) for path in ("$[0]", "$[1]"))
    within = chosen.join(column.table, column.between(first, last))
    return sa.select(result).select_from(within).correlate(None)


def _ranges(tables: Tables, ids: pa.Array) -> Iterator[tuple[Any, Any]]:
    """First and last of each run of consecutive integers, or each text twice; `ids` ascend and are not empty."""
    if tables.kind is not int:
        return ((id_, id_) for id_ in ids.to_pylist())
    steps = pc.not_equal(pc.subtract(ids.slice(1), ids.slice(0, len(ids) - 1)), 1)
    starts = [0, *(position + 1 for position in pc.indices_nonzero(steps).to_pylist())]
    ends = [*(start - 1 for start in starts[1:]), len(ids) - 1]
    return zip(ids.take(pa.array(starts)).to_pylist(), ids.take(pa.array(ends)).to_pylist(), strict=True)
