"""Rows as PostgreSQL's COPY reads them."""

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from pyarrow import csv
from pydantic_core import to_json
from sqlalchemy.dialects import postgresql

_TYPES: Final[dict[pa.DataType, Callable[[], sa.types.TypeEngine[Any]]]] = {
    pa.bool_(): sa.Boolean,
    pa.int32(): sa.Integer,
    pa.int64(): sa.BigInteger,
    pa.float64(): sa.Double,
    pa.string(): sa.Text,
    pa.binary(): postgresql.BYTEA,
    pa.date32(): sa.Date,
    pa.timestamp("us", "UTC"): lambda: sa.DateTime(timezone=True),
    pa.timestamp("us"): sa.DateTime,
}
_CSV: Final = csv.WriteOptions(include_header=False, quoting_style="needed")
"""Text is quoted, also if it is empty; an unquoted empty field is null, as COPY reads it."""


def column_type(column: pa.DataType) -> sa.types.TypeEngine[Any]:
    """Return the type of a column in PostgreSQL. Lists, models and dicts are stored as JSON."""
    if pa.types.is_decimal(column):
        return sa.Numeric(column.precision, column.scale)
    return _TYPES.get(column, postgresql.JSONB)()


def copy_rows(
    connection: sa.Connection, table: sa.Table, names: Sequence[str], batches: Iterator[pa.RecordBatch]
) -> None:
    """Append the columns with these names to a table."""
    from psycopg import sql

    raw: Any = connection.connection.driver_connection
    into = sql.Identifier(*filter(None, (table.schema, table.name)))
    listed = sql.SQL(", ").join(map(sql.Identifier, names))
    statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(into, listed)
    with raw.cursor() as cursor, cursor.copy(statement) as copy:
        for batch in batches:
            text = io.BytesIO()
            columns = [_printable(batch.column(name)) for name in names]
            csv.write_csv(pa.RecordBatch.from_arrays(columns, [*names]), text, _CSV)
            copy.write(text.getbuffer())


def _printable(column: pa.Array) -> pa.Array:
    """Return a column whose values PyArrow writes as COPY reads them."""
    if pa.types.is_binary(column.type):
        return pa.array([None if value is None else f"\\x{value.hex()}" for value in column.to_pylist()], pa.string())
    if pa.types.is_decimal(column.type):
        return pc.cast(column, pa.string())
    if column.type in _TYPES:
        return column
    return pa.array(map(_json, column.to_pylist(maps_as_pydicts="strict")), pa.string())


def _json(value: Any) -> str | None:
    return None if value is None else to_json(value, bytes_mode="base64", inf_nan_mode="strings").decode()
