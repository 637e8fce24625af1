"""Names of the previous release in a deployment: options, the retry job, rows of early acknowledgements."""

from types import SimpleNamespace

import dagster as dg
import pytest

from pipeline_platform import PipelineError
from pipeline_platform.model.actions import EARLY, EARLY_ACTIONS
from pipeline_platform.orchestration.deployment import platform_definitions
from pipeline_platform.orchestration.jobs import RunTags
from tests.fixtures.built import build
from tests.fixtures.jobs_under_test import resources_at
from tests.fixtures.pipelines_under_test import Told


def test_options_of_a_pipeline_have_their_former_names():
    with pytest.warns(DeprecationWarning, match="fail_run_on is deprecated"):
        built = build(fail_run_on="any", redrive="0 3 * * *")
    assert (built.max_failed_share, built.retry_schedule) == (0.0, "0 3 * * *")


def test_a_former_option_with_an_invalid_value_is_rejected_by_its_new_name():
    deprecated = pytest.warns(DeprecationWarning, match="fail_run_on is deprecated")
    with deprecated, pytest.raises(PipelineError, match="max_failed_share: must be"):
        build(fail_run_on="always")


def test_both_names_of_an_option_are_rejected():
    with pytest.raises(PipelineError, match="both redrive and retry_schedule"):
        build(redrive="0 3 * * *", retry_schedule="0 3 * * *")


def test_the_retry_job_has_its_former_name_with_the_same_assets_and_tags():
    location = platform_definitions([Told], resources_at("nowhere", "nowhere")).get_repository_def()
    job, former = location.get_job("told_retry"), location.get_job("told_backfill")
    assert job.tags == former.tags
    assert job.tags[RunTags.of(Told).origin] == "failed"
    assert job.asset_layer.selected_asset_keys == former.asset_layer.selected_asset_keys
    assert "Deprecated" in (former.description or "")
    assert isinstance(former.executor_def, dg.ExecutorDefinition)


def test_early_acknowledgements_of_earlier_releases_are_recognised():
    assert {EARLY, "told early"} == EARLY_ACTIONS


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("pipeline_platform", "Held", "LeasedIds"),
        ("pipeline_platform.source.contract", "Held", "LeasedIds"),
        ("pipeline_platform.model.actions", "Word", "AckAction"),
        ("pipeline_platform.model.actions", "Words", "AckActions"),
    ],
)
def test_names_for_connectors_have_their_former_names(module, old, new):
    namespace = SimpleNamespace()
    with pytest.warns(DeprecationWarning, match=f"Use {module}.{new}"):
        exec(f"from {module} import {old}, {new}", vars(namespace))
    assert getattr(namespace, old) is getattr(namespace, new)
