"""The producer sensor and the schedules: ticks on a real instance, with real queue, lake and control store."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import dagster as dg
import pytest

from assets.tags import RunTags
from assets.windows import contiguous, window_now
from pipeline_platform.control import ControlStore
from pipeline_platform.definitions import platform_definitions
from pipeline_platform.lake.storage import Lake
from pipeline_platform.options import Producer, RateLimiting
from pipeline_platform.pipeline import Pipeline
from pipeline_platform.windows import WINDOW_FORMAT
from resources.table_queue import TableQueue
from sensors import producer
from sensors.producer import in_flight
from tests.jobs_under_test import resources_at
from tests.pipelines_under_test import Told

ROOT = Path(__file__).parents[1]


class Asked(Told):
    """One run takes 100, two may be under way; a run pays from 50."""

    name = "asked"


TAGS = RunTags.of(Asked)


class Limited(Told):
    """Ten a minute."""

    name = "limited"
    producer = Producer(
        source="queue", max_runs=2, rate_limiting=RateLimiting(allowed_messages=10, interval=timedelta(minutes=1))
    )


class Place:
    """A queue, a control store and an instance, and ticks on them."""

    def __init__(self, folder: Path, instance: dg.DagsterInstance) -> None:
        self.folder, self.instance, self.cursor = folder, instance, None
        self.queue = TableQueue(name="queue", url=f"sqlite:///{folder}/queue.sqlite", created_column="created_at")
        self.queue.create()
        self.control = ControlStore(f"sqlite:///{folder}/control.sqlite")

    def enqueue(self, count: int) -> None:
        self.queue.enqueue(b"x" for _ in range(count))

    def tick(self, pipeline: type[Pipeline] = Asked, source: TableQueue | None = None) -> Any:
        """What a tick of the sensor comes to; remembers its cursor, as the daemon does."""
        definitions = platform_definitions([pipeline], resources_at(str(self.folder), "nowhere"))
        context = dg.build_sensor_context(
            instance=self.instance,
            cursor=self.cursor,
            resources={"queue": source or self.queue, "control": self.control},
            definitions=definitions,
        )
        told = definitions.resolve_sensor_def(f"{pipeline.name}_producer").evaluate_tick(context)
        self.cursor = told.cursor or self.cursor
        return told

    def asked(self, pipeline: type[Pipeline] = Asked) -> list[int]:
        """The demands of the runs that a tick asks for, which are under way from then on."""
        requests = self.tick(pipeline).run_requests
        for request in requests:
            self.queued(request.tags)
        return [int(request.tags[RunTags.of(pipeline).demand]) for request in requests]

    def skips(self, pipeline: type[Pipeline] = Asked) -> str:
        """Why a tick asks for nothing."""
        told = self.tick(pipeline)
        assert not told.run_requests
        return str(told.skip_message)

    def queued(
        self,
        tags: Mapping[str, str],
        status: dg.DagsterRunStatus = dg.DagsterRunStatus.NOT_STARTED,
        **options: Any,
    ) -> dg.DagsterRun:
        run = dg.DagsterRun(job_name="any", status=status, tags=tags, **options)
        return self.instance.add_run(run)


@pytest.fixture
def place(tmp_path: Path, instance: dg.DagsterInstance) -> Place:
    for run in instance.get_runs():
        instance.delete_run(run.run_id)
    return Place(tmp_path, instance)


def tags(demand: int, **more: str) -> dict[str, str]:
    return {TAGS.origin: "source", TAGS.demand: str(demand), **more}


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Have the sensor look at a later time."""

    class Clock(datetime):
        ahead = timedelta(0)

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + cls.ahead

    monkeypatch.setattr(producer, "datetime", Clock)
    return lambda ahead: setattr(Clock, "ahead", ahead)


# Asking


