"""What every source promises, asked of each of them on a real server; a new connector joins `SOURCES`."""

import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.servers import sqs
from pipeline_platform.model.message import DELIVERIES
from pipeline_platform.source.contract import Source, SourceError
from resources.sqs import SqsSource
from resources.table_queue import TableQueue

LEASE_S = 2
PAYLOADS = [b"plain", '{"name": "Zoë → 東京"}'.encode(), *(b'{"n": %d}' % n for n in range(40))]


@dataclass(frozen=True)
class Waiting:
    """A source in which `PAYLOADS` wait, and one like it that is not there."""

    source: Source
    missing: Source


def table(url: str) -> Waiting:
    queue = TableQueue(name="contract", url=url, lease_s=LEASE_S)
    queue.create()
    queue.enqueue(PAYLOADS)
    return Waiting(queue, TableQueue(name="contract", url=url, table="not_there"))


def sqlite(request: pytest.FixtureRequest) -> Waiting:
    folder: Path = request.getfixturevalue("tmp_path")
    return table(f"sqlite:///{folder}/queue.sqlite")


def postgresql(request: pytest.FixtureRequest) -> Waiting:
    return table(request.getfixturevalue("postgres_url"))


def sqs_server(request: pytest.FixtureRequest) -> Waiting:
    endpoint: str = request.getfixturevalue("sqs_server")
    create: Callable[..., str] = request.getfixturevalue("sqs_queue")

    def at(url: str) -> SqsSource:
        return SqsSource(name="contract", queue_url=url, visibility_timeout=LEASE_S, endpoint_url=endpoint)

    url = create()
    sqs.fill(url, PAYLOADS)
    return Waiting(at(url), at(f"{url}-not-there"))


SOURCES = [sqlite, postgresql, sqs_server]


@pytest.fixture(params=SOURCES, ids=lambda build: build.__name__)
def waiting(request: pytest.FixtureRequest) -> Waiting:
    built: Waiting = request.param(request)
    return built


@pytest.fixture
def source(waiting: Waiting) -> Source:
    return waiting.source


def receive(source: Source, receive_id: str, demand: int = 1_000) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    shares = source.plan(demand, 2, receive_id)
    assert len(shares) <= 2
    for share in shares:
        before = len(rows)
        for batch in source.read(share, receive_id):
            assert batch.schema == DELIVERIES
            rows += batch.to_pylist()
        assert len(rows) - before <= share.messages
    return rows


def ack(source: Source, rows: list[dict[str, Any]]) -> list[Any]:
    (ack_ref,) = {row["ack_ref"] for row in rows}
    return source.ack(ack_ref, [row["ack_id"] for row in rows])


def come_back(source: Source, receive_id: str, count: int) -> list[dict[str, Any]]:
    """Receive until so many came; leases have to run out first."""
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + 10 * LEASE_S
    while len(rows) < count and time.monotonic() < deadline:
        rows += receive(source, f"{receive_id}-{len(rows)}")
        time.sleep(0.1)
    return rows


def test_what_waits_is_delivered_once_as_it_was_sent(source: Source) -> None:
    assert source.backlog().messages == len(PAYLOADS)

    rows = receive(source, "a")

    assert sorted(row["data"] for row in rows) == sorted(PAYLOADS)
    assert len({row["message_id"] for row in rows}) == len(PAYLOADS)
    assert {row["source"] for row in rows} == {"contract"}
    assert all(row["metadata"] is None or json.loads(row["metadata"]) for row in rows)


def test_no_more_is_given_than_is_asked_for_and_nothing_to_two(source: Source) -> None:
    first, second = receive(source, "a", demand=15), receive(source, "b", demand=1_000)

    assert len(first) == 15
    assert len(first) + len(second) == len(PAYLOADS)
    assert not {row["message_id"] for row in first} & {row["message_id"] for row in second}


def test_what_is_acknowledged_is_gone_and_the_rest_comes_back_marked_under_its_own_id(source: Source) -> None:
    rows = receive(source, "a")
    done, left = rows[:30], rows[30:]

    assert ack(source, done) == []
    again = come_back(source, "b", len(left))

    assert {row["message_id"] for row in again} == {row["message_id"] for row in left}
    assert all(row["redelivered"] for row in again)


def test_acknowledging_twice_and_by_another_process_does_no_harm(source: Source) -> None:
    rows = receive(source, "a")

    assert ack(source, rows) == []
    assert all(refused.lost for refused in ack(pickle.loads(pickle.dumps(source)), rows))
    assert source.backlog().messages == 0


def test_what_is_released_is_given_to_the_next_at_once(source: Source) -> None:
    rows = receive(source, "a")

    assert source.release(rows[0]["ack_ref"], [row["ack_id"] for row in rows]) == []
    again = receive(source, "b")

    assert {row["message_id"] for row in again} == {row["message_id"] for row in rows}
    assert ack(source, again) == []


def test_what_is_released_for_later_is_given_to_nobody_until_then(source: Source) -> None:
    rows = receive(source, "a")

    assert source.release(rows[0]["ack_ref"], [row["ack_id"] for row in rows], 2) == []
    assert receive(source, "b") == []

    assert {row["message_id"] for row in come_back(source, "c", len(rows))} == {row["message_id"] for row in rows}


def test_who_was_late_does_not_touch_what_another_holds_by_now(source: Source) -> None:
    late = receive(source, "a")
    held = come_back(source, "b", len(late))

    ack(source, late)
    again = come_back(source, "c", len(held))

    assert len(held) == len(late)
    assert {row["message_id"] for row in again} == {row["message_id"] for row in held}


def test_a_source_that_is_not_there_is_refused_by_name_before_anything_is_leased(waiting: Waiting) -> None:
    waiting.source.check_ready()

    with pytest.raises(SourceError, match="contract"):
        waiting.missing.check_ready()
    with pytest.raises(SourceError, match="contract"):
        waiting.missing.backlog()


def test_a_relative_path_to_a_queue_is_the_same_one_for_tasks_that_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    queue = TableQueue(name="contract", url="sqlite:///queue.sqlite")
    queue.create()
    monkeypatch.chdir("/")

    assert pickle.loads(pickle.dumps(queue)).backlog().messages == 0
