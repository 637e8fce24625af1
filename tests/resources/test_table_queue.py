"""What a queue in a SQL table promises, on SQLite and on PostgreSQL."""

from __future__ import annotations

import json
import pickle
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from pipeline_platform.source.contract import Backlog, Refused, Share, SourceError
from resources import table_leases
from resources.table_queue import LOST, TableQueue
from tests.fixtures.processes import PROCESSES

Rows = list[dict[str, Any]]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the queue lives: an empty database of this test alone."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'a folder' / 'queue.db'}"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def queue(url: str) -> TableQueue:
    queue = TableQueue(name="flights", url=url, metadata_column="metadata", created_column="created")
    queue.create()
    return queue


@pytest.fixture
def run_sql(url: str) -> Callable[..., Any]:
    """Do what somebody else does to the database, behind the queue's back."""

    def run(statement: str, **values: Any) -> Any:
        engine = table_leases.engine_of(TableQueue(name="other", url=url).url, create=True)
        with engine.begin() as connection:
            result = connection.execute(sa.text(statement), values)
            return result.all() if result.returns_rows else None

    return run


@pytest.fixture
def let_run_out(run_sql: Callable[..., Any]) -> Callable[[str], None]:
    """Turn the clock: a receive's lease ran out a second ago."""
    return lambda receive_id: run_sql(
        "UPDATE messages_receives SET leased_until = leased_until - 61 WHERE receive_id = :id", id=receive_id
    )


def receive(queue: TableQueue, receive_id: str, demand: int = 1_000, concurrency: int = 2) -> Rows:
    shares = queue.plan(demand, concurrency, receive_id)
    return [row for share in shares for row in read(queue, share, receive_id)]


def read(queue: TableQueue, share: Share, receive_id: str) -> Rows:
    return [row for batch in queue.read(share, receive_id) for row in batch.to_pylist()]


def ids(rows: Rows) -> list[str]:
    return [row["message_id"] for row in rows]


def numbers(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last + 1)]


def test_a_receive_gets_the_oldest_messages_as_they_were_put_in(queue: TableQueue) -> None:
    assert queue.enqueue([b"first", b"second", b"third"], metadata=[{"key": 1}, None, {}]) == 3

    rows = receive(queue, "a", demand=2)

    assert rows[0] == {
        "source": "flights",
        "message_id": "1",
        "data": b"first",
        "metadata": '{"key": 1}',
        "ack_ref": "a",
        "ack_id": "1",
        "attempt": 1,
        "redelivered": False,
        "published_at": None,
    }
    assert [row["data"] for row in rows] == [b"first", b"second"]
    assert rows[1]["metadata"] is None


@pytest.mark.parametrize("payload", [b"", b"\x00", b"a\x00b", b"\xff\xfe", b"\\x41\t\n\\N", b"x" * 1_000_000])
def test_a_payload_comes_out_as_it_went_in(queue: TableQueue, payload: bytes) -> None:
    queue.enqueue([payload])

    assert [row["data"] for row in receive(queue, "a")] == [payload]


def test_large_payloads_come_in_small_batches(queue: TableQueue) -> None:
    queue.enqueue(b"%d" % number * 500_000 for number in range(1, 61))
    [share] = queue.plan(60, 1, "a")

    batches = list(queue.read(share, "a"))

    assert sum(batch.num_rows for batch in batches) == 60
    assert max(batch.nbytes for batch in batches) < 3 * table_leases.BYTES_PER_BATCH


def test_many_messages_are_divided_evenly_and_read_in_batches(queue: TableQueue) -> None:
    queue.enqueue(b"%d" % number for number in range(1, 5_001))

    shares = queue.plan(5_000, 3, "a")
    read_in_parallel = [list(queue.read(share, "a")) for share in shares]

    assert [share.messages for share in shares] == [1_667, 1_667, 1_666]
    assert [sum(batch.num_rows for batch in batches) for batches in read_in_parallel] == [1_667, 1_667, 1_666]
    rows = [row for batches in read_in_parallel for batch in batches for row in batch.to_pylist()]
    assert [row["data"] for row in rows] == [b"%d" % number for number in range(1, 5_001)]
    [share] = queue.model_copy().plan(5_000, 1, "a")
    assert [batch.num_rows for batch in queue.read(share, "a")] == [2_000, 2_000, 1_000]


