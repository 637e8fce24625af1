"""Concurrent manual closing and reopening of failures: each message has one open event."""

from collections.abc import Callable
from typing import Any

import pytest

from pipeline_platform.lake.failures import closing
from pipeline_platform.lake.failures.inspection import history
from pipeline_platform.lake.tables import Tables
from tests.fixtures.failures import NOON, event, failures, record
from tests.fixtures.received import received
from tests.fixtures.small_lake import Keeping, Memory, Mended, Run, visible


@pytest.fixture
def tables(lake):
    """Two messages that failed."""
    tables = Tables(lake, Keeping)
    Run(tables, Memory(deliveries_=(("m", b"fail m"), ("n", b"fail n"))), "r1").finish()
    return tables


@pytest.fixture
def meanwhile(monkeypatch):
    """Run an action once, after a command has read failures and before it commits."""

    def inject(happens: Callable[[], object]) -> None:
        write, left = closing.write_rows, [happens]

        def writes(*given: Any) -> Any:
            written = write(*given)
            if left:
                left.pop()()
            return written

        monkeypatch.setattr(closing, "write_rows", writes)

    return inject


def close(tables: Tables, **selection: Any) -> int:
    return closing.close(tables, failures(tables.lake, **selection), "me", "known")


def reopen(tables: Tables, **selection: Any) -> int:
    return closing.reopen(tables, failures(tables.lake, **selection))


def retry(tables: Tables, receive_id: str, pipeline: type[Keeping] = Keeping) -> Run:
    """A retry that has handled all open failures, and is not decided."""
    return Run(Tables(tables.lake, pipeline), failures(tables.lake), receive_id, origin="failed").work()


def given_out(tables: Tables) -> list[tuple[str, int]]:
    return [(row["message_id"], row["attempt"]) for row in received(failures(tables.lake))]


def events_of(tables: Tables, message_id: str) -> list[tuple[int, str]]:
    return [(event["attempt"], event["state"]) for event in history(failures(tables.lake), message_id)]


def test_of_two_that_reopen_a_failure_at_the_same_time_one_does(tables, meanwhile):
    close(tables, message_id="m")
    counts: list[int] = []
    meanwhile(lambda: counts.append(reopen(tables)))

    assert [reopen(tables), *counts] == [0, 1]
    assert events_of(tables, "m") == [(1, "open"), (1, "closed"), (2, "open")]
    assert given_out(tables) == [("n", 2), ("m", 3)]


def test_of_two_that_close_a_failure_at_the_same_time_one_does(tables, meanwhile):
    counts: list[int] = []
    meanwhile(lambda: counts.append(close(tables, message_id="m")))

    assert [close(tables), *counts] == [1, 1], "the other failure is closed all the same"
    assert events_of(tables, "m") == events_of(tables, "n") == [(1, "open"), (1, "closed")]


def test_a_commit_about_other_messages_needs_no_second_look(tables, meanwhile, monkeypatch):
    looks: list[str] = []
    look = closing.failure_events.chosen
    monkeypatch.setattr(closing.failure_events, "chosen", lambda *given: looks.append("look") or look(*given))
    meanwhile(lambda: record(tables.lake, "r2", event("other")))

    assert close(tables, message_id="m") == 1
    assert looks == ["look"]


@pytest.mark.parametrize(("pipeline", "closed"), [(Keeping, 1), (Mended, 0)])
def test_closing_uses_failures_that_a_retry_published_meanwhile(lake, tables, meanwhile, pipeline, closed):
    close(tables, message_id="n")
    meanwhile(lambda: retry(tables, "r2", pipeline).decide().publish())

    assert close(tables) == closed
    assert failures(lake).chosen_by_window() == {}
    assert events_of(tables, "m")[-1] == (2, "closed")


@pytest.mark.parametrize("is_decided", [True, False])
def test_a_failure_that_is_closed_and_reopened_during_a_retry_that_fails_is_open_once(lake, tables, is_decided):
    run = retry(tables, "r2")
    if is_decided:
        run.decide()
    assert close(tables, message_id="m") == 1
    assert reopen(tables) == 1
    run.decide().publish()

    assert events_of(tables, "m") == [(1, "open"), (1, "closed"), (2, "open")]
    assert events_of(tables, "n") == [(1, "open"), (2, "open")], "the result of the others is published"
    assert sorted(given_out(tables)) == [("m", 3), ("n", 3)]
    retry(tables, "r3", Mended).decide().publish()
    assert sorted(row["message_id"] for row in visible(tables, "kept")) == ["m", "n"]
    assert failures(lake).chosen_by_window() == {}


def test_a_failure_that_is_reopened_during_a_retry_that_handles_it_is_closed(lake, tables):
    run = retry(tables, "r2", Mended)
    close(tables)
    reopen(tables)
    run.decide().publish()

    assert failures(lake).chosen_by_window() == {}
    assert sorted(row["message_id"] for row in visible(tables, "kept")) == ["m", "n"]


def test_duplicate_open_events_of_a_message_are_retried_once(lake):
    """As in tables of an earlier release. The last event counts."""
    tables = Tables(lake, Keeping)
    record(lake, "r1", event("m", data=b"first"), event("m", data=b"second"), event("n"))
    record(lake, "r2", event("m", data=b"third"), event("o", due_at=NOON))

    assert sorted(given_out(tables)) == [("m", 2), ("n", 2), ("o", 2)]
    assert failures(lake).backlog().messages == 3
    (share,) = failures(lake, message_id="m").plan(10, 1, "r")
    (batch,) = failures(lake, message_id="m").read(share, "r")
    assert batch.column("data").to_pylist() == [b"third"]
    assert close(tables) == 3
    assert reopen(tables) == 3
    assert sorted(given_out(tables)) == [("m", 3), ("n", 3), ("o", 3)]


def test_failures_are_reopened_by_the_cause_that_they_had(lake):
    tables = Tables(lake, Keeping)
    reasons = {"a": "order 1 is late", "b": "order 2 is late", "c": "order 1 is lost"}
    record(lake, "r1", *(event(name, reason=reason) for name, reason in reasons.items()))

    assert close(tables, cause="order * is late") == 2
    assert close(tables) == 1
    assert reopen(tables, cause="order * is lost") == 1
    assert given_out(tables) == [("c", 3)]
    assert reopen(tables, kind="ValueError", reason="late") == 2
    assert reopen(tables) == 0


def test_progress_is_reported_after_each_part(lake):
    record(lake, "r1", *(event(name) for name in "abc"))
    record(lake, "r2", event("d"))
    closed, reopened = list[int](), list[int]()
    tables = Tables(lake, Keeping)

    assert closing.close(tables, failures(lake), "me", "known", closed.append) == 4
    assert closing.reopen(tables, failures(lake), reopened.append) == 4
    assert (closed[-1], reopened[-1]) == (4, 4)
