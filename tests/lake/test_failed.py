"""Open failures, by the latest event of each message."""

import pytest

from pipeline_platform.lake.failures import failed
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.message import DELIVERIES
from tests.fixtures.failures import LATER, event, failures, record
from tests.fixtures.small_lake import WINDOW, Keeping, Memory, Mended, Run, visible


def given_out(source: FailedMessages, demand: int = 100) -> dict[str, int]:
    """Return the attempt of each message of a receive."""
    rows = []
    for share in source.plan(demand, 2, "r"):
        for batch in source.read(share, "r"):
            assert batch.schema == DELIVERIES
            rows += batch.to_pylist()
        assert len(rows) <= demand
    assert len({row["message_id"] for row in rows}) == len(rows), "each once"
    return {row["message_id"]: row["attempt"] for row in rows}


def test_without_a_table_there_are_no_failures(lake):
    assert failures(lake).backlog().messages == 0
    assert failures(lake).plan(10, 1, "r") == []


EVENTS = {
    "one": ([(1, "open")], 2),
    "again": ([(1, "open"), (2, "open")], 3),
    "late": ([(2, "open"), (1, "open")], 3),
    "closed": ([(1, "open"), (2, "closed")], None),
    "closed, late": ([(2, "closed"), (1, "open")], None),
    "closed at last": ([(1, "open"), (2, "open"), (3, "closed")], None),
    "closed manually": ([(1, "closed"), (1, "open")], None),
    "twice": ([(1, "open"), (1, "open")], 2),
}
"""Attempts and states of a message's events, and the attempt that follows."""


@pytest.mark.parametrize("in_one_file", [True, False])
def test_the_latest_event_says_whether_a_failure_is_open(lake, in_one_file):
    for number in range(1) if in_one_file else range(3):
        events = ((name, some if in_one_file else some[number : number + 1]) for name, (some, _) in EVENTS.items())
        record(lake, f"r{number}", *(event(name, *each) for name, some in events for each in some))
    still_open = {name: attempt for name, (_, attempt) in EVENTS.items() if attempt}
    assert given_out(failures(lake)) == still_open
    assert failures(lake).backlog().messages == len(still_open)


def test_failures_of_the_chosen_windows_are_given_out_and_no_others(lake):
    record(lake, "r1", event("a"))
    record(lake, "r2", event("b"), window=LATER)
    assert given_out(failures(lake, windows=(LATER,))) == {"b": 2}
    assert failures(lake).chosen_by_window() == {WINDOW: 1, LATER: 1}


def test_each_failure_stays_in_its_window(lake):
    record(lake, "r1", event("a"))
    record(lake, "r2", event("b"), window=LATER)
    assert [share.window for share in failures(lake).plan(10, 4, "r")] == [WINDOW, LATER]


def test_no_more_is_given_out_than_asked_for(lake):
    record(lake, "r1", event("a"), event("b"), event("c"))
    record(lake, "r2", event("d"), event("e"), window=LATER)
    assert [len(given_out(failures(lake), demand)) for demand in (0, 1, 3, 5, 9)] == [0, 1, 3, 5, 5]


def test_the_original_payload_is_given_out_again(lake):
    record(lake, "r1", event("a"), event("a", 2, metadata='{"a": 1}'))
    (share,) = failures(lake).plan(10, 1, "r")
    (batch,) = failures(lake).read(share, "r")
    (row,) = batch.to_pylist()
    assert (row["data"], row["metadata"], row["source"]) == (b"a:2", '{"a": 1}', "memory")


def test_a_retried_failure_is_closed_by_success_and_kept_open_by_failure(lake):
    tables = Tables(lake, Keeping)
    deliveries = (("good", b"fail now"), ("bad", b"fail always"))
    Run(tables, Memory(deliveries_=deliveries), "r1").finish()
    assert failures(lake).backlog().messages == 2
    Run(Tables(lake, Mended), failures(lake), "r2", origin="failed").finish()
    assert given_out(failures(lake)) == {"bad": 3}
    (row,) = visible(tables, "kept")
    assert (row["text"], row["message_id"], row["attempt"]) == ("mended", "good", 2)


def test_of_two_receives_that_retry_the_same_failure_one_decides_it(lake):
    tables = Tables(lake, Keeping)
    Run(tables, Memory(deliveries_=(("m", b"fail now"),)), "r1").finish()
    mended = Tables(lake, Mended)
    first = Run(mended, failures(lake), "r2", origin="failed").work()
    second = Run(mended, failures(lake), "r3", origin="failed").work()
    second.decide().publish()
    first.decide().publish()
    (row,) = visible(tables, "kept")
    assert row["receive_id"] == "r3"
    assert failures(lake).backlog().messages == 0


def test_a_failure_that_was_decided_after_a_backfill_had_begun_does_not_hinder_it(lake):
    """The backfill waited for capacity meanwhile: it retries this failure, one attempt later."""
    tables = Tables(lake, Keeping)
    tables.ensure()
    base = tables["outcomes"].open().version()
    Run(tables, Memory(deliveries_=(("m", b"fail now"),)), "r1").finish()
    Run(Tables(lake, Mended), failures(lake), "r2", origin="failed", base=base).finish()
    assert [row["attempt"] for row in visible(tables, "kept")] == [2]
    assert failures(lake).backlog().messages == 0


def test_windows_are_counted_again_only_when_their_files_change(lake, monkeypatch):
    record(lake, "r1", event("a"), event("b"))
    record(lake, "r2", event("c"), window=LATER)
    assert failures(lake).chosen_by_window() == {WINDOW: 2, LATER: 1}
    counted: list[int] = []
    count = failed.open_failures
    monkeypatch.setattr(failed, "open_failures", lambda lake, paths: counted.append(len(paths)) or count(lake, paths))
    assert failures(lake, windows=(WINDOW,)).chosen_by_window() == {WINDOW: 2}
    record(lake, "r3", event("a", 2, "closed"))
    assert failures(lake).chosen_by_window() == {WINDOW: 1, LATER: 1}
    assert failures(lake, windows=(WINDOW,)).chosen_by_window() == {WINDOW: 1}
    assert counted == [2], "the first window, once, when it had another file"


def test_a_count_that_cannot_be_read_is_made_again(lake):
    record(lake, "r1", event("a"))
    for broken in (b"", b"{", b"[1]", b'{"w": 1}'):
        lake.write("keeping/_open_failures.json", broken)
        assert failures(lake).chosen_by_window() == {WINDOW: 1}
