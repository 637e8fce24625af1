"""One way to a SQL database, SQLite or PostgreSQL: opened late, safe over threads, forks and processes.

The control store and the table queue use it. A connector of your own that keeps a table may use it, too.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_exponential, wait_fixed

from pipeline_platform.control import database_errors
from pipeline_platform.model.safe_text import is_ambiguous, redacted, secrets_in

T = TypeVar("T")

BUSY_S: Final = 30
"""Seconds that a SQLite connection waits for another that holds the file."""

IDLE_S: Final = 30
LOCK_S: Final = 60
"""PostgreSQL ends a session that stands still inside a transaction for IDLE_S, as one whose host is gone does. It ends
a wait for a lock after LOCK_S: longer, so that what waits for such a session is served. Neither ends a statement that
merely takes long."""

_SILENT_S: Final = 25
"""A client gives up a connection after so long without a sign of PostgreSQL's host: a renewal that hangs is tried again
before its lease is over."""
_CONNECTION: Final[dict[str, Any]] = {
    "connect_timeout": 10,
    "application_name": "pipeline-platform",
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": _SILENT_S * 1_000,
    # A pooler may give each transaction another session, which would not know what an earlier one prepared.
    "prepare_threshold": None,
    # For a database of SQL_ASCII psycopg would return all text as bytes.
    "client_encoding": "utf8",
}
"""What libpq gets for each connection, unless `url` says otherwise."""


class Database:
    """Transactions on one database. It can be pickled: each process makes its own connections.

    Args:
        url: SQLAlchemy URL of a SQLite file or a PostgreSQL database.
        what: Names its use at the beginning of an error.
        error: Raised for whatever goes wrong here. Its message names use, URL without password, reason and way out.
        away: Raised in its place for what passes by itself, as a server that restarts; None for `error`, too.
        ways_out: What to do about an error, by words of its reason; they come before this module's own.
        create: Whether to make a SQLite file and its folders where they are missing.
        durable: Whether a commit on SQLite survives a power cut. Without it the last ones may be lost, never the file.
        keep: Whether a process keeps a connection open between two uses.
        now: Seconds since the epoch, for tests; None for the clock that all who share the database share.

    Raises:
        Exception: As `error` says: the URL is for another kind of database, or for none.
    """

    def __init__(
        self,
        url: str,
        what: str,
        error: type[Exception],
        *,
        away: type[Exception] | None = None,
        ways_out: Mapping[str, str] | None = None,
        create: bool = True,
        durable: bool = True,
        keep: bool = False,
        now: Callable[[], float] | None = None,
    ) -> None:
        try:
            self.url = parse(url)
        except ValueError as refused:
            raise error(f"{what}: {refused}") from None
        self._what, self._error, self._away = what, error, away or error
        self._ways_out = dict(ways_out or {})
        self._create, self._durable, self._keep, self._now = create, durable, keep, now
        self._made: tuple[int, sa.Engine] | None = None
        self._is_prepared = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections behind: they belong to this process. A copy knows that the tables are made."""
        return {**self.__dict__, "_made": None, "_is_prepared": self._is_prepared or self._made is not None}

    def __str__(self) -> str:
        """Return the URL without password and query, which may contain one, too."""
        return self.url.set(query={}).render_as_string(hide_password=True)

    def __repr__(self) -> str:
        """Name the database, without its password."""
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def _whole_url(self) -> str:
        return self.url.render_as_string(hide_password=False)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is SQLite, else PostgreSQL."""
        return self.url.get_backend_name() == "sqlite"

    def prepare(self, engine: sa.Engine) -> None:
        """Make what is missing. Called before the first use, not in processes that get a copy; a subclass says what."""

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that may write. On SQLite writers take turns; on PostgreSQL lock what you decide by."""
        with self._named_errors(), transaction(self._engine(), immediate=True) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction that only reads, and waits for no writer."""
        with self._named_errors(), transaction(self._engine(), immediate=False) as connection:
            yield connection

    @contextmanager
    def alone(self) -> Iterator[sa.Connection]:
        """Open a connection on which each statement is a transaction: no round trips to begin and to end one."""
        with self._named_errors(), self._engine().connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def write(
        self, work: Callable[[sa.Connection], T], *, before: Callable[[sa.Connection], object] | None = None
    ) -> T:
        """Call `work` in a transaction that may write; again where PostgreSQL ends it for the sake of another.

        Args:
            work: What to do.
            before: What to do first, in a transaction of its own over the same connection.
        """

        def once(connection: sa.Connection, call: Callable[[sa.Connection], T]) -> T:
            with connection.begin():
                return call(connection)

        broken_off = retry_if_exception(lambda error: database_errors.sqlstate(error) in ("40001", "40P01"))
        pause = wait_exponential(multiplier=0.02, exp_base=5)
        tries = Retrying(retry=broken_off, wait=pause, stop=stop_after_attempt(4), reraise=True)
        with self._named_errors(), self._engine().connect().execution_options(immediate=True) as connection:
            if before is not None:
                tries(once, connection, before)
            return tries(once, connection, work)

    def sync(self) -> None:
        """Have what is committed survive a power cut. On PostgreSQL and on a durable SQLite it does anyway."""
        if self.is_sqlite and not self._durable:
            with suppress(FileNotFoundError), Path(f"{self.url.database}-wal").open("rb") as log:
                os.fsync(log.fileno())

    def now(self, connection: sa.Connection) -> int:
        """Read the time in microseconds since the epoch: by the server's clock, or this machine's for SQLite."""
        return int(connection.execute(sa.select(self.clock())).scalar_one())

    @property
    def fixed_now(self) -> int | None:
        """The time of a test's clock; None for the clock that all share."""
        return None if self._now is None else round(self._now() * 1_000_000)

    def clock(self) -> sa.ColumnElement[int]:
        """The same as an expression, for a statement that reads more besides."""
        fixed = time.time_ns() // 1_000 if self.is_sqlite and self._now is None else self.fixed_now
        if fixed is not None:
            return sa.literal(fixed)
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * 1_000_000, sa.BigInteger)

    def close(self) -> None:
        """Close this process's connections; the next use opens them again."""
        if self._made and self._made[0] == os.getpid():
            self._made[1].dispose()
        self._made = None

    def refusal(self, reason: str) -> Exception:
        """Make an error of a reason, with the words that all errors of this database begin with."""
        return self._error(self._in_words(reason))

    def _in_words(self, reason: str) -> str:
        return f"{self._what} {self} cannot be used: {reason}"

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        # Without its cause below: a driver may quote the whole address.
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "psycopg":
                raise self.refusal("psycopg is missing. Install pipeline-platform[postgres]") from None
            if not database_errors.is_of_database(error):
                raise
            reason = redacted(database_errors.reason(error), secrets_in(self._whole_url))
            way_out = database_errors.way_out(reason, self._ways_out)
            way_out = way_out.replace("{file}", str(self.url.database)).replace("{busy}", f"{BUSY_S:g}")
            kind = self._away if database_errors.passes(error) else self._error
            raise kind(self._in_words(f"{reason}. {way_out}")) from None

    def _engine(self) -> sa.Engine:
        pid = os.getpid()
        if self._made is None or self._made[0] != pid:  # a forked child must not share its parent's connections
            # Two threads that meet here make one engine too many, which is collected unused.
            engine = self._open()
            if not self._is_prepared:
                self.prepare(engine)
            self._made = (pid, engine)
        return self._made[1]

    def _open(self) -> sa.Engine:
        # One idle connection a process: every Spark worker is one.
        kept: dict[str, Any] = {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 9}
        options = kept if self._keep else {"poolclass": sa.NullPool}
        if not self.is_sqlite:
            arguments = {name: value for name, value in _CONNECTION.items() if name not in self.url.query}
            if "options" not in self.url.query:
                limits = f"-c idle_in_transaction_session_timeout={IDLE_S}s -c lock_timeout={LOCK_S}s"
                # The session's time zone decides what PostgreSQL writes into a column without a zone, or into JSON.
                arguments["options"] = f"{limits} -c timezone=UTC"
            options |= {"connect_args": arguments, "isolation_level": "READ COMMITTED"}
            return sa.create_engine(self.url, hide_parameters=True, use_native_hstore=False, **options)
        engine = sa.create_engine(self.url, hide_parameters=True, creator=self._connect_sqlite, **options)
        sa.event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _connect_sqlite(self) -> sqlite3.Connection:
        path = Path(str(self.url.database))
        if self._create:
            with suppress(OSError):  # SQLite refuses to open the file then
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # By an address, for a plain path makes an empty file where reading has to fail.
        address = f"file:{quote(str(path))}?mode={'rwc' if self._create else 'rw'}"
        # Transactions begin where `_begin_sqlite` says.
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        if self._create:
            _log_ahead(connection)
        connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'NORMAL'}")
        return connection


