"""Retention of runs: what maintenance deletes from Dagster's storage, and what windows keep."""

from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import Tables
from pipeline_platform.model.options import Retention
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration import WHEN_NEW
from pipeline_platform.orchestration.asset_windows import windows_of
from pipeline_platform.orchestration.graph import asset_keys
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.retention.maintenance_job import maintenance_job
from pipeline_platform.orchestration.retention.run_retention import Freed, delete_old_runs
from tests.fixtures.dagster import LAST, NEXT, WINDOW
from tests.fixtures.pipelines_under_test import Told
from tests.fixtures.small_lake import put


class Short(Told):
    """The same pipeline with few windows, which a tick of the automation evaluates quickly."""

    name = "told"
    first_window = datetime(2025, 3, 1, tzinfo=UTC)


DAYS = timedelta(days=14)
KEYS = asset_keys(Told)
WINDOWS = windows_of(Short)
VERSION = "dagster/data_version"
SOON = datetime(2025, 3, 1, 3, 5, tzinfo=UTC)
"""Time just after the last window."""
ROUNDS = RunTags.of(Told).rounds
FAILS, OBSERVES = "fails", "observes"
_CHECK = dg.AssetCheckSpec("open_failures", asset=KEYS["failed"])
_FAILED_ABOVE = dg.AutomationCondition.any_deps_match(dg.AutomationCondition.execution_failed())
_CONDITIONS = {
    "new": WHEN_NEW,
    "eager": dg.AutomationCondition.eager(),
    "failed_above": _FAILED_ABOVE,
    "missing_above": dg.AutomationCondition.any_deps_missing(),
}


@dg.multi_asset(
    outs={key.path[-1]: dg.AssetOut(key=key, is_required=False) for key in KEYS.values()},
    partitions_def=WINDOWS,
    check_specs=[_CHECK],
)
def tables(context: dg.AssetExecutionContext) -> Iterator[dg.AssetCheckResult]:
    """The assets of the pipeline: each gets a materialisation with the data version of a tag, or an observation."""
    version, window = context.run.tags["version"], context.partition_key
    for _ in range(int(context.run.tags.get(ROUNDS, 1))):
        for key in KEYS.values():
            if version == OBSERVES:
                context.log_event(dg.AssetObservation(key, partition=window))
            elif version != FAILS:
                context.log_event(dg.AssetMaterialization(key, partition=window, tags={VERSION: version}))
    yield dg.AssetCheckResult(passed=True, asset_key=_CHECK.asset_key, check_name=_CHECK.name)
    if version in (FAILS, OBSERVES):
        raise ValueError(version)


def downstream(name: str, condition: dg.AutomationCondition) -> dg.AssetsDefinition:
    @dg.asset(name=name, deps=[KEYS["lines"]], partitions_def=WINDOWS, automation_condition=condition)
    def made() -> None: ...

    return made


JOBS = ("told_pull", "told_retry", "told_replay", "told_maintenance", "told_limits", "nightly")
DEFINITIONS = dg.Definitions(
    [tables, *(downstream(*given) for given in _CONDITIONS.items())],
    jobs=[dg.define_asset_job(name, dg.AssetSelection.assets(tables)) for name in JOBS],
    executor=dg.in_process_executor,
)


class Storage:
    """An instance with runs of a pipeline."""

    def __init__(self, instance: dg.DagsterInstance, home: Path) -> None:
        self.instance, self.home = instance, home
        self.cursor: Any = None

    def run(self, version: str, window: str = WINDOW, job: str = "told_pull", **tags: str) -> str:
        """Execute a run; return its id."""
        job_def = DEFINITIONS.resolve_job_def(job)
        return job_def.execute_in_process(
            instance=self.instance, partition_key=window, tags={"version": version, **tags}, raise_on_error=False
        ).run_id

    def unfinished(self, job: str, status: dg.DagsterRunStatus, **given: Any) -> str:
        """Create a run without executing it; return its id."""
        job_def = DEFINITIONS.resolve_job_def(job)
        tags = {"version": "r0", "dagster/partition": WINDOW}
        return self.instance.create_run_for_job(job_def, status=status, tags=tags, **given).run_id

    def delete(self, after: timedelta = DAYS, by: dg.DagsterRun | None = None, **options: Any) -> Freed:
        """Delete runs, some time after the runs of the test."""
        by = by or dg.DagsterRun(job_name="told_maintenance")
        now = datetime.now(UTC) + after + timedelta(minutes=1)
        return delete_old_runs(self.instance, Told, DAYS, by, now, **options)

    def left(self) -> set[str]:
        """Return the ids of all runs."""
        return set(self.instance.get_run_ids())

    def state(self) -> Any:
        """Return what Dagster derives from events: windows, versions, attempts, a check, requested partitions."""
        storage, state = self.instance.event_log_storage, []
        for key in KEYS.values():
            newest = self.instance.get_latest_storage_id_by_partition(key, dg.DagsterEventType.ASSET_MATERIALIZATION)
            tags = [record.asset_materialization.tags for record in self._materialisations(key, newest.values())]
            attempts = storage.get_latest_asset_partition_materialization_attempts_without_materializations(key)
            state.append((self.instance.get_materialized_partitions(key), newest, tags, attempts))
        check = storage.get_latest_asset_check_execution_by_key([_CHECK.key])[_CHECK.key]
        return state, (check.run_id, check.status), self.asks(cursor=None)

    def _materialisations(self, key: dg.AssetKey, ids: Collection[int]) -> Sequence[dg.EventLogRecord]:
        filters = dg.AssetRecordsFilter(key, storage_ids=list(ids))
        return self.instance.fetch_materializations(filters, limit=100).records

    def asks(self, cursor: Any) -> dict[str, set[str | None]]:
        """Return the partitions that a tick of the automation requests, by asset."""
        result = dg.evaluate_automation_conditions(DEFINITIONS, self.instance, evaluation_time=SOON, cursor=cursor)
        self.cursor = result.cursor
        return {name: set(result.get_requested_partitions(dg.AssetKey(name))) for name in _CONDITIONS}


