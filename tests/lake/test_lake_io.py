"""Tables as arguments and results of downstream assets, and the lake on an object store."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import dagster as dg
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame

from pipeline_platform.cli.lake.deliveries import deliveries_of
from pipeline_platform.connectors.table_queue import TableQueue
from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.orchestration.resources.lake_resources import LakeIOManager, LakeResource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import intake_of
from tests.fixtures.dagster import NEXT, WINDOW, Location, empty_location
from tests.fixtures.flow import run
from tests.fixtures.pipelines_under_test import SINCE, Told

HOURLY = dg.HourlyPartitionsDefinition(start_date=SINCE, fmt="%Y-%m-%dT%H%M", timezone="UTC")
LINES = dg.AssetSpec(["told", "lines"], partitions_def=HOURLY)


@pytest.fixture(scope="module")
def filled(tmp_path_factory, warm_spark, open_spark, instance):
    """Two windows of lines, written with an older and a newer model, then partly compacted.

    They are in a folder whose name is quoted in URLs.
    """
    location = empty_location(tmp_path_factory.mktemp("Zoë's lake: a=b + c"), warm_spark, instance)
    for window, line, edit in ((WINDOW, "one", ""), (NEXT, "two", ""), (WINDOW, "three words here", "widened")):
        location.enqueue(line)
        assert location.run("told_pull", window, edit=edit).status == dg.DagsterRunStatus.SUCCESS
    assert Tables(Lake(root=str(location.root / "lake")), Told)["lines"].open().optimize.compact()["numFilesAdded"] == 1
    yield location
    location.control.close()


def texts(frame: Any) -> list[tuple[str, str]]:
    """The texts and windows of any kind of frame."""
    if isinstance(frame, DataFrame):
        frame = frame.toArrow()
    if isinstance(frame, pl.LazyFrame):
        frame = frame.collect()
    rows = frame.to_pylist() if isinstance(frame, pa.Table) else frame.to_dicts()
    return sorted((row["text"], row["window"]) for row in rows)


def materialise(asset: dg.AssetsDefinition, location: Location, spark: SparkResource, **options: Any) -> Any:
    return materialise_in(LakeResource(root=str(location.root / "lake")), asset, spark, **options)


def materialise_in(lake: LakeResource, asset: dg.AssetsDefinition, spark: SparkResource, **options: Any) -> Any:
    resources = {"io_manager": LakeIOManager(lake=lake, spark=spark)}
    return dg.materialize([LINES, asset], resources=resources, selection=[asset], **options)


def reading(
    kind: Any, partitions_def: dg.PartitionsDefinition[str] | None = None
) -> tuple[dg.AssetsDefinition, list[Any]]:
    """Return an asset that takes the lines as `kind`, and the list of its arguments."""
    got: list[Any] = []

    def reader(lines: Any) -> None:
        got.append((type(lines), texts(lines)))

    reader.__annotations__["lines"] = kind
    ins = {"lines": dg.AssetIn(key=["told", "lines"])}
    return dg.asset(name="reader", ins=ins, partitions_def=partitions_def)(reader), got


@pytest.mark.parametrize("kind", [pa.Table, pl.DataFrame, pl.LazyFrame, DataFrame])
def test_a_downstream_asset_takes_all_windows_or_its_own_by_annotation(filled, spark, kind):
    all_of_them, got = reading(kind)
    materialise(all_of_them, filled, spark)
    its_own, got_one = reading(kind, HOURLY)
    materialise(its_own, filled, spark, partition_key=NEXT)
    (told, rows), ((_, partition),) = got[0], got_one
    assert issubclass(told, kind)
    assert rows == [("one", WINDOW), ("three words here", WINDOW), ("two", NEXT)]
    assert partition == [("two", NEXT)]


@pytest.mark.parametrize("kind", [pl.LazyFrame, DataFrame])
def test_a_window_without_rows_is_an_empty_table_of_the_same_columns(filled, spark, kind):
    asset, got = reading(kind, HOURLY)
    materialise(asset, filled, spark, partition_key="2025-03-02T0000")
    assert got[0][1] == []


def returning(frame: Any, partitions_def: dg.PartitionsDefinition[str] | None = None) -> dg.AssetsDefinition:
    policy = dg.BackfillPolicy.single_run() if partitions_def else None

    @dg.asset(name="writer", partitions_def=partitions_def, backfill_policy=policy)
    def writer() -> Any:
        return frame

    return writer


def stored(location: Location) -> list[dict[str, Any]]:
    return pl.read_delta(str(location.root / "lake" / "writer")).sort("n").to_dicts()


@pytest.mark.parametrize(
    "frame", [pa.table({"n": [1, 2]}), pl.DataFrame({"n": [1, 2]}), pl.LazyFrame({"n": [1, 2]})], ids=type
)
def test_a_returned_table_replaces_the_table_of_an_asset(location, spark, frame):
    materialise(returning(pa.table({"n": [0], "old": [True]})), location, spark)
    result = materialise(returning(frame), location, spark)
    assert stored(location) == [{"n": 1}, {"n": 2}]
    (event,) = result.asset_materializations_for_node("writer")
    assert event.metadata["dagster/row_count"].value == 2


def test_a_returned_table_of_a_partitioned_asset_replaces_its_partition_only(location, spark):
    for window, n in ((WINDOW, 1), (NEXT, 2), (WINDOW, 3)):
        materialise(returning(pa.table({"n": [n]}), HOURLY), location, spark, partition_key=window)
    assert stored(location) == [{"n": 2, "window": NEXT}, {"n": 3, "window": WINDOW}]


def test_a_run_over_several_partitions_must_say_which_row_is_whose(location, spark):
    tags = {"dagster/asset_partition_range_start": WINDOW, "dagster/asset_partition_range_end": NEXT}
    both = pa.table({"n": [1, 2], "window": [WINDOW, NEXT]})
    materialise(returning(both, HOURLY), location, spark, tags=tags)
    assert [row["window"] for row in stored(location)] == [WINDOW, NEXT]
    with pytest.raises(ValueError, match="a run over 2 partitions returned a frame without the column 'window'"):
        materialise(returning(pa.table({"n": [1]}), HOURLY), location, spark, tags=tags)


def test_a_window_that_is_not_a_partition_of_the_run_is_refused(location, spark):
    other = pa.table({"n": [1], "window": [NEXT]})
    with pytest.raises(ValueError, match=f"contains '{NEXT}', which is not a partition of the run"):
        materialise(returning(other, HOURLY), location, spark, partition_key=WINDOW)


def test_first_runs_at_the_same_time_keep_the_rows_of_each_other(tmp_path):
    manager: Any = SimpleNamespace(lake=Lake(root=str(tmp_path)))
    windows = [f"2026-01-0{day}T0000" for day in range(1, 7)]
    start = threading.Barrier(len(windows))

    def write(window: str) -> None:
        context = dg.build_output_context(
            asset_key=dg.AssetKey("writer"), partition_key=window, asset_partitions_def=HOURLY
        )
        start.wait()
        LakeIOManager.handle_output(manager, context, pa.table({"n": [windows.index(window)]}))

    with ThreadPoolExecutor(len(windows)) as runs:
        list(runs.map(write, windows))
    assert sorted(pl.read_delta(str(tmp_path / "writer"))["window"]) == windows


def test_an_asset_that_returns_something_else_is_told_what_the_lake_keeps(location, spark):
    with pytest.raises(TypeError, match=r"must return a pyarrow.Table, a Polars frame or a Spark DataFrame, got dict"):
        materialise(returning({"n": 1}), location, spark)


# On an object store


def test_a_lake_on_s3_goes_all_the_way(tmp_path, warm_spark, s3):
    queue = TableQueue(name="queue", url=f"sqlite:///{tmp_path}/queue.sqlite")
    queue.create()
    lake = Lake(root="s3://lake/here", storage_options=s3)
    control = ControlStore(f"sqlite:///{tmp_path}/control.sqlite")
    there = LakeResource(root="s3://lake/here", storage_options=s3)
    with closing(warm_spark.resource()) as spark:
        flow = Flow(BoundProducer(Told), queue, lake, control, lambda: spark.spark_session)
        for payloads in ([b"one", b"fail", b"letter a"], [b"two"]):
            queue.enqueue(payloads)
            receive = run(flow, windows=[WINDOW])
            assert queue.held() == [], "all is acknowledged"
        for kind in (pa.Table, pl.DataFrame, pl.LazyFrame):
            asset, got = reading(kind, HOURLY)
            materialise_in(there, asset, spark, partition_key=WINDOW)
            assert got == [(kind, [("one", WINDOW), ("two", WINDOW)])]
            materialise_in(there, returning(pl.DataFrame({"n": [1]}), HOURLY), spark, partition_key=WINDOW)

    lines = pl.read_delta("s3://lake/here/told/lines", storage_options=lake.options)
    assert sorted(lines["text"]) == ["one", "two"]
    assert pl.read_delta("s3://lake/here/told/letters", storage_options=lake.options).height == 1
    assert flow.ledger.unfinished() == []
    assert queue.backlog().messages == 0
    again = intake_of(flow, receive.model_copy(update={"origin": "failed"})).source
    assert again.backlog().messages == 1
    (failed,) = pl.read_delta("s3://lake/here/told/failed", storage_options=lake.options)["message_id"]
    assert [delivery.rows for delivery in deliveries_of(flow, failed)] == [[]]