@contextmanager
def transaction(engine: sa.Engine, *, immediate: bool) -> Iterator[sa.Connection]:
    """Open a transaction; with `immediate` no other may write to SQLite before it ends."""
    with engine.connect().execution_options(immediate=immediate) as connection, connection.begin():
        yield connection


def insert(connection: sa.Connection, table: sa.Table) -> Any:
    """Begin an INSERT that may say ON CONFLICT, in the words of the database."""
    return (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)


def parse(text: str) -> sa.URL:
    """Read a SQLAlchemy URL; the path of a SQLite file becomes absolute, for tasks run in folders of their own.

    Raises:
        ValueError: It is for another kind of database, or for none; the message quotes no password.
    """
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError, AttributeError):
        raise ValueError("url cannot be read; give sqlite:///<file> or postgresql://<user>@<host>/<database>") from None
    backend = url.get_backend_name()
    if backend in ("postgresql", "postgres"):
        if is_ambiguous(text):  # the end of a password may be taken for the host, which errors show
            raise ValueError(
                "url has an @ that does not end the user and password. Write @ / ? and # in them as %40 %2F %3F and %23"
            )
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ValueError(f"url is for {backend!r}; give SQLite or PostgreSQL")
    if not url.database or url.database == ":memory:":
        raise ValueError(
            "url names no file: SQLite in memory is a new database in every process; give sqlite:///<file>"
        )
    return url.set(database=str(Path(url.database).absolute()))


def _log_ahead(connection: sqlite3.Connection) -> None:
    """Turn on write-ahead logging, so that readers and the writer do not wait for each other."""
    # Another process may switch the new file at this moment. SQLite does not wait for that by itself.
    in_between = retry_if_exception(
        lambda error: isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode != sqlite3.SQLITE_FULL
    )

    def switch() -> None:
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")

    Retrying(retry=in_between, wait=wait_fixed(0.05), stop=stop_after_delay(BUSY_S), reraise=True)(switch)


def _begin_sqlite(connection: sa.Connection) -> None:
    # Writers take turns from their first read on: a read that becomes a write fails where another came between.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("immediate") else "BEGIN")