def test_it_asks_for_runs_by_demand_on_the_open_window(place: Place) -> None:
    place.enqueue(170)

    requests = place.tick().run_requests

    assert [request.tags[TAGS.demand] for request in requests] == ["100", "70"]
    for request in requests:
        config = request.run_config["ops"]["asked"]["ops"]["receive_messages"]["config"]
        assert config == {"origin": "source", "demand": int(request.tags[TAGS.demand])}
        assert request.partition_key == window_now(Asked)
        assert request.tags["dagster/max_retries"] == "0"


def test_an_empty_queue_is_a_reason(place: Place) -> None:
    assert place.skips() == "the queue is empty"


def test_what_is_not_worth_a_run_waits_for_patience_and_no_longer(
    place: Place, at: Callable[[timedelta], None]
) -> None:
    place.enqueue(3)

    assert place.skips() == "3 messages wait; a run pays from 50, or after 30 s (waited 0 s)"
    at(timedelta(seconds=31))
    assert place.asked() == [3]


def test_queued_runs_count_until_they_end(place: Place) -> None:
    place.enqueue(300)

    assert place.asked() == [100, 100]
    assert place.skips() == "200 messages in flight fill the capacity of 200"
    for run in place.instance.get_runs():
        place.instance.delete_run(run.run_id)
    assert place.asked() == [100, 100]


def test_what_queued_runs_will_take_is_not_asked_for_again(place: Place) -> None:
    place.enqueue(60)

    assert place.asked() == [60]
    assert place.skips() == "60 messages wait, and runs under way will take them"


def test_a_run_that_leased_counts_as_what_it_holds(place: Place) -> None:
    run = place.queued(tags(100, **{TAGS.receive_id: "r"}), dg.DagsterRunStatus.STARTED)
    place.control.claim("asked", "r", run.run_id, wanted=7, capacity=200, lease_s=60)

    assert in_flight(Asked, place.instance, place.control) == (7, 1, 0)


def test_a_dead_run_does_not_count_once_its_claim_is_over(place: Place) -> None:
    run = place.queued(tags(100, **{TAGS.receive_id: "r"}), dg.DagsterRunStatus.STARTED)
    place.control.claim("asked", "r", run.run_id, wanted=100, capacity=200, lease_s=0.05)
    time.sleep(0.1)
    place.enqueue(200)

    assert in_flight(Asked, place.instance, place.control) == (0, 0, 0)
    assert place.asked() == [100, 100]


def test_a_backfill_takes_room_but_nothing_of_what_waits_at_the_source(place: Place) -> None:
    place.queued({**tags(100), TAGS.origin: "failed"})
    place.enqueue(60)

    assert in_flight(Asked, place.instance, place.control) == (100, 1, 0)
    assert place.asked() == [60]


def test_a_re_execution_of_all_steps_counts_as_what_it_will_lease(place: Place) -> None:
    parent = place.queued(tags(80, **{TAGS.receive_id: "r"}), dg.DagsterRunStatus.FAILURE)

    again = place.queued(parent.tags, parent_run_id=parent.run_id, root_run_id=parent.run_id)
    assert in_flight(Asked, place.instance, place.control) == (80, 1, 80)

    place.instance.add_run_tags(again.run_id, {TAGS.receive_id: "its own"})
    assert in_flight(Asked, place.instance, place.control) == (0, 0, 0), "it has had its own, and ended the claim"


def test_a_re_execution_from_failure_leases_nothing(place: Place) -> None:
    parent = place.queued(tags(80, **{TAGS.receive_id: "r"}), dg.DagsterRunStatus.FAILURE)

    place.queued(
        parent.tags,
        parent_run_id=parent.run_id,
        root_run_id=parent.run_id,
        step_keys_to_execute=["asked.commit", "asked.acknowledge"],
    )

    assert in_flight(Asked, place.instance, place.control) == (0, 0, 0)


