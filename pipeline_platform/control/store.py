"""The control store: permits, limits, pauses, claims and positions in logs, in one SQL database of all runs."""

import os
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa

from pipeline_platform.control.claims import Claim, Claims
from pipeline_platform.control.database import insert, transaction
from pipeline_platform.control.limits import TABLES, Grant, Throttle, interval_end
from pipeline_platform.control.overrides import Overriding
from pipeline_platform.control.reserved_offsets import LogPositions
from pipeline_platform.source.readers import Reader

__all__ = ["Claim", "ControlStore", "ControlStoreError", "Grant", "interval_end"]

_VERSION = sa.Table("control_version", TABLES, sa.Column("version", sa.Integer, primary_key=True))
_DEPLOYMENT = sa.Table(
    "control_deployment",
    TABLES,
    sa.Column("one", sa.Integer, primary_key=True),
    sa.Column("id", sa.Text, nullable=False),
)
"""One row: the id of this store, made with its tables."""

_WINDOWS = sa.Table(
    "control_windows",
    TABLES,
    sa.Column("pipeline", sa.Text, primary_key=True),
    sa.Column("first_window", sa.Text, nullable=False),
)
"""The first window of each pipeline whose class leaves it open, by its key."""


def _add_alone(connection: sa.Connection) -> None:
    connection.exec_driver_sql("ALTER TABLE control_receives ADD COLUMN alone BOOLEAN DEFAULT FALSE NOT NULL")


STEPS: Final[list[Callable[[sa.Connection], None]]] = [
    lambda _: None,  # control_stops and control_overrides
    _add_alone,
    lambda _: None,  # control_ended
    lambda _: None,  # control_deployment
    lambda _: None,  # control_windows
]
"""The first step changes the tables of version 1, with what is in them, to those of version 2; and so on.

A new store has the tables that the code names, and the newest version. A store that names no version has version 1.
A step runs once, inside one transaction with the others. Tables that are new are made before; the step that counts
them does nothing.
"""

_DAMAGED: Final = (
    "{file} is damaged: remove it, with the files that end in -wal and -shm beside it, while no run is under way. The "
    "next look makes a new one; limits set at run time, pauses and claims are forgotten"
)
_WAYS_OUT: Final = {"malformed": _DAMAGED, "not a database": _DAMAGED}

_SCHEMA_LOCK = 0x70_69_70_65  # any number that all who make or change the tables agree on


class ControlStoreError(Exception):
    """The control store cannot be used: the message names the store, without the password, and the way out."""


class ControlStore(Throttle, Claims, Overriding, LogPositions):
    """What runs, tasks and sensors of all machines agree on; safe over threads and processes, and picklable.

    Connections and tables are made at the first use, in the process that uses it. A store of an earlier version is
    brought up to this one then.

    Args:
        url: SQLAlchemy URL: `sqlite:///<file>` (one machine, a local disk: its locks do not work over network
            file systems) or `postgresql://...`.
        now: Seconds since the epoch, for tests; None takes the server's clock, or the machine's for SQLite.

    Attributes:
        run_id: The run that ends with this process; empty where its steps have a process each, or nobody said.

    Raises:
        ControlStoreError: The URL is neither of these.
    """

    def __init__(self, url: str, now: Callable[[], float] | None = None) -> None:
        self.run_id = self._id = ""
        # Not durable: a power cut may cost permits and claims, which are of no use after it.
        options: dict[str, Any] = {"ways_out": _WAYS_OUT, "durable": False, "keep": True}
        super().__init__(url, "the control store", ControlStoreError, now=now, **options)

    def reader(self) -> Reader:
        """Say which deployment reads with this store, now: its id, and host and store for people."""
        if not self._id:
            with self.reading() as connection:
                self._id = connection.execute(sa.select(_DEPLOYMENT.c.id)).scalar_one()
        host = os.environ.get("DAGSTER_CLOUD_DEPLOYMENT_NAME") or socket.gethostname()
        return Reader(self._id, f"{host} (control store {self})", time.time())

    def first_window(self, pipeline: str, unless_kept: Callable[[], str]) -> str:
        """Return the first window of a pipeline, the same for all that ask; `unless_kept` says it if nobody has yet."""
        kept = sa.select(_WINDOWS.c.first_window).where(_WINDOWS.c.pipeline == pipeline)
        with self.reading() as connection:
            if found := connection.execute(kept).scalar():
                return str(found)
        window = unless_kept()
        with self.writing() as connection:
            new = insert(connection, _WINDOWS).values(pipeline=pipeline, first_window=window)
            connection.execute(new.on_conflict_do_nothing())
            return str(connection.execute(kept).scalar_one())

    def prepare(self, engine: sa.Engine) -> None:
        """Make the tables that are missing, and bring those of an earlier release up to this one."""
        newest = len(STEPS) + 1
        with transaction(engine, immediate=False) as connection:
            if _version(connection) == newest:
                return  # a process that only looks need not wait for a writer
        with transaction(engine, immediate=True) as connection:
            if not self.is_sqlite:  # CREATE TABLE IF NOT EXISTS is not safe at once
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SCHEMA_LOCK)))
            found = _version(connection) or (1 if sa.inspect(connection).has_table("control_pipelines") else newest)
            if found > newest:
                raise self.refusal(
                    f"its tables have version {found}, and this code knows those up to {newest}. Upgrade "
                    "pipeline-platform here to the release that changed them, or name another store"
                )
            TABLES.create_all(connection)
            new = insert(connection, _DEPLOYMENT).values(one=1, id=str(uuid.uuid4()))
            connection.execute(new.on_conflict_do_nothing())
            for step in STEPS[found - 1 :]:
                step(connection)
            connection.execute(sa.delete(_VERSION))
            connection.execute(sa.insert(_VERSION).values(version=newest))


def _version(connection: sa.Connection) -> int | None:
    """Return the version that the tables name, None where they name none yet."""
    if not sa.inspect(connection).has_table(_VERSION.name):
        return None
    return int(connection.execute(sa.select(_VERSION.c.version)).scalar_one())
