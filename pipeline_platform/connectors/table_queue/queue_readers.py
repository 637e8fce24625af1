"""Marks of the deployments that lease from a table, a row for each beside it."""

import logging

import sqlalchemy as sa

from pipeline_platform.control.database import Database, insert
from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.source.readers import LATELY_S, Reader

_LOG = logging.getLogger(__name__)


class QueueReaders:
    """The marks at one queue. A user who may not write or read them does without, and hears of it once a process.

    Args:
        database: Where the queue is.
        table: Of the marks.
        is_there: Whether that was made: a queue of an earlier release has none.
    """

    def __init__(self, database: Database, table: sa.Table, *, is_there: bool) -> None:
        self._database, self._table, self._is_usable = database, table, is_there

    def mark(self, me: Reader) -> None:
        """Leave a mark, and remove those that count no longer."""
        if not self._is_usable:
            return
        row, table = me._asdict(), self._table
        try:
            with self._database.writing() as connection:
                connection.execute(sa.delete(table).where(table.c.seen_at < me.seen_at - LATELY_S))
                new = insert(connection, table).values(**row)
                connection.execute(new.on_conflict_do_update(index_elements=["id"], set_=row))
        except SourceAwayError:  # whoever reads the queue says so
            pass
        except SourceError as error:
            self._do_without(error)

    def found(self) -> list[Reader] | None:
        """The marks; None where they cannot be read."""
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
        _LOG.warning("which deployments read this queue is not known: %s", error)


def readers_table(tables: sa.MetaData, queue: str) -> sa.Table:
    """Describe the table of the marks."""
    names = sa.Column("id", sa.Text, primary_key=True), sa.Column("name", sa.Text, nullable=False)
    return sa.Table(f"{queue}_readers", tables, *names, sa.Column("seen_at", sa.Double, nullable=False))
