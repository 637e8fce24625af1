"""Changes of a pipeline's windows: refused if existing data would be in other windows, or in none."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.pipeline import Pipeline, PipelineError
from pipeline_platform.run.begin import begin
from pipeline_platform.run.flow import Flow
from tests.fixtures.small_lake import Keeping, Memory, Run

HOURLY, DAILY = "0 * * * *", "0 0 * * *"
FIRST = datetime(2026, 1, 1, tzinfo=UTC)


def keeping(**options: Any) -> type[Pipeline]:
    """The same pipeline after an edit of its windows."""
    return type("Edited", (Keeping,), options)


def with_data(lake: Lake, **options: Any) -> None:
    Run(Tables(lake, keeping(**options)), Memory(deliveries_=(("a", b"a"),)), "r1").finish()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"window_cron": HOURLY}, {"window_cron": DAILY}, "Edited.window_cron must stay '0 * * * *'"),
        (
            {},
            {"first_window": FIRST + timedelta(seconds=1)},
            "Edited.first_window must not be after the oldest window with data, 2026-01-01T0000",
        ),
    ],
)
def test_windows_that_are_not_those_of_the_data_are_refused_before_anything_is_leased(
    lake, tmp_path, before, after, words
):
    with_data(lake, **before)
    queue = TableQueue(name="memory", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    queue.enqueue([b"a"])
    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    flow = Flow(BoundProducer(keeping(**after)), queue, lake, control, lambda: pytest.fail("no Spark"))

    with pytest.raises(PipelineError) as refused:
        begin(flow, origin="source", run_id="test", windows=["2026-01-01T0000"])

    assert str(refused.value).startswith(words)
    assert queue.backlog().messages == 1
    assert list(control.in_flight("keeping")) == []
    control.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"window_cron": HOURLY}, {"window_cron": "@hourly"}),
        ({"window_cron": "0 0 * * MON"}, {"window_cron": " 0 0  * * mon"}),
        ({}, {"first_window": datetime(2020, 1, 1, tzinfo=UTC)}),
        ({"first_window": datetime(2020, 1, 1, tzinfo=UTC)}, {"first_window": FIRST}),
    ],
)
def test_a_change_that_moves_no_data_is_accepted(lake, before, after):
    with_data(lake, **before)
    Tables(lake, keeping(**after)).ensure()


def test_windows_may_change_while_there_is_no_data(lake):
    Tables(lake, keeping(window_cron=HOURLY)).ensure()
    Tables(lake, keeping(window_cron=DAILY, first_window=FIRST + timedelta(days=1))).ensure()
    with_data(lake, window_cron=DAILY)
    with pytest.raises(PipelineError, match="the oldest window with data, 2026-01-01T0000"):
        Tables(lake, keeping(window_cron=DAILY, first_window=FIRST + timedelta(days=2))).ensure()


def test_an_invalid_record_of_windows_raises_an_error_with_its_path(lake):
    with_data(lake)
    lake.write("keeping/_windows.json", b"{")
    with pytest.raises(
        PipelineError, match=r"keeping/_windows.json is not a valid record of window options \(json_invalid\)"
    ):
        Tables(lake, keeping()).ensure()
