"""The schedules: ticks on a real instance."""

from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock
from zoneinfo import ZoneInfo

import dagster as dg
import pytest

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.options import Breaker, Producer
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.asset_windows import contiguous, window_now, windows_of
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.sensors import schedules
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.sensor import Asked, Limited, Place, definitions_of


class Clocked(Told):
    """A pipeline with schedules for pulls and retries."""

    name = "clocked"
    producer = Producer(source="queue", schedule="7 * * * *")
    retry_schedule = "0 5 * * 1"


TAGS = RunTags.of(Clocked)


MIDNIGHT = datetime(2025, 3, 2, tzinfo=UTC)


def scheduled(schedule: str, place: Place, at: datetime = MIDNIGHT) -> Any:
    return scheduled_of(Clocked, schedule, place, at)


def scheduled_of(pipeline: type[Pipeline], schedule: str, place: Place, at: datetime = MIDNIGHT) -> Any:
    """Return the result of a tick of a schedule."""
    definitions = definitions_of(pipeline)
    with dg.build_schedule_context(
        instance=place.instance,
        resources={"queue": place.queue, "lake": Lake(root=str(place.folder / "lake")), "control": place.control},
        scheduled_execution_time=at,
        repository_def=definitions.get_repository_def(),
    ) as context:
        return definitions.resolve_schedule_def(schedule).evaluate_tick(context)


def test_the_pulling_schedule_asks_for_as_much_as_a_run_takes(place):
    (request,) = scheduled("clocked_pull_schedule", place).run_requests
    assert request.partition_key == "2025-03-02T0000"
    assert request.run_config["ops"]["clocked"]["ops"]["receive_messages"]["config"] == {"origin": "source"}
    assert request.tags[TAGS.demand] == "100"


def test_the_redriving_schedule_asks_for_a_run_per_contiguous_range_of_open_failures(place):
    assert scheduled("clocked_retry_schedule", place).skip_message == "there are no open failures to retry"
    waiting = {"2025-03-01T0000": 2, "2025-03-01T0100": 3, "2025-03-01T0400": 4_000}
    with mock.patch.object(schedules.FailedMessages, "chosen_by_window", return_value=waiting):
        requests = scheduled("clocked_retry_schedule", place).run_requests
    first, last = requests
    bounds = [first.tags[f"dagster/asset_partition_range_{bound}"] for bound in ("start", "end")]
    assert (bounds, last.partition_key) == (["2025-03-01T0000", "2025-03-01T0100"], "2025-03-01T0400")
    assert [r.tags[TAGS.demand] for r in requests] == ["5", "100"], "the limit of a run"
    assert {r.tags[TAGS.origin] for r in requests} == {"failed"}
    driven = first.run_config["ops"]["clocked"]["ops"]["receive_messages"]["config"]["failures"]
    assert driven == {"state": "waiting"}, "dead ones are left to people"


def test_the_retry_schedule_merges_the_nearest_ranges_instead_of_requesting_many_runs(place, monkeypatch):
    monkeypatch.setattr(schedules, "_AT_ONCE", 2)
    hours = (0, 2, 3, 10, 12, 14)
    waiting = {f"2025-03-01T{hour:02}00": 2 for hour in hours}
    with mock.patch.object(schedules.FailedMessages, "chosen_by_window", return_value=waiting):
        requests = scheduled("clocked_retry_schedule", place).run_requests
    bounds = [
        [request.tags[f"dagster/asset_partition_range_{bound}"][-4:] for bound in ("start", "end")]
        for request in requests
    ]
    assert bounds == [["0000", "0300"], ["1000", "1400"]]
    assert [request.tags[TAGS.demand] for request in requests] == ["6", "6"]
    receives = [request.run_config["ops"]["clocked"]["ops"]["receive_messages"]["config"] for request in requests]
    assert [receive["demand"] for receive in receives] == [200, 300], "as many as a run for each range"


def test_the_tables_are_seen_to_each_night_and_in_an_hour_in_which_one_is_crowded(place, monkeypatch):
    night = datetime(2025, 3, 2, 2, 30, tzinfo=UTC)

    def asked(at: datetime) -> Any:
        return scheduled("clocked_maintenance_schedule", place, at)

    assert len(asked(night).run_requests) == 1
    assert asked(night + timedelta(hours=1)).skip_message == (
        "no table has 500 small files to compact; all tables are maintained at 02:30 UTC"
    )
    monkeypatch.setattr(schedules, "is_crowded", lambda tables: tables.pipeline is Clocked)
    assert len(asked(night + timedelta(hours=1)).run_requests) == 1


