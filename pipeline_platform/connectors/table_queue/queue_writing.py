"""Inserting messages into the table of a queue."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import sqlalchemy as sa


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
    payloads: Iterable[bytes],
    metadata: Iterable[Mapping[str, Any] | None] | None,
    metadata_column: str | None,
    partition_column: str | None,
    *,
    as_text: bool,
) -> Iterator[tuple[Any, ...]]:
    """Yield the values of each message, in the order payload, metadata, partition."""
    missing: Any = object()
    for payload, note in zip_longest(payloads, () if metadata is None else metadata, fillvalue=missing):
        if payload is missing or (note is missing and metadata is not None):
            which = "more" if payload is missing else "fewer"
            raise ValueError(f"metadata has {which} entries than payloads. Pass one or None per payload.")
        if not isinstance(payload, bytes):
            raise TypeError(f"a payload must be bytes, got {type(payload).__name__}. Encode it.")
        data = payload.decode() if as_text else payload
        if metadata is None:
            yield (data,)
            continue
        text = () if metadata_column is None else (None if note is None else json.dumps(note, default=str),)
        partition = () if partition_column is None else ((note or {}).get(partition_column),)
        yield data, *text, *partition
