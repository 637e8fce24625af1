"""The first window of a pipeline without `first_window`: stored in the control store, equal for all processes."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pipeline_platform.control.store import ControlStore
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.windows import window_key
from pipeline_platform.orchestration.asset_windows import NoWindowError, window_now
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.graph import pipeline_assets
from pipeline_platform.orchestration.resources.lake_resources import ControlResource, LakeResource
from pipeline_platform.orchestration.resources.source_resources import source_resource
from pipeline_platform.orchestration.resources.spark_resource import SparkResource
from tests.fixtures.small_lake import Keeping, Memory, Run

NEXT_YEAR = "2030-05-01T0700"


BEGIN = datetime(2026, 3, 1, 5, tzinfo=UTC)


class Open(Keeping):
    first_window = None


class Said(Keeping):
    first_window = BEGIN


def resources_at(root: Path) -> dict[str, Any]:
    (source,) = {producer.source for producer in BoundProducer.all_of(Keeping)}
    return {
        "lake": LakeResource(root=f"{root}/lake"),
        "control": ControlResource(url=f"sqlite:///{root}/control.sqlite"),
        "spark": SparkResource(),
        source: source_resource(Memory)(name="memory"),
    }


def first_of(pipeline: type[Keeping], root: Path, **given: Any) -> str:
    """Return the first partition of a pipeline's assets, as a process builds them when it loads the definitions."""
    definitions = platform_definitions([pipeline], resources_at(root), **given)
    partitions = {each.partitions_def for each in definitions.resolve_all_asset_specs() if each.partitions_def}
    (windows,) = partitions | {definitions.resolve_job_def(f"{pipeline.name}_pull").partitions_def}
    assert windows is not None
    return windows.get_partition_keys(current_time=datetime(2031, 1, 1, tzinfo=UTC))[0]


class Monthly(Keeping):
    window_cron = "@monthly"
    first_window = datetime(2026, 3, 23, tzinfo=UTC)


def test_a_first_window_within_a_window_is_the_start_of_that_window():
    assert window_now(Monthly, datetime(2026, 3, 28, tzinfo=UTC)) == "2026-03-01T0000"
    assert window_now(Monthly, datetime(2026, 4, 1, tzinfo=UTC)) == "2026-04-01T0000"
    with pytest.raises(NoWindowError):
        window_now(Monthly, datetime(2026, 2, 28, 23, tzinfo=UTC))


def test_a_stored_first_window_is_rounded_down_if_windows_become_longer(tmp_path, monkeypatch):
    ControlStore(f"sqlite:///{tmp_path}/control.sqlite").first_window(Open.name, lambda: NEXT_YEAR)
    monkeypatch.setattr(Open, "window_cron", "@daily")
    assert first_of(Open, tmp_path) == "2030-05-01T0000"


def hour_of(moment: datetime) -> str:
    return window_key(moment.replace(minute=0, second=0, microsecond=0))


def test_windows_begin_with_the_hour_in_which_the_definitions_are_first_loaded(tmp_path):
    before = datetime.now(UTC)
    first = first_of(Open, tmp_path)

    assert first in {hour_of(before), hour_of(datetime.now(UTC))}


def test_whoever_loads_later_makes_the_same_partitions(tmp_path):
    ControlStore(f"sqlite:///{tmp_path}/control.sqlite").first_window(Keeping.name, lambda: NEXT_YEAR)

    assert first_of(Open, tmp_path) == NEXT_YEAR, "no matter what hour it is"


def test_of_two_that_load_first_at_once_one_says_it(tmp_path):
    first, other = (ControlStore(f"sqlite:///{tmp_path}/control.sqlite") for _ in range(2))

    def while_the_other_asks() -> str:
        assert other.first_window("orders", lambda: NEXT_YEAR) == NEXT_YEAR
        return "2031-01-01T0000"

    assert first.first_window("orders", while_the_other_asks) == NEXT_YEAR


def test_windows_begin_with_the_oldest_data_where_the_store_is_new(tmp_path):
    Run(Tables(Lake(root=f"{tmp_path}/lake"), Open), Memory(deliveries_=(("a", b"a"),)), "r1").finish()

    assert first_of(Open, tmp_path) == "2026-01-01T0000"


def test_assets_that_are_made_before_have_the_same_windows(tmp_path):
    ControlStore(f"sqlite:///{tmp_path}/control.sqlite").first_window(Keeping.name, lambda: NEXT_YEAR)

    assert first_of(Open, tmp_path, assets=[pipeline_assets(Open)]) == NEXT_YEAR


def test_what_the_class_says_holds(tmp_path):
    ControlStore(f"sqlite:///{tmp_path}/control.sqlite").first_window(Keeping.name, lambda: NEXT_YEAR)

    assert first_of(Said, tmp_path) == window_key(BEGIN)


def test_while_the_store_is_away_no_window_is_missing_and_a_warning_says_why(tmp_path):
    (tmp_path / "control.sqlite").write_text("no database, but long enough to be read as the header of one" * 4)

    with pytest.warns(UserWarning, match="keeping: .*windows start at 2026-01-01 until .*control.sqlite is damaged"):
        assert first_of(Open, tmp_path) == "2026-01-01T0000"


def test_a_variable_that_is_not_set_keeps_nobody_from_loading(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    resources = {**resources_at(tmp_path), "control": ControlResource(url=dg.EnvVar("NOT_SET"))}

    with pytest.warns(UserWarning, match="keeping: .*windows start at 2026-01-01"):
        platform_definitions([Open], resources)
