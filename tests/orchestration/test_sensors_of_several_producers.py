"""Sensors and schedules of several producers: each reads its own source, and has its own limits."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.demand import InFlight
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.sensors.runs_under_way import in_flight
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Coasts, Told
from tests.fixtures.sensor import Place, definitions_of

TAGS = RunTags.of(Coasts)
FAILURE = dg.DagsterRunStatus.FAILURE


class Mixed(Told):
    """A pipeline with one producer by sensor and one by schedule."""

    name = "mixed"
    producer = None
    producers = {
        "east": Producer(source="queue", idle_timeout=None, oldest_allowed=timedelta(minutes=5)),
        "west": Producer(source="beside_queue", schedule="7 * * * *", oldest_allowed=timedelta(minutes=5)),
    }


@pytest.fixture
def west(place):
    """The other queue."""
    queue = TableQueue(name="beside_queue", url=f"sqlite:///{place.folder}/beside.sqlite", created_column="created_at")
    queue.create()
    return queue


class Coast:
    """Ticks of one producer's sensor, with its own cursor."""

    def __init__(self, place: Place, west: TableQueue, producer: str, pipeline: type[Pipeline] = Coasts) -> None:
        self.place, self.west, self.producer, self.pipeline = place, west, producer, pipeline
        self.cursor: str | None = None

    def tick(self) -> Any:
        definitions = definitions_of(self.pipeline)
        context = dg.build_sensor_context(
            instance=self.place.instance,
            cursor=self.cursor,
            resources={"queue": self.place.queue, "beside_queue": self.west, "control": self.place.control},
            definitions=definitions,
        )
        told = definitions.resolve_sensor_def(f"{self.pipeline.name}_{self.producer}_producer").evaluate_tick(context)
        self.cursor = told.cursor or self.cursor
        return told

    def asked(self) -> list[int]:
        """Return the demands of the runs that a tick requests. They are queued from then on."""
        requests = self.tick().run_requests or []
        for request in requests:
            self.place.queued(request.tags)
        return [int(request.tags[RunTags.of(self.pipeline).demand]) for request in requests]

    def skips(self) -> str:
        told = self.tick()
        assert not told.run_requests
        return str(told.skip_message).partition(". Now: ")[0]


@pytest.fixture
def coasts(place, west):
    return Coast(place, west, "east"), Coast(place, west, "west")


def tags(origin: str, demand: int, producer: str = "") -> Mapping[str, str]:
    named = {TAGS.producer: producer} if producer else {}
    return {TAGS.origin: origin, TAGS.demand: str(demand), **named}


def test_each_asks_for_what_waits_at_its_own_source_and_names_itself(place, west, coasts):
    place.enqueue(170)
    west.enqueue([b"x"] * 60)
    requests = {coast.producer: coast.tick().run_requests for coast in coasts}
    assert {name: [r.tags[TAGS.demand] for r in asked] for name, asked in requests.items()} == {
        "east": ["100", "70"],
        "west": ["60"],
    }
    (request,) = requests["west"]
    assert request.tags[TAGS.producer] == "west"
    config = request.run_config["ops"]["coasts"]["ops"]["receive_messages"]["config"]
    assert config == {"origin": "source", "demand": 60, "producer": "west"}


def test_what_one_has_in_flight_takes_nothing_from_the_other(place, west, coasts):
    place.enqueue(300)
    west.enqueue([b"x"] * 300)
    east, other = coasts
    assert (east.asked(), other.asked()) == ([100, 100], [100])
    assert east.skips().startswith("2 runs active")
    assert other.skips().startswith("1 run active")


class Ordered(Coasts):
    """The same, with messages in order."""

    name = "ordered"
    producers = {
        "east": Producer(source="queue", idle_timeout=None),
        "west": Producer(source="beside_queue", idle_timeout=None),
    }
    partition_by = lambda message: "all"  # noqa: E731


def test_a_continuous_run_of_one_that_stands_by_keeps_no_other_from_its_turn(place, west):
    west.enqueue([b"x"] * 60)
    other = Coast(place, west, "west", Ordered)
    place.control.claim("ordered/east", "a", "run", wanted=5, capacity=300, lease_s=60, alone=True)
    assert other.skips() == "run run is active, and runs take turns to keep messages in order"
    place.control.end("a")
    place.control.stand_by("ordered/east", "run", 60)
    assert other.asked() == [60]


