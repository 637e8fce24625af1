"""Selections of failures: by state, time, kind and reason."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipeline_platform.lake import writer
from pipeline_platform.lake.failures import failure_events, inspection
from pipeline_platform.lake.failures.failed import Counts
from pipeline_platform.lake.failures.failure_events import Selection
from pipeline_platform.lake.failures.inspection import Group, grouped, history
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.retry import Retry
from tests.fixtures.failures import LATER, MINUTE, NOON, event, failures, record
from tests.fixtures.received import received
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Run, visible


def chosen(lake: Lake, **selection: Any) -> list[str]:
    """Return the payloads that a run would get, as many as were counted."""
    source = failures(lake, **selection)
    rows = received(source, 100)
    assert len(rows) == source.backlog().messages
    return sorted(row["data"].decode() for row in rows)


@pytest.fixture
def mixed(lake):
    """Failures in all states, in two windows and several files."""
    record(
        lake,
        "r1",
        event("soon", due_at=NOON + MINUTE),
        event("late", due_at=NOON + timedelta(days=400)),
        event("unsaid"),
        event("again", due_at=NOON - 60 * MINUTE),
        event("done"),
    )
    record(lake, "r2", event("again", 2, due_at=NOON + 10 * MINUTE), event("done", 2, "closed", data=None))
    record(lake, "r3", event("gone", 3, "dead"), event("other", due_at=NOON), window=LATER)
    return lake


def test_failures_are_chosen_by_state_time_and_id(mixed):
    due = {"state": "due"}
    for selection, payloads in (
        ({}, "again:2 gone:3 late:1 other:1 soon:1 unsaid:1"),
        ({"state": "waiting"}, "again:2 late:1 other:1 soon:1 unsaid:1"),
        ({"state": "dead"}, "gone:3"),
        ({**due, "due_by": NOON - MINUTE}, ""),
        ({**due, "due_by": NOON}, "other:1"),
        ({**due, "due_by": NOON + 9 * MINUTE}, "other:1 soon:1"),
        ({**due, "due_by": NOON + 10 * MINUTE}, "again:2 other:1 soon:1"),
        ({**due, "due_by": NOON + timedelta(days=40_000)}, "again:2 late:1 other:1 soon:1"),
        ({"message_id": "again"}, "again:2"),
        ({"message_id": "done"}, ""),
        ({"message_id": "unknown"}, ""),
        ({"message_id": "gone", "state": "waiting"}, ""),
        ({"message_id": "gone", "source": "memory"}, "gone:3"),
        ({"message_id": "gone", "source": "other"}, ""),
        ({"source": "memory", "state": "dead"}, "gone:3"),
        ({"source": "unknown"}, ""),
    ):
        assert chosen(mixed, **selection) == payloads.split(), selection


def test_a_dead_failure_that_fails_again_or_is_closed_is_no_longer_that_one(mixed):
    record(mixed, "r4", event("gone", 4, "dead"), window=LATER)
    assert chosen(mixed, state="dead") == ["gone:4"]
    record(mixed, "r5", event("gone", 5, "closed", data=None), window=LATER)
    assert chosen(mixed, state="dead") == []


def test_failures_are_selected_by_kind_and_reason_of_the_latest_event(lake):
    record(
        lake,
        "r1",
        event("a", kind="KeyError", reason="'price'"),
        event("b"),
        event("c", reason="no date"),
        event("d", reason=None, kind=None),
        event("e", kind="KeyError"),
        event("f", state="dead"),
    )
    record(lake, "r2", event("e", 2, kind="OSError", reason="no price: 8"))

    assert chosen(lake, kind="KeyError") == ["a:1"]
    assert chosen(lake, kind="Key") == []
    assert chosen(lake, reason="no price") == ["b:1", "e:2", "f:1"]
    assert chosen(lake, reason="no price", kind="ValueError") == ["b:1", "f:1"]
    assert chosen(lake, reason="no price", kind="ValueError", state="dead") == ["f:1"]
    assert chosen(lake, reason="no price", message_id="e") == ["e:2"]
    assert chosen(lake, reason="no p.*") == [], "text, no pattern"
    assert chosen(lake, reason="") == ["a:1", "b:1", "c:1", "e:2", "f:1"]


def test_each_window_is_counted_with_its_dead_and_scheduled_and_when_the_first_is_due(mixed):
    first, second = failures(mixed).by_window().items()
    assert first == (WINDOW, Counts(4, 0, failures_at(NOON + MINUTE), 3))
    assert second == (LATER, Counts(2, 1, failures_at(NOON), 1))
    assert failures(mixed).by_window() == dict([first, second]), "the same from what was counted before"


def failures_at(time: datetime) -> int:
    return int((time - datetime(2020, 1, 1, tzinfo=UTC)).total_seconds())


def test_windows_where_nothing_is_due_are_not_read(mixed, monkeypatch):
    failures(mixed).by_window()
    read: list[list[str]] = []
    look = failure_events.chosen
    monkeypatch.setattr(
        failure_events, "chosen", lambda lake, paths, *more: read.append(paths) or look(lake, paths, *more)
    )
    assert failures(mixed, state="due", due_by=NOON).chosen_by_window() == {LATER: 1}
    assert [path for paths in read for path in paths if WINDOW in path] == []


class Patient(Keeping):
    """A pipeline with three attempts, an hour apart."""

    retry = Retry(max_attempts=3, backoff=60 * MINUTE)


def test_a_failure_is_retried_when_it_is_due_until_it_is_dead(lake):
    tables = Tables(lake, Patient)
    Run(tables, Memory(deliveries_=(("bad", b"fail"), ("good", b"fine"))), "r1").finish()
    now = datetime.now(UTC)

    assert failures(lake, state="due", due_by=now + 59 * MINUTE).backlog().messages == 0
    for attempt in (2, 3):
        due = failures(lake, state="due", due_by=now + 80 * MINUTE)
        assert due.backlog().messages == 1
        Run(tables, due, f"r{attempt}", origin="failed").finish()

    assert failures(lake, state="due", due_by=now + timedelta(days=1_000)).backlog().messages == 0
    assert failures(lake).by_window() == {WINDOW: Counts(1, 1, None, 0)}
    assert [row["state"] for row in sorted(visible(tables, "failed"), key=lambda row: row["attempt"])] == [
        "open",
        "open",
        "dead",
    ]

    Run(tables, failures(lake), "r4", origin="failed").finish()

    assert failures(lake, state="dead").backlog().messages == 1, "people may drive it, and it is dead again"


def test_all_steps_of_a_run_use_the_same_due_time():
    assert Selection(state="due").at(NOON).due_by == NOON
    assert Selection(state="due", due_by=NOON).at(NOON + MINUTE).due_by == NOON
    assert Selection(state="dead").at(NOON) == Selection(state="dead")


def test_a_selection_by_unknown_values_is_refused():
    wrong: dict[str, object] = {"state": "closed", "window": "w", "message_id": 7, "kind": ["a"], "cause": 7}
    for name, value in {**wrong, "due_by": "2026-01-01T00:00:00", "failed_before": "today"}.items():
        with pytest.raises(ValidationError):
            Selection(**{name: value})


def test_failures_are_grouped_by_state_kind_and_cause_the_largest_group_first(lake):
    noon, later = NOON, NOON + MINUTE
    record(lake, "r1", event("a", at=later), event("b", due_at=noon), event("c", due_at=later), event("d", at=later))
    record(lake, "r2", event("e", kind="KeyError"), event("f", state="dead"), event("a", 2), event("d", 2, "closed"))
    record(lake, "r3", event("g", reason=None, kind=None), event("h", reason="no price: 8", at=later), window=LATER)

    assert grouped(failures(lake), noon) == (
        [
            Group(3, "waiting", "ValueError", "no price: *", noon, later, WINDOW, LATER, later, "c"),
            Group(1, "dead", "ValueError", "no price: 7", noon, noon, WINDOW, WINDOW, None, "f"),
            Group(1, "due", "ValueError", "no price: 7", noon, noon, WINDOW, WINDOW, noon, "b"),
            Group(1, "waiting", "", "", noon, noon, LATER, LATER, None, "g"),
            Group(1, "waiting", "KeyError", "no price: 7", noon, noon, WINDOW, WINDOW, None, "e"),
        ],
        7,
    )
    assert [group.example for group in grouped(failures(lake, kind="KeyError"), noon).groups] == ["e"]
    assert [group.example for group in grouped(failures(lake, windows=(LATER,)), noon).groups] == ["h", "g"]
    closed, count = grouped(failures(lake), noon, closed=True)
    assert ([(group.state, group.example) for group in closed], count) == ([("closed", "d")], 1)


def test_the_largest_of_many_groups_are_kept_and_all_failures_are_counted(lake, monkeypatch):
    monkeypatch.setattr(inspection, "GROUPS", 2)
    letters = "abcdefghij"
    for number in range(3):
        events = [event(f"{letter}{number}", reason=letter) for letter in (letters[number], "x", "y")]
        record(lake, f"r{number}", *events)

    groups, count = grouped(failures(lake), NOON)

    assert [(group.cause, group.messages) for group in groups[:2]] == [("x", 3), ("y", 3)]
    assert (len(groups) <= 4, count) == (True, 9)


def test_failures_are_selected_by_a_cause_or_by_a_reason_with_this_cause(lake):
    reasons = {"a": "order 1 is late", "b": "order 22 is late", "c": "order 1 is lost", "d": None}
    record(lake, "r1", *(event(name, reason=reason) for name, reason in reasons.items()))

    assert chosen(lake, cause="order * is late") == ["a:1", "b:1"]
    assert chosen(lake, cause="order 333 is late") == ["a:1", "b:1"]
    assert chosen(lake, cause="order * is late", message_id="b") == ["b:1"]
    assert chosen(lake, cause="late") == []


def test_failures_are_selected_by_the_time_of_their_last_failure(lake):
    record(lake, "r1", event("a"), event("b"), event("c", at=NOON + MINUTE))
    record(lake, "r2", event("b", 2, at=NOON + MINUTE))

    assert chosen(lake, failed_before=NOON) == []
    assert chosen(lake, failed_before=NOON + MINUTE) == ["a:1"]
    assert chosen(lake, failed_before=NOON + 2 * MINUTE) == ["a:1", "b:2", "c:1"]


def test_without_a_table_there_is_nothing_to_look_at(lake):
    assert grouped(failures(lake), datetime.now(UTC)) == ([], 0)
    assert history(failures(lake), "m") == []


def test_the_history_of_a_message_is_in_the_order_in_which_events_count(lake):
    record(lake, "r3", event("m", 3, "closed", data=None))
    record(lake, "r1", event("m", 1), event("other", 1))
    record(lake, "r2", event("m", 2, "dead", reason="no date"))
    events = history(failures(lake), "m")
    assert [(event["attempt"], event["state"], event["receive_id"]) for event in events] == [
        (1, "open", "r1"),
        (2, "dead", "r2"),
        (3, "closed", "r3"),
    ]
    assert (events[0]["data"], events[0]["window"], events[1]["reason"]) == (b"m:1", WINDOW, "no date")


def test_the_history_of_a_message_reads_payloads_only_where_the_message_is(lake, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP_ROWS", 10)
    record(lake, "r1", *(event(f"m{number:03}") for number in range(100)), event("m999"))
    record(lake, "r2", *(event(f"{letter}{number}") for number in range(50) for letter in "az"), event("m042", 2))
    read: list[list[str]] = []
    real = pq.ParquetFile.read_row_group

    def reading(self: Any, group: int, columns: list[str], **options: Any) -> Any:
        read.append(columns)
        return real(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", reading)

    assert [event["data"] for event in history(failures(lake), "m042")] == [b"m042:1", b"m042:2"]
    assert sum("data" in columns for columns in read) == 2
    assert len([columns for columns in read if "data" not in columns]) < 22, "statistics exclude most of the first file"
