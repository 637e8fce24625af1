"""The data version of a window changes with its rows, and every window of a run is materialised."""

import dagster as dg

from pipeline_platform.orchestration.reports.data_versions import data_versions
from tests.fixtures.dagster import WINDOW, versions

SUCCESS, FAILURE = dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE


def test_an_empty_pull_and_a_message_for_another_batcher_change_no_version(location):
    location.enqueue("one")
    first = location.run("told_pull", WINDOW)
    empty = location.run("told_pull", WINDOW)
    location.enqueue("letter a")
    other = location.run("told_pull", WINDOW)

    lines, letters = versions(location, first), versions(location, first, "letters")
    assert lines[WINDOW] is not None
    assert versions(location, empty) == versions(location, other) == lines
    assert versions(location, empty, "letters") == letters
    assert versions(location, other, "letters")[WINDOW] not in (None, letters[WINDOW], lines[WINDOW])


def test_rows_that_a_red_run_published_are_new_at_the_next_materialisation(location):
    location.enqueue("one")
    before = versions(location, location.run("strict_pull", WINDOW), "lines", "strict")
    location.enqueue("two", "fail 1")
    red = location.run("strict_pull", WINDOW)
    assert (red.status, versions(location, red, "lines", "strict")) == (FAILURE, {})

    after = versions(location, location.run("strict_pull", WINDOW), "lines", "strict")

    assert after[WINDOW] not in (None, before[WINDOW])


class Without:
    """An instance without the private methods that look up several windows at once."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.fetch_materializations = instance.fetch_materializations
        self.fetch_observations = instance.fetch_observations


def test_versions_are_the_same_with_and_without_dagsters_private_methods(tmp_path):
    """Tried with Dagster 1.13.27."""
    asset = dg.AssetKey(["told", "lines"])
    names = ["reported", "twice", "untagged", "observed", "observed before", "only observed", "never"]
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:

        def report(kind: type, window: str, version: str = "") -> None:
            tags = {"dagster/data_version": version} if version else None
            instance.report_runless_asset_event(kind(asset, partition=window, tags=tags))

        for window, version in (("reported", "a"), ("twice", "b"), ("twice", "c"), ("untagged", ""), ("observed", "d")):
            report(dg.AssetMaterialization, window, version)
        for window in ("observed", "observed before", "only observed"):
            report(dg.AssetObservation, window)
        report(dg.AssetMaterialization, "observed before", "e")

        found = data_versions(instance, asset, names)

        assert found == data_versions(Without(instance), asset, names)
        assert {window: found[window] for window in ("reported", "twice", "observed before")} == {
            "reported": "a", "twice": "c", "observed before": "e"
        }  # fmt: skip
        assert {window for window in found if found[window].startswith("observed-")} == {"observed", "only observed"}
        assert len(found) == 5
        for window in names:
            assert data_versions(instance, asset, [window]).get(window) == found.get(window)
