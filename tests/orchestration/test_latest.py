"""The asset of `latest_of`: its materialisations, automation, readers, and an object store."""

from datetime import timedelta
from typing import Any

import dagster as dg
import polars as pl
import pytest
from dagster._core.events import AssetMaterializationPlannedData, DagsterEvent

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.windows import window_key
from pipeline_platform.orchestration import IO_MANAGER, LakeResource, latest_of, platform_definitions
from pipeline_platform.orchestration.graph import pipeline_assets
from pipeline_platform.orchestration.resources.lake_resources import LakeIOManager
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from tests.fixtures.accounts import WINDOWS, Accounts, Ground, of
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import SINCE

OPTIONS: dict[str, Any] = {"key": "Number", "order": ["at", "step"], "deleted": "gone", "name": "current"}
CURRENT = latest_of(Accounts, "changes", **OPTIONS)
(CHANGES,) = (spec for spec in pipeline_assets(Accounts).specs if spec.key == dg.AssetKey(["accounts", "changes"]))


@dg.asset(ins={"current": dg.AssetIn(key=["accounts", "current"])})
def total(current: pl.LazyFrame) -> float:
    return float(current.select(pl.col("balance").sum()).collect().item())


def materialise(lake: LakeResource, *assets: dg.AssetsDefinition, **options: Any) -> dg.ExecuteInProcessResult:
    resources = {"lake": lake, IO_MANAGER: LakeIOManager(lake=lake, spark=SparkResource())}
    return dg.materialize([CHANGES, CURRENT, total], resources=resources, selection=list(assets), **options)


