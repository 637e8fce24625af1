"""Leases of a queue in a SQL table: each message is leased to one receive, and none is lost."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline_platform.connectors.table_queue.table_queue_source import LOST, TableQueue
from pipeline_platform.source.contract import Refused, SourceError
from pipeline_platform.sql.database import Database
from tests.fixtures.table_queue import Rows, do, ids, numbers, read, receive


def test_the_oldest_messages_are_leased_first(queue, run_sql):
    for number in (10, 20, 30):
        run_sql("INSERT INTO messages (id, data) VALUES (:id, :data)", id=number, data=b"")
    assert ids(receive(queue, "held", demand=1)) == ["10"]
    assert ids(receive(queue, "given back", demand=1)) == ["20"]
    queue.abandon("given back", list)
    for number in (5, 15, 25, 35):
        run_sql("INSERT INTO messages (id, data) VALUES (:id, :data)", id=number, data=b"")

    first, rest = receive(queue, "a", demand=4), receive(queue, "b")

    assert [(row["message_id"], row["redelivered"]) for row in first] == [
        ("20", True),
        ("5", False),
        ("15", False),
        ("25", False),
    ]
    assert ids(rest) == ["30", "35"]


def test_an_expired_receive_is_leased_again_only_once(queue, let_run_out):
    queue.enqueue(b"x" for _ in range(2_000))
    queue.plan(2_000, 1, "dead")
    let_run_out("dead")
    together = threading.Barrier(4)

    def take_over(receive_id: str) -> Rows:
        together.wait()
        return receive(queue, receive_id, demand=800)

    with ThreadPoolExecutor(4) as pool:
        rows = [row for part in pool.map(take_over, "abcd") for row in part]
    rows += receive(queue, "e", demand=2_000)

    assert sorted(ids(rows)) == sorted(numbers(1, 2_000))
    assert all(row["redelivered"] for row in rows)


def test_planners_take_turns(postgres_url):
    queue = TableQueue(name="flights", url=postgres_url)
    queue.create()
    queue.enqueue([b"1", b"2", b"3"])
    slow, quick = queue._table(), ThreadPoolExecutor(1)
    with quick, slow.database.writing() as connection:
        slow.lease(connection, "slow", 60, 2, 1)
        waits = quick.submit(receive, queue, "quick")
        while not connection.exec_driver_sql("SELECT 1 FROM pg_locks WHERE NOT granted").all():
            assert not waits.done()
        connection.commit()
    assert ids(waits.result()) == ["3"]


def test_an_acknowledgement_waits_for_a_planner_that_leases_the_message(postgres_url):
    queue = TableQueue(name="flights", url=postgres_url)
    queue.create()
    queue.enqueue([b"1", b"2"])
    queue.release("early", ids(receive(queue, "early")))
    held = ids(receive(queue, "late"))
    with ThreadPoolExecutor(1) as pool:
        with Database(postgres_url, "a test", SourceError).writing() as planner:
            planner.exec_driver_sql("SELECT FROM messages WHERE id = 1 FOR UPDATE")
            planner.exec_driver_sql("UPDATE messages_leases SET receive = 99, attempts = 3 WHERE id = 1")
            late = pool.submit(queue.ack, "late", held)
            while not planner.exec_driver_sql("SELECT 1 FROM pg_locks WHERE NOT granted").all():
                assert not late.done()
        refused = late.result()

    assert refused == [Refused("1", LOST, lost=True)]
    assert do(postgres_url, "SELECT id FROM messages") == do(postgres_url, "SELECT id FROM messages_leases") == [(1,)]


def test_an_ended_receive_cannot_read(queue, let_run_out):
    queue.enqueue([b"1"])
    [share] = queue.plan(1, 1, "a")
    let_run_out("a")
    queue.plan(1, 1, "b")
    with pytest.raises(SourceError, match=r"receive 'a' has ended.*Raise lease_s \(now 60 s\)"):
        read(queue, share, "a")


def test_a_second_plan_of_a_receive_invalidates_the_earlier_shares(queue):
    queue.enqueue([b"1", b"2", b"3"])
    queue.plan(2, 2, "a")
    rows = receive(queue, "a", demand=1)
    assert [(row["message_id"], row["redelivered"]) for row in rows] == [("1", True)]
    assert queue.backlog().messages == 2


def test_extending_fails_once_an_expired_receive_was_planned_again(queue, let_run_out):
    queue.enqueue([b"1", b"2", b"3"])
    queue.plan(3, 1, "a")
    let_run_out("a")
    queue.plan(1, 1, "b")
    assert not queue.extend("a", list), "one message is lost"
    assert queue.extend("b", list)
    assert ids(receive(queue, "c")) == ["2", "3"]


def test_scattered_and_contiguous_ids_are_acknowledged_exactly(queue, monkeypatch, let_run_out):
    monkeypatch.setattr("pipeline_platform.connectors.table_queue.table_queue_source.IDS_PER_TRANSACTION", 100)
    queue.enqueue(b"x" for _ in range(1_000))
    receive(queue, "a")
    chosen = numbers(1, 150) + numbers(300, 1_000)[::7] + ["250", "250"]
    assert queue.ack("a", chosen[::-1]) == []
    let_run_out("a")
    assert set(ids(receive(queue, "b"))) == set(numbers(1, 1_000)) - set(chosen)


def test_deliveries_are_counted_exactly(queue):
    queue.enqueue([b"1", b"2"], metadata=[{"key": 1}, None])
    for nth in range(3):
        receive(queue, f"run-{nth}", demand=1)
        queue.release(f"run-{nth}", ["1"])
    rows = receive(queue, "last")
    assert [json.loads(row["metadata"] or "{}") for row in rows] == [{"key": 1, "deliveries": 4}, {}]


def test_finished_receives_leave_no_rows_behind(queue, run_sql, let_run_out):
    queue.enqueue([b"1", b"2", b"3"])
    receive(queue, "a", demand=2)
    queue.release("a", ["2"])
    queue.ack("a", ["1"])
    let_run_out("a")
    receive(queue, "b", demand=1)
    assert run_sql("SELECT receive_id FROM messages_receives") == [("b",)]
    assert run_sql("SELECT id, attempts FROM messages_leases") == [(2, 2)]