def test_what_a_dead_run_left_gets_a_run_even_where_no_message_waits(
    place: Place, at: Callable[[timedelta], None]
) -> None:
    place.control.claim("asked", "r", "dead", wanted=100, capacity=200, lease_s=0.01)
    time.sleep(0.05)

    assert place.skips() == "the queue is empty"
    at(timedelta(seconds=31))
    assert place.asked() == [1]
    assert place.skips() == "the queue is empty", "one is enough"


# Holding back


def test_a_pause_is_a_reason_until_it_ends(place: Place) -> None:
    place.enqueue(100)
    place.control.pause("asked", "new schema on Monday")

    assert place.skips() == "paused: new schema on Monday"
    place.control.resume("asked")
    assert place.asked() == [100]


def test_no_more_is_asked_for_than_the_rate_limit_will_give(place: Place) -> None:
    place.enqueue(500)

    asked = place.asked(Limited)
    assert sum(asked) in (10, 20), "the intervals that begin while a run lasts"
    assert "the rate limit" in place.skips(Limited)


def test_a_source_that_is_away_is_a_reason_and_no_error(place: Place) -> None:
    away = TableQueue(name="queue", url=f"sqlite:///{place.folder}/elsewhere.sqlite")

    told = place.tick(source=away)

    assert not told.run_requests
    assert "queue does not answer" in str(told.skip_message)
    assert "url must name a file that is there" in str(told.skip_message)


def test_it_leases_nothing(place: Place) -> None:
    place.enqueue(170)

    place.tick()

    assert place.queue.backlog().messages == 170
    assert place.control.in_flight("asked") == []


