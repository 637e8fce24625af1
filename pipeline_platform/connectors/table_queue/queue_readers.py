"""Marks of the deployments that lease from a table, as rows of a table beside it."""

import logging

import sqlalchemy as sa

from pipeline_platform.control.database import Database, insert
from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.source.readers import LATELY_S, Reader

_LOG = logging.getLogger(__name__)


class QueueReaders:
    """Marks of a queue's readers. Without permission to read or write them they are unavailable, which is logged once.

    Args:
        database: Database of the queue.
        table: Table of the marks.
        is_there: Whether the table exists: a queue of an earlier release lacks it.
    """

    def __init__(self, database: Database, table: sa.Table, *, is_there: bool) -> None:
        self._database, self._table, self._is_usable = database, table, is_there

    def mark(self, me: Reader) -> None:
        """Write a mark, and remove expired marks."""
        if not self._is_usable:
            return
        row, table = me._asdict(), self._table
        try:
            with self._database.writing() as connection:
                connection.execute(sa.delete(table).where(table.c.seen_at < me.seen_at - LATELY_S))
                new = insert(connection, table).values(**row)
                connection.execute(new.on_conflict_do_update(index_elements=["id"], set_=row))
        except SourceAwayError:  # the receive itself reports this
            pass
        except SourceError as error:
            self._do_without(error)

    def found(self) -> list[Reader] | None:
        """Return the marks; None if they cannot be read."""
        if not self._is_usable:
            return None
        try:
            with self._database.reading() as connection:
                return [Reader(*row) for row in connection.execute(sa.select(self._table))]
        except SourceError as error:
            self._do_without(error)
            return None

    def _do_without(self, error: SourceError) -> None:
        self._is_usable = False
        _LOG.warning("Other deployments that read this queue cannot be detected: %s", error)


def readers_table(tables: sa.MetaData, queue: str) -> sa.Table:
    """Return the definition of the table of marks."""
    names = sa.Column("id", sa.Text, primary_key=True), sa.Column("name", sa.Text, nullable=False)
    return sa.Table(f"{queue}_readers", tables, *names, sa.Column("seen_at", sa.Double, nullable=False))
