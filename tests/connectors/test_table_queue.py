"""Messages of a queue in a SQL table, on SQLite and on PostgreSQL."""

import json
import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from pipeline_platform.connectors.table_queue import queue_reading
from pipeline_platform.connectors.table_queue.table_queue_source import LOST, TableQueue
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Refused, SourceError
from tests.fixtures.table_queue import do, ids, read, receive


def test_a_receive_gets_the_oldest_messages_unchanged(queue):
    assert queue.enqueue([b"first", b"second", b"third"], metadata=[{"key": 1}, None, {}]) == 3

    rows = receive(queue, "a", demand=2)

    assert rows[0].pop("published_at") is not None
    assert rows[0] == {
        "source": "flights",
        "message_id": "1",
        "data": b"first",
        "metadata": '{"key": 1}',
        "ack_ref": "a",
        "ack_id": "1",
        "attempt": 1,
        "redelivered": False,
        "partition": None,
        "sequence": 1,
    }
    assert [row["data"] for row in rows] == [b"first", b"second"]
    assert rows[1]["metadata"] is None


def test_many_messages_are_divided_evenly_and_read_in_batches(queue):
    queue.enqueue(b"%d" % number for number in range(1, 5_001))
    shares = queue.plan(5_000, 3, "a")
    read_in_parallel = [list(queue.read(share, "a")) for share in shares]
    assert [share.messages for share in shares] == [1_667, 1_667, 1_666]
    assert [sum(batch.num_rows for batch in batches) for batches in read_in_parallel] == [1_667, 1_667, 1_666]
    rows = [row for batches in read_in_parallel for batch in batches for row in batch.to_pylist()]
    assert [row["data"] for row in rows] == [b"%d" % number for number in range(1, 5_001)]
    [share] = queue.model_copy().plan(5_000, 1, "a")
    sizes = [batch.num_rows for batch in queue.read(share, "a")]
    assert max(sizes) == 2_000
    assert len(sizes) == 6, "few rows come first: nobody knows yet how large they are"


@pytest.mark.parametrize(("data", "metadata"), [(10_000, 0), (0, 10_000)], ids=["payloads", "metadata"])
def test_large_rows_are_read_in_small_batches(queue, monkeypatch, data, metadata):
    monkeypatch.setattr(queue_reading, "BYTES_PER_BATCH", 2**18)
    queue.enqueue((b"x" * data for _ in range(300)), ({"large": "x" * metadata} for _ in range(300)))
    (share,) = queue.plan(300, 1, "a")
    sizes = [batch.nbytes for batch in queue.read(share, "a")]
    assert sum(sizes) > 3_000_000
    assert max(sizes) < 3 * 2**18


def test_invalid_metadata_lose_no_message(queue, run_sql):
    queue.enqueue([b"1", b"2", b"3"])
    bottomless = "[" * 100_000
    for id_, text in ((1, "no json"), (2, "[1]"), (3, bottomless)):
        run_sql("UPDATE messages SET metadata = :text WHERE id = :id", text=text, id=id_)
    told = [json.loads(row["metadata"])["metadata"] for row in receive(queue, "a")]
    assert told == ["no json", [1], bottomless]


def test_deeply_nested_metadata_do_not_fail_a_share(queue, run_sql):
    """Python's JSON parses some nested values that it cannot write; the limit depends on the depth of the caller."""
    queue.enqueue([b""] * 40)
    for id_ in range(1, 41):
        depth = 800 + 5 * id_
        run_sql("UPDATE messages SET metadata = :text WHERE id = :id", text="[" * depth + "]" * depth, id=id_)
    assert len(receive(queue, "a")) == 40


def test_metadata_that_are_not_text_lose_no_message(tmp_path):
    url = f"sqlite:///{tmp_path}/queue.db"
    queue = TableQueue(name="flights", url=url, metadata_column="metadata")
    queue.create()
    queue.enqueue([b"1", b"2"], metadata=[None, {"key": 1}])
    do(url, "UPDATE messages SET metadata = CAST(x'7bff' AS TEXT) WHERE id = 1")
    told = [json.loads(row["metadata"]) for row in receive(queue, "a")]
    assert told == [{"metadata": "{\ufffd"}, {"key": 1}]