def test_neither_the_code_server_nor_a_tick_loads_spark(tmp_path: Path) -> None:
    script = """
import sys, dagster as dg
from pipeline_platform.definitions import defs
from resources.table_queue import TableQueue
from pipeline_platform.control import ControlStore
from pipeline_platform.definitions import platform_definitions
import pipelines.flights
queue = TableQueue(name="flights_queue", url="sqlite:///queue.sqlite")
queue.create()
queue.enqueue([b"{}"])
sensor = defs.resolve_sensor_def("flights_producer")
with dg.instance_for_test() as instance:
    resources = {"flights_queue": queue, "control": ControlStore("sqlite:///control.sqlite")}
    print(sensor.evaluate_tick(dg.build_sensor_context(instance=instance, resources=resources)).skip_message)
sys.exit([name for name in sys.modules if name.split(".")[0] in ("pyspark", "dagster_pyspark", "pandas")][:5] or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "PIPELINE_PLATFORM_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2_000:]
    assert "1 message waits; a run pays from" in done.stdout


# Schedules


class Clocked(Told):
    """Pulled by the clock, and its failures driven again by the clock."""

    name = "clocked"
    producer = Producer(source="queue", schedule="7 * * * *")
    redrive = "0 5 * * 1"


def scheduled(schedule: str, place: Place) -> Any:
    definitions = platform_definitions([Asked], resources_at(str(place.folder), "nowhere"))
    with dg.build_schedule_context(
        instance=place.instance,
        resources={"queue": place.queue, "lake": Lake(root=str(place.folder / "lake")), "control": place.control},
        scheduled_execution_time=datetime(2025, 3, 2, tzinfo=UTC),
        repository_def=definitions.get_repository_def(),
    ) as context:
        return definitions.resolve_schedule_def(schedule).evaluate_tick(context)


def test_the_pulling_schedule_asks_for_as_much_as_a_run_takes(place: Place) -> None:
    (request,) = scheduled("asked_pull_schedule", place).run_requests

    assert request.partition_key == "2025-03-02T0000"
    assert request.run_config["ops"]["asked"]["ops"]["receive_messages"]["config"] == {"origin": "source"}
    assert request.tags[TAGS.demand] == "100"


def test_the_redriving_schedule_asks_for_a_run_per_contiguous_range_of_open_failures(place: Place) -> None:
    assert scheduled("asked_redrive_schedule", place).skip_message == "no failure is open"
    waiting = {"2025-03-01T0000": 2, "2025-03-01T0100": 3, "2025-03-01T0400": 4_000}

    with mock.patch("sensors.schedules.FailedMessages.open_by_window", return_value=waiting):
        requests = scheduled("asked_redrive_schedule", place).run_requests

    ranges = [
        (r.tags["dagster/asset_partition_range_start"], r.tags["dagster/asset_partition_range_end"]) for r in requests
    ]
    assert ranges == [("2025-03-01T0000", "2025-03-01T0100"), ("2025-03-01T0400", "2025-03-01T0400")]
    assert [r.tags[TAGS.demand] for r in requests] == ["5", "100"], "a run takes on no more"
    assert {r.tags[TAGS.origin] for r in requests} == {"failed"}


@pytest.mark.parametrize("schedule", ["asked_backlog_schedule", "asked_maintenance_schedule"])
def test_the_others_just_run_their_job(place: Place, schedule: str) -> None:
    (request,) = scheduled(schedule, place).run_requests

    assert not request.run_config


@pytest.mark.parametrize("schedule", ["asked_pull_schedule", "asked_redrive_schedule"])
def test_a_pause_holds_for_the_clock_too(place: Place, schedule: str) -> None:
    place.control.pause("asked", "new schema on Monday")

    with mock.patch("sensors.schedules.FailedMessages.open_by_window", return_value={"2025-03-01T0000": 2}):
        told = scheduled(schedule, place)
        place.control.resume("asked")
        resumed = scheduled(schedule, place)

    assert not told.run_requests
    assert told.skip_message == "paused: new schema on Monday"
    assert len(resumed.run_requests) == 1


@pytest.mark.parametrize(
    ("pipeline", "on"),
    [
        (Limited, {"limited_producer", "limited_maintenance_schedule"}),
        (Asked, {"asked_producer", "asked_backlog_schedule", "asked_maintenance_schedule"}),
        (Clocked, {"clocked_pull_schedule", "clocked_redrive_schedule", "clocked_maintenance_schedule"}),
    ],
    ids=["by sensor", "with oldest_allowed", "by the clock"],
)
def test_what_a_pipeline_asks_for_is_on_by_itself_and_nothing_else(pipeline: type[Pipeline], on: set[str]) -> None:
    location = platform_definitions([pipeline], resources_at("nowhere", "nowhere")).get_repository_def()

    assert on == {
        definition.name
        for definition in (*location.sensor_defs, *location.schedule_defs)
        if definition.default_status.value == "RUNNING"
    }


def test_the_clock_goes_by_the_pipeline_s_own_schedules() -> None:
    definitions = platform_definitions([Clocked], resources_at("nowhere", "nowhere"))
    schedules = {name: definitions.resolve_schedule_def(f"clocked_{name}_schedule") for name in ("pull", "redrive")}

    assert {name: schedule.cron_schedule for name, schedule in schedules.items()} == {
        "pull": "7 * * * *",
        "redrive": "0 5 * * 1",
    }


def test_windows_fall_into_runs_of_neighbours() -> None:
    keys = [f"2025-03-0{day}T{hour:02}00" for day, hour in ((1, 23), (2, 0), (2, 2), (3, 0), (3, 1))]

    assert contiguous(Asked, keys) == [keys[:2], keys[2:3], keys[3:]]
    assert contiguous(Asked, []) == []


def test_the_window_of_now_is_the_hour_that_is_open() -> None:
    now = datetime(2025, 3, 1, 12, 34, tzinfo=UTC)

    assert window_now(Asked, now) == datetime(2025, 3, 1, 12, tzinfo=UTC).strftime(WINDOW_FORMAT)
    with pytest.raises(ValueError, match="no window has begun yet; first_window is 2025-01-01"):
        window_now(Asked, datetime(2024, 12, 31, tzinfo=UTC))
