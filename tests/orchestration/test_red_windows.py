"""Runs that fail by `max_failed_share`: their windows fail too, while all messages are published and acknowledged."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from pipeline_platform.orchestration.asset_windows import windows_of
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.reports.reporting import failed_too_often
from tests.fixtures.dagster import NEXT, WINDOW, Location, figures
from tests.fixtures.pipelines_under_test import Strict

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


def windows(location: Location, table: str, *keys: str) -> dict[str, str | None]:
    """Return the statuses of windows on the asset page."""
    asset = dg.AssetKey(["strict", table])
    found: Any = location.instance.get_status_by_partition(asset, list(keys), windows_of(Strict))
    return {key: found[key] and found[key].value for key in keys}


def observed(location: Location, run: dg.DagsterRun, table: str) -> dict[str, Any]:
    return {event.partition or "": figures(event) for event in location.observations(run, table, "strict")}


def test_the_windows_of_a_red_run_are_red_and_what_came_of_it_is_published(location):
    location.enqueue("one", "fail")

    run = location.run("strict_pull")

    assert run.status == FAILURE
    assert "1 of 2 messages failed, more than max_failed_share allows (0.0)" in location.log(run)
    assert run.tags[RunTags.of(Strict).published] == run.run_id
    assert location.waiting() == 0
    assert location.rows("lines", "strict")["text"].to_list() == ["one"]
    assert {table: windows(location, table, WINDOW) for table in ("lines", "letters", "failed", "messages")} == {
        "lines": {WINDOW: "FAILED"},
        "letters": {WINDOW: "FAILED"},
        "failed": {WINDOW: "FAILED"},
        "messages": {WINDOW: "MATERIALIZED"},
    }
    assert observed(location, run, "lines")[WINDOW]["rows"] == 1
    assert observed(location, run, "failed")[WINDOW]["open"] == 1
    checks = location.checks(run)
    assert checks["acknowledged"].passed
    assert not checks["open_failures"].passed
    assert location.again(run, from_failure=True).status == SUCCESS, "nothing is left to do"
    assert location.rows("lines", "strict")["text"].to_list() == ["one"]
    assert location.open_failures(pipeline=Strict) == {WINDOW: 1}


def test_each_window_of_a_red_range_is_red_until_a_run_of_it_is_green(location):
    for window in (WINDOW, NEXT):
        location.enqueue("fail")
        location.run("strict_pull", window)
    red = location.run("strict_retry", WINDOW, NEXT)
    assert red.status == FAILURE
    assert windows(location, "failed", WINDOW, NEXT) == {WINDOW: "FAILED", NEXT: "FAILED"}
    assert set(observed(location, red, "failed")) == {WINDOW, NEXT}
    green = location.run("strict_retry", WINDOW, context={"forgiving": True})
    assert green.status == SUCCESS
    assert windows(location, "failed", WINDOW, NEXT) == {WINDOW: "MATERIALIZED", NEXT: "FAILED"}
    assert windows(location, "lines", WINDOW, NEXT) == {WINDOW: "MATERIALIZED", NEXT: "FAILED"}


@pytest.mark.parametrize(
    ("failed", "held", "received", "said"),
    [
        (1, 0, 2, None),
        (2, 0, 3, "2 of 3 messages failed, more than max_failed_share allows (0.5)"),
        (3, 2, 3, None),
        (0, 0, 0, None),
    ],
)
def test_a_run_is_red_beyond_the_share_that_the_pipeline_allows(failed, held, received, said):
    totals: Any = SimpleNamespace(failed=Counter({WINDOW: failed}), held=held, received=received)
    flow: Any = SimpleNamespace(pipeline=SimpleNamespace(max_failed_share=0.5))
    assert str(failed_too_often(flow, totals)).startswith(str(said))
