"""The tables of a queue: inspected once per process, and the definitions of the tables beside it."""

import functools
import os
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from pipeline_platform.connectors.table_queue.leased_table import LeasedTable
from pipeline_platform.source.contract import SourceAwayError, SourceError
from pipeline_platform.source.options import host
from pipeline_platform.sql.database import Database, parse_url

COLUMNS_AS_JSON: Final = 60
"""Maximum columns of a row as JSON: SQLite accepts 127 arguments, two for each member of an object."""

CREATE: Final = "run `pipeline-platform table-queue create`"
"""Command that creates the tables."""

_WAYS_OUT: Final = {
    "unable to open database file": f"The url must name an existing file. To create it, {CREATE}.",
    "file is not a database": "Set url to a SQLite file.",
    "does not exist": f"Correct url or table, or {CREATE}.",
    "no such table": f"Correct table, or {CREATE}.",
    "permission denied for schema": "Grant the user of url USAGE on the schema, and CREATE to create tables.",
    "permission denied for sequence": "Grant the user of url USAGE on the sequence.",
    # UPDATE on the queue, because a planner locks the rows that it leases.
    "permission denied": "Grant the user of url SELECT, UPDATE and DELETE on the queue, with INSERT to enqueue, "
    "and SELECT, INSERT, UPDATE and DELETE on the tables beside it.",
}


@functools.lru_cache(maxsize=32)
def open_table(
    what: str, url: str, schema: str | None, name: str, *, partitions_apart: bool = False, **options: str | None
) -> LeasedTable:
    """Return the tables of a queue, inspected once per process: a queue is pickled and copied, so it keeps none itself.

    `what` names the queue in errors, `options` are names of columns. Raises `SourceError` if the table or a column does
    not exist, or the id column is unsuitable.
    """
    database = database_at(what, url, create=False)
    with database.reading() as connection:
        inspector = sa.inspect(connection)
        if not inspector.has_table(name, schema=schema):
            raise database.refusal(f"table {name!r} does not exist. Correct table, or {CREATE}.")
        found = {column["name"]: column["type"] for column in inspector.get_columns(name, schema=schema)}
        for option, column in options.items():
            if column is not None and column not in found:
                has = ", ".join(sorted(found))
                raise database.refusal(
                    f"{option} {column!r} is not a column of table {name!r}. Set {option} to one of {has}."
                )
        id_ = str(options["id_column"])
        unique: list[Any] = [inspector.get_pk_constraint(name, schema=schema)["constrained_columns"]]
        unique += [constraint["column_names"] for constraint in inspector.get_unique_constraints(name, schema=schema)]
        unique += [index["column_names"] for index in inspector.get_indexes(name, schema=schema) if index["unique"]]
    if [id_] not in unique:
        raise database.refusal(f"id_column must be unique, got {id_!r}. Set it to a primary key or a unique column.")
    kind = next((kind for kind in (int, str, UUID) if _python_type(found[id_]) is kind), None)
    if kind is None:
        wanted = "Set it to a column of integers, texts or UUIDs."
        raise database.refusal(f"id_column {id_!r} has the unsupported type {found[id_]!r}. {wanted}")
    if options["data_column"] is None and database.is_sqlite and len(found) > COLUMNS_AS_JSON:
        most = f"SQLite supports JSON objects of up to {COLUMNS_AS_JSON} columns, and the table has {len(found)}"
        raise database.refusal(f"data_column is None, but {most}. Set data_column.")
    # Not a full `sa.Table`: constraints and indexes of a user's table are left alone.
    queue = sa.table(name, *(sa.column(*column) for column in found.items()), schema=schema)
    columns = {option: queue.c[column] for option, column in options.items() if column is not None}
    id_type = found[id_]
    if database.is_sqlite:
        id_type = sa.Integer() if kind is int else sa.Text()
    leases, receives = _beside(schema, name, id_type, kind)
    return LeasedTable(database, queue, leases, receives, kind, columns, partitions_apart)


def database_at(what: str, url: str, *, create: bool, keep: bool = False) -> Database:
    """Return a queue's database. Its connections are not kept by default: each use is a single bulk statement."""
    return Database(url, what, SourceError, away=SourceAwayError, ways_out=_WAYS_OUT, create=create, keep=keep)


def row_id() -> sa.types.TypeEngine[int]:
    """Return the type of a generated id: 64 bits, but SQLite's row id must be declared INTEGER."""
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _python_type(type_: sa.types.TypeEngine[Any]) -> type | None:
    try:
        return type_.python_type
    except NotImplementedError:
        return None


def _beside(schema: str | None, name: str, id_type: sa.types.TypeEngine[Any], kind: type) -> tuple[sa.Table, sa.Table]:
    tables = sa.MetaData(schema=schema)
    leases = sa.Table(
        f"{name}_leases",
        tables,
        sa.Column("id", id_type, primary_key=True, autoincrement=False),
        sa.Column("receive", row_id()),
        sa.Column("attempts", sa.Integer, nullable=False),
        sqlite_with_rowid=kind is int,
    )
    receives = sa.Table(
        f"{name}_receives",
        tables,
        # An identity column: unlike a serial, it needs no permission on its sequence.
        sa.Column("id", row_id(), sa.Identity(), primary_key=True),
        sa.Column("receive_id", sa.Text, unique=True),
        sa.Column("leased_until", sa.Double),
        sa.Column("spans", sa.Text),
        sqlite_autoincrement=True,
    )
    return leases, receives


def place_of(url: str, schema: str | None, name: str) -> str:
    """Return the canonical name of a table, for `Source.places`."""
    address = parse_url(url)
    if address.get_backend_name() == "sqlite":
        return f"table {name.lower()!r} of {os.path.realpath(str(address.database))}"
    server = str(address.query.get("host", address.host or ""))
    return f"table {schema or 'public'}.{name} of {host(server)}:{address.port or 5432}/{address.database}"
