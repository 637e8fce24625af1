"""Errors of a table queue: missing tables, columns and permissions, and invalid options."""

import secrets
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from pipeline_platform.connectors.table_queue import TableQueue, queue_tables
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import SourceError
from pipeline_platform.sql.database import Database
from tests.fixtures.table_queue import ids, receive


def test_a_missing_file_is_refused_and_not_created(tmp_path):
    path = tmp_path / "missing.db"
    queue = TableQueue(name="flights", url=f"sqlite:///{path}")
    with pytest.raises(
        SourceError,
        match=r"source 'flights', table 'messages' of .*url must name an existing file. To create it, run `pipeline",
    ):
        queue.check_ready()
    with pytest.raises(SourceError, match="url must name an existing file"):
        queue.enqueue([b"1"])
    assert not path.exists()


def test_missing_tables_and_columns_are_named_with_their_options(queue, run_sql):
    queue.check_ready()
    for change, words in {
        (
            "table",
            "mesages",
        ): "table 'mesages' does not exist. Correct table, or run `pipeline-platform table-queue create`",
        (
            "id_column",
            "key",
        ): "id_column 'key' is not a column of table 'messages'. Set id_column to one of created, data, id, metadata",
        ("id_column", "metadata"): "id_column must be unique, got 'metadata'",
        ("data_column", "body"): "data_column 'body' is not a column",
        ("created_column", "data"): None,
    }.items():
        wrong = queue.model_copy(update=dict([change]))
        if words is None:
            queue.enqueue([b"1"])
        with pytest.raises(SourceError) as refused:
            wrong.check_ready()
        assert (words or "created_column 'data' contains b'1', which is not a valid time") in str(refused.value)


def test_a_table_without_leases_beside_it_is_refused(url, run_sql):
    run_sql("CREATE TABLE messages (id INTEGER PRIMARY KEY, data TEXT)")
    with pytest.raises(
        SourceError,
        match=r"table 'messages_leases' for leases does not exist. To create it, run `pipeline-platform",
    ):
        TableQueue(name="flights", url=url).check_ready()


def test_ids_that_are_not_integers_are_refused(queue):
    with pytest.raises(SourceError, match=r"id_column contains integers, but an id is not valid: .*'x'"):
        queue.ack("a", ["1", "x"])


TWO_BESIDE = ("sales.outbox_leases", "sales.outbox_receives")


RIGHTS = [
    ("USAGE", "SCHEMA sales"),
    *((right, "sales.outbox") for right in ("SELECT", "UPDATE", "DELETE")),
    *((right, table) for right in ("SELECT", "INSERT", "UPDATE", "DELETE") for table in TWO_BESIDE),
]
"""Permissions that a run needs if another user created the tables."""


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_run_needs_exactly_the_documented_permissions(url, run_sql):
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
def test_a_missing_permission_on_a_sequence_is_named(url, run_sql):
    run_sql("CREATE TABLE messages (id bigserial PRIMARY KEY, data bytea)")
    owner = TableQueue(name="outbox", url=url)
    owner.create()
    user, writes = new_user(owner, run_sql)
    run_sql(f"GRANT SELECT, INSERT ON messages TO {user}")
    with pytest.raises(
        SourceError, match=r"permission denied for sequence messages_id_seq.*\. Grant .* USAGE on the sequence"
    ):
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
    """Return the name of a new user without permissions, and the queue as that user."""
    user = f"runs_{secrets.token_hex(6)}"
    run_sql(f"CREATE ROLE {user} LOGIN PASSWORD 'theirs'")
    url = sa.make_url(owner.url).set(username=user, password="theirs")
    return user, owner.model_copy(update={"url": url.render_as_string(hide_password=False)})


def take_through(queue: TableQueue, receive_id: str) -> None:
    """Make all calls of a run to its source."""
    queue.check_ready()
    assert queue.backlog().messages > 4
    assert ids(receive(queue, f"{receive_id}, given up", demand=1))
    queue.abandon(f"{receive_id}, given up", list)
    again, new, later, last = ids(receive(queue, receive_id, demand=4))
    assert queue.extend(receive_id, list)
    assert queue.release(receive_id, [new]) == []
    assert queue.release(receive_id, [later], delay_s=1) == []
    assert queue.ack(receive_id, [again, last]) == []


def test_a_full_disk_is_named_in_the_error(tmp_path, monkeypatch):
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
