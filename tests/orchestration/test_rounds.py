"""Runs of many rounds: a run of a producer with `idle_timeout` receives again while messages arrive."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.drain import drain
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import RateLimiting
from pipeline_platform.orchestration import rounds, rounds_end
from pipeline_platform.orchestration.asset_windows import window_now
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.source.backlog import Backlog
from pipeline_platform.source.contract import Share, Source
from tests.fixtures.dagster import Location, figures
from tests.fixtures.pipelines_under_test import Steady

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


def is_in_rounds(location: Location) -> bool:
    """Whether the newest run has started its rounds, and works on no receive."""
    (newest,) = location.instance.get_runs(dg.RunsFilter(job_name="steady_pull"), limit=1)
    steps = location.instance.all_logs(newest.run_id, of_type=dg.DagsterEventType.STEP_START)
    claims = [claim.messages for claim in location.control.in_flight("steady")]
    return claims == [0] and steps[-1].step_key == "steady.further_rounds"


@contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def when_stored(location: Location, *expected: str) -> None:
    """Wait until rows are in the table."""
    deadline = time.monotonic() + 120
    log = location.root / "lake/steady/lines/_delta_log"
    while not any(log.glob("*.json")) or not {*expected} <= {*texts(location)}:
        assert time.monotonic() < deadline, f"{expected} not stored"
        time.sleep(0.05)


@pytest.fixture
def later(location: Location) -> Callable[..., Any]:
    """Return a context in which something happens once the first receive is stored."""
    location.enqueue("first")

    def after_first(*work: Callable[[], Any]) -> Any:
        def perform() -> None:
            when_stored(location, "first")
            for step in work:
                step()

        return meanwhile(perform)

    return after_first


def test_messages_that_arrive_during_a_run_are_stored_by_it_and_it_ends_when_none_arrives(location, later):
    with later(
        lambda: location.enqueue("second", "fail 1"),
        lambda: when_stored(location, "second"),
        lambda: location.enqueue("third", "letter a"),
    ):
        made = run(location)

    assert made.status == SUCCESS
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


def test_a_run_without_rounds_in_its_config_receives_once(location):
    location.enqueue("first")
    made = location.run("steady_pull", window_now(Steady))
    location.enqueue("second")

    assert made.status == SUCCESS
    assert TAGS.rounds not in made.tags
    assert location.waiting() == 1


def test_a_pause_a_drain_and_the_end_of_the_window_end_a_run(location, later, monkeypatch):
    with later(lambda: location.control.pause("steady", "moves"), lambda: location.enqueue("left")):
        assert "steady is paused: moves" in ended(location, run(location))
    assert location.waiting() == 1
    location.control.resume("steady")

    with meanwhile(lambda: [when_stored(location, "left"), drain_now(location)]):
        assert "steady is paused: away" in ended(location, run(location))
    location.control.resume("steady")

    location.enqueue("last")
    monkeypatch.setattr(rounds_end, "window_now", lambda pipeline: "2999-01-01T0000")
    assert "has ended" in ended(location, run(location))


def drain_now(location: Location) -> None:
    drain(location.control, BoundProducer(Steady), "away", log=print)


def test_an_edit_of_the_code_ends_a_run_after_its_round(location, later, monkeypatch, tmp_path):
    code = tmp_path / "edited.py"
    code.write_text("x = 1")
    loaded = {str(code): code.stat().st_mtime}
    monkeypatch.setattr(rounds_end, "_loaded_files", lambda: loaded)
    monkeypatch.setattr(rounds_end, "_LOOK_EVERY_S", 0.0)
    with later(code.unlink):
        assert "edited.py was changed" in ended(location, run(location))


@pytest.mark.parametrize(("origin", "job"), [("failed", "steady_retry"), ("messages", "steady_replay")])
def test_a_retry_or_a_replay_ends_a_continuous_run(location, later, monkeypatch, origin, job):
    monkeypatch.setattr(rounds_end, "_LOOK_EVERY_S", 0.0)
    queued = dg.DagsterRun(job_name=job, status=dg.DagsterRunStatus.NOT_STARTED, tags={TAGS.origin: origin})
    with later(lambda: location.instance.add_run(queued)):
        assert f"run {queued.run_id}, a retry or replay, is active" in ended(location, run(location))
    location.instance.delete_run(queued.run_id)


@pytest.mark.parametrize("slots", [1, 5])
def test_a_queued_run_without_a_slot_ends_a_continuous_run(location, later, monkeypatch, slots):
    monkeypatch.setattr(rounds_end, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(rounds_end, "_slots", lambda instance: slots)
    origin = RemoteJobOrigin(RemoteRepositoryOrigin(GrpcServerCodeLocationOrigin("localhost", 1), "any"), "other")
    queued = dg.DagsterRun(job_name="other", status=dg.DagsterRunStatus.QUEUED, remote_job_origin=origin)
    with later(lambda: location.instance.add_run(queued)):
        reason = ended(location, run(location))
    assert (f"run {queued.run_id} waits for a slot" in reason) == (slots == 1)
    location.instance.delete_run(queued.run_id)


@pytest.mark.parametrize("is_older", [True, False])
def test_the_newest_run_above_max_runs_ends_and_the_others_continue(location, later, monkeypatch, is_older):
    monkeypatch.setattr(rounds_end, "_LOOK_EVERY_S", 0.0)

    def stand_by() -> None:
        location.control.stand_by("steady", "other", 600)

    def after_ours() -> None:
        while not [claim for claim in location.control.in_flight("steady") if claim.receive_id == claim.run_id]:
            time.sleep(0.05)
        stand_by()

    if is_older:
        stand_by()
    with later(*([] if is_older else [after_ours]), lambda: location.enqueue("second")):
        made = run(location)

    location.control.end("other")
    assert made.status == SUCCESS
    assert ("max_runs allows 1 run, and run other is older" in ended(location, made)) == is_older
    assert is_older or texts(location) == ["first", "second"]


def test_a_run_counts_as_active_between_its_first_receive_and_its_rounds(location, monkeypatch):
    active, perform = [], rounds.Rounds.perform

    def looked(self: rounds.Rounds) -> str | None:
        active.extend(claim.run_id for claim in location.control.in_flight("steady"))
        return perform(self)

    monkeypatch.setattr(rounds.Rounds, "perform", looked)
    location.enqueue("first")
    made = run(location)

    assert active == [made.run_id]
    ended(location, made)


def test_rounds_keep_the_rate_limit(location, later):
    limit = RateLimiting(allowed_messages=3, interval=timedelta(seconds=3))
    location.control.set_rate_limiting("steady", limit)
    sent = [f"line {number}" for number in range(9)]
    with later(lambda: location.enqueue(*sent)):
        made = run(location)
    assert made.status == SUCCESS
    assert texts(location) == sorted(["first", *sent])
    decided = location.rows("outcomes", "steady")
    assert decided.group_by("receive_id").len()["len"].max() <= 3
    assert receives(location) >= 4


def test_a_failed_share_above_the_maximum_fails_a_run_after_its_results_are_published(location, later, monkeypatch):
    monkeypatch.setattr(Steady, "max_failed_share", 0.5)
    with later(lambda: location.enqueue(*(f"fail {number}" for number in range(4)))):
        made = run(location)
    assert made.status == FAILURE
    assert "4 of 4 messages failed" in ended(location, made)
    assert location.waiting() == 0
    assert location.stored(made.run_id).tags[TAGS.published] == made.run_id


def test_a_source_that_is_unavailable_for_a_second_does_not_end_a_run(location, later, monkeypatch):
    queue = location.root / "queue.sqlite"
    moved = queue.with_name("away.sqlite")

    def away() -> None:
        queue.rename(moved)
        time.sleep(1)
        moved.rename(queue)

    with later(away, lambda: location.enqueue("second")):
        made = run(location)
    assert made.status == SUCCESS
    assert texts(location) == ["first", "second"]


def test_a_round_that_the_source_refused_to_acknowledge_is_acknowledged_by_the_same_run(location, later, monkeypatch):
    monkeypatch.setattr(rounds, "_FINISH_EVERY_S", 0.5)
    refuses = location.root / "no ack"
    with later(
        refuses.touch,
        lambda: location.enqueue("second"),
        lambda: when_stored(location, "second"),
        refuses.unlink,
    ):
        made = run(location)

    assert made.status == SUCCESS
    assert texts(location) == ["first", "second"]
    assert "Finished receive" in location.log(made)
    assert location.waiting() == 0
    ended(location, made)


@pytest.mark.parametrize("during", ["a round", "a pause"])
def test_a_run_that_is_terminated_acknowledges_what_it_handled_and_leaves_no_claim(location, during):
    begun: Path = location.root / "begun"
    location.enqueue("first")
    process = location.start("steady_pull", window_now(Steady), rounds=True)
    when_stored(location, "first")
    if during == "a round":
        location.enqueue(f"touch {begun}", *(f"sleep 0.3{number:03}" for number in range(20)))
        while not begun.exists():
            time.sleep(0.05)
    else:
        while not is_in_rounds(location):
            time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) != 0

    (made,) = location.instance.get_runs(dg.RunsFilter(job_name="steady_pull"), limit=1)
    assert made.status in (dg.DagsterRunStatus.CANCELED, FAILURE)
    assert location.control.in_flight("steady") + location.control.over("steady") == []
    stored = texts(location)
    assert len(stored) + location.waiting() == (22 if during == "a round" else 1)
    assert ("Stopped as requested" in location.log(made)) == (during == "a round")


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


def test_reports_are_few(location, later, monkeypatch):
    monkeypatch.setattr(rounds, "_REPORTS", rounds.Backoff(first=timedelta(seconds=60), most=timedelta(seconds=60)))

    def one_by_one() -> None:
        for number in range(5):
            location.enqueue(f"line {number}")
            when_stored(location, f"line {number}")

    with later(one_by_one):
        made = run(location)
    assert receives(location) >= 6
    assert len(location.materialisations(made, "messages", "steady")) == 2
    assert len(location.instance.all_logs(made.run_id)) < 80


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
