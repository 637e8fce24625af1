"""A table queue whose database is unavailable: errors are of their own type, and nothing is lost afterwards."""

import os
import re
import socket
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql

from pipeline_platform.connectors.table_queue import TableQueue, queue_reading, queue_tables
from pipeline_platform.connectors.table_queue.leased_table import LeasedTable
from pipeline_platform.source.contract import Share, SourceAwayError, SourceError
from pipeline_platform.sql import database, database_errors
from pipeline_platform.sql.database import Database
from tests.fixtures.postgres import administrator, cut_all_others
from tests.fixtures.table_queue import ids, numbers, read, receive

HELD = Share(at={"spans": [[1, 3]]}, messages=3)
ALL_CALLS: dict[str, Callable[[TableQueue], Any]] = {
    "backlog": lambda queue: queue.backlog(),
    "wait": lambda queue: queue.wait(0),
    "check_ready": lambda queue: queue.check_ready(),
    "plan": lambda queue: queue.plan(5, 2, "another"),
    "read": lambda queue: read(queue, HELD, "held"),
    "ack": lambda queue: queue.ack("held", ["1"]),
    "release": lambda queue: queue.release("held", ["1"]),
    "extend": lambda queue: queue.extend("held", list),
    "abandon": lambda queue: queue.abandon("held", list),
    "held": lambda queue: queue.held(),
    "send": lambda queue: queue.send([b"x"]),
    "create": lambda queue: queue.create(),
}
ON_TABLES = sorted(ALL_CALLS.keys() - {"create"})
"""The calls that need the tables. `create` creates them, and does not change existing ones."""


def filled(url: str, **options: Any) -> TableQueue:
    """A queue of ten messages, of which the receive `held` has leased three."""
    queue = TableQueue(name="flights", url=url, **options)
    queue.create()
    queue.enqueue([b"%d" % number for number in range(1, 11)])
    queue.plan(3, 1, "held")
    return queue


@pytest.fixture
def fresh_tables():
    """Let the process inspect its tables again, with other timeouts."""
    queue_tables.open_table.cache_clear()
    yield
    queue_tables.open_table.cache_clear()


def test_each_call_to_a_stopped_server_raises_and_works_after_the_restart(own_postgres_server):
    queue = filled(own_postgres_server.address)
    own_postgres_server.stop()
    for name, call in ALL_CALLS.items():
        with pytest.raises(SourceAwayError, match=r"flights.*Connection refused.*that the server is running") as said:
            call(queue)
        assert str(sa.make_url(queue.url).password) not in str(said.value), name
    own_postgres_server.start()
    for call in ALL_CALLS.values():
        call(queue)
    queue.abandon("another", list)
    assert ids(receive(queue, "next")) == numbers(2, 11), "but for the first, acknowledged, and with the one just sent"


SAYS_WHO = re.compile(r"lock timeout\. Another session.*pg_blocking_pids\(\) and end")


@pytest.mark.usefixtures("fresh_tables")
def test_no_call_waits_for_a_lock_for_longer_than_its_time_out(postgres_url, monkeypatch):
    monkeypatch.setattr(database, "LOCK_S", 1)
    queue = filled(postgres_url)
    with psycopg.connect(postgres_url) as another, ThreadPoolExecutor(len(ON_TABLES)) as pool:
        another.execute("LOCK TABLE messages, messages_leases, messages_receives IN ACCESS EXCLUSIVE MODE")
        waiting = {name: pool.submit(call, queue) for name, call in ALL_CALLS.items() if name in ON_TABLES}
        refused = {name: wait.exception() for name, wait in waiting.items()}
        another.rollback()
    assert {type(error) for error in refused.values()} == {SourceAwayError}
    assert [name for name, error in refused.items() if not SAYS_WHO.search(str(error))] == []
    for call in ALL_CALLS.values():
        call(queue)


@pytest.mark.usefixtures("fresh_tables")
def test_a_planner_waits_for_another_planner_no_longer_than_the_timeout(postgres_url, monkeypatch):
    monkeypatch.setattr(database, "LOCK_S", 1)
    queue = filled(postgres_url, partition_column="customer", one_receive_per_partition=True)
    stalled = queue._table()
    with stalled.database.writing() as connection:
        stalled.lease(connection, "stalled", 60, 1, 1)
        with pytest.raises(SourceAwayError, match="lock timeout"):
            queue.plan(1, 1, "next")


def test_a_server_that_became_a_standby_counts_as_unavailable(postgres_url):
    filled(postgres_url)
    queue = TableQueue(name="flights", url=f"{postgres_url}?options=-c%20default_transaction_read_only%3Don")
    with pytest.raises(SourceAwayError, match=r"read-only transaction\. The server may be a standby"):
        queue.plan(1, 1, "a")


@pytest.mark.usefixtures("fresh_tables")
def test_an_interrupted_read_can_be_repeated(postgres_url, monkeypatch):
    monkeypatch.setattr(queue_reading, "ROWS_PER_BATCH", 1)
    queue = filled(postgres_url)
    (share,) = queue.plan(7, 1, "a")
    batches = queue.read(share, "a")
    next(batches)
    with administrator(postgres_url) as connection:
        assert cut_all_others(connection) == 1
    with pytest.raises(SourceAwayError, match=r"(terminating connection|connection is lost).*ended the session"):
        list(batches)
    assert ids(read(queue, share, "a")) == numbers(4, 10)