def sqlite(_: pytest.FixtureRequest) -> str:
    return ""


def postgres(request: pytest.FixtureRequest) -> str:
    url = request.getfixturevalue("postgres_url").replace("://", "+psycopg2://")
    return f"storage: {{postgres: {{postgres_url: '{url}'}}}}"


@pytest.fixture
def storage(request: pytest.FixtureRequest, tmp_path: Path, instance: dg.DagsterInstance) -> Iterator[Storage]:
    """An instance without runs, on a database of its own if the test names one."""
    if not hasattr(request, "param"):
        for run_id in instance.get_run_ids():
            instance.delete_run(run_id)
        yield Storage(instance, tmp_path)
        return
    (tmp_path / "dagster.yaml").write_text(f"telemetry: {{enabled: false}}\n{request.param(request)}")
    with dg.DagsterInstance.from_config(str(tmp_path)) as own:
        yield Storage(own, tmp_path)


on_each_database = pytest.mark.parametrize("storage", [sqlite, postgres], indirect=True, ids=["sqlite", "postgres"])
"""For rules whose SQL depends on the database."""


@on_each_database
def test_windows_keep_their_state_and_data_version_after_their_older_runs_are_deleted(storage):
    old = [storage.run("r1"), storage.run("r1"), storage.run("r2", NEXT), storage.run(OBSERVES, LAST)]
    newest = {storage.run("r3"), storage.run("r2", NEXT), storage.run(FAILS, NEXT), storage.run("observed-1", LAST)}
    newest.add(old.pop())  # the newest observation of its window
    state, again = storage.state(), storage.asks(storage.cursor)
    assert [len(windows) for windows, *_ in state[0]] == [3] * len(KEYS)
    assert state[2]["missing_above"].isdisjoint({WINDOW, NEXT, LAST})
    assert state[2]["failed_above"] == {NEXT}

    assert storage.delete(after=4 * DAYS).runs == len(old)

    assert storage.left() == newest
    assert storage.asks(storage.cursor) == again
    assert storage.state() == state
    assert storage.delete(after=4 * DAYS).runs == 0


@on_each_database
def test_a_run_is_deleted_with_its_events_logs_and_files(storage):
    old, newest = storage.run("r1"), storage.run("r2")
    assert any(old in path.name for path in storage.home.rglob("*"))

    freed = storage.delete()

    assert freed.runs == 1
    assert freed.bytes > 0
    assert [path for path in storage.home.rglob("*") if old in path.name] == []
    assert any(newest in path.name for path in storage.home.rglob("*"))
    assert storage.instance.get_run_by_id(old) is None
    assert storage.instance.all_logs(newest)
    history = storage.instance.event_log_storage.get_asset_check_execution_history(_CHECK.key, limit=10)
    assert {evaluation.run_id for evaluation in history} == {newest}


@on_each_database
def test_a_continuous_run_that_stays_loses_all_reports_but_the_last(storage):
    once, continuous = storage.run("r1", NEXT), storage.run("r2", **{ROUNDS: "3"})
    state, again = storage.state(), storage.asks(storage.cursor)

    def reports(run_id: str) -> int:
        kind = dg.DagsterEventType.ASSET_MATERIALIZATION
        events = storage.instance.all_logs(run_id, of_type=kind)
        records = storage.instance.fetch_materializations(KEYS["lines"], limit=10).records
        copies = [record for record in records if record.run_id == run_id]
        assert len(events) == len(KEYS) * len(copies)
        return len(copies)

    assert (reports(once), reports(continuous)) == (1, 3)
    others = len(storage.instance.all_logs(continuous)) - 3 * len(KEYS)

    for _ in range(2):
        assert storage.delete().runs == 0
        assert (reports(once), reports(continuous)) == (1, 1)
        assert len(storage.instance.all_logs(continuous)) == others + len(KEYS)
        assert storage.asks(storage.cursor) == again
        assert storage.state() == state


