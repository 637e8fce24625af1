"""The database under the control store: SQLite or PostgreSQL, opened late, safe over threads, forks and processes."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

_CREATION_LOCK = 0x70_69_70_65  # any number that all who create the tables agree on
_CLOCK = sa.text("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
# A process stopped inside a transaction holds its locks: the server ends it before others give up waiting.
_POSTGRES_OPTIONS = "-c idle_in_transaction_session_timeout=10s -c lock_timeout=20s"
BUSY_S = 30
"""How long a SQLite connection waits for whoever holds the file."""


class ControlStoreError(Exception):
    """The control store cannot be used: its message names the store, without the password, and what to do."""


class Database:
    """Transactions on one database; picklable, for connections are made where they are used.

    Args:
        url: SQLAlchemy URL of a SQLite file or a PostgreSQL database.
        tables: Created at the first use where they are missing.

    Raises:
        ControlStoreError: The URL is neither of these.
    """

    def __init__(self, url: str, tables: sa.MetaData) -> None:
        self._url = _parse(url)
        self._tables = tables
        self._made: tuple[int, sa.Engine] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections behind: they belong to this process."""
        return {**self.__dict__, "_made": None}

    def __str__(self) -> str:
        """Give the URL, without its password."""
        return without_secrets(self._url)

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that may write. On SQLite writers take turns; on PostgreSQL lock what you decide by.

        Raises:
            ControlStoreError: The database cannot be reached, or refuses.
        """
        with self._named_errors(), self._engine().connect() as connection:
            immediate = connection.execution_options(immediate=True)
            with immediate.begin():
                yield immediate

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction that only reads, and waits for no writer.

        Raises:
            ControlStoreError: The database cannot be reached, or refuses.
        """
        with self._named_errors(), self._engine().connect() as connection, connection.begin():
            yield connection

    def close(self) -> None:
        """Close this process's connections; the next use opens them again."""
        if self._made and self._made[0] == os.getpid():
            self._made[1].dispose()
        self._made = None

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        # Without its cause below: a driver may quote the whole address.
        except ImportError as error:
            raise ControlStoreError(f"{self} needs {error.name}: install pipeline-platform[postgres]") from None
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            reason = str(getattr(error, "orig", None) or error).strip()
            if self._url.password:
                reason = reason.replace(self._url.password, "***")
            raise ControlStoreError(
                f"the control store {self} cannot be used: {reason}. {self._way_out(reason)}"
            ) from None

    def _way_out(self, reason: str) -> str:
        file = self._url.database
        if "disk is full" in reason:
            return "Make room where it lies."
        if "malformed" in reason or "not a database" in reason:
            return (
                f"{file} is damaged: remove it, with the files that end in -wal and -shm beside it, while no run is "
                "under way. The next look makes a new one; limits set at run time, pauses and claims are forgotten"
            )
        if "database is locked" in reason:
            return f"For {BUSY_S:g} s another process holds {file}: wait for it, or end it (`fuser {file}` names it)"
        return "Is the database there, and may this user write to it?"

    def _engine(self) -> sa.Engine:
        pid = os.getpid()
        if self._made is None or self._made[0] != pid:  # a forked child must not share its parent's connections
            # Two threads that meet here make one engine too many, which is collected unused.
            engine = _open(self._url)
            self._create_missing(engine)
            self._made = (pid, engine)
        return self._made[1]

    def _create_missing(self, engine: sa.Engine) -> None:
        with engine.connect() as connection, connection.begin():
            if set(self._tables.tables) <= set(sa.inspect(connection).get_table_names()):
                return  # who only looks need not wait for a writer
        with engine.connect().execution_options(immediate=True) as connection, connection.begin():
            if connection.dialect.name == "postgresql":  # CREATE TABLE IF NOT EXISTS is not safe at once
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION_LOCK)))
            self._tables.create_all(connection)


def without_secrets(url: sa.URL) -> str:
    """A database's URL as people may see it: without a password, and without a query, which may hold one too."""
    return url.set(query={}).render_as_string(hide_password=True)


def clock(connection: sa.Connection) -> int:
    """Read the time in microseconds since the epoch: the server's, or this machine's for SQLite."""
    if connection.dialect.name == "postgresql":
        return int(connection.execute(_CLOCK).scalar_one())
    return time.time_ns() // 1_000


def insert_missing(connection: sa.Connection, table: sa.Table, row: dict[str, Any]) -> None:
    """Insert a row unless its key is there already, be it put there at this moment by another."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    connection.execute(dialect.insert(table).values(row).on_conflict_do_nothing())


def _parse(text: str) -> sa.URL:
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError, AttributeError):
        # Not quoted: it may hold a password.
        raise ControlStoreError(
            "the control store's URL cannot be read; give sqlite:///<file> or postgresql://<user>@<host>/<database>"
        ) from None
    backend = url.get_backend_name()
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ControlStoreError(f"the control store is SQLite or PostgreSQL, not {backend}")
    if not url.database or url.database == ":memory:":
        raise ControlStoreError(
            "a control store in memory is seen by one process alone, and holds no limit over runs; "
            "give a file: sqlite:///<file>"
        )
    return url.set(database=str(Path(url.database).absolute()))  # tasks run in folders of their own


def _open(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() == "postgresql":
        arguments: dict[str, Any] = {"connect_timeout": 10}
        if "options" not in url.query:
            arguments["options"] = _POSTGRES_OPTIONS
        # One idle connection a process: every Spark worker has one of these.
        return sa.create_engine(
            url,
            connect_args=arguments,
            isolation_level="READ COMMITTED",
            pool_pre_ping=True,
            pool_size=1,
            max_overflow=9,
        )
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_S})
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            # Another process switches the new file at this moment; SQLite does not wait for that by itself.
            if time.monotonic() > deadline or error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise
            time.sleep(0.05)
    connection.execute("PRAGMA synchronous = NORMAL")  # loses permits at a power cut, never the file


def _begin_sqlite(connection: sa.Connection) -> None:
    # Writers take turns from their first read on: a read that becomes a write fails where another came between.
    immediate = connection.get_execution_options().get("immediate")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")
