"""Messages in flight: claims, and runs that may still claim."""

import json
import os
import sqlite3
import subprocess
from datetime import timedelta

import dagster as dg
import pytest
from dagster._core.events import DagsterEvent

from pipeline_platform.control import demand
from pipeline_platform.control.demand import InFlight, Waiting
from pipeline_platform.launcher import run_process
from pipeline_platform.launcher.run_process import LAUNCHER_TAG, PROCESS_TAG, RunProcess, is_gone
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.sensors.runs_under_way import in_flight
from tests.fixtures.sensor import TAGS, Asked, Place, tags

STARTING, STARTED = dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED


def test_queued_runs_count_until_they_end(place):
    place.enqueue(300)
    assert place.asked() == [100, 100]
    named = ", ".join(sorted(run.run_id[:8] for run in place.instance.get_runs()))
    reason, _, state = str(place.tick().skip_message).partition(". Now: ")
    assert reason.startswith("2 runs active; ")
    assert all(name in state for name in named.split(", ")), "people can look them up"
    for run in place.instance.get_runs():
        place.instance.delete_run(run.run_id)
    assert place.asked() == [100, 100]


def test_messages_for_queued_runs_are_not_requested_again(place):
    place.enqueue(60)
    assert place.asked() == [60]
    (run,) = place.instance.get_runs()
    assert place.skips() == f"60 messages wait, and run {run.run_id[:8]} will lease them"


def test_a_run_counts_the_messages_that_it_leased(place):
    run = place.queued(tags(100, **{TAGS.receive_id: "r", TAGS.received: "7"}), dg.DagsterRunStatus.STARTED)
    place.control.claim("asked", "r", run.run_id, wanted=7, capacity=200, lease_s=60)
    found = in_flight(BoundProducer(Asked), place.instance, place.control)
    assert (found, found.held) == (InFlight(7, 1, 0), 7)


ENDED = [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]


def test_a_run_that_ended_in_dagster_does_not_count_and_its_messages_are_due_at_once(place):
    """A killed run ends neither its claim nor its leases, so the claim would count for a minute."""
    assert place.skips() == "the queue is empty"
    run = place.queued(tags(7, **{TAGS.receive_id: "r"}), dg.DagsterRunStatus.FAILURE)
    place.control.claim("asked", "r", run.run_id, wanted=7, capacity=200, lease_s=60)
    assert place.asked() == [7]
    assert [claim.run_id for claim in place.control.over("asked")] == [run.run_id], "for the next run to give back"


def test_a_run_whose_process_ended_does_not_count_before_dagster_detects_it(place, process):
    run = run_in(process, place, STARTED)
    place.control.claim("asked", "r", run.run_id, wanted=7, capacity=200, lease_s=60)
    assert place.skips() != ""
    assert place.control.over("asked") == []
    process.kill()
    process.wait()
    assert place.asked() == [7]


@pytest.mark.parametrize("status", ENDED)
def test_patience_does_not_restart_for_released_messages(place, status, at):
    place.enqueue(60)
    assert place.asked() == [60]
    (run,) = place.instance.get_runs()
    (event,) = {"FAILURE": ["RUN_FAILURE"], "CANCELED": ["RUN_CANCELED"]}[status.value]
    place.instance.report_dagster_event(DagsterEvent(dg.DagsterEventType[event].value, run.job_name), run.run_id)
    with sqlite3.connect(place.folder / "queue.sqlite") as queue:
        queue.execute("DELETE FROM messages WHERE id > 7")
    assert place.asked() == [7]
    place.instance.delete_run(place.instance.get_runs()[0].run_id)
    assert place.skips() == "7 messages wait; a run starts at 50, or after 30 s (waited 0 s)", "once"


def test_an_unfinishable_receive_leads_to_an_immediate_run_and_to_another_after_a_pause(place):
    """Each run that tries leaves the claim unchanged: it expired when the first run ended."""
    run = place.queued(tags(7, **{TAGS.receive_id: "r"}), dg.DagsterRunStatus.SUCCESS)
    place.control.claim("asked", "r", run.run_id, wanted=7, capacity=200, lease_s=60)
    place.control.expire("r")
    assert place.asked() == [7]
    place.instance.delete_run(place.instance.get_runs()[0].run_id)
    place.control.expire("r")
    assert "the queue is empty" in place.skips()
    minutes_ago = Waiting.from_json(place.cursor).asked - demand.LONGEST_PAUSE
    place.cursor = Waiting(asked=minutes_ago, since=minutes_ago).to_json()
    assert place.asked() == [7]


def test_a_backfill_uses_capacity_but_no_messages_of_the_source(place):
    place.queued({**tags(100), TAGS.origin: "failed"})
    place.enqueue(60)
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight(100, 1, 0)
    assert place.asked() == [60]


