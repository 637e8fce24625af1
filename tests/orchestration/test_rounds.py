"""Runs of many rounds: a run of a producer with `idle_timeout` receives again while messages arrive."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dagster as dg
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.demand import InFlight, Limits
from pipeline_platform.model.options import RateLimiting
from pipeline_platform.model.retry import Backoff
from pipeline_platform.orchestration.asset_windows import window_now
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.resources.source_resources import AcknowledgerResource
from pipeline_platform.orchestration.rounds import rounds, rounds_end
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Share, Source
from tests.fixtures.dagster import Location, figures
from tests.fixtures.pipelines_under_test import Steady

SECOND = timedelta(seconds=1)
SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE
TAGS = RunTags.of(Steady)


def texts(location: Location) -> list[str]:
    return sorted(location.rows("lines", "steady")["text"])


def receives(location: Location) -> int:
    return location.rows("outcomes", "steady")["receive_id"].n_unique()


def run(location: Location) -> dg.DagsterRun:
    return location.run("steady_pull", window_now(Steady), rounds=True)


def ended(location: Location, run: dg.DagsterRun) -> str:
    """Return why a run ended its rounds."""
    assert location.control.in_flight("steady") + location.control.over("steady") == []
    assert location.flow(Steady).ledger.unfinished() == []
    return next(line for line in location.log(run).splitlines() if "Ended after" in line)


def when(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def when_stored(location: Location, *expected: str) -> None:
    """Wait until rows are in the table."""
    log = location.root / "lake/steady/lines/_delta_log"
    when(lambda: any(log.glob("*.json")) and {*expected} <= {*texts(location)})


@pytest.fixture
def later(location: Location) -> Callable[..., Any]:
    """Return a context in which steps follow once the first receive is stored."""
    location.enqueue("first")

    @contextmanager
    def after_first(*work: Callable[[], Any]) -> Iterator[None]:
        def perform() -> None:
            when_stored(location, "first")
            for step in work:
                step()

        thread = threading.Thread(target=perform)
        thread.start()
        yield
        thread.join()

    return after_first


def test_messages_that_arrive_during_a_run_are_stored_by_it_and_it_ends_when_none_arrives(location, later, monkeypatch):
    active, perform = [], rounds.Rounds.perform

    def look(performing: rounds.Rounds) -> str | None:
        active.extend(claim.run_id for claim in location.control.in_flight("steady"))
        return perform(performing)

    monkeypatch.setattr(rounds.Rounds, "perform", look)
    with later(
        lambda: location.enqueue("second", "fail 1"),
        lambda: when_stored(location, "second"),
        lambda: location.enqueue("third", "letter a"),
    ):
        made = run(location)

    assert made.status == SUCCESS
    assert active == [made.run_id], "also between its first receive and its rounds"
    assert texts(location) == ["first", "second", "third"]
    assert location.rows("letters", "steady").height == 1
    assert location.waiting() == 0
    assert receives(location) >= 3
    assert "no message arrived for 0:00:02" in ended(location, made)
    assert location.checks(made)["acknowledged"].passed
    assert not location.checks(made)["open_failures"].passed
    first, *later_ones = location.materialisations(made, "messages", "steady")
    assert figures(first)["received"] == 1
    assert sum(figures(each)["received"] for each in later_ones) == 4
    assert figures(later_ones[-1])["dagster/partition_row_count"] == 5
    assert int(location.stored(made.run_id).tags[TAGS.rounds]) == receives(location) - 1
    versions = {event.tags["dagster/data_version"] for event in location.materialisations(made, "lines", "steady")}
    assert len(versions) == 1 + len(later_ones), "each report is new for downstream assets"


def test_a_run_without_rounds_in_its_config_receives_once(location, monkeypatch):
    monkeypatch.setattr(rounds.Rounds, "perform", lambda _: "it continued")
    location.enqueue("first")
    made = location.run("steady_pull", window_now(Steady))

    assert (made.status, texts(location)) == (SUCCESS, ["first"])
    assert location.control.in_flight("steady") == []


def test_rounds_keep_the_rate_limit_and_reports_are_few(location, later, monkeypatch):
    monkeypatch.setattr(rounds, "_REPORTS", rounds.Backoff(first=timedelta(seconds=60), most=timedelta(seconds=60)))
    limit = RateLimiting(allowed_messages=2, interval=timedelta(seconds=2))
    location.control.set_rate_limiting("steady", limit)
    sent = [f"line {number}" for number in range(7)]
    with later(lambda: location.enqueue(*sent)):
        made = run(location)
    assert made.status == SUCCESS
    assert texts(location) == sorted(["first", *sent])
    decided = location.rows("outcomes", "steady")
    assert decided.group_by("receive_id").len()["len"].max() <= 2
    assert receives(location) >= 5
    assert len(location.materialisations(made, "messages", "steady")) == 2
    assert len(location.instance.all_logs(made.run_id)) < 80


def test_messages_that_wait_for_permits_are_looked_for_as_seldom_as_their_source_prescribes(monkeypatch):
    clock = [0.0]
    source = Mock(backlog_up_to=Mock(return_value=Backlog(5)), poll_pauses=Backoff(first=SECOND, most=4 * SECOND))
    run = rounds.Rounds(Mock(), Mock(source=source), {})
    bounds = Limits(Steady.producer, Steady.processors, permits=0, permits_soon=0)
    monkeypatch.setattr(rounds, "limits", lambda *given, **options: bounds)
    monkeypatch.setattr(rounds, "in_flight", lambda *given, **options: InFlight())
    monkeypatch.setattr(rounds.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(rounds.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))

    while clock[0] < 60:
        assert run._ask(Mock()) == 0

    assert source.backlog_up_to.call_count <= 18


def test_a_failed_share_above_the_maximum_fails_a_run_after_its_results_are_published(location, later, monkeypatch):
    monkeypatch.setattr(Steady, "max_failed_share", 0.5)
    with later(lambda: location.enqueue(*(f"fail {number}" for number in range(4)))):
        made = run(location)
    assert made.status == FAILURE
    assert "4 of 4 messages failed" in ended(location, made)
    assert location.waiting() == 0
    assert location.stored(made.run_id).tags[TAGS.published] == made.run_id


def test_a_run_continues_after_an_outage_and_acknowledges_a_round_that_the_source_refused(location, later, monkeypatch):
    monkeypatch.setattr(rounds, "_FINISH_EVERY_S", 0.5)
    queue, refuses, refused = (location.root / name for name in ("queue.sqlite", "no ack", "refused"))
    attempts = AcknowledgerResource().attempts
    moved = queue.with_name("away.sqlite")

    def away() -> None:
        queue.rename(moved)
        time.sleep(1)
        moved.rename(queue)

    with later(
        away,
        lambda: when(lambda: location.waiting() == 0),
        refuses.touch,
        lambda: location.enqueue("second"),
        lambda: when(lambda: refused.exists() and len(refused.read_text().splitlines()) == attempts),
        refuses.unlink,
    ):
        made = run(location)

    assert made.status == SUCCESS
    assert texts(location) == ["first", "second"]
    assert "Finished receive" in location.log(made)
    assert location.waiting() == 0
    ended(location, made)


def test_a_run_that_is_terminated_in_a_round_acknowledges_what_it_handled_and_leaves_no_claim(location):
    begun: Path = location.root / "begun"
    location.enqueue("first")
    process = location.start("steady_pull", window_now(Steady), rounds=True)
    when_stored(location, "first")
    location.enqueue(f"touch {begun}", *(f"sleep 0.3{number:03}" for number in range(20)))
    while not begun.exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) != 0

    (made,) = location.instance.get_runs(dg.RunsFilter(job_name="steady_pull"), limit=1)
    assert made.status in (dg.DagsterRunStatus.CANCELED, FAILURE)
    assert location.control.in_flight("steady") + location.control.over("steady") == []
    assert len(texts(location)) + location.waiting() == 22
    assert "Stopped as requested" in location.log(made)


def test_a_run_that_is_terminated_while_it_waits_for_messages_leaves_no_claim(location, monkeypatch):
    """The signal is real, and Dagster's own handler takes it."""

    def terminated(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    monkeypatch.setattr(TableQueue, "wait", terminated)
    location.enqueue("first")

    assert run(location).status == FAILURE
    assert location.control.in_flight("steady") + location.control.over("steady") == []
    assert (texts(location), location.waiting()) == (["first"], 0)


def test_a_run_that_dagster_is_canceling_ends_its_rounds_as_canceled_without_a_signal(location, monkeypatch):
    def wait(*_: Any) -> bool:
        (claim,) = location.control.in_flight("steady")
        active = location.stored(claim.run_id)
        if active.status is dg.DagsterRunStatus.STARTED:
            location.instance.report_run_canceling(active)
        return False

    monkeypatch.setattr(rounds_end, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(TableQueue, "wait", wait)
    location.enqueue("first")
    made = run(location)

    assert made.status == dg.DagsterRunStatus.CANCELED
    assert "Dagster has marked the run as CANCELING" in ended(location, made)


@pytest.mark.parametrize("end", ["terminated", "failed"])
def test_a_run_that_ends_between_two_rounds_reports_the_rounds_before(location, monkeypatch, end):
    monkeypatch.setattr(rounds, "_REPORTS", rounds.Backoff(first=timedelta(seconds=60), most=timedelta(seconds=60)))
    waits: list[float] = []

    def wait(_: TableQueue, seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 1:
            location.enqueue("second")
        elif end == "failed":
            raise OSError("No space left on device")
        else:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        return True

    monkeypatch.setattr(TableQueue, "wait", wait)
    location.enqueue("first")
    made = run(location)

    assert made.status == FAILURE
    assert texts(location) == ["first", "second"]
    first, second = location.materialisations(made, "lines", "steady")
    assert (first.tags or {})["dagster/data_version"] != (second.tags or {})["dagster/data_version"]


@pytest.mark.parametrize("fault", [OSError("Dagster's storage is unavailable"), KeyboardInterrupt()])
def test_a_report_that_fails_after_an_error_does_not_replace_it(monkeypatch, fault):
    performing = rounds.Rounds(Mock(), Mock(), {})
    monkeypatch.setattr(rounds, "standing_by", lambda *_: nullcontext())
    monkeypatch.setattr(rounds, "RoundsEnd", Mock())
    monkeypatch.setattr(performing, "_perform_until", Mock(side_effect=fault))
    monkeypatch.setattr(performing, "_report", Mock(side_effect=OSError("another")))
    with pytest.raises(type(fault)) as raised:
        performing.perform()
    assert raised.value is fault


@pytest.mark.faults
def test_a_run_that_is_killed_in_a_round_is_continued_by_the_next(location):
    begun: Path = location.root / "begun"
    location.enqueue("first")
    process = location.start("steady_pull", window_now(Steady), rounds=True)
    when_stored(location, "first")
    location.enqueue(f"touch {begun}", "sleep 5", "second")
    while not begun.exists():
        time.sleep(0.05)
    process.kill()
    process.wait()
    (made,) = location.instance.get_runs(dg.RunsFilter(job_name="steady_pull"), limit=1)
    location.control.let_go(made.run_id)  # as the sensor does
    location.queue.enqueue([b"third"])

    assert run(location).status == SUCCESS
    assert "third" in texts(location)
    assert len(texts(location)) == len(set(texts(location))) == 5
    assert location.control.in_flight("steady") + location.control.over("steady") == []


def test_a_run_of_a_source_that_does_not_report_its_backlog_tries_now_and_then_and_ends(location, later, monkeypatch):
    plans: list[int] = []
    plan = TableQueue.plan

    def counted(queue: TableQueue, demand: int, *more: Any) -> list[Share]:
        plans.append(demand)
        return plan(queue, demand, *more)

    monkeypatch.setattr(TableQueue, "plan", counted)
    monkeypatch.setattr(TableQueue, "backlog_up_to", lambda *_: Backlog(None))
    monkeypatch.setattr(TableQueue, "wait", Source.wait)
    with later(lambda: location.enqueue("second")):
        made = run(location)

    assert made.status == SUCCESS
    assert texts(location) == ["first", "second"]
    assert "no message arrived for 0:00:02" in ended(location, made)
    assert len(plans) - receives(location) <= 5, "a round without messages is followed by a pause"