def figures(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    (event,) = result.asset_materializations_for_node("accounts__current")
    return {name: value.value for name, value in event.metadata.items()}


@pytest.fixture
def ground(lake: Lake) -> Ground:
    return Ground(lake)


def test_a_materialisation_merges_new_rows_and_assets_downstream_read_the_table(ground):
    lake = LakeResource(root=ground.lake.root)
    ground.store(of(1, 1, 10.0), of(2, 1, 20.0), of(3, 1, 30.0))
    materialise(lake, CURRENT)
    ground.store(of(1, 2, 11.0), of(2, 2, gone=True), of(4, 1, 40.0))

    done = materialise(lake, CURRENT, total)

    assert figures(done) == {
        "rows read": 3,
        "rows inserted": 1,
        "rows updated": 1,
        "rows deleted": 1,
        "dagster/row_count": 3,
        "dagster/uri": ground.lake.uri("accounts", "current"),
    }
    assert done.output_for_node("total") == 81.0


def test_the_data_version_changes_with_the_rows_of_the_batcher(ground):
    lake, versions = LakeResource(root=ground.lake.root), []
    for rows in ([of(1, 1)], [], [of(1, 2)]):
        if rows:
            ground.store(*rows)
        (event,) = materialise(lake, CURRENT).asset_materializations_for_node("accounts__current")
        versions.append((event.tags or {})["dagster/data_version"])
    first, again, changed = versions
    assert first == again != changed


def test_a_row_without_a_key_ends_the_run_with_its_reason_alone(ground):
    ground.store({**of(1, 1), "Number": None})
    done = materialise(LakeResource(root=ground.lake.root), CURRENT, raise_on_error=False)
    (failure,) = (event for event in done.all_events if event.event_type_value == "STEP_FAILURE")
    error = failure.step_failure_data.error
    assert error is not None
    assert error.message.startswith(
        "dagster._core.definitions.events.Failure: MergeError: accounts/changes: Number is null"
    )


class Automation:
    """A daemon that evaluates the condition of the asset, tick by tick."""

    def __init__(self, lake: Lake) -> None:
        root = LakeResource(root=lake.root)
        resources = {"lake": root, IO_MANAGER: LakeIOManager(lake=root, spark=SparkResource())}
        self.definitions = dg.Definitions(assets=[CHANGES, CURRENT], resources=resources)
        self.instance, self.now = dg.DagsterInstance.ephemeral(), SINCE + timedelta(minutes=5, seconds=7)
        self.cursor: dg.AutomationConditionCursor | None = None

    def publishes(self, version: str, hours_ago: int = 0) -> None:
        window = window_key((self.now - timedelta(hours=hours_ago)).replace(minute=0))
        tags = {"dagster/data_version": version}
        self.instance.report_runless_asset_event(dg.AssetMaterialization(CHANGES.key, partition=window, tags=tags))

    def asks(self, **later: int) -> int:
        self.now += timedelta(**later)
        chosen = dg.AssetSelection.assets(CURRENT.key)
        result = dg.evaluate_automation_conditions(
            self.definitions, self.instance, chosen, evaluation_time=self.now, cursor=self.cursor
        )
        self.cursor = result.cursor
        return result.total_requested

    def runs(self, kind: str) -> None:
        run = self.instance.add_run(dg.DagsterRun("merge", status=dg.DagsterRunStatus.STARTED))
        planned = AssetMaterializationPlannedData(CURRENT.key)
        event = DagsterEvent.build_asset_materialization_planned_event("merge", "merge", planned)
        self.instance.report_dagster_event(event, run.run_id)
        self.instance.report_dagster_event(DagsterEvent(kind, "merge"), run.run_id)


def test_it_fires_for_each_window_that_changes_and_not_for_existing_rows(lake):
    daemon = Automation(lake)
    daemon.publishes("r1")
    assert daemon.asks() == 0
    for version, hours_ago in (("r2", 0), ("r3", 0), ("r4", 13)):
        assert daemon.asks(hours=7) == 0
        daemon.publishes(version, hours_ago)
        assert daemon.asks() == 1
        daemon.runs("PIPELINE_SUCCESS")
        assert [daemon.asks(seconds=5), daemon.asks(minutes=30)] == [0, 0]


def test_a_failed_run_is_repeated_every_ten_minutes(lake):
    daemon = Automation(lake)
    assert daemon.asks() == 0
    daemon.publishes("r1")
    assert daemon.asks() == 1
    daemon.runs("PIPELINE_FAILURE")
    asked = [daemon.asks(minutes=1) for _ in range(10)]
    assert sum(asked) == 1
    daemon.runs("PIPELINE_SUCCESS")
    assert [daemon.asks(minutes=1) for _ in range(10)] == [0] * 10


def test_it_goes_into_the_definitions_of_a_deployment(tmp_path):
    resources = resources_at(str(tmp_path), str(tmp_path))
    defined = platform_definitions([Accounts], resources, assets=[CURRENT, total])
    dg.Definitions.validate_loadable(defined)
    node = defined.resolve_asset_graph().get(dg.AssetKey(["accounts", "current"]))
    assert node.group_name == "accounts"
    assert node.parent_keys == {CHANGES.key}
    assert "gone" not in {column.name for column in node.metadata["dagster/column_schema"].columns}


def test_on_an_object_store(s3):
    lake = LakeResource(root="s3://lake/newest", storage_options=s3)
    ground = Ground(Lake(root="s3://lake/newest", storage_options=s3))
    ground.store(of(1, 1, 10.0), of(2, 1, 20.0))
    materialise(lake, CURRENT)
    ground.store(of(1, 2, gone=True), of(3, 1, 30.0), window=WINDOWS[1])
    materialise(lake, CURRENT)
    ground.store(of(1, 1, 99.0), of(2, 2, 21.0))

    done = materialise(lake, CURRENT, total)

    assert ground.balances() == {2: 21.0, 3: 30.0}
    assert done.output_for_node("total") == 51.0


def test_in_a_folder_whose_name_is_quoted_in_urls(tmp_path):
    ground = Ground(Lake(root=str(tmp_path / "Zoë's lake: a=b + c")))
    ground.store(of(1, 1, 10.0), of(2, 1, 20.0))
    ground.merge()
    ground.store(of(1, 2, gone=True))
    ground.merge()
    ground.store(of(1, 1, 99.0))
    ground.merge()
    assert ground.balances() == {2: 20.0}
