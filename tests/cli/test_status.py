"""`status`: states of pipelines, exit codes, what is shown of many pipelines and windows, and repeated looks."""

import json
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType

from pipeline_platform import Backlog, Breaker, Producer, Retry, SourceAwayError
from pipeline_platform.cli.status import status_command
from pipeline_platform.cli.waiting import Wait, delay_s
from pipeline_platform.control.store import ControlStoreError
from pipeline_platform.lake.storage import Lake
from pipeline_platform.launcher import run_process
from pipeline_platform.orchestration.jobs import RunTags
from tests.fixtures.failures import event, record
from tests.fixtures.heartbeats import beat, turn_off
from tests.fixtures.pipelines_under_test import Steady
from tests.fixtures.small_lake import Keeping, Memory


class Watched(Keeping):
    """A pipeline with a limit for the age of messages, and with retries."""

    name = "watched"
    producer = Producer(source="old", oldest_allowed=timedelta(minutes=5))
    retry = Retry(max_attempts=3)


class Guarded(Keeping):
    """A pipeline with a breaker."""

    name = "guarded"
    producer = Producer(source="memory", breaker=Breaker(of_last=10))


class Old(Memory):
    """A source with one message, published an hour ago; while it is away, it does not answer."""

    name: str = "old"
    away: bool = False
    age: timedelta = timedelta(minutes=1)

    def backlog(self) -> Backlog:
        if self.away:
            raise SourceAwayError("connection refused")
        return Backlog(1, datetime.now(UTC) - self.age)


def state(cli, *arguments):
    """Return the exit code, the state and the kinds of the problems of each pipeline."""
    answer = cli("status", *arguments, "--json")
    found = json.loads(answer.stdout)
    problems = {name: {each["kind"] for each in its["problems"]} for name, its in found["pipelines"].items()}
    return answer.exit_code, found["state"], problems


def test_a_pipeline_whose_runs_are_requested_is_healthy(beside, alive):
    assert state(beside(Keeping, memory=Memory())) == (0, "healthy", {"keeping": set()})


def test_a_paused_pipeline_is_healthy_with_an_idle_daemon(beside, alive, control):
    control.pause("keeping", "moves")
    beat(alive, ago_s=600)
    assert state(beside(Keeping, memory=Memory()))[:2] == (0, "healthy")


def test_messages_that_wait_too_long_are_behind(beside, alive):
    cli = beside(Watched, Keeping, old=Old(age=timedelta(hours=1)), memory=Memory())
    assert state(cli) == (1, "behind", {"watched": {"oldest_allowed"}, "keeping": set()})
    assert state(cli, "keeping")[0] == 0, "only the chosen pipeline counts"


@pytest.mark.parametrize(
    ("failure", "code"),
    [({"state": "open", "due_at": datetime.now(UTC)}, 0), ({"state": "open"}, 1), ({"state": "dead"}, 1)],
)
def test_failures_without_automatic_retry_are_failing(beside, alive, tmp_path, failure, code):
    record(Lake(root=str(tmp_path / "lake")), "r1", event("a", **failure), pipeline="watched")
    found, _, problems = state(beside(Watched, old=Old()))
    assert (found, problems["watched"]) == (code, {"open_failures"} if code else set())


def test_a_run_whose_claim_has_expired_is_failing(beside, alive, control):
    control.claim("keeping", "r1", "gone", wanted=5, capacity=10, lease_s=-1)
    assert state(beside(Keeping, memory=Memory())) == (1, "failing", {"keeping": {"crashed_runs"}})


def test_the_pause_of_a_breaker_is_failing_until_it_ends(beside, alive, control):
    control.judge("guarded", Guarded.producer.breaker, 40, 30)
    cli = beside(Guarded, memory=Memory())
    assert state(cli) == (1, "failing", {"guarded": {"breaker"}})
    producer = json.loads(cli("status", "--json").stdout)["pipelines"]["guarded"]["producers"][""]
    assert (producer["pause"]["by_breaker"], producer["requests"]["state"]) == (True, "paused")
    assert cli("resume", "guarded").stdout.splitlines()[1] == "Resumed guarded."
    assert state(cli)[:2] == (0, "healthy")


def in_flight(cli):
    """Return the messages in flight of the only producer, and its runs with their state and messages."""
    (pipeline,) = json.loads(cli("status", "--json").stdout)["pipelines"].values()
    found = pipeline["producers"][""]["in_flight"]
    return found["messages"], [(run["run_id"], run["state"], run["messages"]) for run in found["runs"]]


