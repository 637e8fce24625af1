"""Retries of open failures and full replays: whole runs over windows, with metadata for each window."""

import dagster as dg
import pytest

from pipeline_platform.lake.failures.failed import Counts
from pipeline_platform.orchestration.reports import run_checks
from pipeline_platform.run import lease
from pipeline_platform.run.intake import Intake
from tests.fixtures.dagster import LAST, NEXT, WINDOW, figures, rows_of, versions

SUCCESS = dg.DagsterRunStatus.SUCCESS


@pytest.fixture
def short_waits(monkeypatch):
    """Leases and waits of seconds instead of a minute."""
    monkeypatch.setattr(lease, "CLAIM_S", 3.0)
    monkeypatch.setattr(Intake, "room_within_s", 2.0)


def test_a_backfill_of_three_windows_is_one_run_with_figures_and_a_data_version_for_each_window(location):
    pulls = list[dg.DagsterRun]()
    for window, payloads in ((WINDOW, ["fail 1", "one"]), (NEXT, ["fail 2", "fail 3"]), (LAST, ["letter x", "two"])):
        location.enqueue(*payloads)
        pulls.append(pulled := location.run("told_pull", window))
        assert pulled.status == SUCCESS
    assert location.open_failures() == {WINDOW: 1, NEXT: 2, LAST: 1}
    warned = location.checks(pulled)["open_failures"]
    assert str(warned.description).startswith("4 open failures in 3 windows. ")
    assert [row["open"] for row in rows_of(warned.metadata["windows"])] == [1, 2, 1]
    assert figures(location.materialisations(pulled, "failed")[0])["open"] == 1, "of the window itself"
    idle = location.checks(location.run("told_pull", LAST))["open_failures"]
    assert not idle.passed, "a run that received nothing hides nothing either"

    nothing = versions(location, location.run("told_retry", WINDOW, LAST))
    assert nothing == {
        WINDOW: versions(location, pulls[0])[WINDOW],
        NEXT: None,
        LAST: versions(location, pulls[2])[LAST],
    }
    assert None not in (nothing[WINDOW], nothing[LAST])

    run = location.run("told_retry", WINDOW, LAST, context={"forgiving": True})

    assert run.status == SUCCESS
    forgiven = versions(location, run)
    assert forgiven[WINDOW] not in (None, nothing[WINDOW])
    assert (forgiven[NEXT], forgiven[LAST]) == (forgiven[WINDOW], nothing[LAST])
    events = location.materialisations(run, "lines")
    told = {event.partition: figures(event) for event in events}
    assert [event.partition for event in events] == [WINDOW, NEXT, LAST]
    assert [told[w]["rows"] for w in (WINDOW, NEXT, LAST)] == [1, 2, 0]
    assert [told[w]["dagster/partition_row_count"] for w in (WINDOW, NEXT, LAST)] == [2, 2, 1]
    acknowledged = [(event.partition, figures(event)) for event in location.materialisations(run, "messages")]
    assert [(window, told["received"], told["handled"], told["failed"]) for window, told in acknowledged] == [
        (WINDOW, 1, 1, 0),
        (NEXT, 2, 2, 0),
        (LAST, 1, 0, 1),
    ]
    failed = {event.partition: figures(event)["failed"] for event in location.materialisations(run, "failed")}
    assert failed == {WINDOW: 0, NEXT: 0, LAST: 1}
    failures = [figures(event) for event in location.materialisations(run, "failed")]
    assert [told["dagster/partition_row_count"] for told in failures] == [0, 0, 1], "those that are open"
    assert location.texts() == ["fail 1", "fail 2", "fail 3", "one", "two"]
    assert location.open_failures() == {LAST: 1}, "the letter still does not go"
    events_of = location.rows("failed").sort("message_id", "attempt")
    last = events_of.group_by("message_id", maintain_order=True).last()
    assert sorted(zip(last["state"], last["attempt"], strict=True)) == [
        ("closed", 3),
        ("closed", 3),
        ("closed", 3),
        ("open", 3),
    ]
    assert not location.checks(run)["open_failures"].passed

    replayed = versions(location, location.run("told_replay", WINDOW, NEXT))
    assert replayed[WINDOW] != forgiven[WINDOW], "all rows are replaced"


def test_of_many_windows_with_open_failures_the_oldest_are_named():
    waiting = {f"2025-03-{day:02}T0000": Counts(day, 1, None, 0) for day in range(31, 0, -1)}

    told = run_checks.judge_failures(waiting)

    assert str(told.description).startswith("496 open failures in 31 windows, 31 of them dead. ")
    assert str(told.description).endswith("The table lists the oldest 20 windows.")
    assert [row["window"] for row in rows_of(told.metadata["windows"])] == sorted(waiting)[:20]


def test_a_backfill_of_windows_without_open_failures_says_so(location):
    run = location.run("told_retry", WINDOW, NEXT)

    assert run.status == SUCCESS
    assert f"Found no open failures in {WINDOW}, {NEXT}" in location.log(run)
    assert [event.partition for event in location.materialisations(run, "failed")] == [WINDOW, NEXT]


def test_a_backfill_waits_for_capacity_then_retries_all_in_the_capacity_that_is_left(location, short_waits):
    location.enqueue(*(f"fail {n}" for n in range(10)))
    location.run("told_pull")
    location.control.claim("told", "another", "run", wanted=196, capacity=200, lease_s=60)

    run = location.run("told_retry", context={"forgiving": True})

    assert "waiting up to 2 s for other runs" in location.log(run)
    assert "capacity for 4 of 10 messages" in location.log(run)
    assert run.status == SUCCESS
    assert "Retried 4 of 10 failures" in location.log(run)
    assert location.checks(run)["open_failures"].passed
    assert len(location.texts()) == 10
