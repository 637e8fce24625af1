"""The catalog of a source's files, in a SQL table: new, leased and finished files."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, Self, TypeVar

import pyarrow.fs as pafs
import sqlalchemy as sa

from pipeline_platform.model.portions import portions
from pipeline_platform.sql.database import Database, insert

T = TypeVar("T")

_IDS = 500
"""Ids in one statement."""
_RECENT = 100
"""Number of recent files that are done, by which the size of a row is estimated."""
_FIRST_BYTES = 2**20
"""Size of the files of a receive until a file is done: highly compressed rows may be much smaller than expected."""


class Found(NamedTuple):
    """A version of a file: a file that is written again is another version.

    Attributes:
        path: Path under the root.
        size: Bytes.
        modified: Time of its last change, in seconds since 1970.
    """

    path: str
    size: int
    modified: float

    @classmethod
    def of(cls, info: pafs.FileInfo, *, is_local: bool) -> Self:
        """Return a version as the file system reports it. Object stores may omit parts of a second in some answers."""
        return cls(info.path, info.size, info.mtime_ns / 1e9 if is_local else float(info.mtime_ns // 10**9))

    @property
    def id(self) -> str:
        """Identity of the version."""
        return f"{self.path}@{round(self.modified * 1000):x}-{self.size:x}"


class Leased(NamedTuple):
    """A file that a receive leases."""

    id: str
    path: str
    size: int
    modified: float
    attempts: int


class Catalog:
    """Versions of files: waiting, leased by a receive until a time, or done.

    Files stay in the catalog after they are removed: a folder may be unavailable for a while and look empty.
    """

    def __init__(self, database: Database, table: str) -> None:
        self._database = database
        self._table = sa.Table(
            table,
            sa.MetaData(),
            sa.Column("id", sa.Text, primary_key=True),
            sa.Column("path", sa.Text, nullable=False),
            sa.Column("size", sa.BigInteger, nullable=False),
            sa.Column("modified", sa.Double, nullable=False),
            sa.Column("receive", sa.Text, index=True),
            sa.Column("leased_until", sa.Double, nullable=False, server_default="0"),
            sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
            sa.Column("rows", sa.BigInteger),
            sa.Column("is_done", sa.Boolean, nullable=False, server_default=sa.false()),
        )
        sa.Index(f"{table}_next", self._table.c.is_done, self._table.c.modified)
        self._listings = sa.Table(
            f"{table}_listings",
            self._table.metadata,
            sa.Column("place", sa.Text, primary_key=True),
            sa.Column("started", sa.Double, nullable=False),
        )

    def create(self) -> None:
        """Create the table, if it does not exist."""
        with self._database.writing() as connection:
            if not self._database.is_sqlite:  # concurrent CREATE TABLE IF NOT EXISTS is not safe
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(self._table.name))))
            self._table.metadata.create_all(connection)

    def listing_due(self, place: str, every_s: float) -> float | None:
        """Return the current time if a listing of a place is due, else None."""
        started = sa.select(self._listings.c.started).where(self._listings.c.place == place)
        with self._database.reading() as connection:
            last, now = connection.execute(started).scalar(), self._now(connection)
        return None if last is not None and last <= now < last + every_s else now

    def record_listing(self, place: str, started: float) -> None:
        """Record a complete listing of a place, and the time of its start."""
        with self._database.writing() as connection:
            record = insert(connection, self._listings).values(place=place, started=started)
            connection.execute(record.on_conflict_do_update(index_elements=["place"], set_={"started": started}))

    def is_new(self) -> bool:
        """Whether it contains no complete listing or no file: an earlier catalog may have been lost."""
        with self._database.reading() as connection:
            tables = self._listings, self._table
            return any(connection.execute(sa.select(table).limit(1)).first() is None for table in tables)

    def add(self, files: Iterable[Found]) -> None:
        """Add files that are not in the catalog; in a new catalog they count as redelivered."""
        is_new = self.is_new()
        rows = [{"id": file.id, **file._asdict(), "attempts": int(is_new)} for file in files]
        # In the same order in every process: otherwise two of them could wait for each other's rows in PostgreSQL.
        for some in _groups(sorted(rows, key=lambda row: str(row["id"]))):
            with self._database.writing() as connection:
                if is_new:  # it stays new for all processes until a listing is complete
                    connection.execute(sa.delete(self._listings))
                connection.execute(insert(connection, self._table).on_conflict_do_nothing(), some)

    def row_bytes(self, connection: sa.Connection) -> float | None:
        """Return the mean bytes of a row in recent files that are done; None if no file is done yet."""
        files = self._table.c
        done = files.is_done & (files.rows > 0)
        recent = sa.select(files.size, files.rows).where(done).order_by(files.modified.desc()).limit(_RECENT).subquery()
        size, rows = connection.execute(sa.select(sa.func.sum(recent.c.size), sa.func.sum(recent.c.rows))).one()
        return float(size) / float(rows) if rows else None

    def waiting(self, default_row_bytes: int) -> tuple[int, datetime | None]:
        """Return the estimated number of waiting rows, and the time of the oldest file."""
        files = self._table.c
        with self._database.reading() as connection:
            row_bytes = self.row_bytes(connection) or default_row_bytes
            free = self._free(connection)
            columns = sa.func.count(), sa.func.sum(files.size), sa.func.min(files.modified)
            count, size, oldest = connection.execute(sa.select(*columns).where(free)).one()
        since = None if oldest is None else datetime.fromtimestamp(oldest, UTC)
        return max(count, round(float(size or 0) / row_bytes)), since

    def lease(
        self, receive_id: str, lease_s: float, demand: int, most: int, default_row_bytes: int
    ) -> tuple[list[Leased], float]:
        """Lease the oldest files, until their estimated rows reach the demand; return also the bytes of a row.

        Until a file is done, a receive gets one file, or several small files.
        """
        files = self._table.c

        def choose(connection: sa.Connection) -> tuple[list[Leased], float]:
            known = self.row_bytes(connection)
            row_bytes, size = known or default_row_bytes, 0
            columns = files.id, files.path, files.size, files.modified, files.attempts
            oldest = sa.select(*columns).where(self._free(connection)).order_by(files.modified, files.id).limit(most)
            chosen, rows = list[Leased](), 0.0
            for row in connection.execute(oldest.with_for_update(skip_locked=True)).all():
                chosen.append(Leased(row.id, row.path, row.size, row.modified, row.attempts + 1))
                rows, size = rows + max(1.0, row.size / row_bytes), size + row.size
                if rows >= demand or (known is None and size >= _FIRST_BYTES):
                    break
            until = self._now(connection) + lease_s
            for some in _groups(file.id for file in chosen):
                mine = sa.update(self._table).where(files.id.in_(some))
                connection.execute(mine.values(receive=receive_id, leased_until=until, attempts=files.attempts + 1))
            return chosen, row_bytes

        return self._database.write(choose)

    def count_rows(self, file: str, receive_id: str, rows: int) -> None:
        """Store the number of rows of a file that was read."""
        files = self._table.c
        counted = sa.update(self._table).where(files.id == file, files.receive == receive_id).values(rows=rows)
        self._database.write(lambda connection: connection.execute(counted))

    def finish(self, receive_id: str) -> None:
        """Mark the files of a receive as done."""
        self._of(receive_id, is_done=True)

    def release(self, receive_id: str, ids: Iterable[str], delay_s: int = 0) -> None:
        """Release files of a receive, after a delay."""
        files = self._table.c
        for some in _groups(ids):
            with self._database.writing() as connection:
                mine = sa.update(self._table).where(files.receive == receive_id, ~files.is_done, files.id.in_(some))
                until = self._now(connection) + delay_s if delay_s else 0
                connection.execute(mine.values(receive=None, leased_until=until))

    def renew(self, receive_id: str, lease_s: float) -> bool:
        """Renew the leases of a receive; return whether it has any file."""

        def renew(connection: sa.Connection) -> bool:
            mine = sa.update(self._table).where(self._table.c.receive == receive_id)
            return bool(connection.execute(mine.values(leased_until=self._now(connection) + lease_s)).rowcount)

        return self._database.write(renew)

    def abandon(self, receive_id: str) -> None:
        """Release the files of a receive."""
        self._of(receive_id, receive=None, leased_until=0)

    def _of(self, receive_id: str, **values: float | str | bool | None) -> None:
        files = self._table.c
        mine = sa.update(self._table).where(files.receive == receive_id, ~files.is_done)
        self._database.write(lambda connection: connection.execute(mine.values(values)))

    def _free(self, connection: sa.Connection) -> sa.ColumnElement[bool]:
        files = self._table.c
        return ~files.is_done & (files.leased_until <= self._now(connection))

    def _now(self, connection: sa.Connection) -> float:
        return self._database.now(connection) / 1_000_000


def _groups(items: Iterable[T]) -> Iterator[list[T]]:
    return portions(items, lambda _: 0, 1, _IDS)


def divided(files: Sequence[Leased], shares: int) -> Iterator[list[Leased]]:
    """Divide files into shares of similar size, largest file first; no share is empty."""
    parts: list[tuple[int, list[Leased]]] = [(0, []) for _ in range(min(shares, len(files)))]
    for file in sorted(files, key=lambda file: -file.size):
        least = min(range(len(parts)), key=lambda number: parts[number][0])
        size, part = parts[least]
        parts[least] = size + file.size, [*part, file]
    yield from (part for _, part in parts)
