"""When windows begin: at `first_window`, in whatever zone it is given, and not before."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from pipeline_platform.model.options import Producer
from pipeline_platform.orchestration.asset_windows import window_now, windows_of
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.sensor import Asked, Place
from tests.orchestration.test_schedules import scheduled_of

TOKYO = datetime(2026, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo"))
LATER = datetime(2999, 1, 1, tzinfo=UTC)


class InTokyo(Told):
    """Its windows begin with the year in Tokyo."""

    name = "in_tokyo"
    first_window = TOKYO


class Future(Asked):
    """Its windows have not begun."""

    name = "future"
    first_window = LATER


class FutureByClock(Future):
    """The same by the clock."""

    name = "future_by_clock"
    producer = Producer(source="queue", schedule="7 * * * *")


def test_windows_begin_at_the_moment_that_was_given_in_another_zone() -> None:
    first = windows_of(InTokyo).get_partition_keys(current_time=TOKYO + timedelta(minutes=1))

    assert first == ["2025-12-31T1500"]
    assert window_now(InTokyo, TOKYO + timedelta(minutes=59)) == "2025-12-31T1500"


def test_the_sensor_waits_for_the_first_window_and_says_so(place: Place) -> None:
    place.enqueue(100)

    assert place.skips(Future) == "future: no window has begun yet; first_window is 2999-01-01 00:00:00+00:00"


def test_the_clock_waits_for_the_first_window_too(place: Place) -> None:
    told = scheduled_of(FutureByClock, "future_by_clock_pull_schedule", place)

    assert not told.run_requests
    assert "no window has begun yet" in str(told.skip_message)
