"""Inserting messages into the table of a queue."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from pipeline_platform.source.metadata import as_json


def copy_in(connection: sa.Connection, queue: sa.TableClause, names: Sequence[str], rows: Iterable[Any]) -> int:
    """Insert rows by the driver: SQLAlchemy needs a dict for each, and up to five times as long."""
    raw: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        # The given order of columns may differ from the table's.
        in_order = sa.table(queue.name, *map(sa.column, names), schema=queue.schema)
        insert = str(in_order.insert().compile(dialect=connection.dialect))
        return int(raw.executemany(insert, rows).rowcount)
    from psycopg import sql

    into = sql.Identifier(*filter(None, (queue.schema, queue.name)))
    columns = sql.SQL(", ").join(map(sql.Identifier, names))
    with raw.cursor() as cursor:
        with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(into, columns)) as copy:
            for row in rows:
                copy.write_row(row)
        return int(cursor.rowcount)


def rows_of(
    messages: Iterable[tuple[bytes, Mapping[str, Any]]],
    *,
    as_text: bool,
    has_metadata: bool,
    partition_column: str | None,
) -> Iterator[tuple[Any, ...]]:
    """Yield the values of each message, in the order payload, metadata, partition."""
    for payload, note in messages:
        text = (as_json(note) if note else None,) if has_metadata else ()
        partition = (note.get(partition_column),) if partition_column else ()
        yield payload.decode() if as_text else payload, *text, *partition
