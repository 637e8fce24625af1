"""Batchers without a table and filtered messages in Dagster: assets, figures, and refused readers."""

import dagster as dg
import polars as pl
import pytest

from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.orchestration import IO_MANAGER, pipeline_assets, platform_definitions
from pipeline_platform.orchestration.reports.run_checks import run_checks
from tests.fixtures.dagster import figures, rows_of
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Sending


def test_its_asset_shows_messages_and_failures_of_each_window(location):
    location.enqueue("one", "letter a", "letter a", "letter x", "other")

    run = location.run("sending_pull")

    assert run.status == dg.DagsterRunStatus.SUCCESS
    (letters,) = location.materialisations(run, "letters", "sending")
    shown = figures(letters)
    assert (shown["messages"], shown["failed"], shown["batch keys"]) == (2, 1, {"a": 2})
    assert letters.tags["dagster/data_version"] == shown["receive_id"]
    assert {"rows", "dagster/uri", "dagster/partition_row_count"}.isdisjoint(shown)
    assert not (location.root / "lake" / "sending" / "letters").exists()
    messages = figures(location.materialisations(run, "messages", "sending")[0])
    assert (messages["received"], messages["handled"], messages["skipped"], messages["failed"]) == (5, 3, 1, 1)
    assert rows_of(messages["reasons of skipped messages"]) == [{"reason": "filtered by `only`", "messages": 1}]
    assert location.rows("messages", "sending").height == 5


def test_a_run_without_messages_for_it_keeps_its_data_version(location):
    location.enqueue("letter a")
    first = location.run("sending_pull")
    location.enqueue("one")
    second = location.run("sending_pull")

    versions = [
        location.materialisations(run, "letters", "sending")[0].tags["dagster/data_version"] for run in (first, second)
    ]
    assert versions[0] == versions[1]


def test_the_catalog_shows_no_columns_and_no_check_of_them():
    (spec,) = [spec for spec in pipeline_assets(Sending).specs if spec.key.path[-1] == "letters"]

    assert "dagster/column_schema" not in spec.metadata
    assert "Without a table" in (spec.description or "")
    checks = {key.asset_key.path[-1] for check in run_checks(Sending) for key in check.check_keys}
    assert checks == {"messages", "failed", "lines"}


def test_an_asset_that_reads_its_table_fails_with_the_reason(location):
    @dg.asset(ins={"letters": dg.AssetIn(["sending", "letters"], input_manager_key=IO_MANAGER)})
    def reader(letters: pl.DataFrame) -> int:
        return letters.height

    resources = resources_at(str(location.root), str(location.spark_folder))
    defined = platform_definitions([Sending], resources, assets=[reader])

    with pytest.raises(PipelineError, match=r"sending/letters: has no table to read, because Sending\.batchers"):
        defined.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=location.instance, asset_selection=[dg.AssetKey("reader")]
        )
