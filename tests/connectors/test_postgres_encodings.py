"""PostgreSQL databases with an encoding other than UTF-8: queues and the control store."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.source.contract import SourceError
from tests.fixtures.postgres import administrator
from tests.fixtures.received import received

TEXT = "naïve 湖"


@pytest.fixture
def ascii_url(postgres_server: str) -> Iterator[str]:
    """URL of a database that stores bytes without an encoding."""
    name = "as_they_come"
    how = "ENCODING 'SQL_ASCII' TEMPLATE template0"
    with administrator(postgres_server) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} " + how).format(sql.Identifier(name)))
    yield postgres_server.removesuffix("postgres") + name
    with administrator(postgres_server) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def queue(ascii_url):
    made = TableQueue(name="queue", url=ascii_url, table="orders", id_column="code", data_column="note")
    with psycopg.connect(ascii_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (code text PRIMARY KEY, note text)")
        connection.execute(b"INSERT INTO orders VALUES ('" + "ï1".encode() + b"', '" + TEXT.encode() + b"')")
    made.create()
    return made


def test_a_queue_in_a_database_of_sql_ascii_is_read_as_utf_8(queue):
    assert queue.backlog().messages == 1
    (row,) = received(queue, 10)
    assert (row["message_id"], row["data"].decode()) == ("ï1", TEXT)
    assert queue.ack(row["ack_ref"], [row["ack_id"]]) == []
    assert queue.backlog().messages == 0


def test_text_that_is_not_utf_8_is_a_source_error_with_the_encoding(queue, ascii_url):
    with psycopg.connect(ascii_url, autocommit=True) as connection:
        connection.execute(b"UPDATE orders SET note = '\xe9'")
    with pytest.raises(SourceError, match=r"invalid byte sequence .* has the encoding SQL_ASCII"):
        received(queue, 10)


def test_a_control_store_in_a_database_of_sql_ascii_works(ascii_url):
    control = ControlStore(ascii_url)
    control.pause("orders", TEXT)
    assert control.paused("orders") == TEXT
    assert control.claim("orders", "r1", "run", wanted=1, capacity=1, lease_s=60) == 1
    assert [claim.receive_id for claim in control.in_flight("orders")] == ["r1"]
    control.close()
