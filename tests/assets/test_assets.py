"""Pipelines as partitioned assets: whole runs on a real Dagster instance, Spark and queue."""

import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import pytest

from assets import graph, settlement
from assets.graph import pipeline_assets
from assets.settlement import Settled
from assets.tags import RunTags
from pipeline_platform.run import lease, steps
from pipeline_platform.run.intake import Intake
from pipeline_platform.run.steps import Acknowledgement
from tests.fixtures.dagster import LAST, NEXT, WINDOW, Location, figures
from tests.fixtures.jobs_under_test import job_at
from tests.fixtures.pipelines_under_test import Told

TAGS = RunTags.of(Told)
ROOT = Path(__file__).parents[2]
SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases and waits of seconds instead of a minute."""
    monkeypatch.setattr(lease, "CLAIM_S", 3.0)
    monkeypatch.setattr(Intake, "room_within_s", 2.0)


def failing_once(name: str, error: Exception) -> Any:
    """Have a step raise the first time it is asked."""
    real = getattr(steps, name)
    left = [error]

    def step(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args, **options)

    return mock.patch.object(steps, name, step)


# What the asset graph shows


def test_the_asset_graph_reads_like_the_pipeline() -> None:
    assets = pipeline_assets(Told)
    specs = {spec.key.path[-1]: spec for spec in assets.specs}

    assert {key.to_user_string() for key in assets.keys} == {
        "told/messages",
        "told/lines",
        "told/letters",
        "told/failed",
    }
    messages = dg.AssetKey(["told", "messages"])
    upstream = {name: {dep.asset_key for dep in spec.deps} for name, spec in specs.items()}
    assert upstream == {"messages": set(), "lines": {messages}, "letters": {messages}, "failed": {messages}}
    for spec in specs.values():
        assert spec.kinds == {"spark", "deltalake"}
        assert list(spec.owners) == ["team:tests"]
        assert spec.group_name == "told"
        assert spec.partitions_def is not None
    assert "Lines of text, which may ask to fail" in (specs["messages"].description or "")
    assert "Columns: `Line`" in (specs["lines"].description or "")
    assert "batches of up to 3" in (specs["letters"].description or "")
    assert "drive those that are open once more" in (specs["failed"].description or "")
    assert {(key.asset_key.path[-1], key.name) for key in assets.check_keys} == {
        ("messages", "acknowledged"),
        ("failed", "no_open_failures"),
    }


def test_its_ops_are_the_way_of_a_message() -> None:
    names = [node.name for node in pipeline_assets(Told).node_def.nodes_in_topological_order]  # type: ignore[attr-defined]

    assert names == ["receive_messages", "handle_messages", "batch_letters", "handle_failed", "commit", "acknowledge"]


# Pulling


def test_a_pull_fills_every_table_tells_all_of_it_and_empties_the_queue(location: Location) -> None:
    location.enqueue("one", "other", "fail", "letter a", "letter a", "letter b", "letter x")

    run = location.run("told_pull")

    assert run.status == SUCCESS
    assert location.texts() == ["one", "other"]
    assert location.texts("letters") == ["letter a", "letter a", "letter b"]
    assert location.open_failures() == {WINDOW: 2}
    assert location.waiting() == 0
    assert location.flow().ledger.unfinished() == []
    told = {}
    for table in ("messages", "lines", "letters", "failed"):
        (event,) = location.materialisations(run, table)
        assert event.partition == WINDOW
        told[table] = figures(event)
    assert told["messages"]["received"] == 7
    (settled,) = location.observations(run, "messages")
    assert settled.partition == WINDOW
    told["messages"] = figures(settled)
    counts = {"received": 7, "handled": 5, "failed": 2, "acknowledged": 7, "unacknowledged": 0, "batches": 3}
    for table, rows in (("messages", 7), ("lines", 2), ("letters", 3), ("failed", 2)):
        assert {name: told[table][name] for name in counts} == counts
        assert told[table]["rows"] == told[table]["dagster/row_count"] == rows
        assert told[table]["messages per second"] > 0
        assert {"seconds: receive", "seconds: handle", "seconds: batch-letters"} <= set(told[table])
    assert told["lines"]["batch keys"] == {"o": 2}
    assert told["letters"]["batch keys"] == {"a": 2, "b": 1}
    assert told["messages"]["batch keys"] == told["failed"]["batch keys"] == {"o": 2, "a": 2, "b": 1}
    for event in (settled, *(location.materialisations(run, table)[0] for table in ("lines", "letters", "failed"))):
        assert sorted((failure["stage"], failure["reason"]) for failure in _records(event, "failures")) == [
            ("handle_batch", "not this letter"),
            ("handle_message", "told to fail"),
        ]
    checks = location.checks(run)
    assert checks["acknowledged"].passed
    assert not checks["no_open_failures"].passed
    assert checks["no_open_failures"].severity == dg.AssetCheckSeverity.WARN
    assert "2 failed messages wait" in checks["no_open_failures"].description


def _records(event: dg.AssetMaterialization | dg.AssetObservation, name: str) -> list[dict[str, Any]]:
    return _rows(event.metadata[name])


def _rows(table: Any) -> list[dict[str, Any]]:
    assert isinstance(table, dg.TableMetadataValue)
    return [dict(record.data) for record in table.records]


def test_an_empty_queue_still_yields_every_output(location: Location) -> None:
    run = location.run("told_pull")

    assert run.status == SUCCESS
    for table in ("messages", "lines", "letters", "failed"):
        (event,) = location.materialisations(run, table)
        assert figures(event)["received"] == 0
    assert all(check.passed for check in location.checks(run).values())


def test_two_runs_in_one_window_add_up(location: Location) -> None:
    location.enqueue("one", "two")
    first = location.run("told_pull")
    location.enqueue("three", "fail")
    second = location.run("told_pull")

    assert location.texts() == ["one", "three", "two"]
    (before,), (after,) = location.materialisations(first, "lines"), location.materialisations(second, "lines")
    assert (figures(before)["rows"], figures(before)["dagster/row_count"]) == (2, 2)
    assert (figures(after)["rows"], figures(after)["dagster/row_count"]) == (1, 3), "its own, and the window's total"


def test_two_runs_at_once_share_the_messages(location: Location) -> None:
    location.enqueue(*(f"line {n}" for n in range(80)))

    runs = [location.start("told_pull") for _ in range(2)]
    assert [process.wait(120) for process in runs] == [0, 0]

    assert location.texts() == sorted(f"line {n}" for n in range(80))
    assert location.waiting() == 0


def test_a_pull_without_room_says_so_and_takes_nothing(location: Location) -> None:
    location.enqueue("one")
    location.control.claim("told", "another", "run", wanted=200, capacity=200, lease_s=60)

    run = location.run("told_pull")

    assert run.status == SUCCESS
    assert run.tags[TAGS.demand] == "0"
    assert location.waiting() == 1
    assert "room for 0 of 100 messages: other runs hold" in location.log(run)


# Backfills and replays


def three_windows_with_failures(location: Location) -> None:
    for window, payloads in ((WINDOW, ["fail 1", "one"]), (NEXT, ["fail 2", "fail 3"]), (LAST, ["letter x", "two"])):
        location.enqueue(*payloads)
        assert location.run("told_pull", window).status == SUCCESS
    assert location.open_failures() == {WINDOW: 1, NEXT: 2, LAST: 1}


def test_a_backfill_of_three_windows_is_one_run_with_figures_for_each_window(location: Location) -> None:
    three_windows_with_failures(location)

    run = location.run("told_backfill", WINDOW, LAST, context={"forgiving": True})

    assert run.status == SUCCESS
    events = location.materialisations(run, "lines")
    told = {event.partition: figures(event) for event in events}
    assert [event.partition for event in events] == [WINDOW, NEXT, LAST]
    assert [(told[w]["received"], told[w]["handled"], told[w]["rows"]) for w in (WINDOW, NEXT, LAST)] == [
        (1, 1, 1),
        (2, 2, 2),
        (1, 0, 0),
    ]
    assert [told[w]["dagster/row_count"] for w in (WINDOW, NEXT, LAST)] == [2, 2, 1]
    received = {event.partition: figures(event)["received"] for event in location.materialisations(run, "messages")}
    assert received == {WINDOW: 1, NEXT: 2, LAST: 1}
    settled = [(event.partition, figures(event)) for event in location.observations(run, "messages")]
    assert [(window, told["received"], told["handled"], told["failed"]) for window, told in settled] == [
        (WINDOW, 1, 1, 0),
        (NEXT, 2, 2, 0),
        (LAST, 1, 0, 1),
    ]
    failed = {event.partition: figures(event)["failed"] for event in location.materialisations(run, "failed")}
    assert failed == {WINDOW: 0, NEXT: 0, LAST: 1}
    assert location.texts() == ["fail 1", "fail 2", "fail 3", "one", "two"]
    assert location.open_failures() == {LAST: 1}, "the letter still does not go"
    events_of = location.rows("failed").sort("message_id", "attempt")
    last = events_of.group_by("message_id", maintain_order=True).last()
    assert sorted(zip(last["state"], last["attempt"], strict=True)) == [
        ("closed", 2),
        ("closed", 2),
        ("closed", 2),
        ("open", 2),
    ]
    assert not location.checks(run)["no_open_failures"].passed


def test_the_check_warns_of_open_failures_of_any_window_until_they_are_driven(location: Location) -> None:
    location.enqueue("fail 1", "fail 2", "one")
    location.run("told_pull", WINDOW)
    location.enqueue("two")

    clean = location.run("told_pull", NEXT)
    warned = location.checks(clean)["no_open_failures"]
    idle = location.checks(location.run("told_pull", LAST))["no_open_failures"]
    driven = location.checks(location.run("told_backfill", WINDOW, context={"forgiving": True}))["no_open_failures"]

    assert not warned.passed
    assert warned.description == "2 failed messages wait; materialise this window to drive them once more."
    assert _rows(warned.metadata["windows"]) == [{"window": WINDOW, "open": 2}]
    assert figures(location.materialisations(clean, "failed")[0])["open"] == 0, "of the window itself"
    assert not idle.passed, "a run that received nothing hides nothing either"
    assert driven.passed
    assert driven.metadata["open"].value == 0


def test_of_many_windows_with_open_failures_the_oldest_are_named() -> None:
    waiting = {f"2025-03-{day:02}T0000": day for day in range(31, 0, -1)}
    specs = {name: dg.AssetCheckSpec(name, asset="failed") for name in ("acknowledged", "no_open_failures")}

    _, told = Settled(Acknowledgement(0, 0, 0, []), waiting, None).checks(*specs.values())

    assert told.description == (
        "496 failed messages wait; materialise these 31 windows to drive them once more. The oldest 20 are named."
    )
    assert [row["window"] for row in _rows(told.metadata["windows"])] == sorted(waiting)[:20]


def test_what_fails_again_stays_open_with_one_attempt_more(location: Location) -> None:
    location.enqueue("fail")
    location.run("told_pull")

    for attempt in (2, 3):
        run = location.run("told_backfill")
        assert run.status == SUCCESS
        assert location.rows("failed")["attempt"].max() == attempt
        assert location.open_failures() == {WINDOW: 1}


def test_a_backfill_of_windows_without_open_failures_says_so(location: Location) -> None:
    run = location.run("told_backfill", WINDOW, NEXT)

    assert run.status == SUCCESS
    assert f"no failure is open in {WINDOW}, {NEXT}" in location.log(run)
    assert [event.partition for event in location.materialisations(run, "failed")] == [WINDOW, NEXT]


def test_two_backfills_at_once_drive_nothing_twice(location: Location) -> None:
    location.enqueue(*(f"fail {n}" for n in range(40)))
    location.run("told_pull")

    runs = [location.start("told_backfill", forgiving=True) for _ in range(2)]
    assert [process.wait(120) for process in runs] == [0, 0]

    assert location.texts() == sorted(f"fail {n}" for n in range(40))
    assert location.open_failures() == {}
    assert location.rows("failed").filter(state="closed")["message_id"].n_unique() == 40
    assert location.rows("failed").filter(state="closed").height == 40


def test_a_backfill_waits_for_room_then_takes_what_there_is(location: Location, short_waits: None) -> None:
    location.enqueue(*(f"fail {n}" for n in range(10)))
    location.run("told_pull")
    location.control.claim("told", "another", "run", wanted=196, capacity=200, lease_s=60)

    some = location.run("told_backfill", context={"forgiving": True})
    location.control.end("another")
    rest = location.run("told_backfill", context={"forgiving": True})

    assert "waiting up to 2 s for other runs" in location.log(some)
    assert "room for 4 of 10 messages" in location.log(some)
    assert (some.status, rest.status) == (FAILURE, SUCCESS), "a green window would say that it was driven"
    assert "took on 4 of 10 open failures" in location.log(some)
    assert "6 failed messages wait" in location.checks(some)["no_open_failures"].description
    assert location.checks(rest)["no_open_failures"].passed
    assert len(location.texts()) == 10


def test_a_backfill_takes_its_room_as_soon_as_it_is_there(location: Location) -> None:
    location.enqueue("fail")
    location.run("told_pull")
    location.control.claim("told", "another", "run", wanted=200, capacity=200, lease_s=2)

    run = location.run("told_backfill", context={"forgiving": True})

    assert run.tags[TAGS.demand] == "1"
    assert location.open_failures() == {}


def test_a_full_replay_replaces_exactly_what_its_windows_hold(location: Location) -> None:
    location.enqueue("one", "fail", "letter a")
    location.run("told_pull", WINDOW)
    location.enqueue("two")
    location.run("told_pull", NEXT)
    before = location.rows("lines").filter(window=NEXT)

    run = location.run("told_replay", WINDOW, context={"forgiving": True})

    assert run.status == SUCCESS
    assert location.texts() == ["fail", "one", "two"]
    assert location.texts("letters") == ["letter a"]
    assert location.open_failures() == {}
    lines = location.rows("lines")
    assert lines.filter(window=NEXT).equals(before)
    assert set(lines.filter(window=WINDOW)["receive_id"]) == {run.tags[TAGS.receive_id]}
    assert location.rows("messages").filter(window=WINDOW)["message_id"].n_unique() == 3


# Faults, re-execution, termination


def test_a_failed_commit_is_made_good_from_failure(location: Location) -> None:
    location.enqueue("one", "fail", "letter a")
    with failing_once("publish", OSError(28, "No space left on device")):
        failed = location.run("told_pull")
    assert failed.status == FAILURE
    assert "No space left on device" in location.log(failed)
    assert not location.materialisations(failed, "lines")
    assert location.control.in_flight("told") == [], "nobody waits for the lease of a run that is known to have failed"

    run = location.again(failed, from_failure=True)

    assert run.status == SUCCESS
    assert run.tags[TAGS.receive_id] == failed.tags[TAGS.receive_id], "nothing was received anew"
    assert location.texts() == ["one"]
    assert location.texts("letters") == ["letter a"]
    assert location.waiting() == 0
    (event,) = location.materialisations(run, "lines")
    assert figures(event)["acknowledged"] == 3
    assert location.flow().ledger.unfinished() == []


def test_a_failed_handling_goes_on_from_failure_under_a_lease_of_its_own(location: Location) -> None:
    location.enqueue("one", "two")
    with failing_once("handle_messages", OSError(28, "No space left on device")):
        failed = location.run("told_pull")
    seen = []
    real = steps.handle_messages

    def look(flow: Any, receive: Any) -> Any:
        seen.append([(claim.run_id, claim.messages) for claim in flow.control.in_flight(flow.pipeline.name)])
        return real(flow, receive)

    with mock.patch.object(steps, "handle_messages", look):
        run = location.again(failed, from_failure=True, copied_tags=False)

    assert run.status == SUCCESS
    assert seen == [[(run.run_id, 2)]]
    assert location.texts() == ["one", "two"]


def test_the_next_run_finishes_what_a_failed_one_decided(location: Location) -> None:
    location.enqueue("one", "fail")
    with failing_once("publish", OSError(28, "No space left on device")):
        failed = location.run("told_pull")
    location.enqueue("two")

    run = location.run("told_pull", NEXT)
    late = location.again(failed, from_failure=True)

    assert run.status == SUCCESS
    assert "cleared up after runs that died" in location.log(run)
    assert location.texts() == ["one", "two"]
    assert location.rows("lines").sort("text")["window"].to_list() == [WINDOW, NEXT]
    assert location.waiting() == 0
    assert late.status == SUCCESS
    assert "is finished: nothing is left to do here" in location.log(late)
    assert location.checks(late)["acknowledged"].description == "Had nothing to tell the source."


@pytest.mark.parametrize("copied_tags", [True, False])
def test_a_re_execution_of_all_steps_receives_anew(location: Location, copied_tags: bool) -> None:
    location.enqueue("one")
    first = location.run("told_pull")
    location.enqueue("two", "three")

    run = location.again(first, from_failure=False, copied_tags=copied_tags)

    assert run.status == SUCCESS
    assert run.tags[TAGS.receive_id] != first.tags[TAGS.receive_id]
    assert location.texts() == ["one", "three", "two"]
    assert figures(location.materialisations(run, "messages")[0])["received"] == 2


def test_a_source_that_will_not_be_told_is_told_by_the_next_run(location: Location) -> None:
    location.enqueue("one", "fail")
    mood = location.root / "no ack"
    mood.touch()

    first = location.run("told_pull")
    mood.unlink()
    second = location.run("told_pull")

    check = location.checks(first)["acknowledged"]
    assert first.status == SUCCESS
    assert not check.passed
    assert check.severity == dg.AssetCheckSeverity.WARN
    assert check.metadata["unacknowledged"].value == 2
    assert "told to refuse" in str(check.metadata["errors"].value)
    assert figures(location.materialisations(first, "lines")[0])["unacknowledged"] == 2
    assert location.checks(second)["acknowledged"].passed
    assert location.texts() == ["one"], "once, although its first acknowledgement was refused"
    assert left_in(location) == 0


def left_in(location: Location) -> int:
    with sqlite3.connect(location.root / "queue.sqlite") as database:
        return int(database.execute("SELECT count(*) FROM messages").fetchone()[0])


def test_a_termination_in_mid_handling_loses_nothing(location: Location) -> None:
    location.enqueue("one", "sleep 300")
    process = location.start("told_pull")
    claim = until(lambda: [claim for claim in location.control.in_flight("told") if claim.messages == 2], process)[0]
    time.sleep(1.0)

    process.send_signal(signal.SIGTERM)
    assert process.wait(30) != 0

    run = location.instance.get_run_by_id(claim.run_id)
    assert run is not None
    assert run.status in (dg.DagsterRunStatus.CANCELED, FAILURE)
    assert location.control.in_flight("told") == [], "its room is free at once"
    with sqlite3.connect(location.root / "queue.sqlite") as database:
        database.execute("UPDATE messages SET data = 'two' WHERE data = CAST('sleep 300' AS BLOB)")
    began = time.monotonic()
    assert location.run("told_pull").status == SUCCESS
    assert location.texts() == ["one", "two"]
    assert left_in(location) == 0
    assert time.monotonic() - began < 150, "the Spark work of the terminated run is ended, not waited for"


@pytest.mark.parametrize(("module", "name"), [(settlement, "tell_received"), (graph, "receive_of")])
def test_a_termination_at_the_end_of_a_step_or_the_start_of_the_next_frees_the_room_at_once(
    location: Location, module: Any, name: str
) -> None:
    """The signal is real, and Dagster's own handler takes it."""
    location.enqueue("one")

    def terminated(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    with mock.patch.object(module, name, terminated):
        run = location.run("told_pull")

    assert run.status == FAILURE
    assert "Execution was interrupted" in location.log(run)
    assert location.control.in_flight("told") == []
    assert location.run("told_pull").status == SUCCESS
    assert location.texts() == ["one"]


def until(found: Any, process: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if answer := found():
            return answer
        assert process.poll() is None, "the run ended before it could be hit"
        time.sleep(0.05)
    raise AssertionError("it never came to that")


def test_the_lease_is_renewed_while_a_commit_takes_long(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "CLAIM_S", 1.0)
    location.enqueue("one")
    seen = []
    real = steps.publish

    def slowly(flow: Any, receive: Any) -> Any:
        time.sleep(2.5)
        seen.append([claim.messages for claim in location.control.in_flight("told")])
        return real(flow, receive)

    with mock.patch.object(steps, "publish", slowly):
        run = location.run("told_pull")

    assert run.status == SUCCESS
    assert seen == [[1], [1]], "while it is decided and published, and while it is acknowledged"


# Looking after it


def test_the_maintenance_job_puts_files_together_and_says_so(location: Location) -> None:
    for line in ("one", "two", "three"):
        location.enqueue(line)
        location.run("told_pull")

    run = location.run("told_maintenance")

    assert run.status == SUCCESS
    assert location.texts() == ["one", "three", "two"]
    assert len(location.flow().tables["lines"].files(location.flow().tables["lines"].open())) == 1
    (entry,) = location.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_OUTPUT)
    assert entry.dagster_event is not None
    metadata: Any = entry.dagster_event.step_output_data.metadata
    assert metadata["lines"].value["compacted"] == 3


# What is refused, and how


@pytest.mark.parametrize(
    ("job", "status"),
    [("told_pull", SUCCESS), ("strict_pull", FAILURE), ("lenient_pull", SUCCESS)],
)
def test_failures_turn_a_run_red_only_where_the_pipeline_says_so(location: Location, job: str, status: Any) -> None:
    location.enqueue("one", "fail")

    run = location.run(job)

    assert run.status == status
    assert location.waiting() == 0, "red or not, all is published and acknowledged"
    assert location.rows("lines", job.split("_", maxsplit=1)[0])["text"].to_list() == ["one"]
    assert len(location.materialisations(run, "lines", job.split("_", maxsplit=1)[0])) == (status == SUCCESS)
    if status == FAILURE:
        assert "1 of 2 messages failed, and fail_run_on is 'any'" in location.log(run)


def test_more_failures_than_the_allowed_share_turn_a_run_red(location: Location) -> None:
    location.enqueue("one", "fail", "fail")

    run = location.run("lenient_pull")

    assert run.status == FAILURE
    assert "2 of 3 messages failed, more than fail_run_on allows (0.5)" in location.log(run)
    assert not location.checks(run)["no_open_failures"].passed, "the checks are told all the same"


def test_a_run_may_change_the_context_and_a_wrong_one_is_refused_before_anything_is_leased(location: Location) -> None:
    location.enqueue("fail")

    wrong = location.run("told_pull", context={"forgivng": True})
    assert wrong.status == FAILURE
    assert "context has no field ['forgivng']; it has ['forgiving']" in location.log(wrong)
    assert location.waiting() == 1
    right = location.run("told_pull", context={"forgiving": True})

    assert right.status == SUCCESS
    assert location.texts() == ["fail"]


def test_a_new_field_widens_the_table_and_a_changed_type_is_refused_before_anything_is_leased(
    location: Location,
) -> None:
    location.enqueue("one")
    location.run("told_pull")
    location.enqueue("two words")

    refused = location.run("told_pull", edit="changed")
    assert refused.status == FAILURE
    assert "told/lines.text is" in location.log(refused)
    assert location.waiting() == 1
    widened = location.run("told_pull", edit="widened")

    assert widened.status == SUCCESS
    assert location.rows("lines").sort("text")["words"].to_list() == [None, 2]


def test_a_missing_queue_is_a_clear_error_of_the_run(location: Location) -> None:
    run = location.run("told_pull", queue_url=f"sqlite:///{location.root}/elsewhere.sqlite")

    assert run.status == FAILURE
    assert "url must name a file that is there; create() makes it" in location.log(run)
    assert location.control.in_flight("told") == []


def test_wrong_credentials_are_a_clear_error_and_appear_nowhere(
    location: Location, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme, _, rest = postgres_url.partition("tests:")
    secret = "hush-this-is-secret"
    monkeypatch.setenv("QUEUE_UNDER_TEST", f"{scheme}tests:{secret}@{rest.partition('@')[2]}")

    run = location.run("told_pull", queue_url="env:QUEUE_UNDER_TEST")

    assert run.status == FAILURE
    log = location.log(run)
    assert "correct user and password in url" in log
    for shown in (log, str(run.run_config), str(run.tags)):
        assert secret not in shown


def test_an_unknown_origin_is_refused_with_those_there_are(location: Location) -> None:
    job = job_at("told_pull", str(location.root), "")
    config = {"ops": {"told": {"ops": {"receive_messages": {"config": {"origin": "sauce"}}}}}}

    with pytest.raises(dg.DagsterInvalidConfigError, match="not in enum type RunOrigin got sauce"):
        dg.validate_run_config(job, config)


@pytest.mark.parametrize("pipeline", ["bare", "fast"])
def test_pipelines_without_batchers_and_by_columns_run_alike(location: Location, pipeline: str) -> None:
    location.enqueue("one", "two")

    run = location.run(f"{pipeline}_pull")

    assert run.status == SUCCESS
    assert location.waiting() == 0
    assert location.rows("outcomes", pipeline)["outcome"].to_list() == ["handled", "handled"]
    if pipeline == "fast":
        assert sorted(location.rows("lines", pipeline)["text"]) == ["one", "two"]
