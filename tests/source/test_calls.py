"""Calls of a few messages each: their number, their end, and failures."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest

from pipeline_platform.source import calls
from pipeline_platform.source.contract import Refused


class Server:
    """A server of numbered messages that records the size of each call, and fails from call `fails_at` on."""

    def __init__(self, messages: int, fails_at: int | None = None) -> None:
        self.left, self.fails_at, self.asked = list(range(messages)), fails_at, list[int]()
        self.lock = threading.Lock()

    def receive(self, most: int) -> list[int]:
        with self.lock:
            self.asked.append(most)
            if self.fails_at is not None and len(self.asked) > self.fails_at:
                raise OSError("gone")
            given, self.left = self.left[:most], self.left[most:]
            return given


def batches(server: Server, wanted: int, **options: Any) -> list[list[int]]:
    given = {"per_call": 10, "empty_replies": 3, **options}
    return list(calls.receive(server.receive, wanted, size=lambda _: 1, **given))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(calls, "THREADS", 1)


@pytest.mark.parametrize(
    ("messages", "wanted", "options", "asked"),
    [
        (30, 25, {}, [10, 10, 5]),
        (6, 5, {"per_call": 2}, [2, 2, 1]),
        (2, 10, {}, [10, 8, 8, 8]),
        (0, 10, {"empty_replies": 1}, [10]),
    ],
    ids=["no more than the demand", "no more than a call takes", "until it seems empty", "one empty reply"],
)
def test_calls_request_the_remaining_demand_until_the_queue_seems_empty(messages, wanted, options, asked):
    server = Server(messages)
    assert [*chain(*batches(server, wanted, **options))] == list(range(min(messages, wanted)))
    assert server.asked == asked


@pytest.mark.parametrize("bound", ["BATCH_ROWS", "BATCH_BYTES"])
def test_batches_are_bounded_by_rows_and_by_bytes(bound, monkeypatch):
    monkeypatch.setattr(calls, bound, 20)
    assert [len(batch) for batch in batches(Server(45), 45)] == [20, 20, 5]


def test_calls_are_concurrent_and_never_exceed_the_demand(monkeypatch):
    monkeypatch.setattr(calls, "THREADS", 4)
    server, meet = Server(100), threading.Barrier(4, timeout=10)

    def together(most: int) -> list[int]:
        meet.wait()
        return server.receive(most)

    received = calls.receive(together, 40, per_call=10, empty_replies=1, size=lambda _: 1)

    assert sorted(number for batch in received for number in batch) == list(range(40))


def test_after_an_empty_reply_calls_are_sequential(monkeypatch):
    monkeypatch.setattr(calls, "THREADS", 8)
    server = Server(40)
    assert sorted(chain(*batches(server, 10_000))) == list(range(40))
    assert len(server.asked) <= 4 + 7 + 3


def test_no_call_is_started_when_time_is_up():
    server = Server(1_000)
    receive = server.receive
    server.receive = lambda most: (time.sleep(0.05), receive(most))[1]  # type: ignore[method-assign]
    assert 0 < len([*chain(*batches(server, 1_000, within_s=0.2))]) < 1_000


def test_an_error_ends_a_receive_and_is_raised_only_if_it_is_empty(caplog):
    with caplog.at_level(logging.WARNING):
        assert [*chain(*batches(Server(30, fails_at=1), 30))] == list(range(10))
    assert "Ended a receive after 10 messages: gone" in caplog.text
    with pytest.raises(OSError, match="gone"):
        batches(Server(30, fails_at=0), 30)


# Acknowledging

IDS = [f"h{number}" for number in range(100)]


def failing(fails: Callable[[int], bool]) -> tuple[list[Sequence[str]], Callable[[Sequence[str]], list[Refused]]]:
    """Return a call that fails by its number, and the groups that it was called with."""
    made: list[Sequence[str]] = []

    def call(group: Sequence[str]) -> list[Refused]:
        made.append(group)
        if fails(len(made)):
            raise OSError("cut off")
        return [Refused(ack_id, "not now") for ack_id in group if ack_id == "h3"]

    return made, call


def test_ids_are_acknowledged_in_groups_and_refused_ids_are_returned():
    made, call = failing(lambda number: False)
    assert calls.in_groups(call, IDS[:25], 10) == [Refused("h3", "not now")]
    assert made == [IDS[:10], IDS[10:20], IDS[20:25]]
    assert calls.in_groups(call, [], 10) == []


def test_a_failed_call_does_not_affect_other_groups():
    _, call = failing(lambda number: number == 2)
    refused = calls.in_groups(call, IDS[:30], 10)
    assert refused == [Refused("h3", "not now"), *(Refused(ack_id, "cut off") for ack_id in IDS[10:20])]


def test_after_repeated_failures_the_other_groups_are_reported_without_a_call():
    made, call = failing(lambda number: number > 1)
    refused = calls.in_groups(call, IDS, 10)
    assert len(made) == 1 + calls.FAILED_CALLS
    assert [entry.ack_id for entry in refused] == ["h3", *IDS[10:]]
    assert refused[-1].reason == "not tried after 3 failed calls: cut off"


def test_the_error_is_raised_if_no_call_succeeds():
    with pytest.raises(OSError, match="cut off"):
        calls.in_groups(failing(lambda number: True)[1], IDS, 10)


def test_groups_are_acknowledged_concurrently(monkeypatch):
    monkeypatch.setattr(calls, "THREADS", 10)
    meet = threading.Barrier(10, timeout=10)

    def together(group: Sequence[str]) -> list[Refused]:
        meet.wait()
        return []

    assert calls.in_groups(together, IDS, 10) == []
