"""PostgreSQL sessions of a table queue: an idle session blocks others only briefly, and all sessions use UTC."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from pipeline_platform.connectors.table_queue import TableQueue, queue_reading, queue_tables
from pipeline_platform.connectors.table_queue.leased_table import LeasedTable
from pipeline_platform.source.contract import SourceError
from pipeline_platform.sql import database
from pipeline_platform.sql.database import Database

ROOT = Path(__file__).parents[2]

STANDS_STILL = """
import signal, os, sys
from pipeline_platform.sql import database
database.IDLE_S = 1
from pipeline_platform.connectors.table_queue.leased_table import LeasedTable
from pipeline_platform.connectors.table_queue import TableQueue
queue = TableQueue(name="flights", url=sys.argv[1])
renew = LeasedTable.renew
def and_stop(*arguments):
    renewed = renew(*arguments)
    os.kill(os.getpid(), signal.SIGSTOP)
    return renewed
LeasedTable.renew = and_stop
queue.extend("lost", list)
"""
"""Program that stops between UPDATE and COMMIT, like a lost host."""


@pytest.fixture
def queue(postgres_url):
    made = TableQueue(name="flights", url=postgres_url)
    made.create()
    made.enqueue([b"1", b"2"])
    return made


@contextmanager
def another_session(url: str) -> Iterator[psycopg.Connection]:
    """A session that is not the queue's, and has no timeouts."""
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        yield connection
        connection.rollback()


def test_a_host_lost_before_its_commit_blocks_others_only_until_the_timeout(queue):
    queue.plan(1, 1, "lost")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", STANDS_STILL, queue.url], env=environment, cwd=ROOT) as process:
        try:
            assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT) is not None
            with another_session(queue.url) as connection:
                connection.execute("SET lock_timeout = '20s'")
                started = time.monotonic()
                connection.execute("UPDATE messages_receives SET leased_until = 0")
                connection.commit()
            assert time.monotonic() - started < 10
            [share] = queue.plan(2, 1, "next")
        finally:
            process.send_signal(signal.SIGKILL)
    assert share.messages == 2, "what the lost one had is given out again"


def test_an_idle_session_is_named_in_the_error(queue, monkeypatch):
    monkeypatch.setattr(database, "IDLE_S", 1)
    queue_tables.open_table.cache_clear()
    queue.plan(1, 1, "a")
    renew = LeasedTable.renew

    def slowly(table: LeasedTable, connection: sa.Connection, receive_id: str, lease_s: float) -> bool:
        renew(table, connection, receive_id, lease_s)
        time.sleep(2.5)
        return renew(table, connection, receive_id, lease_s)

    monkeypatch.setattr(LeasedTable, "renew", slowly)
    with pytest.raises(SourceError, match=r"idle-in-transaction timeout\. This process was idle inside a transaction"):
        queue.extend("a", list)


def test_a_reading_task_may_be_idle_while_it_writes(queue, monkeypatch):
    monkeypatch.setattr(database, "IDLE_S", 1)
    monkeypatch.setattr(queue_reading, "ROWS_PER_BATCH", 1)
    queue_tables.open_table.cache_clear()
    [share] = queue.plan(2, 1, "a")
    batches = queue.read(share, "a")
    first = next(batches)
    time.sleep(2.5)
    assert first.num_rows + sum(batch.num_rows for batch in batches) == 2


def test_options_in_the_url_take_precedence(postgres_url):
    url = sa.make_url(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    own = url.update_query_dict({"options": "-c lock_timeout=7s"}).render_as_string(hide_password=False)

    def shown(of: str, setting: str) -> str:
        with Database(of, "a test", SourceError).reading() as connection:
            return str(connection.exec_driver_sql(f"SHOW {setting}").scalar_one())

    assert shown(own, "lock_timeout") == "7s"
    assert shown(own, "idle_in_transaction_session_timeout") == "0"
    ours = url.render_as_string(hide_password=False)
    assert [shown(ours, name) for name in ("lock_timeout", "TimeZone", "statement_timeout")] == ["1min", "UTC", "0"]


def test_the_time_zone_of_a_server_changes_no_time(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        database = connection.info.dbname
        connection.execute(f"ALTER DATABASE {database} SET timezone = 'America/New_York'")  # type: ignore[arg-type, unused-ignore]
    with psycopg.connect(postgres_url) as connection:
        connection.execute(
            "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, data bytea, "
            "came timestamp DEFAULT now(), at timestamptz DEFAULT '2026-01-01 00:00:00+00')"
        )
    queue = TableQueue(name="orders", url=postgres_url, table="orders", created_column="came")
    queue.create()
    queue.enqueue([b"1"])

    oldest = queue.backlog().oldest

    assert oldest is not None
    assert abs(oldest - datetime.now(UTC)) < timedelta(minutes=10)
    whole = queue.model_copy(update={"data_column": None})
    [share] = whole.plan(1, 1, "a")
    [row] = [row for batch in whole.read(share, "a") for row in batch.to_pylist()]
    assert json.loads(row["data"])["at"] == "2026-01-01T00:00:00+00:00"
