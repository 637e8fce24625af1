"""Partitions of a table queue, and their lease to one receive at a time."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from tests.fixtures.table_queue import ids, receive


@pytest.fixture
def apart(url):
    """A queue of twelve messages of the customers 0, 1 and 2, in turn."""
    queue = TableQueue(name="orders", url=url, partition_column="customer", one_receive_per_partition=True)
    queue.create()
    queue.enqueue([b"%d" % n for n in range(12)], [{"customer": str(n % 3)} for n in range(12)])
    return queue


def test_a_partition_is_leased_to_one_receive_until_that_has_acknowledged_it(apart):
    first = receive(apart, "a", demand=2, concurrency=1)
    second = receive(apart, "b")
    assert [row["partition"] for row in first] == ["0", "1"]
    assert {row["partition"] for row in second} == {"2"}
    assert receive(apart, "c") == []
    assert apart.ack("a", [first[0]["ack_id"]]) == []
    assert {row["partition"] for row in receive(apart, "d")} == {"0"}


def test_concurrent_planners_share_no_partition(apart):
    for turn in range(5):
        with ThreadPoolExecutor(4) as pool:
            taken = list(pool.map(lambda n, turn=turn: receive(apart, f"{turn}-{n}", demand=2), range(4)))  # type: ignore[misc]
        partitions = [{row["partition"] for row in rows} for rows in taken if rows]
        assert sum(map(len, partitions)) == len(set().union(*partitions)), partitions
        for n in range(4):
            apart.abandon(f"{turn}-{n}", list)


def test_without_the_option_a_partition_is_shared(url, apart):
    shared = apart.model_copy(update={"one_receive_per_partition": False})
    assert len(receive(shared, "a", demand=2)) == 2
    assert len(receive(shared, "b")) == 10


def test_a_table_of_json_payloads_gives_them_as_text(url, run_sql):
    queue = TableQueue(name="orders", url=url)
    queue.create("json")
    queue.send([b'{"a": 1}'])
    if url.startswith("postgresql"):
        assert run_sql("SELECT data ->> 'a' FROM messages") == [("1",)]
    (row,) = receive(queue, "a")
    assert row["data"] == b'{"a": 1}'


def test_leases_are_listed_with_the_seconds_left(apart):
    taken = receive(apart, "a", demand=2)
    apart.release("a", ids(taken[:1]), 30)
    (mine, delayed) = apart.held()
    assert (mine[0], mine[2]) == ("a", 1)
    assert 55 < mine[1] <= 60
    assert (delayed[0], delayed[2]) == (None, 1)
    assert 25 < delayed[1] <= 30