def test_only_old_runs_are_deleted_and_failed_ones_four_times_as_late(storage):
    first, failed, newest = storage.run("r1"), storage.run(FAILS), storage.run("r2")

    assert storage.delete(after=DAYS - timedelta(hours=1)).runs == 0
    assert storage.delete(after=4 * DAYS - timedelta(hours=1)).runs == 1
    assert storage.left() == {failed, newest}
    assert storage.delete(after=4 * DAYS).runs == 1
    assert storage.left() == {newest} != {first}


def test_runs_of_other_jobs_and_unfinished_runs_are_kept(storage):
    other = {storage.run("r1", job="nightly"), storage.run("r1", job="told_limits")}
    parent, own = storage.run("r1"), [storage.run("r1", job=name) for name in JOBS[:4]]
    waiting = storage.unfinished("told_pull", dg.DagsterRunStatus.NOT_STARTED, parent_run_id=parent, root_run_id=parent)
    newest = storage.run("r2")

    assert storage.delete().runs == len(own)

    assert storage.left() == {*other, parent, waiting, newest}


def test_runs_of_a_job_with_the_same_name_in_another_code_location_are_kept(storage):
    def origin(location: str) -> RemoteJobOrigin:
        return RemoteJobOrigin(
            RemoteRepositoryOrigin(RegisteredCodeLocationOrigin(location), "__repository__"), "told_maintenance"
        )

    ended = dg.DagsterRunStatus.SUCCESS
    theirs, ours = (
        storage.unfinished("told_maintenance", ended, remote_job_origin=origin(name)) for name in ("theirs", "ours")
    )
    storage.run("r1")
    by = dg.DagsterRun(job_name="told_maintenance", remote_job_origin=origin("ours"))

    assert storage.delete(by=by).runs == 1

    assert theirs in storage.left()
    assert ours not in storage.left()


def test_the_oldest_runs_are_deleted_first_and_a_later_maintenance_continues(storage):
    runs = [storage.run("r1") for _ in range(3)]

    freed = storage.delete(longest=timedelta(0))
    assert (freed.runs, freed.is_all) == (1, False)
    assert storage.left() == set(runs[1:])
    freed = storage.delete()
    assert (freed.runs, freed.is_all) == (1, True)
    assert storage.left() == {runs[2]}


def test_a_crash_between_two_deletions_leaves_the_windows_as_they_were(storage, monkeypatch):
    runs = [storage.run("r1") for _ in range(4)]
    state, delete_events = storage.state(), storage.instance.event_log_storage.delete_events

    def crash(run_id: str) -> None:
        if run_id == runs[1]:
            raise KeyboardInterrupt
        delete_events(run_id)

    monkeypatch.setattr(storage.instance.event_log_storage, "delete_events", crash)
    with pytest.raises(KeyboardInterrupt):
        storage.delete()
    assert storage.left() == set(runs[2:])
    assert storage.state() == state

    monkeypatch.undo()
    assert storage.delete().runs == 1
    assert (storage.left(), storage.state()) == ({runs[3]}, state)


class Brief(Told):
    """The same pipeline, with a retention that ends at once."""

    name = "told"
    retention = Retention(runs=timedelta(microseconds=1))


class Endless(Told):
    """The same pipeline, which keeps its runs."""

    name = "told"
    retention = Retention(runs=None)


def maintained(pipeline: type[Pipeline], storage: Storage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the maintenance job; return what it reports about tables and runs."""
    lake = Lake(root=str(storage.home / "lake"))
    result = maintenance_job(pipeline).execute_in_process(instance=storage.instance, resources={"lake": lake})
    events = result.filter_events(lambda event: event.is_successful_output)
    steps = {event.step_key: event.step_output_data.metadata for event in events}
    return tuple({name: value.value for name, value in steps[step].items()} for step in ("maintain", "delete_runs"))


def test_the_maintenance_job_reports_files_that_it_compacts_and_runs_that_it_deletes_if_it_is_the_only_one(
    storage, monkeypatch
):
    tables = Tables(Lake(root=str(storage.home / "lake")), Brief)
    tables.ensure()
    for text in ("one", "two"):
        put(tables["lines"], text, {"text": text})
    storage.run("r1")
    newest = storage.run("r1")
    other = storage.unfinished("told_maintenance", dg.DagsterRunStatus.STARTED)
    compacted, deleted = maintained(Brief, storage)
    assert (compacted["lines"]["compacted"], deleted) == (2, {})
    assert len(tables["lines"].files(tables["lines"].open())) == 1
    storage.instance.delete_run(other)
    assert maintained(Endless, storage)[1] == {}
    with monkeypatch.context() as dagster_plus:
        dagster_plus.setenv("DAGSTER_CLOUD_DEPLOYMENT_NAME", "prod")
        assert maintained(Brief, storage)[1] == {}

    _, report = maintained(Brief, storage)

    assert report["runs deleted"] == 4, "a pull, and the maintenances before"
    assert report["bytes freed"] > 0
    assert newest in storage.left()