def test_a_continuous_run_is_listed_once_with_the_messages_of_its_round(beside, alive, control):
    tags = RunTags.of(Steady)
    of_rounds = {tags.origin: "source", tags.received: "7", tags.rounds: "5"}
    run_id = alive.add_run(dg.DagsterRun("any", tags=of_rounds, status=dg.DagsterRunStatus.STARTED)).run_id
    cli = beside(Steady, queue=Memory())

    control.stand_by("steady", run_id, 60)
    assert in_flight(cli) == (0, [(run_id, "to_lease", 100)])
    control.claim("steady", "r5", run_id, wanted=7, capacity=200, lease_s=60)
    assert in_flight(cli) == (7, [(run_id, "leased", 7)])


def test_a_run_that_has_only_claimed_its_messages_is_to_lease_them(beside, alive, control):
    tags = {RunTags.of(Keeping).origin: "source"}
    run_id = alive.add_run(dg.DagsterRun("any", tags=tags, status=dg.DagsterRunStatus.STARTED)).run_id
    control.claim("keeping", "r1", run_id, wanted=5, capacity=10, lease_s=60)
    assert in_flight(beside(Keeping, memory=Memory())) == (0, [(run_id, "to_lease", 5)])


def test_a_long_run_on_another_host_is_crashed_only_without_a_claim(beside, alive, control, monkeypatch):
    monkeypatch.setattr(run_process, "STARTS_WITHIN", timedelta(0))
    tags = {RunTags.of(Keeping).origin: "source"}
    run_id = alive.add_run(dg.DagsterRun("any", tags=tags, status=dg.DagsterRunStatus.STARTED)).run_id
    cli = beside(Keeping, memory=Memory())
    assert state(cli)[2] == {"keeping": {"crashed_runs"}}
    control.claim("keeping", "r1", run_id, wanted=5, capacity=10, lease_s=60)
    assert state(cli)[2] == {"keeping": set()}
    control.finish("r1")
    alive.add_run_tags(run_id, {RunTags.of(Keeping).received: "5"})
    assert state(cli)[2] == {"keeping": set()}, "it may materialise other assets"


@dg.op
def refuse():
    raise dg.Failure("SourceError: the login was refused")


@dg.op
def divide():
    return 1 / 0


@pytest.mark.parametrize(
    ("op", "reason"), [(refuse, "SourceError: the login was refused"), (divide, "ZeroDivisionError: division by zero")]
)
def test_a_failed_run_is_failing_until_a_run_acknowledges_messages(beside, alive, control, op, reason):
    @dg.job
    def pull():
        op()

    tags = {RunTags.of(Keeping).origin: "source"}
    run_id = pull.execute_in_process(instance=alive, raise_on_error=False, tags=tags).run_id
    cli = beside(Keeping, memory=Memory())
    assert state(cli) == (1, "failing", {"keeping": {"failed_runs"}})
    failed = json.loads(cli("status", "--json").stdout)["pipelines"]["keeping"]["producers"][""]["failed_runs"]
    assert (failed["runs"], failed["run_id"], failed["step"], failed["reason"]) == (1, run_id, op.name, reason)
    assert f"the last run failed, {run_id[:8]} in {op.name}: {reason}" in cli("status").stdout
    control.claim("keeping", "r2", "continuous", wanted=5, capacity=10, lease_s=60)
    control.finish("r2")
    assert state(cli) == (0, "healthy", {"keeping": set()})


def test_a_source_that_does_not_answer_is_broken(beside, alive):
    assert state(beside(Watched, old=Old(away=True))) == (2, "broken", {"watched": {"source"}})


@pytest.mark.parametrize("reason", ["sensor", "daemon"])
def test_a_pipeline_whose_runs_are_not_requested_is_broken(beside, alive, reason):
    if reason == "sensor":
        turn_off(alive, "keeping_producer", InstigatorType.SENSOR)
    else:
        beat(alive, ago_s=600)
    cli = beside(Keeping, memory=Memory())
    assert state(cli) == (2, "broken", {"keeping": {"not_requested"}})
    assert "pipeline-platform doctor" in cli("status").stdout


def test_without_dagster_the_state_is_unknown(beside):
    assert state(beside(Keeping, memory=Memory())) == (2, "broken", {"keeping": {"dagster"}})


def test_several_pipelines_are_a_line_each_and_one_line_per_problem(beside, alive, control):
    control.pause("keeping", "moves")
    answer = beside(Watched, Keeping, old=Old(age=timedelta(hours=1)), memory=Memory())("status")
    lines = [line.split() for line in answer.stdout.splitlines()]
    assert ["watched", "behind", "1", "1", "h", "0", "0"] in lines
    assert ["keeping", "paused", "0", "0", "0"] in lines
    (problem,) = [line for line in answer.stdout.splitlines() if line.startswith("watched: ")]
    assert "longer than oldest_allowed" in problem
    assert "rate limit" not in answer.stdout


