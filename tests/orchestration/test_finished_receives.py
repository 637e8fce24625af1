"""Receives that a later run finishes are reported to Dagster: the data versions of their windows change."""

from unittest import mock

import dagster as dg
import pytest

from pipeline_platform.orchestration.reports.data_versions import data_versions
from pipeline_platform.run import steps
from tests.fixtures.dagster import NEXT, WINDOW, Location, figures

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


def version(location: Location, table: str, pipeline: str = "told") -> str | None:
    """Return the data version of `WINDOW`, on which `WHEN_NEW` depends."""
    return data_versions(location.instance, dg.AssetKey([pipeline, table]), [WINDOW]).get(WINDOW)


def left(location: Location, step: str, *payloads: str, pipeline: str = "told") -> dg.DagsterRun:
    """Run a pull that decides its receive and fails at a later step."""
    location.enqueue(*payloads)
    with mock.patch.object(steps, step, mock.Mock(side_effect=OSError(28, "No space left on device"))):
        run = location.run(f"{pipeline}_pull")
    assert run.status == FAILURE
    return run


@pytest.mark.parametrize("step", ["publish", "acknowledge"])
def test_a_receive_that_a_later_run_finishes_changes_the_data_version_of_its_window_once(location, step):
    location.enqueue("one")
    location.run("told_pull")
    before = version(location, "lines")
    dead = left(location, step, "two", "fail 1")
    assert version(location, "lines") == before

    later = location.run("told_pull", NEXT)

    assert later.status == SUCCESS
    messages, lines = (
        next(event for event in location.materialisations(later, table) if event.partition == WINDOW)
        for table in ("messages", "lines")
    )
    assert figures(messages)["finished for run"] == dead.run_id
    assert figures(lines)["rows"] == 1
    after = {table: version(location, table) for table in ("messages", "lines", "failed")}
    assert None not in after.values()
    assert before not in after.values()
    assert {event.partition for event in location.materialisations(later, "letters")} == {NEXT}
    assert not location.checks(later)["open_failures"].passed

    assert location.run("told_pull").status == SUCCESS
    assert {table: version(location, table) for table in after} == after


def test_a_finished_receive_with_too_many_failures_leaves_its_window_failed(location):
    left(location, "publish", "one", "fail 1", pipeline="strict")

    later = location.run("strict_pull", NEXT)

    assert later.status == SUCCESS
    assert [event.partition for event in location.materialisations(later, "lines", "strict")] == [NEXT]
    assert [event.partition for event in location.observations(later, "lines", "strict")] == [WINDOW]
    assert str(version(location, "lines", "strict")).startswith("observed-")