def test_a_re_execution_of_all_steps_counts_as_what_it_will_lease(place):
    parent = place.queued(tags(80, **{TAGS.receive_id: "r"}), dg.DagsterRunStatus.FAILURE)
    again = place.queued(parent.tags, parent_run_id=parent.run_id, root_run_id=parent.run_id)
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight(80, 1, 80)
    place.instance.add_run_tags(again.run_id, {TAGS.receive_id: "its own"})
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight(), (
        "it has had its own, and ended the claim"
    )


def test_a_re_execution_from_failure_leases_nothing(place):
    parent = place.queued(tags(80, **{TAGS.receive_id: "r"}), dg.DagsterRunStatus.FAILURE)
    place.queued(
        parent.tags,
        parent_run_id=parent.run_id,
        root_run_id=parent.run_id,
        step_keys_to_execute=["asked.commit", "asked.acknowledge"],
    )
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight()


# Runs without a claim, which may never claim


@pytest.fixture
def process():
    """An idle process, until it is killed."""
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        yield sleeping
        sleeping.kill()


def run_in(process: subprocess.Popen[bytes], place: Place, status: dg.DagsterRunStatus) -> dg.DagsterRun:
    """A run that will lease a hundred messages, and whose process has just started."""
    run = place.queued(tags(100), STARTING)
    if status is STARTED:
        started = DagsterEvent(dg.DagsterEventType.RUN_START.value, run.job_name)
        place.instance.report_dagster_event(started, run.run_id)
    place.instance.add_run_tags(run.run_id, {PROCESS_TAG: RunProcess.tag(run.run_id, process.pid)})
    return run


@pytest.mark.parametrize("status", [STARTING, STARTED])
def test_a_run_that_was_killed_before_it_claimed_stops_counting_at_once(place, process, status):
    run_in(process, place, status)
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight(100, 1, 100)
    process.kill()
    process.wait()
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight()


def test_a_run_whose_process_lives_counts_however_slowly_it_starts(place, process, at):
    run_in(process, place, STARTING)
    at(timedelta(hours=1))
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight(100, 1, 100)


def test_a_run_on_another_host_counts_for_fifteen_minutes(place, at):
    place.queued(tags(100), STARTING)
    at(timedelta(minutes=14))
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight(100, 1, 100)
    at(timedelta(minutes=16))
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight()


def test_a_process_that_is_hidden_from_this_one_may_be_alive(place, process, monkeypatch):
    """As the processes of another unit of systemd with `ProtectProc=invisible`."""
    run = place.instance.get_run_by_id(run_in(process, place, STARTED).run_id)
    exists = os.path.exists
    monkeypatch.setattr(run_process, "born", lambda pid: None)
    assert is_gone(run), "a zombie"
    monkeypatch.setattr(os.path, "exists", lambda path: path != f"/proc/{process.pid}" and exists(path))
    assert is_gone(run) is None
    process.kill()
    process.wait()
    assert is_gone(run)


def test_a_run_whose_launcher_died_before_it_had_a_process_stops_counting(place, process):
    run = place.queued(tags(100), STARTING)
    place.instance.add_run_tags(run.run_id, {LAUNCHER_TAG: RunProcess.tag(run.run_id, process.pid)})
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight(100, 1, 100)
    process.kill()
    process.wait()
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight()


def test_a_run_whose_launcher_died_before_it_left_its_tag_stops_counting_soon(tmp_path, at):
    launcher = {"module": "pipeline_platform.launcher.run_launcher", "class": "StandbyRunLauncher"}
    settings = {"run_launcher": launcher, "telemetry": {"enabled": False}}
    (tmp_path / "dagster.yaml").write_text(json.dumps(settings))
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        place = Place(tmp_path, instance)
        place.queued(tags(100), STARTING)
        at(timedelta(seconds=2))
        assert in_flight(BoundProducer(Asked), instance, place.control) == InFlight(100, 1, 100)
        at(timedelta(seconds=11))
        assert in_flight(BoundProducer(Asked), instance, place.control) == InFlight()

        place.queued(tags(100, **{".dagster/grpc_info": "{}"}), STARTING)
        assert in_flight(BoundProducer(Asked), instance, place.control) == InFlight(100, 1, 100), (
            "Dagster's own launcher started it"
        )


def test_a_re_execution_is_not_judged_by_the_process_of_its_parent(place, process):
    parent = run_in(process, place, STARTED)
    process.kill()
    process.wait()
    copied = place.instance.get_run_by_id(parent.run_id)
    assert copied
    place.queued(copied.tags, STARTED, parent_run_id=parent.run_id, root_run_id=parent.run_id)
    assert in_flight(BoundProducer(Asked), place.instance, place.control) == InFlight(100, 1, 100)
