"""The control store: one SQL database with the limits, pauses, claims and log positions of all runs."""

import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa

from pipeline_platform.control.breaker import Breakers, forget_breaker
from pipeline_platform.control.claims import Claim, Claims
from pipeline_platform.control.history import History
from pipeline_platform.control.limits import TABLES, Grant, Throttle, interval_end
from pipeline_platform.control.overrides import Overriding
from pipeline_platform.control.reserved_offsets import LogPositions
from pipeline_platform.source.readers import Reader
from pipeline_platform.sql.database import insert, transaction

__all__ = ["Claim", "ControlStore", "ControlStoreError", "Grant", "interval_end"]

_VERSION = sa.Table("control_version", TABLES, sa.Column("version", sa.Integer, primary_key=True))
_DEPLOYMENT = sa.Table(
    "control_deployment",
    TABLES,
    sa.Column("one", sa.Integer, primary_key=True),
    sa.Column("id", sa.Text, nullable=False),
)
"""A single row with the id of this store, created with its tables."""

_WINDOWS = sa.Table(
    "control_windows",
    TABLES,
    sa.Column("pipeline", sa.Text, primary_key=True),
    sa.Column("first_window", sa.Text, nullable=False),
)
"""First window of each pipeline whose class does not set it, by its key."""


VERSION: Final = 8
"""Version of the tables. A release that changes a table migrates the tables of the release before it in `prepare`."""
_BEFORE: Final = 6
"""Version of release 0.3.0, which has no tables of breakers and of the history."""

_DAMAGED: Final = (
    "{file} is damaged. Stop all runs, and remove it with the -wal and -shm files beside it. A new file is created on "
    "the next use; limits set at run time, pauses, claims and the history are lost"
)
_WAYS_OUT: Final = {"malformed": _DAMAGED, "not a database": _DAMAGED}

_SCHEMA_LOCK = 0x70_69_70_65  # an arbitrary number, the same in all processes


class ControlStoreError(Exception):
    """The control store cannot be used. The message contains its URL, without the password, and a fix."""


class ControlStore(Throttle, Claims, Overriding, LogPositions, Breakers, History):
    """State shared by the runs, tasks and sensors of all machines; safe for threads and processes, and picklable.

    Connections and tables are created on first use, in the process that uses it.

    Args:
        url: SQLAlchemy URL: `sqlite:///<file>` (one machine, a local disk: its locks do not work over network
            file systems) or `postgresql://...`.
        now: Seconds since the epoch, for tests; None for the server's clock, or the machine's for SQLite.

    Attributes:
        run_id: The run that ends with this process; empty if its steps have separate processes, or if it is not set.

    Raises:
        ControlStoreError: The URL is invalid, or for an unsupported database.
    """

    def __init__(self, url: str, now: Callable[[], float] | None = None) -> None:
        self.run_id = self._id = ""
        # Not durable: permits and claims are useless after a power cut.
        options: dict[str, Any] = {"ways_out": _WAYS_OUT, "durable": False, "keep": True}
        super().__init__(url, "the control store", ControlStoreError, now=now, **options)

    def reader(self) -> Reader:
        """Return the deployment that reads with this store: its id, its host and store as text, and the time."""
        if not self._id:
            with self.reading() as connection:
                self._id = connection.execute(sa.select(_DEPLOYMENT.c.id)).scalar_one()
        host = os.environ.get("DAGSTER_CLOUD_DEPLOYMENT_NAME") or socket.gethostname()
        return Reader(self._id, f"{host} (control store {self})", time.time())

    def first_window(self, pipeline: str, unless_kept: Callable[[], str]) -> str:
        """Return the stored first window of a pipeline; if there is none, store the result of `unless_kept`."""
        kept = sa.select(_WINDOWS.c.first_window).where(_WINDOWS.c.pipeline == pipeline)
        with self.reading() as connection:
            if found := connection.execute(kept).scalar():
                return str(found)
        window = unless_kept()
        with self.writing() as connection:
            new = insert(connection, _WINDOWS).values(pipeline=pipeline, first_window=window)
            connection.execute(new.on_conflict_do_nothing())
            return str(connection.execute(kept).scalar_one())

    def resume(self, pipeline: str) -> None:
        """End a pause or a drain, and the pauses of breakers; no effect on a pipeline that is not paused."""
        super().resume(pipeline)
        with self.writing() as connection:
            forget_breaker(connection, pipeline)

    def prepare(self, engine: sa.Engine) -> None:
        """Create missing tables, and refuse tables of another version."""
        with transaction(engine, immediate=False) as connection:
            if _version(connection) == VERSION:
                return  # a process that only reads need not wait for a writer
        with transaction(engine, immediate=True) as connection:
            if not self.is_sqlite:  # concurrent CREATE TABLE IF NOT EXISTS is not safe
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SCHEMA_LOCK)))
            found = _version(connection)
            if found is not None and not _BEFORE <= found <= VERSION:
                fix = "Upgrade pipeline-platform" if found and found > VERSION else "Upgrade to release 0.3.0 first"
                raise self.refusal(
                    f"its tables have version {found}, and this release supports version {VERSION}. {fix}, or use "
                    "another store"
                )
            TABLES.create_all(connection)
            new = insert(connection, _DEPLOYMENT).values(one=1, id=str(uuid.uuid4()))
            connection.execute(new.on_conflict_do_nothing())
            connection.execute(sa.delete(_VERSION))
            connection.execute(sa.insert(_VERSION).values(version=VERSION))


def _version(connection: sa.Connection) -> int | None:
    if not sa.inspect(connection).has_table(_VERSION.name):
        return None
    return int(connection.execute(sa.select(_VERSION.c.version)).scalar_one())
