"""Downstream assets fire by `WHEN_NEW` when a window gets rows, even if other windows stay empty."""

from datetime import timedelta
from typing import Any

import dagster as dg
import pytest
from dagster._core.events import AssetMaterializationPlannedData, DagsterEvent, StepMaterializationData

from pipeline_platform.model.windows import window_key
from pipeline_platform.orchestration import WHEN_NEW
from pipeline_platform.orchestration.asset_windows import windows_of
from pipeline_platform.orchestration.graph import asset_keys, pipeline_assets
from tests.fixtures.pipelines_under_test import SINCE, Told

LINES, COUNTED = asset_keys(Told)["lines"], dg.AssetKey("counted")
(UPSTREAM,) = (spec for spec in pipeline_assets(Told).specs if spec.key == LINES)
PARTITIONS = {
    "none": (None, lambda _: None),
    "days": (dg.DailyPartitionsDefinition(SINCE, end_offset=1), lambda window: window[:10]),
    "windows": (windows_of(Told), lambda window: window),
}


class Daemon:
    """A daemon that evaluates the condition tick by tick, and materialises the requested partitions.

    The table is in another code location: all that Dagster knows of it is its spec.
    """

    def __init__(
        self, partitions: dg.PartitionsDefinition | None, condition: dg.AutomationCondition[Any] = WHEN_NEW
    ) -> None:
        @dg.asset(deps=[LINES], partitions_def=partitions, automation_condition=condition)
        def counted() -> None: ...

        self.definitions = dg.Definitions(assets=[UPSTREAM, counted])
        self.instance = dg.DagsterInstance.ephemeral()
        self.cursor: dg.AutomationConditionCursor | None = None
        self.now = SINCE + timedelta(minutes=5)

    def publishes(self, window: str, version: str | None) -> None:
        tags = {"dagster/data_version": version} if version else None
        self.instance.report_runless_asset_event(dg.AssetMaterialization(LINES, partition=window, tags=tags))

    def starts(self, partition: str | None, key: dg.AssetKey = LINES) -> str:
        """Start a run that materialises a partition, and does not end; return its id."""
        tags = {"dagster/partition": partition} if partition else {}
        run = self.instance.add_run(dg.DagsterRun("pull", status=dg.DagsterRunStatus.STARTED, tags=tags))
        planned = AssetMaterializationPlannedData(key, partition=partition)
        event = DagsterEvent.build_asset_materialization_planned_event(run.job_name, "lines", planned)
        self.instance.report_dagster_event(event, run.run_id)
        return run.run_id

    def ends(self, run_id: str, partition: str | None) -> None:
        """End a run that has materialised a partition of the asset downstream."""
        made = StepMaterializationData(dg.AssetMaterialization(COUNTED, partition=partition))
        for kind, data in (("ASSET_MATERIALIZATION", made), ("PIPELINE_SUCCESS", None)):
            self.instance.report_dagster_event(DagsterEvent(kind, "pull", event_specific_data=data), run_id)

    def asks(self, *, runs: bool = True) -> set[str | None]:
        """Return the partitions that a tick requests; `{None}` for an unpartitioned asset.

        They are materialised at once, unless they are to be materialised by `starts` and `ends`.
        """
        result = dg.evaluate_automation_conditions(
            self.definitions,
            self.instance,
            asset_selection=dg.AssetSelection.assets(COUNTED),
            evaluation_time=self.now,
            cursor=self.cursor,
        )
        self.cursor = result.cursor
        asked = result.get_requested_partitions(COUNTED)
        for partition in asked if runs else ():
            self.instance.report_runless_asset_event(dg.AssetMaterialization(COUNTED, partition=partition))
        return set(asked)


@pytest.fixture(params=PARTITIONS)
def partitioned(request):
    """A daemon that knows an asset with these partitions, and the partitions of a window."""
    partitions, partition_of = PARTITIONS[request.param]
    return Daemon(partitions), partition_of


def test_each_window_with_messages_fires_once_also_after_hours_without(partitioned):
    daemon, partition_of = partitioned
    assert daemon.asks() == set(), "nothing was published"

    for pause in (timedelta(hours=1), timedelta(hours=7), timedelta(days=3)):
        daemon.now += pause
        assert daemon.asks() == set(), "an hour without messages is nothing new"
        daemon.publishes(window := window_key(daemon.now.replace(minute=0)), f"r{pause}")
        assert daemon.asks() == {partition_of(window)}
        assert daemon.asks() == set()


def test_a_past_window_that_gets_rows_by_a_retry_fires_again(partitioned):
    daemon, partition_of = partitioned
    window = window_key(SINCE)
    daemon.publishes(window, "r1")
    daemon.now += timedelta(days=2)
    daemon.asks()

    daemon.publishes(window, "r2")

    assert daemon.asks() == {partition_of(window)}


@pytest.mark.parametrize("ticks", [0, 1], ids=["right after the request", "later"])
def test_rows_that_arrive_while_a_run_reads_start_another_run(partitioned, ticks):
    daemon, partition_of = partitioned
    window = window_key(SINCE)
    daemon.asks()
    daemon.publishes(window, "r1")
    assert daemon.asks(runs=False) == {partition_of(window)}
    run_id = daemon.starts(partition_of(window), COUNTED)
    for _ in range(ticks):
        assert daemon.asks() == set()

    daemon.publishes(window, "r2")
    assert daemon.asks() == set(), "the run is active"
    daemon.ends(run_id, partition_of(window))

    assert daemon.asks() == {partition_of(window)}
    assert daemon.asks() == set()


def test_windows_whose_rows_stay_the_same_fire_nothing(partitioned):
    daemon, _ = partitioned
    assert daemon.asks() == set()
    window, empty = window_key(SINCE), window_key(SINCE + timedelta(hours=1))
    daemon.now += timedelta(hours=2)
    daemon.publishes(window, "r1")
    daemon.asks()

    daemon.publishes(window, "r1")
    daemon.publishes(empty, None)

    assert daemon.asks() == set()


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (WHEN_NEW, True),
        (WHEN_NEW & dg.AutomationCondition.cron_tick_passed("*/10 * * * *"), False),
        (WHEN_NEW & ~dg.AutomationCondition.any_deps_in_progress(), False),
    ],
    ids=["at once", "every ten minutes", "after all runs"],
)
def test_new_rows_fire_while_runs_are_active_as_the_condition_says(condition, expected):
    daemon, window = Daemon(windows_of(Told), condition), window_key(SINCE)
    daemon.asks()
    daemon.now += timedelta(minutes=1)

    daemon.publishes(window, "r1")
    daemon.starts(window)

    assert daemon.asks() == ({window} if expected else set())
    daemon.now += timedelta(minutes=10)
    assert daemon.asks() == ({window} if "cron" in str(condition) else set())
