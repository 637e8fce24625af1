"""Whether runs of a producer are requested: its sensor or schedule is on, and a daemon evaluates it."""

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import InstigatorStatus

from pipeline_platform import Producer
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.sensors.asking import not_asked_for
from tests.fixtures.heartbeats import beat, turn
from tests.fixtures.pipelines_under_test import Told


class ByClock(Told):
    """A pipeline pulled by a schedule; its sensor is off."""

    name = "by_clock"
    producer = Producer(source="queue", schedule="0 * * * *")


@pytest.fixture
def instance():
    with dg.DagsterInstance.local_temp() as instance:
        yield instance


def test_a_sensor_that_a_daemon_evaluates_asks(instance):
    beat(instance, "SENSOR")
    assert not_asked_for(BoundProducer(Told), instance) is None


def test_no_daemon_asks_for_nothing(instance):
    assert "has never run" in str(not_asked_for(BoundProducer(Told), instance))
    beat(instance, "SENSOR", ago_s=600)
    assert "was last seen at" in str(not_asked_for(BoundProducer(Told), instance))


def test_a_sensor_that_is_off_asks_for_nothing(instance):
    beat(instance, "SENSOR")
    turn(instance, "told_producer", InstigatorType.SENSOR, InstigatorStatus.STOPPED)
    assert not_asked_for(BoundProducer(Told), instance) == "told_producer is turned off in Dagster"


@pytest.mark.parametrize("is_on", [True, False])
def test_the_state_of_a_location_that_was_renamed_does_not_count(instance, is_on):
    beat(instance, "SENSOR")
    running, stopped = InstigatorStatus.RUNNING, InstigatorStatus.STOPPED
    then, now = (stopped, running) if is_on else (running, stopped)
    turn(instance, "told_producer", InstigatorType.SENSOR, now, "new_location", ticked_at=2_000.0)
    turn(instance, "told_producer", InstigatorType.SENSOR, then, "former_location", ticked_at=1_000.0)
    assert not_asked_for(BoundProducer(Told), instance) == (None if is_on else "told_producer is turned off in Dagster")


def test_a_schedule_asks_in_the_sensor_s_place_and_its_sensor_once_it_is_on(instance):
    beat(instance, "SENSOR")
    assert "has never run" in str(not_asked_for(BoundProducer(ByClock), instance)), "the scheduler has not"
    beat(instance, "SCHEDULER")
    assert not_asked_for(BoundProducer(ByClock), instance) is None
    turn(instance, "by_clock_pull_schedule", InstigatorType.SCHEDULE, InstigatorStatus.STOPPED)
    off = "by_clock_producer and by_clock_pull_schedule are turned off in Dagster"
    assert not_asked_for(BoundProducer(ByClock), instance) == off
    turn(instance, "by_clock_producer", InstigatorType.SENSOR, InstigatorStatus.RUNNING)
    assert not_asked_for(BoundProducer(ByClock), instance) is None
