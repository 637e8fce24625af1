"""What a table queue refuses, and in which words."""

import secrets
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from pipeline_platform.connectors.table_queue import TableQueue, queue_tables
from pipeline_platform.control.database import Database
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import SourceError
from tests.fixtures.table_queue import ids, receive


def test_a_missing_file_is_refused_and_not_made(tmp_path):
    path = tmp_path / "missing.db"
    queue = TableQueue(name="flights", url=f"sqlite:///{path}")
    with pytest.raises(
        SourceError,
        match=r"flights, table 'messages' of .*url must name a file that is there; to make it, run `pipeline",
    ):
        queue.check_ready()
    with pytest.raises(SourceError, match="url must name a file"):
        queue.enqueue([b"1"])
    assert not path.exists()


def test_what_is_not_there_is_named_with_its_option(queue, run_sql):
    queue.check_ready()
    for change, words in {
        (
            "table",
            "mesages",
        ): "there is no table 'mesages'; correct table, or run `pipeline-platform table-queue create`",
        ("id_column", "key"): "id_column is 'key', and table 'messages' has only created, data, id, metadata",
        ("id_column", "metadata"): "id_column is 'metadata', which is not unique",
        ("data_column", "body"): "data_column is 'body', and table",
        ("created_column", "data"): None,
    }.items():
        wrong = queue.model_copy(update=dict([change]))
        if words is None:
            queue.enqueue([b"1"])
        with pytest.raises(SourceError) as refused:
            wrong.check_ready()
        assert (words or "created_column is 'data', and b'1' in it is no time") in str(refused.value)


def test_a_table_without_leases_beside_it_is_refused(url, run_sql):
    run_sql("CREATE TABLE messages (id INTEGER PRIMARY KEY, data TEXT)")
    with pytest.raises(
        SourceError, match=r"there is no table 'messages_leases' for leases: run `pipeline-platform table-queue create`"
    ):
        TableQueue(name="flights", url=url).check_ready()


def test_ids_that_are_no_integers_are_refused(queue):
    with pytest.raises(SourceError, match=r"id_column holds integers, and among the ids is another: .*'x'"):
        queue.ack("a", ["1", "x"])


TWO_BESIDE = ("sales.outbox_leases", "sales.outbox_receives")


RIGHTS = [
    ("USAGE", "SCHEMA sales"),
    *((right, "sales.outbox") for right in ("SELECT", "UPDATE", "DELETE")),
    *((right, table) for right in ("SELECT", "INSERT", "UPDATE", "DELETE") for table in TWO_BESIDE),
]
"""What a run needs where another user made the tables."""


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_run_needs_each_of_the_rights_that_are_asked_for_and_no_other(url, run_sql):
    run_sql("CREATE SCHEMA sales")
    owner = TableQueue(name="outbox", url=url, table="sales.outbox", created_column="created")
    owner.create()
    owner.enqueue(b"x" for _ in range(100))
    user, runs = new_user(owner, run_sql)
    for right, where in RIGHTS:
        run_sql(f"GRANT {right} ON {where} TO {user}")

    take_through(runs, "all granted")

    for right, where in RIGHTS:
        run_sql(f"REVOKE {right} ON {where} FROM {user}")
        way_out = "Grant the user of url " + ("USAGE" if right == "USAGE" else "SELECT, UPDATE and DELETE on the queue")
        with pytest.raises(SourceError, match=f"permission denied for (table|schema).*\\. {way_out}"):
            take_through(runs, f"without {right} on {where}")
        run_sql(f"GRANT {right} ON {where} TO {user}")
    with pytest.raises(SourceError, match=r"permission denied for table outbox\. .*, with INSERT to enqueue"):
        runs.enqueue([b"1"])
    run_sql(f"GRANT INSERT ON sales.outbox TO {user}")
    assert runs.enqueue([b"1"]) == 1


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_sequence_of_ones_own_table_is_named_where_it_must_be_granted(url, run_sql):
    run_sql("CREATE TABLE messages (id bigserial PRIMARY KEY, data bytea)")
    owner = TableQueue(name="outbox", url=url)
    owner.create()
    user, writes = new_user(owner, run_sql)
    run_sql(f"GRANT SELECT, INSERT ON messages TO {user}")
    with pytest.raises(SourceError, match=r"permission denied for sequence messages_id_seq.*\. Grant .* USAGE on it"):
        writes.enqueue([b"1"])


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_row_that_postgresql_refuses_is_not_quoted(url, run_sql):
    run_sql("CREATE TABLE messages (id bigserial PRIMARY KEY, data text CHECK (length(data) < 5))")
    queue = TableQueue(name="outbox", url=url)
    queue.create()
    with pytest.raises(SourceError, match="violates check constraint") as refused:
        queue.enqueue([b"payload"])
    assert "payload" not in str(refused.value)


def new_user(owner: TableQueue, run_sql: Callable[..., Any]) -> tuple[str, TableQueue]:
    """Name, and the same queue, of a user who may do nothing yet."""
    user = f"runs_{secrets.token_hex(6)}"
    run_sql(f"CREATE ROLE {user} LOGIN PASSWORD 'theirs'")
    url = sa.make_url(owner.url).set(username=user, password="theirs")
    return user, owner.model_copy(update={"url": url.render_as_string(hide_password=False)})


def take_through(queue: TableQueue, receive_id: str) -> None:
    """All that a run asks of its source."""
    queue.check_ready()
    assert queue.backlog().messages > 4
    assert ids(receive(queue, f"{receive_id}, given up", demand=1))
    queue.abandon(f"{receive_id}, given up", list)
    again, new, later, last = ids(receive(queue, receive_id, demand=4))
    assert queue.extend(receive_id, list)
    assert queue.release(receive_id, [new]) == []
    assert queue.release(receive_id, [later], delay_s=1) == []
    assert queue.ack(receive_id, [again, last]) == []


def test_a_server_that_is_not_there_is_refused():
    queue = TableQueue(name="flights", url="postgresql://someone:secret@127.0.0.1:1/queue")
    with pytest.raises(SourceError, match="Check the host and port in url") as refused:
        queue.backlog()
    assert "secret" not in str(refused.value)
    assert "secret" not in repr(queue)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("sqlite://", "another in-memory database"),
        ("mysql://user:secret@host/db", "must be for SQLite or PostgreSQL, got 'mysql'"),
        ("secret", "Use sqlite:///<file> or postgresql"),
    ],
)
def test_a_wrong_url_is_refused_when_the_queue_is_built(wrong, words):
    with pytest.raises(ValidationError, match=words) as refused:
        TableQueue(name="flights", url=wrong)
    assert "secret" not in str(refused.value)


def test_a_full_disk_is_told_as_one(tmp_path, monkeypatch):
    queue = TableQueue(name="flights", url=f"sqlite:///{tmp_path}/queue.db")
    queue.create()
    connect = Database._connect_sqlite

    def full(database: Database) -> Any:
        connection = connect(database)
        connection.execute("PRAGMA max_page_count = 40")
        return connection

    with monkeypatch.context() as small:
        small.setattr(Database, "_connect_sqlite", full)
        queue_tables.open_table.cache_clear()
        with pytest.raises(SourceError, match=r"database or disk is full\. Free space on the disk"):
            queue.enqueue(b"x" * 10_000 for _ in range(100))
    queue_tables.open_table.cache_clear()
    assert queue.backlog() == Backlog(0)
