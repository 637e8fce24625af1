"""Pauses after runs that failed in a row."""

from datetime import UTC, datetime, timedelta

import pytest

from pipeline_platform.orchestration.sensors.runs_under_way import FailedRuns, hold_back

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


@pytest.mark.parametrize(
    ("runs", "pause"), [(0, 0), (1, 0), (2, 5), (3, 10), (4, 20), (7, 160), (8, 300), (9, 300), (5_000, 300)]
)
def test_the_pause_after_failures_in_a_row_doubles_to_five_minutes(runs, pause):
    failed = FailedRuns(runs, NOON, "4f1e")

    assert bool(pause) == bool(hold_back(failed, seconds(5), NOON + seconds(max(0, pause - 1))))
    assert hold_back(failed, seconds(5), NOON + seconds(pause)) is None


def test_failures_dated_in_the_future_do_not_delay_runs():
    failed = FailedRuns(3, NOON + timedelta(days=1), "4f1e")

    assert hold_back(failed, seconds(5), NOON) is None
    assert hold_back(FailedRuns(3, NOON + seconds(1), "4f1e"), seconds(5), NOON), "no two clocks agree to the second"


def test_the_reason_of_a_pause_has_its_end_and_a_run_id():
    assert hold_back(FailedRuns(3, NOON, "4f1e"), seconds(5), NOON) == (
        "the last 3 runs failed; next run at 12:00:10 UTC; see run 4f1e"
    )