def test_fewer_messages_than_tasks_make_fewer_shares(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2"])

    assert [share.messages for share in queue.plan(10, 8, "a")] == [1, 1]
    assert queue.plan(10, 8, "b") == []
    assert queue.plan(0, 8, "c") == []


def test_shares_can_be_read_in_other_processes(queue: TableQueue) -> None:
    queue.enqueue(b"%d" % number for number in range(100))
    shares = queue.plan(100, 2, "a")

    with ProcessPoolExecutor(2, mp_context=PROCESSES) as pool:
        rows = [row for part in pool.map(read, [queue] * 2, shares, ["a"] * 2) for row in part]

    assert ids(rows) == numbers(1, 100)


def test_a_share_can_be_read_again_and_nothing_is_marked_by_that(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2"])
    [share] = queue.plan(2, 1, "a")

    assert read(queue, share, "a") == read(queue, share, "a")
    assert not any(row["redelivered"] for row in read(queue, share, "a"))


def test_what_is_leased_is_given_to_nobody_else(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2", b"3"])

    assert ids(receive(queue, "a", demand=2)) == ["1", "2"]
    assert ids(receive(queue, "b", demand=2)) == ["3"]
    assert receive(queue, "c") == []


def test_the_oldest_are_leased_first_wherever_leases_are(queue: TableQueue, run_sql: Callable[..., Any]) -> None:
    for number in (10, 20, 30):
        run_sql("INSERT INTO messages (id, data) VALUES (:id, :data)", id=number, data=b"")
    assert ids(receive(queue, "held", demand=1)) == ["10"]
    assert ids(receive(queue, "given back", demand=1)) == ["20"]
    queue.abandon("given back")
    for number in (5, 15, 25, 35):
        run_sql("INSERT INTO messages (id, data) VALUES (:id, :data)", id=number, data=b"")

    first, rest = receive(queue, "a", demand=4), receive(queue, "b")

    assert [(row["message_id"], row["redelivered"]) for row in first] == [
        ("5", False),
        ("15", False),
        ("20", True),
        ("25", False),
    ]
    assert ids(rest) == ["30", "35"]


def test_concurrent_planners_never_lease_one_message(queue: TableQueue) -> None:
    queue.enqueue(b"x" for _ in range(3_000))
    planners = [f"planner-{number}" for number in range(6)]

    with ProcessPoolExecutor(3, mp_context=PROCESSES) as pool:
        received = list(pool.map(_receive_all_in_small_parts, [queue] * 6, planners))

    assert sorted(id_ for part in received for id_ in part) == sorted(numbers(1, 3_000))


def _receive_all_in_small_parts(queue: TableQueue, planner: str) -> list[str]:
    received: list[str] = []
    for nth in range(1_000):
        rows = receive(queue, f"{planner}-{nth}", demand=100)
        if not rows and not queue.backlog().messages:
            return received
        received += ids(rows)
    raise AssertionError(f"still {queue.backlog()} after {len(received)}")


def test_planners_take_an_expired_receive_over_once(queue: TableQueue, let_run_out: Callable[[str], None]) -> None:
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


def test_a_planner_who_saw_a_message_free_does_not_take_it_from_one_who_leased_it_since(postgres_url: str) -> None:
    queue = TableQueue(name="flights", url=postgres_url)
    queue.create()
    queue.enqueue([b"1", b"2", b"3"])
    engine = table_leases.engine_of(queue.url)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END'"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER wait BEFORE INSERT ON messages_leases FOR EACH ROW WHEN (NEW.id = 1) "
            "EXECUTE FUNCTION wait()"
        )
    with ThreadPoolExecutor(1) as pool, engine.connect() as gate:
        gate.exec_driver_sql("SELECT pg_advisory_lock(1)")
        slow = pool.submit(receive, queue, "slow")
        while not gate.exec_driver_sql("SELECT 1 FROM pg_locks WHERE NOT granted").all():
            assert not slow.done()
        quick = ids(receive(queue, "quick"))
        gate.exec_driver_sql("SELECT pg_advisory_unlock(1)")

    assert quick == ["2", "3"], "it skips what the other has locked"
    assert ids(slow.result()) == ["1"]
    assert queue.ack("quick", quick) == []


def test_a_lease_that_ran_out_is_delivered_again_and_marked(
    queue: TableQueue, let_run_out: Callable[[str], None]
) -> None:
    queue.enqueue([b"1", b"2", b"3"], metadata=[{"key": 1}, None, None])
    receive(queue, "a", demand=2)
    let_run_out("a")

    rows = receive(queue, "b")

    assert [(row["message_id"], row["redelivered"], row["attempt"]) for row in rows] == [
        ("1", True, 1),
        ("2", True, 1),
        ("3", False, 1),
    ]
    assert [json.loads(row["metadata"] or "{}") for row in rows] == [{"key": 1, "deliveries": 2}, {"deliveries": 2}, {}]


def test_a_tiny_lease_runs_out_by_the_clock_of_the_database(queue: TableQueue) -> None:
    queue.enqueue([b"1"])
    hasty = queue.model_copy(update={"lease_s": 1e-6})
    hasty.plan(1, 1, "a")

    assert ids(receive(queue, "b")) == ["1"]


def test_a_receive_that_is_over_reads_nothing(queue: TableQueue, let_run_out: Callable[[str], None]) -> None:
    queue.enqueue([b"1"])
    [share] = queue.plan(1, 1, "a")
    let_run_out("a")
    queue.plan(1, 1, "b")

    with pytest.raises(SourceError, match=r"receive 'a' is over.*raise lease_s \(now 60\)"):
        read(queue, share, "a")


def test_planning_again_under_one_name_voids_the_earlier_shares(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2", b"3"])
    queue.plan(2, 2, "a")

    rows = receive(queue, "a", demand=1)

    assert [(row["message_id"], row["redelivered"]) for row in rows] == [("1", True)]
    assert queue.backlog().messages == 2


def test_extending_keeps_a_receive_from_running_out(queue: TableQueue, let_run_out: Callable[[str], None]) -> None:
    queue.enqueue([b"1"])
    queue.plan(1, 1, "a")

    assert queue.extend("a")
    let_run_out("a")
    assert queue.extend("a"), "it ran out, but nobody has planned since"
    assert receive(queue, "b") == []


def test_extending_fails_once_another_planned_after_it_ran_out(
    queue: TableQueue, let_run_out: Callable[[str], None]
) -> None:
    queue.enqueue([b"1", b"2", b"3"])
    queue.plan(3, 1, "a")
    let_run_out("a")
    queue.plan(1, 1, "b")

    assert not queue.extend("a"), "one message is lost"
    assert queue.extend("b")
    assert ids(receive(queue, "c")) == ["2", "3"]


def test_extending_fails_where_nothing_is_held(queue: TableQueue) -> None:
    queue.enqueue([b"1"])
    queue.plan(1, 1, "a")
    queue.ack("a", ["1"])

    assert not queue.extend("a")
    assert not queue.extend("never planned")


def test_acknowledged_messages_are_gone_for_good(queue: TableQueue, let_run_out: Callable[[str], None]) -> None:
    queue.enqueue([b"1", b"2", b"3"])
    receive(queue, "a")

    assert queue.ack("a", ["3", "1", "3"]) == []

    let_run_out("a")
    assert ids(receive(queue, "b")) == ["2"]


def test_acknowledging_twice_is_fine(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2"])
    receive(queue, "a")

    assert queue.ack("a", ["1"]) == []
    assert queue.ack("a", ["1", "2"]) == []
    assert queue.ack("a", ["1", "2"]) == []
    assert queue.ack("a", []) == []


@pytest.mark.parametrize("theirs", [["2"], ["2", "3"]])
def test_acknowledging_never_deletes_what_another_holds(
    queue: TableQueue, let_run_out: Callable[[str], None], theirs: list[str]
) -> None:
    queue.enqueue([b"1", b"2", b"3", b"4"])
    receive(queue, "a")
    queue.ack("a", ["1"])
    let_run_out("a")
    assert ids(receive(queue, "b", demand=len(theirs))) == theirs

    refused = queue.ack("a", ["1", "2", "3", "4"])

    assert sorted(refused) == [Refused(id_, LOST, lost=True) for id_ in theirs]
    assert queue.ack("b", theirs) == []
    assert receive(queue, "c") == []


def test_a_late_acknowledgement_counts_while_nobody_else_was_given_the_message(
    queue: TableQueue, let_run_out: Callable[[str], None]
) -> None:
    queue.enqueue([b"1", b"2"])
    receive(queue, "dead")
    let_run_out("dead")
    receive(queue, "b", demand=1)

    assert queue.ack("dead", ["2"]) == [], "whoever finishes a dead run acknowledges in its name"
    assert queue.backlog() == Backlog(0)


def test_an_unknown_receive_acknowledges_nothing(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2"])
    receive(queue, "a", demand=1)

    assert sorted(queue.ack("b", ["1", "2"])) == [Refused("1", LOST, lost=True), Refused("2", LOST, lost=True)]


def test_scattered_and_contiguous_ids_are_acknowledged_exactly(
    queue: TableQueue, monkeypatch: pytest.MonkeyPatch, let_run_out: Callable[[str], None]
) -> None:
    monkeypatch.setattr("resources.table_queue.IDS_PER_TRANSACTION", 100)
    queue.enqueue(b"x" for _ in range(1_000))
    receive(queue, "a")
    chosen = numbers(1, 150) + numbers(300, 1_000)[::7] + ["250"]

    assert queue.ack("a", chosen[::-1]) == []

    let_run_out("a")
    assert set(ids(receive(queue, "b"))) == set(numbers(1, 1_000)) - set(chosen)


def test_several_tasks_acknowledge_at_once(queue: TableQueue) -> None:
    queue.enqueue(b"x" for _ in range(4_000))
    receive(queue, "a", demand=4_000)
    parts = [numbers(1, 4_000)[nth::4] for nth in range(4)]

    with ProcessPoolExecutor(2, mp_context=PROCESSES) as pool:
        refused = list(pool.map(queue.ack, ["a"] * 8, parts * 2))

    assert refused == [[]] * 8
    assert queue.backlog() == Backlog(0)


def test_released_messages_come_back_marked_and_the_others_do_not(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2", b"3"])
    receive(queue, "a")

    assert queue.release("a", ["1", "3"]) == []

    assert [(row["message_id"], row["redelivered"]) for row in receive(queue, "b")] == [("1", True), ("3", True)]
    assert queue.release("a", ["1"]) == [Refused("1", LOST, lost=True)]
    assert queue.ack("a", ["2"]) == []


def test_released_with_a_delay_they_come_back_after_it(queue: TableQueue, run_sql: Callable[..., Any]) -> None:
    queue.enqueue([b"1", b"2"])
    receive(queue, "a")

    assert queue.release("a", ["1"], delay_s=100) == []

    assert queue.backlog().messages == 0
    assert receive(queue, "b") == []
    run_sql("UPDATE messages_receives SET leased_until = leased_until - 101 WHERE receive_id IS NULL")
    assert queue.backlog().messages == 1
    assert ids(receive(queue, "b")) == ["1"]


def test_deliveries_are_counted_exactly(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2"])
    for nth in range(3):
        receive(queue, f"run-{nth}", demand=1)
        queue.release(f"run-{nth}", ["1"])

    rows = receive(queue, "last")

    assert [row["metadata"] for row in rows] == ['{"deliveries": 4}', None]


def test_abandoned_messages_are_given_back_at_once(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2"])
    receive(queue, "a")

    queue.abandon("a")
    queue.abandon("never planned")

    assert not queue.extend("a")
    assert queue.backlog().messages == 2
    assert ids(receive(queue, "b")) == ["1", "2"]


def test_backlog_counts_what_could_be_leased_and_since_when_it_waits(
    queue: TableQueue, run_sql: Callable[..., Any]
) -> None:
    assert queue.backlog() == Backlog(0)
    queue.enqueue([b"1", b"2", b"3"])
    run_sql("UPDATE messages SET created = '2013-01-01 10:00:00+00:00' WHERE id = 1")

    assert queue.backlog() == Backlog(3, datetime(2013, 1, 1, 10, tzinfo=UTC))
    queue.plan(1, 1, "a")
    messages, oldest = queue.backlog()
    assert messages == 2
    assert oldest is not None
    assert abs(datetime.now(UTC) - oldest) < timedelta(minutes=1)


def test_no_id_is_ever_used_twice(queue: TableQueue) -> None:
    queue.enqueue([b"1", b"2"])
    queue.ack("a", ids(receive(queue, "a")))
    queue.create()
    queue.enqueue([b"3"])

    assert ids(receive(queue, "b")) == ["3"]


def test_finished_receives_leave_no_rows_behind(
    queue: TableQueue, run_sql: Callable[..., Any], let_run_out: Callable[[str], None]
) -> None:
    queue.enqueue([b"1", b"2"])
    queue.ack("a", ids(receive(queue, "a", demand=1)))
    let_run_out("a")
    receive(queue, "b")

    assert run_sql("SELECT receive_id FROM messages_receives") == [("b",)]
    assert run_sql("SELECT id, attempts FROM messages_leases") == [(2, 1)]


def test_enqueueing_is_all_or_nothing(queue: TableQueue) -> None:
    with pytest.raises(TypeError, match="a payload is bytes, not str; encode it"):
        queue.enqueue([b"1", "2"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="fewer metadata than payloads"):
        queue.enqueue([b"1", b"2"], metadata=[None])
    with pytest.raises(ValueError, match="more metadata than payloads"):
        queue.enqueue([b"1"], metadata=[None, None])

    assert queue.backlog() == Backlog(0)


def test_broken_metadata_cost_no_message(queue: TableQueue, run_sql: Callable[..., Any]) -> None:
    queue.enqueue([b"1", b"2", b"3"])
    bottomless = "[" * 100_000
    for id_, text in ((1, "no json"), (2, "[1]"), (3, bottomless)):
        run_sql("UPDATE messages SET metadata = :text WHERE id = :id", text=text, id=id_)

    told = [json.loads(row["metadata"])["metadata"] for row in receive(queue, "a")]
    assert told == ["no json", [1], bottomless]


def test_no_depth_of_metadata_stops_a_share(queue: TableQueue, run_sql: Callable[..., Any]) -> None:
    """Python's JSON reads some that it cannot write: where that begins depends on who calls it."""
    queue.enqueue([b""] * 200)
    for id_ in range(1, 201):
        depth = 800 + id_
        run_sql("UPDATE messages SET metadata = :text WHERE id = :id", text="[" * depth + "]" * depth, id=id_)

    assert len(receive(queue, "a")) == 200


def test_metadata_that_are_no_text_cost_no_message(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    queue = TableQueue(name="flights", url=url, metadata_column="metadata")
    queue.create()
    queue.enqueue([b"1", b"2"], metadata=[None, {"key": 1}])
    with table_leases.engine_of(url).begin() as connection:
        connection.execute(sa.text("UPDATE messages SET metadata = CAST(x'7bff' AS TEXT) WHERE id = 1"))

    told = [json.loads(row["metadata"]) for row in receive(queue, "a")]
    assert told == [{"metadata": "{\ufffd"}, {"key": 1}]


def test_rows_are_read_few_at_a_time_where_their_metadata_are_large(queue: TableQueue) -> None:
    queue.enqueue((b"1" for _ in range(300)), ({"large": "x" * 100_000} for _ in range(300)))

    (share,) = queue.plan(300, 1, "a")
    sizes = [batch.nbytes for batch in queue.read(share, "a")]
    assert sum(sizes) > 30_000_000
    assert max(sizes) < 3 * table_leases.BYTES_PER_BATCH


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    queue = TableQueue(name="flights", url=url)
    queue.create()
    pages = "PRAGMA max_page_count = 40"

    def full(dbapi_connection: Any, _record: object) -> None:
        dbapi_connection.execute(pages)

    engine = table_leases.open_tables(queue.url, None, "messages", "id", "data", None, None).engine
    sa.event.listen(engine, "connect", full)
    try:
        with pytest.raises(SourceError, match="database or disk is full; make room on the disk of the file in url"):
            queue.enqueue(b"x" * 10_000 for _ in range(100))
    finally:
        sa.event.remove(engine, "connect", full)
    assert queue.backlog() == Backlog(0)


@pytest.mark.parametrize("kind", ["json", "jsonb"])
def test_no_depth_stops_a_share_whose_metadata_the_driver_would_parse(postgres_url: str, kind: str) -> None:
    queue = TableQueue(name="flights", url=postgres_url, metadata_column="notes")
    with table_leases.engine_of(queue.url).begin() as connection:
        connection.execute(sa.text(f"CREATE TABLE messages (id bigserial PRIMARY KEY, data bytea, notes {kind})"))
        statement = sa.text(f"INSERT INTO messages (data, notes) VALUES ('', CAST(:notes AS {kind}))")
        deep = "[" * 2_000 + "]" * 2_000
        for notes in (deep, '{"key": 1.5}', None):
            connection.execute(statement, {"notes": notes})
    queue.create()

    told = [json.loads(row["metadata"] or "{}") for row in receive(queue, "a")]
    assert told == [{"notes": deep}, {"key": 1.5}, {}]


# A table of one's own.


def test_a_table_of_ones_own_is_a_queue_of_rows(url: str, run_sql: Callable[..., Any]) -> None:
    run_sql('CREATE TABLE "Order" (number INTEGER PRIMARY KEY, "the item" TEXT, price REAL)')
    run_sql("""INSERT INTO "Order" VALUES (7, 'a "tea" pot', 1.5), (3, NULL, NULL)""")
    queue = TableQueue(name="orders", url=url, table="Order", id_column="number", data_column=None)
    queue.create()

    rows = receive(queue, "a")

    assert ids(rows) == ["3", "7"]
    assert [json.loads(row["data"]) for row in rows] == [
        {"number": 3, "the item": None, "price": None},
        {"number": 7, "the item": 'a "tea" pot', "price": 1.5},
    ]
    assert queue.ack("a", ["7"]) == []
    assert run_sql('SELECT number FROM "Order"') == [(3,)]
    with pytest.raises(SourceError, match="data_column is None, so there is no column to put payloads in"):
        queue.enqueue([b"1"])


def test_text_columns_come_as_utf_8(url: str, run_sql: Callable[..., Any]) -> None:
    run_sql("CREATE TABLE messages (id INTEGER PRIMARY KEY, data TEXT)")
    run_sql("INSERT INTO messages VALUES (1, 'Zürich'), (2, NULL)")
    queue = TableQueue(name="places", url=url)
    queue.create()

    assert [row["data"] for row in receive(queue, "a")] == ["Zürich".encode(), b""]


def test_binary_columns_of_a_row_come_as_digits(url: str, run_sql: Callable[..., Any]) -> None:
    binary = "BLOB" if url.startswith("sqlite") else "BYTEA"
    run_sql(f"CREATE TABLE messages (id INTEGER PRIMARY KEY, picture {binary})")
    run_sql("INSERT INTO messages VALUES (1, :picture)", picture=b"\x00\xff")
    queue = TableQueue(name="pictures", url=url, data_column=None)
    queue.create()

    assert json.loads(receive(queue, "a")[0]["data"]) == {"id": 1, "picture": "\\x00ff"}


@pytest.mark.parametrize(
    ("type_", "keys"),
    [
        ("VARCHAR(40)", ["a", "b c", "d'e\"f", "ü", "00:1"]),
        ("UUID", [str(UUID(int=number)) for number in range(1, 6)]),
    ],
)
def test_ids_may_be_texts_or_uuids(url: str, run_sql: Callable[..., Any], type_: str, keys: list[str]) -> None:
    if type_ == "UUID" and url.startswith("sqlite"):
        type_ = "CHAR(36)"
    run_sql(f"CREATE TABLE messages (id {type_} PRIMARY KEY, data TEXT)")
    for key in keys:
        run_sql("INSERT INTO messages VALUES (:id, :data)", id=key, data=key)
    queue = TableQueue(name="named", url=url)
    queue.create()

    rows = receive(queue, "a", concurrency=3)

    assert sorted(ids(rows)) == sorted(keys)
    assert [row["data"].decode() for row in rows] == ids(rows)
    assert queue.release("a", keys[:1]) == []
    assert queue.ack("a", keys[1:3]) == []
    assert queue.ack("a", keys[:4]) == [Refused(keys[0], LOST, lost=True)]
    assert [(row["message_id"], row["redelivered"]) for row in receive(queue, "b")] == [(keys[0], True)]
    assert queue.extend("a")


def test_rows_without_an_id_are_left_alone(url: str, run_sql: Callable[..., Any]) -> None:
    run_sql("CREATE TABLE messages (id TEXT UNIQUE, data TEXT)")
    run_sql("INSERT INTO messages VALUES (NULL, 'x'), ('a', 'y')")
    queue = TableQueue(name="named", url=url)
    queue.create()

    assert queue.backlog().messages == 1
    assert ids(receive(queue, "a")) == ["a"]


def test_messages_that_others_delete_are_gone(queue: TableQueue, run_sql: Callable[..., Any]) -> None:
    queue.enqueue([b"1", b"2", b"3"])
    shares = queue.plan(3, 1, "a")
    run_sql("DELETE FROM messages WHERE id = 2")

    assert ids(read(queue, shares[0], "a")) == ["1", "3"]
    assert queue.ack("a", ["1", "2", "3"]) == []
    assert run_sql("SELECT * FROM messages_leases") == []


# What is refused, and in which words.


def test_a_missing_file_is_refused_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "missing.db"
    queue = TableQueue(name="flights", url=f"sqlite:///{path}")

    with pytest.raises(
        SourceError, match=r"flights \(table 'messages' at .*url must name a file that is there; create"
    ):
        queue.refuse_or_pass()
    with pytest.raises(SourceError, match="url must name a file"):
        queue.enqueue([b"1"])
    assert not path.exists()


def test_what_is_not_there_is_named_with_its_option(queue: TableQueue, run_sql: Callable[..., Any]) -> None:
    queue.refuse_or_pass()
    for change, words in {
        ("table", "mesages"): "there is no table 'mesages'; correct table, or call create()",
        ("id_column", "key"): "id_column is 'key', and table 'messages' has only created, data, id, metadata",
        ("id_column", "metadata"): "id_column is 'metadata', which is not unique",
        ("data_column", "body"): "data_column is 'body', and table",
        ("created_column", "data"): None,
    }.items():
        wrong = queue.model_copy(update=dict([change]))
        if words is None:
            queue.enqueue([b"1"])
        with pytest.raises(SourceError) as refused:
            wrong.refuse_or_pass()
        assert (words or "created_column is 'data', and b'1' in it is no time") in str(refused.value)


def test_a_table_without_leases_beside_it_is_refused(url: str, run_sql: Callable[..., Any]) -> None:
    run_sql("CREATE TABLE messages (id INTEGER PRIMARY KEY, data TEXT)")

    with pytest.raises(SourceError, match=r"there is no table 'messages_leases' for leases; call create\(\) once"):
        TableQueue(name="flights", url=url).refuse_or_pass()


def test_ids_that_are_no_integers_are_refused(queue: TableQueue) -> None:
    with pytest.raises(SourceError, match=r"id_column holds integers, and among the ids is another: .*'x'"):
        queue.ack("a", ["1", "x"])


def test_a_wrong_password_is_refused_without_telling_it(postgres_url: str) -> None:
    wrong = sa.make_url(postgres_url).set(password="not-the-one").render_as_string(hide_password=False)

    with pytest.raises(SourceError, match="correct user and password in url") as refused:
        TableQueue(name="flights", url=wrong).refuse_or_pass()
    assert "not-the-one" not in str(refused.value)


TWO_BESIDE = ("sales.outbox_leases", "sales.outbox_receives")
RIGHTS = [
    ("USAGE", "SCHEMA sales"),
    *((right, "sales.outbox") for right in ("SELECT", "UPDATE", "DELETE")),
    *((right, table) for right in ("SELECT", "INSERT", "UPDATE", "DELETE") for table in TWO_BESIDE),
]
"""What a run needs where another user made the tables."""


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_run_needs_each_of_the_rights_that_are_asked_for_and_no_other(url: str, run_sql: Callable[..., Any]) -> None:
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
        way_out = "grant the user of url " + ("USAGE" if right == "USAGE" else "SELECT, UPDATE and DELETE on the queue")
        with pytest.raises(SourceError, match=f"permission denied for (table|schema).*; {way_out}"):
            take_through(runs, f"without {right} on {where}")
        run_sql(f"GRANT {right} ON {where} TO {user}")
    with pytest.raises(SourceError, match=r"permission denied for table outbox; .*, with INSERT to enqueue"):
        runs.enqueue([b"1"])
    run_sql(f"GRANT INSERT ON sales.outbox TO {user}")
    assert runs.enqueue([b"1"]) == 1


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_sequence_of_ones_own_table_is_named_where_it_must_be_granted(url: str, run_sql: Callable[..., Any]) -> None:
    run_sql("CREATE TABLE messages (id bigserial PRIMARY KEY, data bytea)")
    owner = TableQueue(name="outbox", url=url)
    owner.create()
    user, writes = new_user(owner, run_sql)
    run_sql(f"GRANT SELECT, INSERT ON messages TO {user}")

    with pytest.raises(SourceError, match=r"permission denied for sequence messages_id_seq.*; grant .* USAGE on it"):
        writes.enqueue([b"1"])


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_row_that_postgresql_refuses_is_not_quoted(url: str, run_sql: Callable[..., Any]) -> None:
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
    queue.refuse_or_pass()
    assert queue.backlog().messages > 4
    assert ids(receive(queue, f"{receive_id}, given up", demand=1))
    queue.abandon(f"{receive_id}, given up")
    first, second, *handled = ids(receive(queue, receive_id, demand=4))
    assert queue.extend(receive_id)
    assert queue.release(receive_id, [first]) == []
    assert queue.release(receive_id, [second], delay_s=1) == []
    assert queue.ack(receive_id, handled) == []


def test_a_server_that_is_not_there_is_refused() -> None:
    queue = TableQueue(name="flights", url="postgresql://someone:secret@127.0.0.1:1/queue")

    with pytest.raises(SourceError, match="correct host and port in url") as refused:
        queue.backlog()
    assert "secret" not in str(refused.value)
    assert "secret" not in repr(queue)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("sqlite://", "a SQLite queue in memory would be a new one in every process"),
        ("mysql://user:secret@host/db", "url is for 'mysql'; a table queue is sqlite or postgresql"),
        ("secret", "url is no SQLAlchemy URL; write sqlite:///<path> or postgresql"),
    ],
)
def test_a_wrong_url_is_refused_when_the_queue_is_built(wrong: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as refused:
        TableQueue(name="flights", url=wrong)
    assert "secret" not in str(refused.value)


def test_it_is_pickled_after_use(queue: TableQueue) -> None:
    queue.enqueue([b"1"])

    assert pickle.loads(pickle.dumps(queue)).backlog().messages == 1
