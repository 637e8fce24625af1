"""Reasons for a run to end its rounds."""

from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteJobOrigin, RemoteRepositoryOrigin

from pipeline_platform import Producer
from pipeline_platform.orchestration.asset_windows import window_now
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.rounds import rounds_end
from pipeline_platform.orchestration.rounds.rounds_end import RoundsEnd
from pipeline_platform.run import stopping
from tests.fixtures.flow import flow_of
from tests.fixtures.pipelines_under_test import Coasts, Steady

ORIGIN = RemoteJobOrigin(RemoteRepositoryOrigin(GrpcServerCodeLocationOrigin("localhost", 1), "any"), "other")
TAGS = RunTags.of(Steady)


@pytest.fixture
def run(place):
    tags = {TAGS.origin: "source", TAGS.demand: "5", "dagster/max_runtime": "600"}
    return place.queued(tags, dg.DagsterRunStatus.STARTED)


@pytest.fixture
def end(place, run, monkeypatch):
    """The end of an active run whose source has messages."""
    monkeypatch.setattr(rounds_end, "_LOOK_EVERY_S", 0.0)
    context: Any = SimpleNamespace(instance=place.instance, run=run, partition_keys=[window_now(Steady)])
    rounds_end_ = RoundsEnd(context, flow_of(place.folder, Steady, place.queue))
    rounds_end_._files = {}  # other tests of this process may have loaded files that are gone
    return rounds_end_


def test_a_run_without_a_reason_to_end_continues(end):
    assert [end.reason(), end.reason()] == [None, None]


def test_a_request_a_pause_a_new_window_and_a_runtime_near_its_limit_end_a_run(end, place, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(stopping, "_TO_END", ["r"])
        assert end.reason() == "the run was asked to stop"
    place.control.pause("steady", "moves")
    assert end.reason() == "steady is paused: moves"
    place.control.resume("steady")
    with monkeypatch.context() as patch:
        patch.setattr(rounds_end, "window_now", lambda pipeline: "2999-01-01T0000")
        assert str(end.reason()).endswith(" has ended")
    end._started_at -= 530
    assert end.reason() is None
    end._started_at -= 20
    assert end.reason() == "max_runtime of 600 s is near"


@pytest.mark.parametrize("status", ["CANCELING", "CANCELED", "FAILURE"])
def test_a_run_that_dagster_has_marked_as_ended_ends(end, place, run, monkeypatch, status):
    """The daemon that launched it was restarted, and its process got no signal."""
    monkeypatch.setattr(stopping, "_TO_END", [])
    report = {
        "CANCELING": place.instance.report_run_canceling,
        "CANCELED": place.instance.report_run_canceled,
        "FAILURE": place.instance.report_run_failed,
    }
    report[status](run)
    assert end.reason() == f"Dagster has marked the run as {status}"
    assert stopping.is_to_end(), "otherwise Dagster would mark it as succeeded"


def test_an_edit_of_the_code_ends_a_run(end, tmp_path):
    code = tmp_path / "edited.py"
    code.write_text("x = 1")
    end._files = {str(code): code.stat().st_mtime}
    assert end.reason() is None
    code.unlink()
    assert end.reason() == "edited.py was changed"


@pytest.mark.parametrize(("origin", "job"), [("failed", "steady_retry"), ("messages", "steady_replay")])
def test_a_retry_or_a_replay_ends_a_run(end, place, origin, job):
    queued = dg.DagsterRun(job_name=job, status=dg.DagsterRunStatus.NOT_STARTED, tags={TAGS.origin: origin})
    place.instance.add_run(queued)
    assert end.reason() == f"run {queued.run_id}, a retry or replay, is active"


def test_a_retry_whose_host_was_lost_ends_no_run(end, place):
    tags = {TAGS.origin: "failed", TAGS.receive_id: "r"}
    lost = dg.DagsterRun(job_name="steady_retry", status=dg.DagsterRunStatus.STARTED, tags=tags)
    place.instance.add_run(lost)
    place.control.claim("steady", "r", lost.run_id, wanted=1, capacity=100, lease_s=60)
    assert end.reason() == f"run {lost.run_id}, a retry or replay, is active"
    place.control.expire("r")
    assert end.reason() is None


@pytest.mark.parametrize("slots", [1, 5])
def test_a_queued_run_without_a_slot_ends_a_run(end, place, monkeypatch, slots):
    monkeypatch.setattr(rounds_end, "_slots", lambda instance: slots)
    queued = dg.DagsterRun(job_name="other", status=dg.DagsterRunStatus.QUEUED, remote_job_origin=ORIGIN)
    place.instance.add_run(queued)
    assert end.reason() is None, "it may get a slot at once"
    assert end.reason() == (f"run {queued.run_id} waits for a slot" if slots == 1 else None)


@pytest.mark.parametrize("is_older", [True, False])
def test_the_newest_run_above_max_runs_ends(end, place, run, is_older):
    for run_id in ["other", run.run_id] if is_older else [run.run_id, "other"]:
        place.control.stand_by("steady", run_id, 600)
    assert end.reason() == ("max_runs allows 1 run, and run other is older" if is_older else None)


def test_a_run_that_waits_for_its_turn_ends_a_run(end, place, monkeypatch):
    monkeypatch.setattr(Steady, "partition_by", "source")
    assert end.reason() is None, "it has its own turn"
    waiting = place.queued({TAGS.origin: "source", TAGS.demand: "5"})
    assert end.reason() == f"run {waiting.run_id} waits for its turn"


class Ordered(Coasts):
    """Two producers whose messages are in order."""

    name = "ordered"
    producers = {"east": Producer(source="queue"), "west": Producer(source="beside_queue")}
    partition_by = "source"


def test_a_run_of_another_producer_that_waits_for_its_turn_ends_a_run(place, monkeypatch):
    monkeypatch.setattr(rounds_end, "_LOOK_EVERY_S", 0.0)
    tags = RunTags.of(Ordered)
    started = {tags.origin: "source", tags.demand: "5", tags.producer: "east", tags.receive_id: "r"}
    run = place.queued(started, dg.DagsterRunStatus.STARTED)
    context: Any = SimpleNamespace(instance=place.instance, run=run, partition_keys=[window_now(Ordered)])
    end = RoundsEnd(context, flow_of(place.folder, Ordered, place.queue, "east"))
    end._files = {}
    assert end.reason() is None
    waiting = place.queued({tags.origin: "source", tags.demand: "5", tags.producer: "west"})
    assert end.reason() == f"run {waiting.run_id} waits for its turn"