@pytest.mark.parametrize(
    "statement", ["acknowledge", "give_back", "lease", "end_what_ran_out", "renew", "give_back_all"]
)
def test_an_interrupted_transaction_is_rolled_back_and_can_be_repeated(postgres_url, monkeypatch, statement):
    queue = filled(postgres_url)
    call = {"acknowledge": "ack", "give_back": "release", "renew": "extend", "give_back_all": "abandon"}
    work = getattr(LeasedTable, statement)

    def and_cut(*arguments: Any) -> Any:
        done = work(*arguments)
        with administrator(postgres_url) as connection:
            assert cut_all_others(connection) == 1
        return done

    monkeypatch.setattr(LeasedTable, statement, and_cut)
    with pytest.raises(SourceAwayError, match=r"terminating connection.*ended the session"):
        ALL_CALLS[call.get(statement, "plan")](queue)
    monkeypatch.undo()

    assert queue.held()[0][::2] == ("held", 3)
    assert queue.backlog().messages == 7
    assert ALL_CALLS[call.get(statement, "plan")](queue) is not False


def test_a_changed_password_is_a_permanent_error_and_is_not_quoted(postgres_url, postgres_server):
    owner, user = filled(postgres_url), f"user_{os.urandom(4).hex()}"
    with administrator(postgres_url) as connection:
        change = sql.SQL("{} ROLE {} LOGIN SUPERUSER PASSWORD {}")
        connection.execute(change.format(sql.SQL("CREATE"), sql.Identifier(user), sql.Literal("the-old-one")))
        url = sa.make_url(owner.url).set(username=user, password="the-old-one").render_as_string(hide_password=False)
        queue = owner.model_copy(update={"url": url})
        assert queue.backlog().messages == 7
        connection.execute(change.format(sql.SQL("ALTER"), sql.Identifier(user), sql.Literal("the-new-one")))

        for call in ALL_CALLS.values():
            with pytest.raises(
                SourceError, match=r"authentication failed.*Check the user and the password in url"
            ) as said:
                call(queue)
            assert not isinstance(said.value, SourceAwayError)
            assert "the-old-one" not in str(said.value)
        connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(user)))


def test_a_dropped_table_is_a_permanent_error(postgres_url):
    queue = filled(postgres_url)
    with administrator(postgres_url) as connection:
        connection.execute("DROP TABLE messages, messages_leases, messages_receives")
    for name in ON_TABLES:
        with pytest.raises(SourceError, match=r"does not exist.* run `pipeline-platform table-queue create`") as said:
            ALL_CALLS[name](queue)
        assert not isinstance(said.value, SourceAwayError)
    queue.create()
    assert queue.backlog().messages == 0


@pytest.mark.usefixtures("fresh_tables")
def test_a_locked_sqlite_file_is_a_transient_error(tmp_path, monkeypatch):
    queue = filled(f"sqlite:///{tmp_path}/queue.db")
    monkeypatch.setattr(database, "BUSY_S", 0.2)
    with closing(sqlite3.connect(tmp_path / "queue.db", isolation_level=None)) as another:
        another.execute("BEGIN IMMEDIATE")
        with pytest.raises(SourceAwayError, match=r"database is locked\. Another process has locked"):
            queue.plan(1, 1, "next")


REFUSED = 'connection failed: connection to server at "127.0.0.1", port 5432 failed: '


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("Connection refused", True),
        ("server closed the connection unexpectedly", True),
        ("FATAL:  the database system is starting up", True),
        ("FATAL:  the database system is shutting down", True),
        ("FATAL:  the database system is in recovery mode", True),
        ("FATAL:  sorry, too many clients already", True),
        ('FATAL:  too many connections for role "few"', True),
        ("FATAL:  remaining connection slots are reserved for non-replication superuser connections", True),
        ('FATAL:  password authentication failed for user "x"', False),
        ('FATAL:  database "x" does not exist', False),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "x", database "x", no encryption', False),
        ("FATAL:  unsupported startup parameter: options", False),
        ("fe_sendauth: no password supplied", False),
        ("server does not support SSL, but SSL was required", False),
    ],
)
def test_a_refused_connection_is_transient_if_waiting_helps(said, passes):
    assert database_errors.passes(psycopg.OperationalError(REFUSED + said)) is passes


def test_too_many_connections_are_a_transient_error(postgres_url):
    with administrator(postgres_url) as connection:
        name = connection.info.dbname
        connection.execute(sql.SQL("ALTER DATABASE {} CONNECTION LIMIT 0").format(sql.Identifier(name)))
        connection.execute("CREATE ROLE few LOGIN PASSWORD 'few'")
        try:
            url = sa.make_url(postgres_url).set(username="few", password="few").render_as_string(hide_password=False)
            with pytest.raises(SourceAwayError, match=r"too many connections .*\. Run fewer runs and tasks"):
                TableQueue(name="flights", url=url).backlog()
        finally:
            connection.execute("DROP ROLE few")


def test_connections_detect_a_lost_host_unless_the_url_overrides_it(postgres_url):
    def option(url: str, level: int, name: int) -> int:
        with Database(url, "a test", SourceError).reading() as connection:
            raw: Any = connection.connection.driver_connection
            with socket.socket(fileno=os.dup(raw.fileno())) as open_socket:
                return open_socket.getsockopt(level, name)

    own = f"{postgres_url}?keepalives_idle=77&connect_timeout=3"

    assert option(postgres_url, socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert option(own, socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        assert option(postgres_url, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert option(own, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 77
        assert option(postgres_url, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


def test_a_server_that_does_not_answer_is_named_with_the_fix_and_without_the_drivers_question():
    queue = TableQueue(name="flights", url="postgresql+psycopg://shop@127.0.0.1:1/shop")
    with pytest.raises(SourceAwayError) as raised:
        queue.backlog()
    said = str(raised.value)
    assert said.endswith("Connection refused. Check the host and port in url, and that the server is running"), said
