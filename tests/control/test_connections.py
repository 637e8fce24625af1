"""Load of the control store on PostgreSQL: statements of tasks, and sessions through a pooler."""

import os
import pickle
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest
import sqlalchemy as sa

from pipeline_platform.control.pace import Pace
from pipeline_platform.control.store import ControlStore
from pipeline_platform.model.options import RateLimiting
from servers.server import Program, free_ports

HUNDRED = RateLimiting(allowed_messages=100, interval=timedelta(hours=1))
"""A limit per hour, so that intervals hardly ever end during a test."""


@pytest.fixture
def store(postgres_url):
    with closing(ControlStore(postgres_url)) as store:
        store.rate_limiting("flights", None)  # creates the tables
        yield store


@contextmanager
def statements():
    """Record the statements of all engines of this process."""
    asked = []

    def ask(connection, cursor, statement, *_):
        asked.append(statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", ask)
    yield asked
    sa.event.remove(sa.Engine, "before_cursor_execute", ask)


def in_a_task(thing):
    return pickle.loads(pickle.dumps(thing))


def test_a_task_without_a_limit_asks_nothing(store):
    pace = Pace(store, "flights", None, None, ["flights", "r"])
    assert pace.portion(50) == 50
    with statements() as asked:
        assert in_a_task(pace).permitted(50)[0] == 50
    assert asked == []


@pytest.mark.parametrize("set_it", ["limit", "stop"])
def test_a_task_that_begins_later_looks_for_a_limit_and_a_stop(store, set_it, monkeypatch):
    pace = Pace(store, "flights", None, None, ["flights", "r"])
    pace.portion(50)
    if set_it == "limit":
        store.set_rate_limiting("flights", HUNDRED)
    else:
        store.stop("r", timedelta(0))
    now = time.time()
    monkeypatch.setattr("pipeline_platform.control.pace.time.time", lambda: now + 6)
    assert in_a_task(pace).permitted(50)[0] == (1 if set_it == "limit" else 0)


def test_a_block_of_permits_is_three_statements_of_a_task(store):
    store.take({"flights": HUNDRED}, 1)
    with closing(in_a_task(store)) as task:
        task.take({"flights": HUNDRED}, 1)  # SQLAlchemy sends these on a new connection
        with statements() as asked:
            assert task.take({"flights": HUNDRED}, 10, ["flights"]).messages == 10
    assert len(asked) == 3


def test_blocks_taken_at_once_never_exceed_the_limit(postgres_url):
    """Twelve sessions take permits of two limits, in both orders."""
    beside = RateLimiting(allowed_messages=70, interval=timedelta(hours=1))

    def take(number):
        with closing(ControlStore(postgres_url)) as own:
            limits = dict([("flights", HUNDRED), ("trains", beside)][:: 1 if number % 2 else -1])
            return sum(own.take(limits, 3).messages for _ in range(10))

    with ThreadPoolExecutor(12) as threads:
        assert sum(threads.map(take, range(12))) == 70
    with closing(ControlStore(postgres_url)) as store:
        assert store.take({"flights": HUNDRED}, 100).messages == 30


@pytest.fixture
def pooled_url(postgres_url):
    """The same database through pgbouncer, which gives each transaction one of two sessions."""
    if not (program := shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")):
        pytest.skip("pgbouncer not found; on Debian: apt-get install pgbouncer")
    url = sa.make_url(postgres_url)
    (port,) = free_ports(1)
    with psycopg.connect(postgres_url, autocommit=True) as administrator:
        for setting in ("idle_in_transaction_session_timeout = '30s'", "lock_timeout = '60s'", "timezone = 'UTC'"):
            administrator.execute(f"ALTER DATABASE {url.database} SET {setting}")
    begin = []
    with TemporaryDirectory() as at:
        if os.getuid() == 0:  # it refuses to run as root
            shutil.chown(at, "nobody")
            begin = ["setpriv", "--reuid=nobody", "--clear-groups"]
        folder = Path(at)
        (folder / "users").write_text(f'"{url.username}" "{url.password}"\n')
        (folder / "pooler.ini").write_text(
            f"""
            [databases]
            {url.database} = host={url.host} port={url.port}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {port}
            unix_socket_dir =
            auth_type = plain
            auth_file = {folder}/users
            pool_mode = transaction
            default_pool_size = 2
            ignore_startup_parameters = options
            """.replace("\n            ", "\n")
        )
        pooled = url.set(port=port).render_as_string(hide_password=False)
        with Program(pooled, [*begin, program, f"{folder}/pooler.ini"], folder, "process up", {}).running():
            yield pooled


@pytest.mark.faults
def test_fifty_tasks_share_two_sessions_of_a_pooler(pooled_url, postgres_url):
    with closing(ControlStore(pooled_url)) as store, ExitStack() as closing_up:
        store.rate_limiting("flights", HUNDRED)
        tasks = [closing_up.enter_context(closing(in_a_task(store))) for _ in range(50)]
        with ThreadPoolExecutor(50) as threads:
            taken = threads.map(lambda task: sum(task.take({"flights": HUNDRED}, 3).messages for _ in range(5)), tasks)
            taken = sum(taken)
        with psycopg.connect(postgres_url) as looking:
            others = "datname = current_database() AND pid <> pg_backend_pid()"
            (sessions,) = looking.execute(f"SELECT count(*) FROM pg_stat_activity WHERE {others}").fetchone()
    assert (taken, sessions) == (100, 2)