def test_a_backfill_takes_of_a_producer_s_room_what_the_others_do_not_leave_it(place):
    def counted(producer: str) -> InFlight:
        return in_flight(BoundProducer(Coasts, producer), place.instance, place.control)

    place.control.claim("coasts", "backfill", "run", wanted=80, capacity=300, lease_s=60)
    assert (counted("east"), counted("west")) == (InFlight(), InFlight()), "it has room beside either"

    place.queued(tags("source", 200, "east"))
    assert counted("east") == InFlight(200, 1, 200)
    assert counted("west") == InFlight(of_others=80)

    place.queued(tags("failed", 50))
    assert counted("west") == InFlight(of_others=130)


def test_failures_in_a_row_hold_back_only_the_producer_whose_runs_failed(place, west, coasts):
    place.enqueue(60)
    west.enqueue([b"x"] * 60)
    for _ in range(4):
        place.queued(tags("source", 60, "east"), FAILURE)
    east, other = coasts
    assert east.skips().startswith("the last 4 runs failed")
    assert other.asked() == [60]


@pytest.mark.parametrize(("key", "asks"), [("coasts/west", 1), ("coasts", 0)], ids=["a run of west", "a backfill"])
def test_what_the_dead_left_is_asked_for_by_its_own_sensor_or_by_the_first(place, coasts, key, asks):
    place.control.claim(key, "of the dead", "dead", wanted=70, capacity=300, lease_s=0)
    assert coasts[1 - asks].skips() == "the queue is empty"
    assert coasts[asks].asked() == [70]


def test_each_has_a_sensor_a_schedule_and_a_check_of_its_own_and_the_rest_is_the_pipeline_s():
    location = platform_definitions([Mixed], resources_at("nowhere", "nowhere")).get_repository_def()
    definitions = [*location.sensor_defs, *location.schedule_defs]
    on = {sensor.name for sensor in definitions if sensor.default_status.value == "RUNNING"}
    off = {sensor.name for sensor in definitions} - on
    of_pipeline = {"mixed_west_pull_schedule", "mixed_maintenance_schedule", "mixed_history"}
    assert on == {"mixed_east_producer", "mixed_east_backlog", "mixed_west_backlog", *of_pipeline}
    assert off == {"mixed_west_producer"}
    jobs = {job.name for job in location.get_all_jobs() if not job.name.startswith("__")}
    assert jobs == {"mixed_pull", "mixed_retry", "mixed_replay", "mixed_maintenance", "mixed_limits"}
    checks = {key.name for key in location.asset_graph.asset_check_keys}
    assert checks == {"acknowledged", "columns", "open_failures", "backlog_east", "backlog_west"}


def test_a_schedule_pulls_from_its_producer(place):
    definitions = definitions_of(Mixed)

    def tick() -> Any:
        with dg.build_schedule_context(
            instance=place.instance,
            resources={"control": place.control},
            scheduled_execution_time=datetime(2025, 3, 2, tzinfo=UTC),
            repository_def=definitions.get_repository_def(),
        ) as context:
            return definitions.resolve_schedule_def("mixed_west_pull_schedule").evaluate_tick(context)

    (request,) = tick().run_requests
    assert request.run_config["ops"]["mixed"]["ops"]["receive_messages"]["config"] == {
        "origin": "source",
        "producer": "west",
    }
    place.control.pause("mixed/west", "not now")
    assert tick().skip_message == "paused: not now"


def test_the_backlog_check_of_one_looks_at_its_source_alone(place, west):
    west.enqueue([b"x"])
    definitions = definitions_of(Mixed)
    queues = {"queue": place.queue, "beside_queue": west}

    def look(producer: str, sources: Mapping[str, TableQueue]) -> Any:
        context = dg.build_sensor_context(
            instance=place.instance, resources={**sources, "control": place.control}, definitions=definitions
        )
        told = definitions.resolve_sensor_def(f"mixed_{producer}_backlog").evaluate_tick(context)
        (event,) = told.asset_events
        return event

    away = TableQueue(name="queue", url=f"sqlite:///{place.folder}/elsewhere.sqlite")
    found = {name: look(name, {**queues, "queue": away}) for name in ("east", "west")}

    assert [(e.check_name, e.passed) for e in found.values()] == [("backlog_east", False), ("backlog_west", True)]
    assert found["west"].metadata["backlog"].value == 1
