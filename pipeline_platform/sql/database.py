"""Access to a SQL database, SQLite or PostgreSQL: opened on first use, safe for threads, forks and processes.

The control store and the table queue use it. Your own connectors may use it, too.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from pydantic import AfterValidator
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_fixed

from pipeline_platform.model.retry import Backoff
from pipeline_platform.model.safe_text import is_ambiguous, redacted, secrets_in
from pipeline_platform.sql import database_errors

T = TypeVar("T")

BUSY_S: Final = 30
"""Seconds that a SQLite connection waits for a lock of the file."""

IDLE_S: Final = 30
LOCK_S: Final = 60
"""PostgreSQL ends a session that is idle inside a transaction for IDLE_S, for example after its host has crashed. It
ends a wait for a lock after LOCK_S, which is longer, so that a wait for an idle session succeeds. Neither ends a slow
statement."""

_SILENT_S: Final = 25
"""Seconds after which a client closes a connection to an unreachable PostgreSQL host: a renewal that hangs is retried
before its lease expires."""
_CONNECTION: Final[dict[str, Any]] = {
    "connect_timeout": 10,
    "application_name": "pipeline-platform",
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": _SILENT_S * 1_000,
    # A pooler may give each transaction another session, which lacks statements prepared earlier.
    "prepare_threshold": None,
    # For a database of SQL_ASCII psycopg would return all text as bytes.
    "client_encoding": "utf8",
}
"""Connection parameters of libpq, which `url` may override."""
_BACKOFF: Final = Backoff(first=timedelta(milliseconds=20), factor=5)


class Database:
    """Transactions on one database. It can be pickled: each process makes its own connections.

    Args:
        url: SQLAlchemy URL of a SQLite file or a PostgreSQL database.
        what: Use of the database, the first words of each error.
        error: Type of all errors. Messages contain the use, the URL without password, the reason and a fix.
        away: Type of temporary errors, for example while a server restarts; None for `error`.
        ways_out: Fixes by words of the reason; they take precedence over the fixes of this package.
        create: Whether to create a missing SQLite file and its folders.
        durable: Whether a commit on SQLite survives a power cut. If not, the last commits may be lost, never the file.
        keep: Whether a process keeps a connection open between two uses.
        now: Seconds since the epoch, for tests; None for the database's clock.

    Raises:
        Exception: Of the type `error`: the URL is invalid, or for an unsupported database.
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
            self.url = parse_url(url)
        except ValueError as refused:
            raise error(f"{what}: {refused}") from None
        self._what, self._error, self._away = what, error, away or error
        self._ways_out = dict(ways_out or {})
        self._create, self._durable, self._keep, self._now = create, durable, keep, now
        self._made: tuple[int, sa.Engine] | None = None
        self._is_prepared = False

    def __getstate__(self) -> dict[str, Any]:
        """Omit connections, which belong to this process; keep the fact that the tables exist."""
        return {**self.__dict__, "_made": None, "_is_prepared": self._is_prepared or self._made is not None}

    def __str__(self) -> str:
        """Return the URL without password and query, which may contain one, too."""
        return self.url.set(query={}).render_as_string(hide_password=True)

    def __repr__(self) -> str:
        """Return the type and the URL without password."""
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def _whole_url(self) -> str:
        return self.url.render_as_string(hide_password=False)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is SQLite, else PostgreSQL."""
        return self.url.get_backend_name() == "sqlite"

    def prepare(self, engine: sa.Engine) -> None:
        """Create missing tables; subclasses override it. Called before the first use, not in processes with a copy."""

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that may write. SQLite serialises writers; on PostgreSQL, lock the rows that you read."""
        with self._named_errors(), transaction(self._engine(), immediate=True) as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a read-only transaction, which does not wait for writers."""
        with self._named_errors(), transaction(self._engine(), immediate=False) as connection:
            yield connection

    def write(
        self, work: Callable[[sa.Connection], T], *, before: Callable[[sa.Connection], object] | None = None
    ) -> T:
        """Call `work` in a transaction that may write; retry it after a serialisation failure or a deadlock.

        Args:
            work: Called with the connection.
            before: Called first, in a separate transaction on the same connection.
        """

        def once(connection: sa.Connection, call: Callable[[sa.Connection], T]) -> T:
            with connection.begin():
                return call(connection)

        broken_off = retry_if_exception(lambda error: database_errors.sqlstate(error) in ("40001", "40P01"))
        tries = Retrying(
            retry=broken_off,
            wait=lambda state: _BACKOFF.before(state.attempt_number + 1).total_seconds(),
            stop=stop_after_attempt(4),
            reraise=True,
        )
        with self._named_errors(), self._engine().connect().execution_options(immediate=True) as connection:
            if before is not None:
                tries(once, connection, before)
            return tries(once, connection, work)

    def sync(self) -> None:
        """Make commits survive a power cut. No effect on PostgreSQL and on a durable SQLite, where they always do."""
        if self.is_sqlite and not self._durable:
            with suppress(FileNotFoundError), Path(f"{self.url.database}-wal").open("rb") as log:
                os.fsync(log.fileno())

    def now(self, connection: sa.Connection) -> int:
        """Return the time in microseconds since the epoch: by the server's clock, or this machine's for SQLite."""
        return int(connection.execute(sa.select(self.clock())).scalar_one())

    def clock(self) -> sa.ColumnElement[int]:
        """Return the time of `now` as an expression, for use in a statement."""
        if self._now is not None:
            return sa.literal(round(self._now() * 1_000_000))
        if self.is_sqlite:
            return sa.literal(time.time_ns() // 1_000)
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * 1_000_000, sa.BigInteger)

    def close(self) -> None:
        """Close this process's connections; the next use opens them again."""
        if self._made and self._made[0] == os.getpid():
            self._made[1].dispose()
        self._made = None

    def refusal(self, reason: str) -> Exception:
        """Return an error with this reason, its use and its URL."""
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
            if database_errors.sqlstate(error) == database_errors.STANDBY:
                self.close()  # the next connection may lead to the new primary server
            reason = redacted(database_errors.reason(error), secrets_in(self._whole_url))
            way_out = database_errors.way_out(reason, self._ways_out)
            way_out = way_out.replace("{file}", str(self.url.database)).replace("{busy}", f"{BUSY_S:g}")
            kind = self._away if database_errors.passes(error) else self._error
            raise kind(self._in_words(f"{reason}. {way_out}")) from None

    def _engine(self) -> sa.Engine:
        pid = os.getpid()
        if self._made is None or self._made[0] != pid:  # a forked child must not share its parent's connections
            # Two threads may create an engine each here; the second replaces the first, which is unused.
            engine = self._open()
            if not self._is_prepared:
                self.prepare(engine)
            self._made = (pid, engine)
        return self._made[1]

    def _open(self) -> sa.Engine:
        # One idle connection per process, because each Spark worker is a process.
        kept: dict[str, Any] = {"pool_pre_ping": True, "pool_size": 1, "max_overflow": 9}
        options = kept if self._keep else {"poolclass": sa.NullPool}
        if not self.is_sqlite:
            arguments = {name: value for name, value in _CONNECTION.items() if name not in self.url.query}
            if "options" not in self.url.query:
                limits = f"-c idle_in_transaction_session_timeout={IDLE_S}s -c lock_timeout={LOCK_S}s"
                # PostgreSQL uses the session's time zone for columns without a zone and for JSON.
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
        # As a URI: with a plain path, SQLite would create a missing file where reading must fail.
        address = f"file:{quote(str(path))}?mode={'rwc' if self._create else 'rw'}"
        # `_begin_sqlite` starts transactions.
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        if self._create:
            _log_ahead(connection)
        connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'NORMAL'}")
        return connection


