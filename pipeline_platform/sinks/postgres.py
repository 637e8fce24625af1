"""Tables in PostgreSQL. A transaction stores the rows of a receive together with its id."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Self

import pyarrow as pa
import sqlalchemy as sa
from pydantic import Field, model_validator
from sqlalchemy.dialects import postgresql

from pipeline_platform.model.strict_options import did_you_mean
from pipeline_platform.sinks.contract import Publication, Sink, SinkAwayError, SinkError
from pipeline_platform.sinks.postgres_copy import column_type, copy_rows
from pipeline_platform.sql.database import Database

_KEEP: Final = sa.text("interval '30 days'")
"""Time for which a sink keeps the ids of published receives. A receive is published until its run or a later run
has acknowledged it, usually within seconds."""
_LONGEST: Final = 63
"""Longest name of a table in PostgreSQL."""


class PostgresSink(Sink):
    """Tables `<pipeline>_<batcher>` in a PostgreSQL database, with the columns of the batchers' tables in the lake."""

    url: str = Field(
        repr=False, description="SQLAlchemy URL: postgresql://user:password@host/database. Write @ / ? # as %40 %2F ..."
    )
    namespace: str = Field("public", min_length=1, description="Schema of the database. Must exist.")
    key: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Columns that identify a row. The tables have one row per key, which is updated. Empty: all rows.",
    )
    order: str | None = Field(
        None,
        description="With `key`: column whose greatest value is the newest row of a key, such as a version or a time.",
    )

    @model_validator(mode="after")
    def _has_key_and_order(self) -> Self:
        if self.key and self.order is None:
            raise SinkError(
                f"PostgresSink.order: must be set with key={self.key}, got None. Use the column whose greatest value "
                "is the newest row of a key, such as a version or a time."
            )
        if self.order is not None and not self.key:
            raise SinkError(
                f"PostgresSink.key: must be set with order={self.order!r}, got (). Use the columns that identify a row."
            )
        return self

    def ensure(self, pipeline: str, table: str, columns: pa.Schema) -> None:
        """Create a table, or add its new columns."""
        wanted = self._table(pipeline, table, columns)
        with self._database.writing() as connection:
            self._expect_utf_8(connection)
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
            self._ensure_key(inspector, connection, wanted)

    def publish(self, publication: Publication) -> bool:
        """Store the rows of a receive and its id in one transaction. It waits for a transaction with the same id."""
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
            if self.key:
                self._upsert(connection, table, publication.rows())
            else:
                copy_rows(connection, table, table.columns.keys(), publication.rows())
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
        storable = {source: [key for key in some if "\0" not in key] for source, some in messages.items()}
        is_mine = [
            sa.and_(there.c.source == source, there.c.message_id == sa.any_(sa.literal(some, _TEXTS)))
            for source, some in storable.items()
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
        types = ((field.name, column_type(field.type)) for field in columns)
        made = sa.Table(name, sa.MetaData(schema=self.namespace), *(sa.Column(*column) for column in types))
        sa.Index(None, made.c.receive_id)  # a replay removes rows by it
        if self.order is not None:
            for column in (*self.key, self.order):
                if column not in made.c:
                    option = "key" if column in self.key else "order"
                    reason = f"must be a column of {pipeline}/{table}, got {column!r}"
                    raise SinkError(
                        f"PostgresSink.{option}: {reason}. {did_you_mean(column, columns.names, 'columns')}"
                    )
            sa.Index(None, *(made.c[column] for column in self.key), unique=True, postgresql_nulls_not_distinct=True)
        return made

    def _expect_utf_8(self, connection: sa.Connection) -> None:
        """Refuse a database that cannot store every text, because such a row would keep its receive unpublished."""
        if (encoding := connection.exec_driver_sql("SHOW server_encoding").scalar_one()) != "UTF8":
            raise SinkError(
                f"sink {self.name!r}: the database has the encoding {encoding}, which cannot store every text. Use a "
                "database with UTF8"
            )

    def _ensure_key(self, inspector: sa.Inspector, connection: sa.Connection, table: sa.Table) -> None:
        """Create the unique index of the key; refuse others, because rows that violate one would block all runs."""
        indexes = inspector.get_indexes(table.name, self.namespace)
        known = {index["name"]: tuple(index["column_names"]) for index in indexes if index["unique"]}
        for name, columns in known.items():
            if {*columns} != {*self.key}:
                raise SinkError(
                    f"sink {self.name!r}: {table.fullname} has the unique index {name} over {columns}, and key is "
                    f"{self.key}. Drop the index, or set key to its columns"
                )
        if self.key and not known:
            keys = [table.c[name] for name in self.key]
            if connection.execute(sa.select(*keys).group_by(*keys).having(sa.func.count() > 1).limit(1)).first():
                raise SinkError(
                    f"sink {self.name!r}: {table.fullname} has several rows of a key. Delete the older rows, or rename "
                    "the batcher, so that it gets a new table"
                )
            next(index for index in table.indexes if index.unique).create(connection)

    def _add(self, connection: sa.Connection, table: sa.Table, column: sa.Column[Any]) -> None:
        quote = connection.dialect.identifier_preparer.quote
        added = f"ADD COLUMN {quote(column.name)} {column.type.compile(connection.dialect)}"
        connection.exec_driver_sql(f"ALTER TABLE {quote(self.namespace)}.{quote(table.name)} {added}")

    def _forget(self, connection: sa.Connection) -> None:
        connection.execute(self._receives.delete().where(self._receives.c.published_at < sa.func.now() - _KEEP))

    def _upsert(self, connection: sa.Connection, table: sa.Table, batches: Iterator[pa.RecordBatch]) -> None:
        """Insert the newest row of each key, or update a stored row that is not newer."""
        assert self.order is not None
        names, place = table.columns.keys(), "pipeline_platform_place"
        columns = (sa.Column(column.name, column.type) for column in table.columns)
        in_order = sa.Column(place, sa.BigInteger, sa.Identity())
        staged = sa.Table(
            f"{place}s", sa.MetaData(), *columns, in_order, prefixes=["TEMPORARY"], postgresql_on_commit="DROP"
        )
        staged.create(connection)
        copy_rows(connection, staged, names, batches)
        newest_first = staged.c[self.order].desc().nulls_last(), in_order.desc()
        rank = sa.func.row_number().over(partition_by=[staged.c[name] for name in self.key], order_by=newest_first)
        ranked = sa.select(*(staged.c[name] for name in names), rank.label(place)).subquery()
        newest = sa.select(*(ranked.c[name] for name in names)).where(ranked.c[place] == 1)
        newest = newest.order_by(*(ranked.c[name] for name in self.key))  # runs lock rows in the same order
        insert = postgresql.insert(table).from_select(names, newest)
        stored, new = table.c[self.order], insert.excluded
        updated = {name: new[name] for name in names}
        is_newer = sa.or_(stored.is_(None), new[self.order] >= stored)
        connection.execute(insert.on_conflict_do_update(index_elements=self.key, set_=updated, where=is_newer))


_TEXTS: Final = postgresql.ARRAY(sa.Text)


def _name(pipeline: str, table: str) -> str:
    return f"{pipeline}_{table}"


def _shown(type_: sa.types.TypeEngine[Any]) -> str:
    return type_.compile(postgresql.dialect())  # type: ignore[no-untyped-call]
