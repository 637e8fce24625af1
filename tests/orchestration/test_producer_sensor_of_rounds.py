"""The producer sensor of a pipeline with continuous runs."""

import threading
import time
from datetime import timedelta
from unittest import mock

import dagster as dg
import pytest
from dagster._core.scheduler.instigation import SensorInstigatorData

from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Producer
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.sensors import producers
from pipeline_platform.orchestration.sensors.runs_under_way import in_flight
from tests.fixtures.sensor import Asked

STARTED = dg.DagsterRunStatus.STARTED


class Continuous(Asked):
    name = "continuous"
    producer = Producer(source="queue", max_runs=2, idle_timeout=timedelta(minutes=1))


def test_a_run_of_many_rounds_leases_what_arrives_and_another_run_is_for_a_backlog_beyond_a_round(place):
    tags, source = RunTags.of(Continuous), {RunTags.of(Continuous).origin: "source"}
    place.enqueue(30)
    (request,) = place.tick(Continuous).run_requests
    assert request.run_config["ops"]["continuous"]["ops"]["receive_messages"]["config"]["rounds"] is True
    received = {tags.demand: "30", tags.receive_id: "r1", tags.received: "30", tags.rounds: "5"}
    run = place.queued({**source, **received}, STARTED)
    place.control.stand_by("continuous", run.run_id, 60)

    assert place.skips(Continuous) == f"30 messages wait, and run {run.run_id[:8]} will lease them"
    place.control.claim("continuous", "r2", run.run_id, wanted=30, capacity=200, lease_s=60)
    place.enqueue(60)
    assert place.skips(Continuous) == f"90 messages wait, and run {run.run_id[:8]} will lease them"
    place.enqueue(130)
    assert place.asked(Continuous) == [100]

    place.control.end(run.run_id)
    place.control.end("r2")
    assert run.run_id[:8] not in str(place.tick(Continuous).skip_message), "it has ended its rounds"


def test_the_messages_of_a_round_are_in_flight_beside_those_that_the_next_round_may_lease(place):
    tags = RunTags.of(Continuous)
    run = place.queued({tags.origin: "source", tags.received: "30", tags.rounds: "5"}, STARTED)
    producer, named = BoundProducer(Continuous), f"run {run.run_id[:8]}"
    place.control.stand_by("continuous", run.run_id, 60)

    between = in_flight(producer, place.instance, place.control)
    place.control.claim("continuous", "r2", run.run_id, wanted=30, capacity=200, lease_s=60)
    at_work = in_flight(producer, place.instance, place.control)

    assert (between.held, between.leasing({}), between.idle({})) == (0, named, named)
    assert (at_work.held, at_work.holding({}), at_work.leasing({}), at_work.idle({})) == (30, named, named, "")
    assert (between.to_lease, at_work.to_lease) == ({run.run_id: 100}, {run.run_id: 70})


def test_a_run_that_crashed_between_two_rounds_leaves_no_messages(place):
    place.tick(Continuous)
    place.control.stand_by("continuous", "crashed", -1)

    assert place.skips(Continuous) == "the queue is empty"


@pytest.mark.parametrize(("pipeline", "thread_is_left"), [(Continuous, True), (Continuous, False), (Asked, True)])
def test_a_tick_waits_for_a_first_message_that_is_worth_a_run_if_a_thread_is_left(
    place, pipeline, thread_is_left, monkeypatch
):
    monkeypatch.setattr(producers, "_is_thread_left", lambda instance: thread_is_left)
    place.tick(pipeline)  # reports the check
    arrival = threading.Timer(0.5, place.enqueue, (1,))
    arrival.start()

    requests = place.tick(pipeline).run_requests or []

    arrival.join()
    assert len(requests) == int(pipeline is Continuous and thread_is_left)


@pytest.mark.parametrize(
    ("settings", "producing", "is_left"),
    [
        ({"use_threads": True, "num_workers": 2}, 1, True),
        ({"use_threads": True, "num_workers": 2}, 2, False),
        ({"use_threads": True}, 1, False),
        ({"use_threads": False, "num_workers": 2}, 1, False),
        (None, 0, False),
    ],
)
def test_a_thread_is_left_if_the_daemon_has_more_than_producers(settings, producing, is_left):
    ticked, removed = (SensorInstigatorData(last_tick_timestamp=at) for at in (time.time(), time.time() - 3_600))
    on = mock.Mock(is_running=True, instigator_name="flights_producer", instigator_data=ticked)
    others = [
        mock.Mock(is_running=True, instigator_name="removed_producer", instigator_data=removed),
        mock.Mock(is_running=False, instigator_name="b_producer"),
        mock.Mock(is_running=True, instigator_name="b"),
    ]
    instance = mock.Mock()
    instance.get_settings.return_value = settings
    instance.all_instigator_state.return_value = [on] * producing + others

    assert producers._is_thread_left(instance) == is_left