@pytest.mark.parametrize("schedule", ["clocked_pull_schedule", "clocked_retry_schedule"])
def test_a_pause_holds_for_the_clock_too(place, schedule):
    place.control.pause("clocked", "new schema on Monday")
    with mock.patch.object(
        schedules.FailedMessages,
        "chosen_by_window",
        return_value={"2025-03-01T0000": 2},
    ):
        told = scheduled(schedule, place)
        place.control.resume("clocked")
        resumed = scheduled(schedule, place)
    assert not told.run_requests
    assert told.skip_message == "paused: new schema on Monday"
    assert len(resumed.run_requests) == 1


def test_the_pause_of_a_breaker_holds_for_pulls_by_the_clock(place, monkeypatch):
    breaker = Breaker(of_last=10)
    monkeypatch.setattr(Clocked, "producer", Clocked.producer.model_copy(update={"breaker": breaker}))
    place.control.judge("clocked", breaker, 40, 30)
    assert not scheduled("clocked_pull_schedule", place).run_requests
    with mock.patch.object(schedules.FailedMessages, "chosen_by_window", return_value={"2025-03-01T0000": 2}):
        assert len(scheduled("clocked_retry_schedule", place).run_requests) == 1


@pytest.mark.parametrize(
    ("pipeline", "on"),
    [
        (Limited, {"limited_producer", "limited_maintenance_schedule"}),
        (Asked, {"asked_producer", "asked_backlog", "asked_maintenance_schedule"}),
        (
            Clocked,
            {"clocked_pull_schedule", "clocked_backlog", "clocked_retry_schedule", "clocked_maintenance_schedule"},
        ),
    ],
    ids=["by sensor", "with oldest_allowed", "by the clock"],
)
def test_what_a_pipeline_asks_for_is_on_by_itself_and_there_is_nothing_else_but_the_sensor(pipeline, on):
    location = platform_definitions([pipeline], resources_at("nowhere", "nowhere")).get_repository_def()
    definitions = (*location.sensor_defs, *location.schedule_defs)
    defined = {definition.name: definition.default_status.value for definition in definitions}
    on = {*on, f"{pipeline.name}_history"}
    assert {name for name, status in defined.items() if status == "RUNNING"} == on
    assert set(defined) == on | {f"{pipeline.name}_producer"}


def test_the_clock_goes_by_the_pipeline_s_own_schedules():
    definitions = platform_definitions([Clocked], resources_at("nowhere", "nowhere"))
    schedules = {name: definitions.resolve_schedule_def(f"clocked_{name}_schedule") for name in ("pull", "retry")}
    assert {name: schedule.cron_schedule for name, schedule in schedules.items()} == {
        "pull": "7 * * * *",
        "retry": "0 5 * * 1",
    }


def test_windows_fall_into_runs_of_neighbours():
    keys = [f"2025-03-0{day}T{hour:02}00" for day, hour in ((1, 23), (2, 0), (2, 2), (3, 0), (3, 1))]
    assert contiguous(Asked, keys) == [keys[:2], keys[2:3], keys[3:]]
    assert contiguous(Asked, []) == []


TOKYO = datetime(2026, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo"))
LATER = datetime(2999, 1, 1, tzinfo=UTC)


class InTokyo(Told):
    """A pipeline whose windows start with the year in Tokyo."""

    name = "in_tokyo"
    first_window = TOKYO


class Future(Asked):
    """A pipeline whose first window is in the future."""

    name = "future"
    first_window = LATER


def test_windows_begin_at_the_moment_that_was_given_in_another_zone():
    first = windows_of(InTokyo).get_partition_keys(current_time=TOKYO + timedelta(minutes=1))
    assert first == ["2025-12-31T1500"]
    assert window_now(InTokyo, TOKYO + timedelta(minutes=59)) == "2025-12-31T1500"


def test_the_sensor_waits_for_the_first_window_and_says_so(place):
    place.enqueue(100)
    assert place.skips(Future) == "future: no window has started yet; first_window is 2999-01-01 00:00:00+00:00"
