"""Windows of a day: pulled, retried, replayed and deleted, from schedule to tables."""

from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import polars as pl
import pytest

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.windows import window_key
from pipeline_platform.orchestration.asset_windows import window_now, windows_of
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.graph import pipeline_assets
from pipeline_platform.orchestration.jobs import RunTags
from tests.fixtures.dagster import Location, figures
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import PIPELINES
from tests.fixtures.windowed_pipelines import Early

TABLES = ("messages", "lines", "letters", "failed")
BEGIN = datetime(2025, 3, 2, 6, 30, tzinfo=UTC)
"""When the later of the two windows that are filled begins."""


@pytest.fixture
def pipeline(monkeypatch):
    """A pipeline that can be put into jobs."""
    monkeypatch.setitem(PIPELINES, Early.name, Early)
    return Early


def asked(location: Location, pipeline: type[Pipeline], schedule: str, at: datetime) -> dg.RunRequest:
    """Return the only run that a schedule requests at its tick."""
    definitions = platform_definitions([pipeline], resources_at(str(location.root), "nowhere"))
    lake = Lake(root=str(location.root / "lake"))
    with dg.build_schedule_context(
        instance=location.instance,
        resources={"queue": location.queue, "lake": lake, "control": location.control},
        scheduled_execution_time=at,
        repository_def=definitions.get_repository_def(),
    ) as context:
        (request,) = (
            definitions.resolve_schedule_def(f"{pipeline.name}_{schedule}_schedule").evaluate_tick(context).run_requests
            or []
        )
    return request


def pull(location: Location, pipeline: type[Pipeline], at: datetime, *payloads: str) -> str:
    """Pull by a schedule; return the window."""
    location.enqueue(*payloads)
    window = asked(location, pipeline, "pull", at).partition_key
    assert window is not None
    run = location.run(f"{pipeline.name}_pull", window)
    assert told(location, run, pipeline) == [window]
    return window


def told(location: Location, run: dg.DagsterRun, pipeline: type[Pipeline]) -> list[str | None]:
    """Return the partitions that a run materialised, equal for all assets."""
    assert run.status == dg.DagsterRunStatus.SUCCESS, location.log(run)
    partitions = [
        [event.partition for event in location.materialisations(run, table, pipeline.name)] for table in TABLES
    ]
    assert partitions == [partitions[0]] * len(TABLES)
    return partitions[0]


def by_window(location: Location, pipeline: type[Pipeline], table: str, column: str) -> dict[str, list[Any]]:
    rows = location.rows(table, pipeline.name).group_by("window").agg(pl.col(column).sort())
    return dict(zip(rows["window"], rows[column].to_list(), strict=True))


def test_partitions_are_named_as_the_platform_names_windows(pipeline):
    begin, day = BEGIN, timedelta(days=1)
    partitions = windows_of(pipeline)
    first = begin.replace(month=1, day=1)
    keys = partitions.get_partition_keys(current_time=begin + timedelta(hours=5))

    assert keys == [window_key(first + n * day) for n in range(-1, 61)], "from the window of first_window on"
    assert partitions.time_window_for_partition_key(window_key(begin)) == dg.TimeWindow(begin, begin + day)
    assert {spec.partitions_def for spec in pipeline_assets(pipeline).specs} == {partitions}


def test_a_window_is_open_from_its_beginning_until_the_next_begins(pipeline):
    begin, day, instant = BEGIN, timedelta(days=1), timedelta(microseconds=1)

    assert window_now(pipeline, begin - instant) == window_key(begin - day)
    assert window_now(pipeline, begin) == window_now(pipeline, begin + day - instant) == window_key(begin)


def test_a_window_of_a_day_is_pulled_driven_again_replayed_and_dropped_by_itself(location, pipeline):
    begin, name = BEGIN, pipeline.name
    yesterday = pull(location, pipeline, begin - timedelta(minutes=1), "fail 1", "one", "letter a")
    today = pull(location, pipeline, begin, "fail 2", "two")

    assert [yesterday, today] == [window_key(begin - timedelta(days=1)), window_key(begin)]
    assert by_window(location, pipeline, "lines", "text") == {yesterday: ["one"], today: ["two"]}
    assert location.open_failures(yesterday, today, pipeline=pipeline) == {yesterday: 1, today: 1}

    driven = location.run(f"{name}_retry", yesterday, context={"forgiving": True})

    assert told(location, driven, pipeline) == [yesterday]
    assert by_window(location, pipeline, "lines", "text") == {yesterday: ["fail 1", "one"], today: ["two"]}
    assert location.open_failures(yesterday, today, pipeline=pipeline) == {today: 1}

    before = by_window(location, pipeline, "lines", "receive_id")
    replayed = location.run(f"{name}_replay", yesterday, context={"forgiving": True})

    assert told(location, replayed, pipeline) == [yesterday]
    assert by_window(location, pipeline, "lines", "text") == {yesterday: ["fail 1", "one"], today: ["two"]}
    receive = replayed.tags[RunTags.of(pipeline).receive_id]
    assert by_window(location, pipeline, "lines", "receive_id") == {**before, yesterday: [receive, receive]}
    assert by_window(location, pipeline, "letters", "receive_id") == {yesterday: [receive]}
    (event,) = location.materialisations(replayed, "lines", name)
    assert figures(event)["dagster/partition_row_count"] == 2

    assert location.run(f"{name}_maintenance").status == dg.DagsterRunStatus.SUCCESS
    assert set(by_window(location, pipeline, "messages", "message_id")) == {today}, "the newest is kept in any case"
    assert set(by_window(location, pipeline, "lines", "text")) == {yesterday, today}, "for ever"