def test_a_backlog_that_is_a_minimum_is_shown_as_one_in_the_overview(beside, alive):
    class Bounded(Memory):
        def backlog(self) -> Backlog:
            return Backlog(1_000, at_least=True)

    lines = [
        line.split() for line in beside(Watched, Keeping, old=Old(), memory=Bounded())("status").stdout.splitlines()
    ]
    assert ["keeping", "healthy", "≥1,000", "0", "0"] in lines


def test_failures_in_many_windows_are_bounded(beside, alive, tmp_path):
    lake = Lake(root=str(tmp_path / "lake"))
    windows = [f"2026-01-{day:02}T{hour:02}00" for day in (1, 2) for hour in range(10)]
    for number, window in enumerate(windows):
        failures = [event(f"{window} {each}") for each in range(number % 7 + 1)]
        record(lake, f"r{number}", *failures, window=window)
    cli = beside(Keeping, memory=Memory())
    lines = [line.split(maxsplit=2) for line in cli("status").stdout.splitlines()]
    assert [words[1] for words in lines if words[0] == "window"] == [
        windows[number] for number in (13, 6, 19, 12, 5)
    ], "the largest, of equal ones the newest"
    failures = json.loads(cli("status", "--json").stdout)["pipelines"]["keeping"]["failures"]
    assert (failures["windows"], failures["first_window"], len(failures["largest"])) == (20, windows[0], 5)


@pytest.mark.parametrize("as_json", [False, True])
def test_watch_looks_again_until_it_is_interrupted(beside, alive, control, monkeypatch, as_json):
    cli, sleeps = beside(Keeping, memory=Memory()), []

    def sleep(seconds):
        sleeps.append(seconds)
        control.pause("keeping", "moves")
        if len(sleeps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_command.time, "sleep", sleep)
    answer = cli("status", "--watch", *(["--json"] if as_json else []))
    assert (answer.exit_code, sleeps) == (0, [5, 5])
    if as_json:
        states = [
            json.loads(line)["pipelines"]["keeping"]["producers"][""]["pause"] for line in answer.stdout.splitlines()
        ]
        assert states == [None, {"reason": "moves", "draining_until": None, "by_breaker": False}]


@pytest.mark.parametrize(("as_json", "looks", "code"), [(False, 2, 2), (True, 3, 0)], ids=["in it", "after it"])
def test_watch_goes_on_after_an_outage_of_the_control_store(beside, alive, control, monkeypatch, as_json, looks, code):
    cli, sleeps, in_flight = beside(Keeping, memory=Memory()), [], control.in_flight

    def away(*_, **__):
        raise ControlStoreError("the control store does not answer")

    def sleep(seconds):
        sleeps.append(seconds)
        monkeypatch.setattr(control, "in_flight", away if len(sleeps) == 1 else in_flight)
        if len(sleeps) == looks:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_command.time, "sleep", sleep)
    answer = cli("status", "--watch", *(["--json"] if as_json else []))
    assert answer.exit_code == code
    assert "the control store does not answer" in (answer.stderr if as_json else answer.stdout)
    if as_json:
        assert len(answer.stdout.splitlines()) == 2


def test_an_outage_of_dagsters_storage_is_an_error_of_the_runs_whatever_it_raises(beside, alive, monkeypatch):
    """`dagster_postgres` raises `DagsterPostgresException`, which is not an error of SQLAlchemy."""

    class DagsterPostgresException(Exception):  # noqa: N818
        pass

    def away(*_, **__):
        raise DagsterPostgresException("too many retries for DB connection")

    for method in ("get_runs", "get_run_records", "all_instigator_state", "get_daemon_heartbeats"):
        monkeypatch.setattr(dg.DagsterInstance, method, away)
    answer = beside(Keeping, memory=Memory())("status", "--json")
    assert answer.exit_code == 2
    error = json.loads(answer.stdout)["pipelines"]["keeping"]["runs"]["error"]
    assert error == "unavailable: DagsterPostgresException: too many retries for DB connection"


def test_what_is_waited_for_is_shown_a_second_after_the_start_of_the_command(monkeypatch):
    delays = []
    for used_s in (0.0, 0.3, 0.95, 5.0):
        monkeypatch.setattr("time.process_time", lambda used_s=used_s: used_s)
        delays.append(round(delay_s(), 3))
    assert delays == [1.0, 0.7, 0.2, 0.2]


def test_what_is_waited_for_names_the_slowest_parts():
    wait = Wait("the code")
    assert str(wait) == "Waiting for the code (0 s)"
    for number in range(5):
        wait.look(f"p{number}", "the source queue")
    wait.look("p0", "")
    assert (
        str(wait)
        == "Waiting for the source queue of p1, the source queue of p2, the source queue of p3 and 1 more (0 s)"
    )
