"""Reading the messages that a receive has leased, in small batches and with payloads as bytes."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from itertools import compress
from typing import Any, Final

import sqlalchemy as sa

from pipeline_platform.connectors.table_queue import id_spans
from pipeline_platform.connectors.table_queue.leased_table import LeasedTable
from pipeline_platform.source.contract import Share

ROWS_PER_BATCH: Final = 2_000
BYTES_PER_BATCH: Final = 8 << 20
"""A batch ends at the limit that is reached first, so that several batches fit beside a task's work.

With 2,000 rows the conversion to columns stays in the processor's cache, which takes half as long as with 10,000.
"""

READING_IDLE_S: Final = 3_600
"""Timeout of a reading transaction, which is idle while the task writes the messages. It locks no row."""


QueueColumns = Mapping[str, Sequence[Any]]
"""Columns `id`, `data` and, if the queue has them, `metadata`, `partition` and `created`; and `attempts` if it may
exceed 1."""


def read(table: LeasedTable, connection: sa.Connection, share: Share, receive_id: str) -> Iterator[QueueColumns]:
    """Yield the messages of a share in batches."""
    leases, receives = table.leases, table.receives
    receive = sa.select(receives.c.id).where(receives.c.receive_id == receive_id)
    beside = [name for name in ("metadata", "partition") if f"{name}_column" in table.columns]
    texts = [_as_text(table, table.columns[f"{name}_column"]).label(name) for name in beside]
    columns = [_payload(table).label("data"), *texts]
    if table.created is not None:
        columns.append(table.created.label("created"))
    if not table.database.is_sqlite:
        connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{READING_IDLE_S}s'")
    if "to" in share.at:
        by_row = (
            sa.select(leases.c.id, *columns, leases.c.attempts)
            .select_from(leases.join(table.queue, table.id == leases.c.id))
            .where(leases.c.receive == receive.scalar_subquery())
            .where(leases.c.id <= table.kind(share.at["to"]))
            .order_by(leases.c.id)
            .limit(share.messages)
        )
        if share.at.get("after") is not None:
            by_row = by_row.where(leases.c.id > table.kind(share.at["after"]))
        yield from _fetched(table, connection, by_row)
    for spans in id_spans.near([(first, last) for first, last in share.at.get("spans", ())], id_spans.HOLE):
        bounds = (spans[0][0], spans[-1][1])
        apart = set(connection.execute(sa.select(leases.c.id).where(leases.c.id.between(*bounds))).scalars())
        within = sa.select(table.id.label("id"), *columns).where(table.id.between(*bounds)).order_by(table.id)
        for part in _fetched(table, connection, within):
            ids = id_spans.inside(part["id"], spans)[0]
            if len(ids) < len(part["id"]) or apart:
                mine = set(ids) - apart
                is_mine = [id_ in mine for id_ in part["id"]]
                part = {name: list(compress(values, is_mine)) for name, values in part.items()}  # noqa: PLW2901
            if part["id"]:
                yield part


def _fetched(table: LeasedTable, connection: sa.Connection, query: sa.Select[Any]) -> Iterator[QueueColumns]:
    names = query.selected_columns.keys()
    if table.database.is_sqlite:
        yield from _by_size(connection.execute(query).cursor, names)
        return
    # A server-side cursor: otherwise the driver fetches the whole share. Binary, because payloads are bytes.
    compiled = query.compile(dialect=connection.dialect)
    raw: Any = connection.connection.driver_connection
    with raw.cursor("share", binary=True) as cursor:
        cursor.execute(str(compiled), compiled.params)
        yield from _by_size(cursor, names)


def _as_text(table: LeasedTable, column: sa.ColumnClause[Any]) -> sa.ColumnElement[Any]:
    """Return a column as text or bytes: drivers fail at deeply nested JSON and at text that is not UTF-8."""
    if table.database.is_sqlite:
        return sa.cast(column, sa.LargeBinary)
    return column if isinstance(column.type, sa.LargeBinary) else sa.cast(column, sa.Text)


def _payload(table: LeasedTable) -> sa.ColumnElement[Any]:
    """Return the payload as bytes, converted by the database."""
    data = table.columns.get("data_column")
    if table.database.is_sqlite:
        # SQLite does not enforce a column's type, so each value is cast.
        return sa.cast(_row_as_json(table) if data is None else data, sa.LargeBinary)
    if data is not None and isinstance(data.type, sa.LargeBinary):
        return data
    if data is None:
        name = table.queue.name.replace('"', '""')
        # With a star: the bare name would mean the column if a column has the table's name.
        text: sa.ColumnElement[Any] = sa.func.row_to_json(sa.literal_column(f'"{name}".*'))
    else:
        text = data
    return sa.func.convert_to(sa.cast(text, sa.Text), "UTF8")


def _row_as_json(table: LeasedTable) -> sa.ColumnElement[Any]:
    members: list[Any] = []
    for column in table.queue.c:
        plain = sa.type_coerce(column, sa.Text)
        digits = sa.literal("\\x").concat(sa.func.lower(sa.func.hex(plain)))  # as PostgreSQL writes it
        members += [sa.literal(column.name), sa.case((sa.func.typeof(plain) == "blob", digits), else_=plain)]
    return sa.func.json_object(*members)


def _by_size(cursor: Any, names: Sequence[str]) -> Iterator[QueueColumns]:
    """Fetch few rows first, and more if they are small: all rows of a fetch are in memory at once."""
    step = 16
    while rows := cursor.fetchmany(min(step, ROWS_PER_BATCH)):
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        yield columns
        texts = (columns.get(name, ()) for name in ("data", "metadata", "partition"))
        fetched = sum(sum(map(len, filter(None, values))) for values in texts)
        step = max(1, min(4 * step, BYTES_PER_BATCH * len(rows) // (fetched + 1)))


def read_time(value: Any) -> datetime | None:
    """Return a value of the created column as a time in UTC; None if it is not a time. No time zone means UTC."""
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        elif isinstance(value, int | float):
            value = datetime.fromtimestamp(value, UTC)
        elif isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        if isinstance(value, datetime):
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    return None
