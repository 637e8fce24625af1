"""Tables in PostgreSQL. A transaction stores the rows of a receive together with its id."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import sqlalchemy as sa
from pyarrow import csv
from pydantic import Field
from pydantic_core import to_json
from sqlalchemy.dialects import postgresql

from pipeline_platform.control.database import Database
from pipeline_platform.sinks.contract import Publication, Sink, SinkAwayError, SinkError

_KEEP: Final = sa.text("interval '30 days'")
"""Time for which a sink keeps the ids of published receives. A receive is published until its run or a later one has
acknowledged it, usually within seconds."""
_LONGEST: Final = 63
"""Longest name of a table in PostgreSQL."""
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


class PostgresSink(Sink):
    """Tables `<pipeline>_<batcher>` in a PostgreSQL database, with the columns of the batchers' tables in the lake."""

    url: str = Field(
        repr=False, description="SQLAlchemy URL: postgresql://user:password@host/database. Write @ / ? # as %40 %2F ..."
    )
    namespace: str = Field("public", min_length=1, description="Schema of the database. Must exist.")

    def ensure(self, pipeline: str, table: str, columns: pa.Schema) -> None:
        """Create a table, or add its new columns."""
        wanted = self._table(pipeline, table, columns)
        with self._database.writing() as connection:
            # Two runs may do this at the same time.
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext("pipeline_platform"))))
            self._receives.metadata.create_all(connection)
            self._forget(connection)
            inspector = sa.inspect(connection)
            if not inspector.has_table(wanted.name, schema=self.namespace):
                wanted.create(connection)
                return
            known = {column["name"]: column["type"] for column in inspector.get_columns(wanted.name, self.namespace)}
            for column in wanted.columns:
                if (there := known.get(column.name)) is None:
                    self._add(connection, wanted, column)
                elif _shown(there) != _shown(column.type):
                    raise SinkError(
                        f"sink {self.name!r}: column {wanted.fullname}.{column.name} has the type {_shown(there)}, and "
                        f"{pipeline}/{table} needs {_shown(column.type)}. Change the column, or rename the field"
                    )

    def publish(self, publication: Publication) -> bool:
        """Store the rows of a receive and its id in one transaction, which waits for another one with the same id."""
        table = self._table(publication.pipeline, publication.table, publication.columns)
        mark = postgresql.insert(self._receives).on_conflict_do_nothing()

        def store(connection: sa.Connection) -> bool:
            ids = {"table_name": table.name, "receive_id": publication.receive_id}
            if not connection.execute(mark.values(ids).returning(self._receives.c.receive_id)).first():
                return False
            mine = sa.select(table.c.receive_id).where(table.c.receive_id == publication.receive_id)
            if connection.execute(mine.limit(1)).first():  # its id was forgotten
                return False
            if publication.replaces:
                is_replaced = table.c.receive_id == sa.any_(sa.literal([*publication.replaces], _TEXTS))
                in_windows = table.c.window == sa.any_(sa.literal([*publication.windows], _TEXTS))
                connection.execute(table.delete().where(is_replaced, in_windows))
            self._copy(connection, table, publication.rows())
            return True

        return self._database.write(store)

    def is_published(self, pipeline: str, table: str, receive_id: str) -> bool:
        """Whether the id of a receive is stored."""
        receives, name = self._receives, _name(pipeline, table)
        found = sa.select(receives).where(receives.c.table_name == name, receives.c.receive_id == receive_id)
        with self._database.reading() as connection:
            return connection.execute(found).first() is not None

    def erase(self, pipeline: str, table: str, messages: Mapping[str, Sequence[str]]) -> int:
        """Delete the rows of messages in one transaction."""
        ids = sa.column("source", sa.Text), sa.column("message_id", sa.Text)
        there = sa.table(_name(pipeline, table), *ids, schema=self.namespace)
        is_mine = [
            sa.and_(there.c.source == source, there.c.message_id == sa.any_(sa.literal([*some], _TEXTS)))
            for source, some in messages.items()
        ]

        def delete(connection: sa.Connection) -> int:
            if not sa.inspect(connection).has_table(there.name, schema=self.namespace):
                return 0
            return connection.execute(sa.delete(there).where(sa.or_(sa.false(), *is_mine))).rowcount

        return self._database.write(delete)

    def close(self) -> None:
        """Close the connections of this process."""
        self._database.close()

    @cached_property
    def _database(self) -> Database:
        what = f"sink {self.name!r}"
        database = Database(self.url, what, SinkError, away=SinkAwayError, keep=True)
        if database.is_sqlite:
            raise SinkError(
                f"{what}: url must be for PostgreSQL, got {database}. Use postgresql://user:password@host/database"
            )
        return database

    @cached_property
    def _receives(self) -> sa.Table:
        return sa.Table(
            "pipeline_platform_receives",
            sa.MetaData(schema=self.namespace),
            sa.Column("table_name", sa.Text, primary_key=True),
            sa.Column("receive_id", sa.Text, primary_key=True),
            sa.Column("published_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        )

    def _table(self, pipeline: str, table: str, columns: pa.Schema) -> sa.Table:
        if len(name := _name(pipeline, table)) > _LONGEST:
            raise SinkError(f"sink {self.name!r}: {name!r} is longer than {_LONGEST} characters. Shorten a name")
        types = ((field.name, _type(field.type)) for field in columns)
        made = sa.Table(name, sa.MetaData(schema=self.namespace), *(sa.Column(*column) for column in types))
        sa.Index(None, made.c.receive_id)  # a replay removes rows by it
        return made

    def _add(self, connection: sa.Connection, table: sa.Table, column: sa.Column[Any]) -> None:
        quote = connection.dialect.identifier_preparer.quote
        added = f"ADD COLUMN {quote(column.name)} {column.type.compile(connection.dialect)}"
        connection.exec_driver_sql(f"ALTER TABLE {quote(self.namespace)}.{quote(table.name)} {added}")

    def _forget(self, connection: sa.Connection) -> None:
        connection.execute(self._receives.delete().where(self._receives.c.published_at < sa.func.now() - _KEEP))

    @staticmethod
    def _copy(connection: sa.Connection, table: sa.Table, batches: Iterator[pa.RecordBatch]) -> None:
        from psycopg import sql

        raw: Any = connection.connection.driver_connection
        into = sql.Identifier(str(table.schema), table.name)
        names = sql.SQL(", ").join(map(sql.Identifier, (column.name for column in table.columns)))
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(into, names)
        with raw.cursor() as cursor, cursor.copy(statement) as copy:
            for batch in batches:
                text = io.BytesIO()
                columns = [_printable(batch.column(column.name)) for column in table.columns]
                csv.write_csv(pa.RecordBatch.from_arrays(columns, [c.name for c in table.columns]), text, _CSV)
                copy.write(text.getbuffer())


_TEXTS: Final = postgresql.ARRAY(sa.Text)


def _name(pipeline: str, table: str) -> str:
    return f"{pipeline}_{table}"


def _type(column: pa.DataType) -> sa.types.TypeEngine[Any]:
    """Return the type of a column in PostgreSQL. Lists, models and dicts are stored as JSON."""
    if pa.types.is_decimal(column):
        return sa.Numeric(column.precision, column.scale)
    return _TYPES.get(column, postgresql.JSONB)()


def _shown(type_: sa.types.TypeEngine[Any]) -> str:
    return type_.compile(postgresql.dialect())  # type: ignore[no-untyped-call]


def _printable(column: pa.Array) -> pa.Array:
    """Return a column whose values PyArrow writes as COPY reads them."""
    if pa.types.is_binary(column.type):
        return pa.array([None if value is None else f"\\x{value.hex()}" for value in column.to_pylist()], pa.string())
    if pa.types.is_decimal(column.type):
        return pc.cast(column, pa.string())
    if column.type in _TYPES:
        return column
    values = column.to_pylist(maps_as_pydicts="strict")
    texts = (None if value is None else to_json(value, inf_nan_mode="strings").decode() for value in values)
    return pa.array(texts, pa.string())
