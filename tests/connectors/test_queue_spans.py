"""Storage of leases in a table queue: spans of ids for new messages, a row for each redelivered message."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline_platform.connectors.table_queue import id_spans
from pipeline_platform.connectors.table_queue.id_spans import IdSpan
from pipeline_platform.connectors.table_queue.table_queue_source import LOST, TableQueue
from pipeline_platform.source.contract import Refused
from tests.fixtures.table_queue import ids, numbers, receive

Sql = Callable[..., Any]


def insert(run_sql: Sql, *ids_: int) -> None:
    run_sql("INSERT INTO messages (id, data) VALUES " + ", ".join(f"({id_}, 'x')" for id_ in ids_))


def spans(run_sql: Sql) -> dict[str, Any]:
    told = run_sql("SELECT receive_id, spans FROM messages_receives")
    return {receive_id: text and json.loads(text) for receive_id, text in told}


def rows(run_sql: Sql) -> list[int]:
    return [id_ for (id_,) in run_sql("SELECT id FROM messages_leases ORDER BY id")]


def test_new_messages_are_leased_in_one_row(queue, run_sql):
    queue.enqueue(b"x" for _ in range(1_000))
    assert ids(receive(queue, "a", demand=600)) == numbers(1, 600)
    assert ids(receive(queue, "b", demand=600)) == numbers(601, 1_000)
    assert spans(run_sql) == {"a": [[1, 600]], "b": [[601, 1_000]]}
    assert rows(run_sql) == []


def test_a_message_committed_late_between_others_is_leased_next(queue, run_sql):
    insert(run_sql, 1, 2, 4, 5, 900)
    shares = queue.plan(10, 1, "a")
    insert(run_sql, 3)

    assert [row["message_id"] for batch in queue.read(shares[0], "a") for row in batch.to_pylist()] == [
        *("1", "2", "4", "5", "900")
    ]
    assert queue.backlog().messages == 1
    (late,) = receive(queue, "b")
    assert (late["message_id"], late["redelivered"]) == ("3", False)
    assert queue.ack("a", ["1", "2", "3", "4", "5", "900"]) == [Refused("3", LOST, lost=True)]
    assert queue.ack("b", ["3"]) == []
    assert queue.backlog().messages == 0


def test_the_lowest_and_the_highest_ids_are_given_out_once(url, run_sql):
    run_sql("CREATE TABLE messages (id BIGINT PRIMARY KEY, data TEXT)")
    all_ids = [-(2**63), 1 - 2**63, -1, 0, 2**63 - 2, 2**63 - 1]
    insert(run_sql, *all_ids)
    queue = TableQueue(name="q", url=url)
    queue.create()
    assert ids(receive(queue, "a", demand=3)) == list(map(str, all_ids[:3]))
    assert queue.backlog().messages == 3
    assert ids(receive(queue, "b")) == list(map(str, all_ids[3:]))
    assert queue.backlog().messages == 0
    queue.abandon("a", list)
    assert ids(receive(queue, "c")) == list(map(str, all_ids[:3]))


def test_messages_with_scattered_ids_have_a_row_each(queue, run_sql):
    scattered = [number * 3 for number in range(1, 301)]
    insert(run_sql, *scattered)
    assert ids(receive(queue, "a", concurrency=3)) == [str(id_) for id_ in scattered]
    assert rows(run_sql) == scattered
    assert receive(queue, "b") == []
    assert queue.ack("a", [str(id_) for id_ in scattered]) == []
    assert rows(run_sql) == []


def test_redelivered_and_new_messages_share_a_receive(queue):
    queue.enqueue(b"x" for _ in range(10))
    queue.release("a", ids(receive(queue, "a", demand=4)))
    shares = queue.plan(10, 3, "b")
    read = [ids([row for batch in queue.read(share, "b") for row in batch.to_pylist()]) for share in shares]
    assert read == [["1", "2", "3", "4"], ["5", "6", "7"], ["8", "9", "10"]]
    assert [share.messages for share in shares] == [4, 3, 3]
    assert queue.extend("b", list)
    assert queue.held()[0][2] == 10
    assert queue.ack("b", numbers(1, 10)) == []
    assert not queue.extend("b", list)


def test_remaining_messages_are_redelivered_after_a_receive_ends(queue, run_sql, let_run_out):
    queue.enqueue(b"x" for _ in range(6))
    receive(queue, "a", demand=5)
    assert queue.ack("a", ["2", "3"]) == []
    assert queue.release("a", ["5"]) == []
    let_run_out("a")
    again = receive(queue, "b", demand=2)
    assert [(row["message_id"], row["redelivered"]) for row in again] == [("1", True), ("4", True)]
    assert queue.ack("a", ["1", "4"]) == [Refused("1", LOST, lost=True), Refused("4", LOST, lost=True)]
    assert ids(receive(queue, "c")) == ["5", "6"]


def test_a_late_acknowledgement_counts_until_the_message_is_leased_again(queue, let_run_out):
    queue.enqueue(b"x" for _ in range(4))
    receive(queue, "late")
    let_run_out("late")
    assert ids(receive(queue, "b", demand=1)) == ["1"]
    assert queue.ack("late", numbers(1, 4)) == [Refused("1", LOST, lost=True)]
    assert queue.backlog().messages == 0


def test_messages_in_the_spans_of_others_are_not_released(queue):
    queue.enqueue(b"x" for _ in range(4))
    receive(queue, "a", demand=2)
    receive(queue, "b", demand=1)
    assert queue.release("b", numbers(1, 3)) == [Refused("1", LOST, lost=True), Refused("2", LOST, lost=True)]
    assert ids(receive(queue, "c")) == ["3", "4"]


def test_a_planner_skips_a_receive_that_is_acknowledging(postgres_url):
    queue = TableQueue(name="flights", url=postgres_url)
    queue.create()
    queue.enqueue(b"x" for _ in range(4))
    receive(queue, "late", demand=3)
    table = queue._table()
    with ThreadPoolExecutor(1) as pool, table.database.writing() as late:
        assert table.acknowledge(late, "late", [1, 2]) == []
        queue.abandon("late", list)
        assert ids(pool.submit(receive, queue, "quick").result(30)) == ["4"]
    assert ids(receive(queue, "next")) == ["3"]


sets = st.sets(st.integers(-30, 30))


def spans_of(members: set[int]) -> list[IdSpan]:
    return id_spans.merged((member, member) for member in members)


def members(of: list[IdSpan]) -> set[int]:
    return {member for first, last in of for member in range(first, last + 1)}


@given(sets)
def test_merged_spans_contain_their_ids(numbers):
    made = spans_of(numbers)
    assert members(made) == numbers
    assert id_spans.size(made) == len(numbers)
    assert [span for group in id_spans.near(made, 2) for span in group] == made
    assert all(later[0] - earlier[1] > 1 for earlier, later in zip(made, made[1:], strict=False))
    if numbers:
        between = {
            number for number in range(-30, max(numbers)) if any(a <= number <= b for a, b in id_spans.gaps(made))
        }
        assert between == set(range(-30, max(numbers))) - numbers


@given(sets, st.integers(0, 70))
def test_spans_are_divided_after_a_number_of_ids(numbers, count):
    head, rest = id_spans.cut_spans(spans_of(numbers), count)
    assert members(head) | members(rest) == numbers
    assert id_spans.size(head) == min(count, len(numbers))
    assert max(members(head), default=-99) < min(members(rest), default=99)


@given(sets, sets)
def test_ids_lie_in_spans_or_outside(numbers, ids_):
    within, outside = id_spans.inside(sorted(ids_), spans_of(numbers))
    assert within == sorted(ids_ & numbers)
    assert outside == sorted(ids_ - numbers)
