"""A queue in a SQL table: SQLite as the embedded default, PostgreSQL for more than one machine.

Three tables. The **queue** (`table`) is only ever inserted into and deleted from, so that a lease never rewrites a
payload and any table with a unique id can be a queue. Beside it `<table>_leases` has one narrow row per message that
was ever leased and not acknowledged: whose it is and how often it was delivered. `<table>_receives` has one row per
receive: until when its lease lasts. Renewing the lease of a million messages is therefore an update of one row.

A message waits when it has no lease row, or when its receive is over. A receive is over once a planner finds that it
ran out, or once it was given back; it never revives. Until a planner comes by, a late driver may still renew it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime
from itertools import chain
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from pydantic import ConfigDict, Field, field_validator

from pipeline_platform.control.database import without_secrets
from pipeline_platform.source.contract import Backlog, Refused, Share, Source, SourceError
from resources import table_leases
from resources.table_leases import Tables, UnfitError

IDS_PER_TRANSACTION: Final = 100_000
"""Acknowledged in one transaction: about 0.1 s of SQLite's only write lock, so that nobody waits long for it."""

LOST: Final = "not leased by this receive any more: another has it, or it was given back"

T = TypeVar("T")


class _BrokenOffError(SourceError):
    """PostgreSQL ended a transaction for another's sake; doing it again is all it takes."""


_WAYS_OUT: Final = {
    "unable to open database file": "url must name a file that is there; create() makes it",
    "database is locked": f"another writer held the file for {table_leases.BUSY_S} s",
    "lock timeout": "another session holds what this one waits for: find it with pg_blocking_pids() and end it, or "
    "wait longer with lock_timeout among the options in url (?options=-c%20lock_timeout%3D5min)",
    "idle-in-transaction timeout": "this process stood still inside a transaction, which is undone: what it was to do "
    "is done by its next try, or by the next run",
    "unsupported startup parameter": "a pooler will not pass on the session's time-outs: name options among its "
    "ignore_startup_parameters, and set lock_timeout and idle_in_transaction_session_timeout for the user of url",
    "disk is full": "make room on the disk of the file in url",
    "file is not a database": "url must name a SQLite file",
    "password authentication failed": "correct user and password in url",
    "no password supplied": "put the password into url",
    "does not exist": "correct url or table, or call create()",
    "no such table": "correct table, or call create()",
    "connection failed": "correct host and port in url, and see that the server runs",
    "connection timeout": "correct host and port in url, and see that the server runs",
    "permission denied for schema": "grant the user of url USAGE on it, and CREATE where create() is to make tables",
    "permission denied for sequence": "grant the user of url USAGE on it",
    # UPDATE on the queue, too: nothing changes its rows, but who leases them locks them.
    "permission denied": "grant the user of url SELECT, UPDATE and DELETE on the queue, with INSERT to enqueue, "
    "and SELECT, INSERT, UPDATE and DELETE on the two tables beside it",
}