@pytest.mark.parametrize("kind", ["json", "jsonb"])
def test_deeply_nested_jsonb_metadata_do_not_fail_a_share(postgres_url, kind):
    queue = TableQueue(name="flights", url=postgres_url, metadata_column="notes")
    do(postgres_url, f"CREATE TABLE messages (id bigserial PRIMARY KEY, data bytea, notes {kind})")
    deep = "[" * 12_000 + "]" * 12_000
    for notes in (deep, '{"key": 1.5}', None):
        do(postgres_url, f"INSERT INTO messages (data, notes) VALUES ('', CAST(:notes AS {kind}))", notes=notes)
    queue.create()
    told = [json.loads(row["metadata"] or "{}") for row in receive(queue, "a")]
    assert told == [{"notes": deep}, {"key": 1.5}, {}]


def test_enqueueing_is_all_or_nothing(queue):
    with pytest.raises(TypeError, match="a payload must be bytes, got str"):
        queue.enqueue([b"1", "2"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="metadata has fewer entries than payloads"):
        queue.enqueue([b"1", b"2"], metadata=[None])
    with pytest.raises(ValueError, match="metadata has more entries than payloads"):
        queue.enqueue([b"1"], metadata=[None, None])
    assert queue.backlog() == Backlog(0)


def test_no_id_is_ever_used_twice(queue):
    queue.enqueue([b"1", b"2"])
    queue.ack("a", ids(receive(queue, "a")))
    queue.create()
    queue.enqueue([b"3"])
    assert ids(receive(queue, "b")) == ["3"]


def test_backlog_counts_available_messages_and_dates_the_oldest(queue, run_sql):
    assert queue.backlog() == Backlog(0)
    queue.enqueue([b"1", b"2", b"3"])
    run_sql("UPDATE messages SET created = '2013-01-01 10:00:00+00:00' WHERE id = 1")
    assert queue.backlog() == Backlog(3, datetime(2013, 1, 1, 10, tzinfo=UTC))
    queue.plan(1, 1, "a")
    messages, oldest, *_ = queue.backlog()
    assert messages == 2
    assert oldest is not None
    assert abs(datetime.now(UTC) - oldest) < timedelta(minutes=1)


def test_backlog_up_to_stops_counting_at_its_limit(queue):
    queue.enqueue(b"x" for _ in range(10))
    shares = queue.plan(4, 1, "a")
    queue.release("a", ids(read(queue, shares[0], "a"))[:1])

    looks = {most: queue.backlog_up_to(most) for most in (1, 6, 7, 8, 100)}

    assert {most: (look.messages, look.at_least) for most, look in looks.items()} == {
        1: (2, True),
        6: (7, True),
        7: (7, True),
        8: (7, False),
        100: (7, False),
    }
    assert queue.backlog().messages == 7


def test_an_existing_table_can_be_a_queue_of_rows(url, run_sql):
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
    with pytest.raises(SourceError, match="data_column is None, so send"):
        queue.enqueue([b"1"])


def test_a_column_may_have_the_name_of_its_table(url, run_sql):
    run_sql("CREATE TABLE message (id INTEGER PRIMARY KEY, message TEXT)")
    run_sql("INSERT INTO message VALUES (1, 'hello')")
    queue = TableQueue(name="greetings", url=url, table="message", data_column=None)
    queue.create()
    assert [json.loads(row["data"]) for row in receive(queue, "a")] == [{"id": 1, "message": "hello"}]


def test_tables_and_columns_may_have_any_name(url):
    queue = TableQueue(
        name="odd",
        url=url,
        table='a "100%" table\'s %(name)s',
        id_column="I%d",
        data_column='Da:ta "x"',
        metadata_column="m'%s",
        partition_column="Übrig (%)",
    )
    queue.create()
    assert queue.enqueue([b"1", b"2"], [{"Übrig (%)": "p"}, None]) == 2
    assert [(row["data"], row["partition"]) for row in receive(queue, "a")] == [(b"1", "p"), (b"2", None)]
    assert queue.release("a", ["1"]) == queue.ack("a", ["2"]) == []
    whole = queue.model_copy(update={"data_column": None})
    assert [json.loads(row["data"])["I%d"] for row in receive(whole, "b")] == [1]
    assert queue.backlog().messages == 0


def test_metadata_and_partition_are_put_into_their_own_columns(url):
    queue = TableQueue(name="both", url=url, metadata_column="notes", partition_column="customer")
    queue.create()
    queue.enqueue([b"1", b"2"], [{"customer": "c1", "key": 1}, None])
    rows = receive(queue, "a")
    assert [row["partition"] for row in rows] == ["c1", None]
    assert [row["metadata"] for row in rows] == ['{"customer": "c1", "key": 1}', None]


def test_published_at_is_the_created_column(queue, run_sql):
    queue.enqueue([b"1", b"2"])
    run_sql("UPDATE messages SET created = '2026-03-01 12:00:00+02:00' WHERE id = 1")

    first, second = receive(queue, "a")

    assert first["published_at"] == datetime(2026, 3, 1, 10, tzinfo=UTC)
    assert abs(second["published_at"] - datetime.now(UTC)) < timedelta(hours=1)
    queue.abandon("a", list)
    assert [row["published_at"] for row in receive(queue, "b")] == [first["published_at"], second["published_at"]]


@pytest.mark.parametrize("value", ["no time", "9999-12-31T23:59:59-05:00", "0001-01-01T00:00:00+05:00", 1e300])
def test_invalid_times_in_the_created_column_lose_no_message(tmp_path, value):
    do(url := f"sqlite:///{tmp_path}/queue.sqlite", "CREATE TABLE messages (id INTEGER PRIMARY KEY, data, came)")
    do(url, "INSERT INTO messages VALUES (1, 'x', :value), (2, 'x', 0)", value=value)
    queue = TableQueue(name="odd", url=url, created_column="came")
    queue.create()

    assert [row["published_at"] for row in receive(queue, "a")] == [None, datetime(1970, 1, 1, tzinfo=UTC)]


@pytest.mark.parametrize("type_", ["TIMESTAMPTZ", "TIMESTAMP", "DATE"])
def test_a_time_that_python_cannot_represent_is_null(postgres_url, type_):
    do(postgres_url, f"CREATE TABLE messages (id INTEGER PRIMARY KEY, data TEXT, came {type_})")
    do(postgres_url, "INSERT INTO messages VALUES (1, 'x', 'infinity'), (2, 'x', '2026-01-01')")
    queue = TableQueue(name="odd", url=postgres_url, created_column="came")
    queue.create()
    queue.check_ready()
    assert (queue.backlog().messages, queue.backlog().oldest) == (2, None)
    assert [row["published_at"] for row in receive(queue, "a", demand=1)] == [None]
    assert queue.backlog().oldest == datetime(2026, 1, 1, tzinfo=UTC)
    assert [row["published_at"] for row in receive(queue, "b")] == [datetime(2026, 1, 1, tzinfo=UTC)]


def test_text_columns_come_as_utf_8(url, run_sql):
    run_sql("CREATE TABLE messages (id INTEGER PRIMARY KEY, data TEXT)")
    run_sql("INSERT INTO messages VALUES (1, 'Zürich'), (2, NULL)")
    queue = TableQueue(name="places", url=url)
    queue.create()
    assert [row["data"] for row in receive(queue, "a")] == ["Zürich".encode(), b""]


def test_binary_columns_of_a_row_are_hexadecimal_digits(url, run_sql):
    binary = "BLOB" if url.startswith("sqlite") else "BYTEA"
    run_sql(f"CREATE TABLE messages (id INTEGER PRIMARY KEY, picture {binary})")
    run_sql("INSERT INTO messages VALUES (1, :picture)", picture=b"\x00\xff")
    queue = TableQueue(name="pictures", url=url, data_column=None)
    queue.create()
    assert json.loads(receive(queue, "a")[0]["data"]) == {"id": 1, "picture": "\\x00ff"}


@pytest.mark.parametrize(
    ("type_", "keys"),
    [("VARCHAR(40)", ["a", "b c", "d'e\"f", "ü", "00:1"]), ("UUID", [str(UUID(int=number)) for number in range(1, 6)])],
)
def test_ids_may_be_texts_or_uuids(url, run_sql, type_, keys):
    if type_ == "UUID" and url.startswith("sqlite"):
        type_ = "CHAR(36)"
    run_sql(f"CREATE TABLE messages (id {type_} PRIMARY KEY, data TEXT)")
    for key in keys:
        run_sql("INSERT INTO messages VALUES (:id, :data)", id=key, data=key)
    queue = TableQueue(name="named", url=url)
    queue.create()

    assert queue.location(keys[1]) == "waiting"
    rows = receive(queue, "a", concurrency=3)
    assert re.fullmatch(r"leased by receive a for another (60|5\d) s", queue.location(keys[1]))

    assert sorted(ids(rows)) == sorted(keys)
    assert [row["data"].decode() for row in rows] == ids(rows)
    assert queue.release("a", keys[:1]) == []
    assert queue.ack("a", keys[1:3]) == []
    assert queue.ack("a", keys[:4]) == [Refused(keys[0], LOST, lost=True)]
    assert [(row["message_id"], row["redelivered"]) for row in receive(queue, "b")] == [(keys[0], True)]
    assert queue.extend("a", list)


def test_texts_with_a_nul_are_distinct_ids(tmp_path):
    url, keys = f"sqlite:///{tmp_path}/queue.sqlite", ["", "\0", "a", "a\0", "a\0b", "a\0ü", "z"]
    do(url, "CREATE TABLE messages (id TEXT PRIMARY KEY, data TEXT)")
    for key in keys:
        do(url, "INSERT INTO messages VALUES (:key, :key)", key=key)
    queue = TableQueue(name="named", url=url)
    queue.create()

    assert [(row["message_id"], row["data"].decode()) for row in receive(queue, "a", concurrency=3)] == [
        (key, key) for key in keys
    ]
    assert queue.ack("a", ["a\0b"]) == []
    assert queue.release("a", ["\0", "a\0"]) == []
    assert ids(receive(queue, "b")) == ["\0", "a\0"], "and no other"
    assert queue.ack("a", ["", "a", "a\0", "a\0b", "a\0ü", "z"]) == [Refused("a\0", LOST, lost=True)]
    assert queue.ack("b", ["\0", "a\0"]) == []
    assert queue.backlog().messages == 0


def test_rows_without_an_id_are_left_alone(url, run_sql):
    run_sql("CREATE TABLE messages (id TEXT UNIQUE, data TEXT)")
    run_sql("INSERT INTO messages VALUES (NULL, 'x'), ('a', 'y')")
    queue = TableQueue(name="named", url=url)
    queue.create()
    assert queue.backlog().messages == 1
    assert ids(receive(queue, "a")) == ["a"]


def test_whereabouts_describes_the_state_of_a_message(queue):
    queue.enqueue([b"1", b"2", b"3"])
    receive(queue, "a", demand=2)
    queue.release("a", ["1"], delay_s=30)
    queue.ack("a", ["2"])
    first, *others = (str(queue.location(id_)).partition(":")[0] for id_ in ("1", "2", "3", "x"))
    assert re.fullmatch(r"waiting for its delay, (30|2\d) s left", first)
    assert others == ["not found", "waiting", "not found"]


def test_messages_deleted_by_others_are_skipped(queue, run_sql):
    queue.enqueue([b"1", b"2", b"3"])
    shares = queue.plan(3, 1, "a")
    run_sql("DELETE FROM messages WHERE id = 2")
    assert ids(read(queue, shares[0], "a")) == ["1", "3"]
    assert queue.ack("a", ["1", "2", "3"]) == []
    assert run_sql("SELECT * FROM messages_leases") == []