@contextmanager
def transaction(engine: sa.Engine, *, immediate: bool) -> Iterator[sa.Connection]:
    """Open a transaction; with `immediate` it locks SQLite for writing from its start."""
    with engine.connect().execution_options(immediate=immediate) as connection, connection.begin():
        yield connection


def insert(connection: sa.Connection, table: sa.Table) -> Any:
    """Return an INSERT that supports ON CONFLICT, in the dialect of the database."""
    return (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(table)


def parse_url(text: str) -> sa.URL:
    """Parse a SQLAlchemy URL; the path of a SQLite file becomes absolute, because tasks run in other folders.

    Raises:
        ValueError: The URL is invalid or for an unsupported database. The message contains no password.
    """
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError, AttributeError):
        raise ValueError(
            "url is not a valid URL. Use sqlite:///<file> or postgresql://<user>@<host>/<database>."
        ) from None
    backend = url.get_backend_name()
    if backend in ("postgresql", "postgres"):
        if is_ambiguous(text):  # the end of a password could be parsed as the host, which errors show
            raise ValueError(
                "url contains an @ in the user or the password. Write @ / ? and # there as %40 %2F %3F and %23."
            )
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ValueError(f"url must be for SQLite or PostgreSQL, got {backend!r}.")
    if not url.database or url.database == ":memory:":
        raise ValueError(
            "url must contain a file: each process would have another in-memory database. Use sqlite:///<file>."
        )
    return url.set(database=str(Path(url.database).absolute()))


DatabaseUrl = Annotated[str, AfterValidator(lambda url: parse_url(url).render_as_string(hide_password=False))]
"""URL of a database, as an option of a source."""


def _log_ahead(connection: sqlite3.Connection) -> None:
    """Turn on write-ahead logging, so that readers and the writer do not wait for each other."""
    # Another process may switch the new file at the same time, and SQLite does not wait for that.
    in_between = retry_if_exception(
        lambda error: isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode != sqlite3.SQLITE_FULL
    )

    def switch() -> None:
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")

    Retrying(retry=in_between, wait=wait_fixed(0.05), stop=stop_after_delay(BUSY_S), reraise=True)(switch)


def _begin_sqlite(connection: sa.Connection) -> None:
    # Lock before the first read: a transaction that reads and then writes fails if another wrote in between.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("immediate") else "BEGIN")