class TableQueue(Source):
    """Messages in a SQL table, leased to one receive at a time, oldest (lowest id) first.

    `create` makes the tables. To use a table of one's own, name its columns and call `create` once: it leaves the
    table as it is and makes the two small ones beside it. Acknowledging a message deletes its row: a table of one's
    own should be an outbox, or a copy. On SQLite it also turns on write-ahead logging for the
    file, so that readers and the writer do not wait for each other; that needs a local disk.
    """

    model_config = ConfigDict(hide_input_in_errors=True)  # a validation error would print the password otherwise

    url: str = Field(
        repr=False,
        description="SQLAlchemy URL: sqlite:///<path> or postgresql+psycopg://user:password@host/database. "
        "Sessions of PostgreSQL have time-outs for locks and idle transactions, and UTC, unless it has own options.",
    )
    table: str = Field("messages", min_length=1, description="Table of the messages; may be <schema>.<table>.")
    id_column: str = Field(
        "id",
        min_length=1,
        description="Unique integer, text or UUID; a message's identity for ever, so never used twice.",
    )
    data_column: str | None = Field("data", description="Payload; None for the whole row as one JSON object.")
    metadata_column: str | None = Field(None, description="JSON object of metadata, where there is one.")
    created_column: str | None = Field(
        None, description="When it came, to tell how long the oldest has waited; UTC where it has no time zone."
    )

    @field_validator("url")
    @classmethod
    def _names_a_database_to_lease_from(cls, url: str) -> str:
        try:
            parsed = sa.make_url(url)
        except sa.exc.ArgumentError:
            raise ValueError(
                "url is no SQLAlchemy URL; write sqlite:///<path> or postgresql+psycopg://user:password@host/database"
            ) from None
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.drivername not in ("sqlite", "sqlite+pysqlite", "postgresql+psycopg"):
            raise ValueError(f"url is for {parsed.drivername!r}; a table queue is sqlite or postgresql+psycopg")
        if parsed.drivername != "postgresql+psycopg" and parsed.database in (None, "", ":memory:"):
            raise ValueError("url names no file: a SQLite queue in memory would be a new one in every process")
        if parsed.drivername != "postgresql+psycopg":
            # Tasks run in folders of their own, where a relative path would be another file.
            parsed = parsed.set(database=os.path.abspath(str(parsed.database)))
        return parsed.render_as_string(hide_password=False)

    def create(self) -> None:
        """Make the tables that are not there yet; on SQLite the file and its folders, too.

        Raises:
            SourceError: The database cannot be reached, or a table of one's own lacks what the options name.
        """
        with self._errors():
            engine = table_leases.engine_of(self.url, create=True)
            schema, name = self._schema_and_name()
            with engine.begin() as connection:
                if not sa.inspect(connection).has_table(name, schema=schema):
                    self._new_queue(schema, name, of_sqlite=table_leases.is_sqlite(engine)).create(connection)
            table_leases.open_tables.cache_clear()
            with self._connected() as (connection, tables):
                tables.leases.metadata.create_all(tables.engine)

    def enqueue(self, payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None = None) -> int:
        """Add messages, all or none, and return how many; they are on disk then.

        On SQLite the write lock is held meanwhile: hand over what is at hand, not what takes long to come.

        Args:
            payloads: One per message.
            metadata: One JSON object or None per payload; needs `metadata_column`.

        Raises:
            SourceError: The table cannot take them.
            TypeError: A payload is not `bytes`.
            ValueError: There are more or fewer metadata than payloads, or a payload for a text column is no UTF-8.
        """
        with self._connected() as (connection, tables):
            if tables.data is None:
                raise UnfitError("data_column is None, so there is no column to put payloads in")
            columns = [tables.data]
            if metadata is not None:
                if tables.metadata is None:
                    raise UnfitError("metadata_column is None, so there is no column for metadata")
                columns.append(tables.metadata)
            rows = _Counted(_rows(payloads, metadata, as_text=not isinstance(tables.data.type, sa.LargeBinary)))
            with _transaction(connection, durable=True):
                table_leases.copy_in(connection, tables.queue, columns, rows)
        return rows.count

    def backlog(self) -> Backlog:
        """Count what waits; about 0.1 s for a million messages on either database.

        With `created_column` it looks for the first message that is not leased, 0.25 s past a million that are.
        """
        with self._connected() as (connection, tables):
            messages = table_leases.count_waiting(connection, tables)
            oldest = table_leases.oldest_waiting(connection, tables) if messages else None
        return Backlog(messages, self._time(oldest))

    def plan(self, demand: int, concurrency: int, receive_id: str) -> list[Share]:
        """Lease up to `demand` messages, oldest first, and divide them into ranges of ids with equal counts.

        Two planners never lease one message. On PostgreSQL they do not wait for each other either; one may then
        get fewer than it asked for. Planned again under the same `receive_id`, what the first plan leased is given
        back: the earlier shares are void.
        """
        if demand < 1:
            return []
        with self._connected() as (connection, tables):
            self._write(connection, table_leases.end_what_ran_out, tables, receive_id)
            arguments = (tables, receive_id, self.lease_s, demand, concurrency)
            return self._write(connection, table_leases.lease, *arguments, durable=True)

    def read(self, share: Share, receive_id: str) -> Iterator[pa.RecordBatch]:
        """Read what this receive still holds of a share, in the order of ids; a task may do so again.

        `redelivered` is exact: it was leased before. Metadata then tell `deliveries`, this one included. A payload
        that is not binary comes as its text in UTF-8, NULL as empty, a whole row as JSON with binary columns as
        a backslash, x and hexadecimal digits.

        Raises:
            SourceError: The receive is over, or the database cannot be reached.
        """
        with self._connected() as (connection, tables):
            if not table_leases.is_live(connection, tables, receive_id):
                raise UnfitError(
                    f"receive {receive_id!r} is over, others may have its messages; "
                    f"extend it in time, or raise lease_s (now {self.lease_s:g})"
                )
            for rows in table_leases.read_share(connection, tables, share, receive_id):
                yield self._batch(rows, receive_id)

    def ack(self, ack_ref: str, ack_ids: Sequence[str]) -> list[Refused]:
        """Delete messages that are leased under `ack_ref`, 100,000 a transaction; several tasks may do so at once.

        The lease may have run out, as long as no other receive was given the message. What is gone already is
        fine. What is there and not under `ack_ref` is returned as lost.
        """
        return self._each(table_leases.acknowledge, ack_ref, ack_ids)

    def release(self, ack_ref: str, ack_ids: Sequence[str], delay_s: int = 0) -> list[Refused]:
        """Give messages that are leased under `ack_ref` back; how often they were delivered is kept."""
        return self._each(table_leases.give_back, ack_ref, ack_ids, delay_s)

    def extend(self, receive_id: str) -> bool:
        """Renew the lease of a whole receive by `lease_s` from now: one row, however many messages.

        Returns:
            True when all that the receive has neither acknowledged nor released is its own for `lease_s` more, even
            if the lease had run out, as long as nobody has planned since. False when the receive is over (it ran
            out and somebody planned, or it was abandoned), was never planned, or has no message left.
        """
        with self._connected() as (connection, tables):
            return self._write(connection, table_leases.renew, tables, receive_id, self.lease_s)

    def abandon(self, receive_id: str) -> None:
        """Give back all that a receive still holds, in one row. Until another is given a message, `ack` still works."""
        with self._connected() as (connection, tables):
            self._write(connection, table_leases.give_back_all, tables, receive_id)

    def refuse_or_pass(self) -> None:
        """Raise `SourceError` where a receive is bound to fail: the tables, the columns, or the right to write."""
        with self._connected() as (connection, tables):
            for table in (tables.leases, tables.receives):
                if not sa.inspect(connection).has_table(table.name, schema=table.schema):
                    raise UnfitError(f"there is no table {table.name!r} for leases; call create() once")
        with self._connected() as (connection, tables):
            table_leases.count_waiting(connection, tables)
            self._time(table_leases.oldest_waiting(connection, tables))
        with self._connected() as (connection, tables):
            self._write(connection, table_leases.end_what_ran_out, tables, "")

    def _schema_and_name(self) -> tuple[str | None, str]:
        schema, dot, name = self.table.rpartition(".")
        return (schema, name) if dot else (None, name)

    def _new_queue(self, schema: str | None, name: str, *, of_sqlite: bool) -> sa.Table:
        if self.data_column is None:
            raise UnfitError("there is no such table, and with data_column None it is one of your own; correct table")
        key = sa.Column(self.id_column, table_leases.row_id(of_sqlite=of_sqlite), sa.Identity(), primary_key=True)
        columns: list[sa.Column[Any]] = [key, sa.Column(self.data_column, sa.LargeBinary, nullable=False)]
        if self.metadata_column:
            columns.append(sa.Column(self.metadata_column, sa.Text))
        if self.created_column:
            time_type = sa.DateTime(timezone=True)
            columns.append(sa.Column(self.created_column, time_type, server_default=sa.func.now(), nullable=False))
        # AUTOINCREMENT: without it SQLite gives the id of the last message, once that is deleted, to the next.
        return sa.Table(name, sa.MetaData(), *columns, schema=schema, sqlite_autoincrement=True)

    def _each(self, act: Callable[..., list[Any]], ack_ref: str, ack_ids: Sequence[str], *more: Any) -> list[Refused]:
        """Act on ids as the column holds them, sorted and each once, some per transaction."""
        left: list[Any] = []
        with self._connected() as (connection, tables):
            ids = pa.array(ack_ids, pa.string())
            if tables.kind is int:
                try:
                    ids = ids.cast(pa.int64())
                except pa.ArrowInvalid as error:
                    raise UnfitError(f"id_column holds integers, and among the ids is another: {error}") from None
            ids = pc.unique(ids)
            ids = ids.take(pc.array_sort_indices(ids))  # for ranges; and who locks in one order does not deadlock
            for start in range(0, len(ids), IDS_PER_TRANSACTION):
                some = ids.slice(start, IDS_PER_TRANSACTION)
                left += self._write(connection, act, tables, ack_ref, some, *more)
        return [Refused(str(id_), LOST, lost=True) for id_ in left]

    def _batch(self, rows: list[tuple[Any, ...]], receive_id: str) -> pa.RecordBatch:
        values, width = list(chain.from_iterable(rows)), len(rows[0])
        ids, attempts, data, *told = (values[nth::width] for nth in range(width))
        id_strings = pa.array(ids).cast(pa.string()) if isinstance(ids[0], int) else [str(id_) for id_ in ids]
        batch = self.deliveries(
            message_id=id_strings,
            data=pc.fill_null(pa.array(data, pa.binary()), b""),
            ack_id=id_strings,
            ack_ref=receive_id,
            metadata=[self._metadata(*note) for note in zip(told[0], attempts, strict=True)] if told else None,
            redelivered=pc.greater(pa.array(attempts, pa.int32()), 1),
        )
        if told or max(attempts) == 1:
            return batch
        # The few texts there are, made once: encoding each would take as long as reading it did.
        notes = {count: json.dumps({"deliveries": count}) if count > 1 else None for count in set(attempts)}
        column = pa.array([notes[count] for count in attempts], pa.string())
        return batch.set_column(batch.schema.get_field_index("metadata"), batch.schema.field("metadata"), column)

    def _metadata(self, note: Any, deliveries: int) -> dict[str, Any]:
        if isinstance(note, str | bytes):
            try:
                note = _parsed(note)
            except (ValueError, RecursionError):  # one row with broken or bottomless JSON must not cost the others
                note = note if isinstance(note, str) else note.decode(errors="replace")
        known = note if isinstance(note, dict) else {} if note is None else {self.metadata_column or "metadata": note}
        return {**known, "deliveries": deliveries} if deliveries > 1 else known

    def _time(self, value: Any) -> datetime | None:
        """Read what the created column holds; what has no zone is UTC, as both databases write it."""
        try:
            if isinstance(value, str):
                value = datetime.fromisoformat(value)
            elif isinstance(value, int | float):
                value = datetime.fromtimestamp(value, UTC)
            elif isinstance(value, date) and not isinstance(value, datetime):
                value = datetime(value.year, value.month, value.day, tzinfo=UTC)
        except (ValueError, OverflowError):
            pass
        if value is not None and not isinstance(value, datetime):
            raise SourceError(
                f"{self._here()}: created_column is {self.created_column!r}, and {value!r} in it is no time; "
                "name a column of timestamps, ISO 8601 texts or seconds since 1970, or leave it out"
            )
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

    @contextmanager
    def _connected(self) -> Iterator[tuple[sa.Connection, Tables]]:
        with self._errors():
            tables = table_leases.open_tables(
                self.url,
                *self._schema_and_name(),
                self.id_column,
                self.data_column,
                self.metadata_column,
                self.created_column,
            )
            with tables.engine.connect() as connection:
                yield connection, tables

    def _write(self, connection: sa.Connection, work: Callable[..., T], *arguments: Any, durable: bool = False) -> T:
        """Call `work(connection, *arguments)` in a transaction; again where PostgreSQL broke it off for another."""
        for pause_s in (0.02, 0.1, 0.5):
            try:
                with self._errors(), _transaction(connection, durable=durable):
                    return work(connection, *arguments)
            except _BrokenOffError:
                time.sleep(pause_s)
        with _transaction(connection, durable=durable):
            return work(connection, *arguments)

    def _here(self) -> str:
        return f"{self.name} (table {self.table!r} at {without_secrets(sa.make_url(self.url))})"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say in the words of the options what the database said in its own."""
        try:
            yield
        except UnfitError as error:
            raise SourceError(f"{self._here()}: {error}") from None
        except ModuleNotFoundError as error:
            raise SourceError(
                f"{self._here()}: needs {error.name}; install it with pip install 'pipeline-platform[postgres]'"
            ) from None
        except sa.exc.SQLAlchemyError as error:
            raise self._said(getattr(error, "orig", None) or error) from None
        except Exception as error:
            if isinstance(error, sqlite3.Error) or type(error).__module__.startswith("psycopg"):
                raise self._said(error) from None
            raise

    def _said(self, error: BaseException) -> SourceError:
        # Of what PostgreSQL says the main sentence alone: the others may quote a row, and with it a payload.
        primary = getattr(getattr(error, "diag", None), "message_primary", None)
        said = " ".join((primary or str(error)).split())
        kind = _BrokenOffError if getattr(error, "sqlstate", None) in ("40001", "40P01") else SourceError
        for words, way_out in _WAYS_OUT.items():
            if words in said:
                return kind(f"{self._here()}: {said}; {way_out}")
        return kind(f"{self._here()}: {said}")


@contextmanager
def _transaction(connection: sa.Connection, *, durable: bool) -> Iterator[None]:
    """Begin to write.

    On SQLite what must survive a power failure is synced: what is enqueued, and a lease, for without it a message
    would come again without the mark that has it looked up. An acknowledgement need not be: its message comes
    again, marked, and is found decided. Skipping the sync never harms a file in write-ahead mode.
    """
    if connection.dialect.name != "sqlite":
        with connection.begin():
            yield
        return
    logs_ahead = connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    connection.exec_driver_sql("PRAGMA synchronous=NORMAL" if logs_ahead and not durable else "PRAGMA synchronous=FULL")
    # At once: a lock that is asked for after the first read may be refused without waiting.
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with suppress(sa.exc.SQLAlchemyError):  # SQLite has rolled back itself where its disk is full
            connection.exec_driver_sql("ROLLBACK")
        raise
    connection.exec_driver_sql("COMMIT")


class _Counted(Iterator[T]):
    """An iterator that knows how many it gave."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self.count = 0

    def __next__(self) -> T:
        item = next(self._items)
        self.count += 1
        return item


def _parsed(text: str | bytes) -> Any:
    parsed = json.loads(text)
    if len(text) > 500:  # long enough to be so deep that it can be read and not be written again
        json.dumps([[parsed]])
    return parsed


def _rows(
    payloads: Iterable[bytes], metadata: Iterable[Mapping[str, Any] | None] | None, *, as_text: bool
) -> Iterator[tuple[Any, ...]]:
    told = None if metadata is None else iter(metadata)
    missing = object()
    for payload in payloads:
        if not isinstance(payload, bytes):
            raise TypeError(f"a payload is bytes, not {type(payload).__name__}; encode it")
        data = payload.decode() if as_text else payload
        if told is None:
            yield (data,)
            continue
        note = next(told, missing)
        if note is missing:
            raise ValueError("there are fewer metadata than payloads; give one or None for each")
        yield data, None if note is None else json.dumps(note, default=str)
    if told is not None and next(told, missing) is not missing:
        raise ValueError("there are more metadata than payloads; give one or None for each")
