"""Retention of runs: deletes old Dagster runs of a pipeline's own jobs, with their events, logs and files.

`DagsterInstance.delete_run` deletes a run and its events. In SQLite it leaves the run's file, without events; in every
database it leaves the run's evaluations of checks. It cannot delete some of a run's events. The last functions use
Dagster's private API for this, as of Dagster 1.13.27. If a version lacks one of the names, nothing is deleted there.
"""

import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import sqlalchemy as sa

from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.orchestration.graph import asset_keys
from pipeline_platform.orchestration.jobs import RunTags
from pipeline_platform.orchestration.sensors.runs_under_way import UNDER_WAY

LONGEST = timedelta(hours=1)
"""Time that one maintenance deletes runs, about 0.1 s each: more than the runs of a day with one every five seconds."""
FAILED_FACTOR = 4
"""Failed runs are kept longer by this factor: people look into their logs."""
_JOBS = ("maintenance", "retry", "replay", "pull")
_EVENTS = (
    dg.DagsterEventType.ASSET_MATERIALIZATION,
    dg.DagsterEventType.ASSET_OBSERVATION,
    dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED,
)
"""Events from which Dagster derives the state and the data version of a window: the newest of each type counts."""
_AT_ONCE = 500
"""Maximum number of records of a query."""
_MOST_SHORTENED = 1_000
"""Maximum number of runs to examine for reports to delete: more than the hours of a month."""


@dataclass
class Freed:
    """Deleted runs and freed bytes.

    Attributes:
        runs: Number of runs.
        bytes: Size of the files on this machine that were deleted with them.
        is_all: Whether no old runs are left.
    """

    runs: int = 0
    bytes: int = 0
    is_all: bool = True


def other_run_of_job(instance: dg.DagsterInstance, run: dg.DagsterRun) -> str | None:
    """Return the id of another run of the same job that is executing; None if there is none.

    A killed run may stay in this state forever, so a run counts for a day only.
    """
    since = datetime.now(UTC) - timedelta(days=1)
    started = dg.RunsFilter(job_name=run.job_name, statuses=[dg.DagsterRunStatus.STARTED], updated_after=since)
    return next((other for other in instance.get_run_ids(started) if other != run.run_id), None)


def delete_old_runs(
    instance: dg.DagsterInstance,
    pipeline: type[Pipeline],
    keep_for: timedelta,
    by: dg.DagsterRun,
    now: datetime | None = None,
    longest: timedelta = LONGEST,
) -> Freed:
    """Delete old runs of a pipeline's own jobs, the oldest of each job first.

    Kept are unfinished runs and the runs that they re-execute, and of each window and asset the run with the newest
    materialisation, with the newest observation and with the newest plan to materialise it. Thus windows stay
    materialised, with their data versions. Runs of other jobs with these assets are kept, because they may contain
    other assets as well. Of a continuous run that is kept, only the last report is kept.

    If the process crashes, the next maintenance continues. At most the events of one run remain without their run.

    Args:
        instance: The instance.
        pipeline: The pipeline.
        keep_for: Time since the last change of a run, after which it is deleted.
        by: Run that deletes. Runs of jobs with the same names in other code locations are kept.
        now: Present time.
        longest: Time after which it stops. It deletes one run in any case.
    """
    now, freed, end = now or datetime.now(UTC), Freed(), time.monotonic() + longest.total_seconds()
    origin = by.remote_job_origin
    tags = {".dagster/repository": origin.repository_origin.get_label()} if origin else {}
    kept = {*_newest(instance, pipeline), *_re_executed(instance, pipeline)}
    ended = {
        keep_for: [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.CANCELED],
        FAILED_FACTOR * keep_for: [dg.DagsterRunStatus.FAILURE],
    }
    for job in _JOBS:
        for age, statuses in ended.items():
            name, before = f"{pipeline.name}_{job}", now - age
            old = dg.RunsFilter(job_name=name, statuses=statuses, updated_before=before, tags=tags)
            for run_ids in _pages(instance, old, kept):
                delete_evaluations(instance, run_ids)
                for run_id in run_ids:
                    freed.bytes += _delete(instance, run_id)
                    freed.runs += 1
                    if time.monotonic() >= end:
                        freed.is_all = False
                        return freed
    _shorten(instance, pipeline, now - keep_for, kept)
    return freed


def _newest(instance: dg.DagsterInstance, pipeline: type[Pipeline]) -> Iterator[str]:
    """Yield the runs with the newest events of each window of each asset."""
    storage = instance.event_log_storage
    for asset in asset_keys(pipeline).values():
        for event in _EVENTS:
            newest = list(storage.get_latest_storage_id_by_partition(asset, event).values())
            for start in range(0, len(newest), _AT_ONCE):
                ids = newest[start : start + _AT_ONCE]
                for record in storage.get_event_records(dg.EventRecordsFilter(event, asset, storage_ids=ids)):
                    yield record.run_id


def _re_executed(instance: dg.DagsterInstance, pipeline: type[Pipeline]) -> Iterator[str]:
    """Yield the runs that unfinished runs re-execute: a re-execution reads the tags of the run before it."""
    for job in _JOBS:
        for run in instance.get_runs(dg.RunsFilter(job_name=f"{pipeline.name}_{job}", statuses=UNDER_WAY)):
            if run.parent_run_id:
                yield run.parent_run_id


def _pages(instance: dg.DagsterInstance, old: dg.RunsFilter, kept: Collection[str]) -> Iterator[list[str]]:
    """Yield old runs without those to keep, oldest first. The caller deletes a page before it asks for the next."""
    cursor = None
    while records := instance.get_run_records(old, limit=_AT_ONCE, ascending=True, cursor=cursor):
        run_ids = [record.dagster_run.run_id for record in records]
        yield [run_id for run_id in run_ids if run_id not in kept]
        # The next page starts after the last kept run, because Dagster cannot find the place of a deleted run.
        cursor = next((run_id for run_id in reversed(run_ids) if run_id in kept), cursor)


def _shorten(instance: dg.DagsterInstance, pipeline: type[Pipeline], before: datetime, kept: Collection[str]) -> None:
    """Delete all but the last report of the continuous runs that stay and have become old in the last month."""
    recent = dg.RunsFilter(
        job_name=f"{pipeline.name}_pull", updated_before=before, updated_after=before - timedelta(days=30)
    )
    for run in instance.get_runs(recent, limit=_MOST_SHORTENED):
        if run.run_id in kept and run.is_finished and RunTags.of(pipeline).rounds in run.tags:
            delete_replaced_reports(instance, run.run_id)


def _delete(instance: dg.DagsterInstance, run_id: str) -> int:
    """Delete a run with its events, logs and files; return the size of the files."""
    events, folder = event_files(instance, run_id), Path(instance.storage_directory(), run_id)
    size = sum(path.stat().st_size for path in (*events, *folder.rglob("*")) if path.is_file())
    instance.compute_log_manager.delete_logs(prefix=[run_id])
    instance.delete_run(run_id)
    for path in events:
        path.unlink(missing_ok=True)
    return size


def event_files(instance: dg.DagsterInstance, run_id: str) -> list[Path]:
    """Return the files of a run's events in SQLite. Other storages have no file per run."""
    with suppress(ImportError, AttributeError):
        from dagster._core.storage.event_log import SqliteEventLogStorage

        if isinstance(storage := instance.event_log_storage, SqliteEventLogStorage):
            path = storage.path_for_shard(run_id)
            return [Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm")]
    return []


def delete_evaluations(instance: dg.DagsterInstance, run_ids: Sequence[str]) -> None:
    """Delete the evaluations of checks by some runs."""
    with suppress(ImportError, AttributeError):
        from dagster._core.storage.event_log import SqlEventLogStorage
        from dagster._core.storage.event_log.schema import AssetCheckExecutionsTable as Evaluations

        if isinstance(storage := instance.event_log_storage, SqlEventLogStorage):
            with storage.index_connection() as connection:
                connection.execute(sa.delete(Evaluations).where(Evaluations.c.run_id.in_(run_ids)))


def delete_replaced_reports(instance: dg.DagsterInstance, run_id: str) -> None:
    """Delete the materialisations, observations and evaluations of a run that were replaced by its last report.

    A continuous run reports each minute. Of each asset and window its newest materialisation and observation stay.
    """
    with suppress(ImportError, AttributeError):
        from dagster._core.storage.event_log import SqlEventLogStorage
        from dagster._core.storage.event_log.schema import AssetEventTagsTable as Tags
        from dagster._core.storage.event_log.schema import SqlEventLogStorageTable as Events

        if not isinstance(storage := instance.event_log_storage, SqlEventLogStorage):
            return
        kind, window = Events.c.dagster_event_type, Events.c.partition
        made, others = dg.DagsterEventType.ASSET_MATERIALIZATION, ("ASSET_OBSERVATION", "ASSET_CHECK_EVALUATION")
        reported = sa.and_(Events.c.run_id == run_id, kind.in_((made.value, *others)))
        newest = sa.select(sa.func.max(Events.c.id)).where(reported).group_by(kind, Events.c.asset_key, window)
        last = sa.select(sa.func.max(Events.c.id)).where(Events.c.run_id == run_id, kind == made.value)
        replaced = sa.and_(reported, Events.c.id.not_in(newest), Events.c.id < last.scalar_subquery())
        ids: Sequence[int] = ()
        # SQLite has the events in the run's file, and a copy for queries over all runs.
        for connect in (storage.run_connection(run_id), storage.index_connection()):
            with connect as connection:
                if ids := connection.execute(sa.select(Events.c.id).where(replaced)).scalars().all():
                    connection.execute(sa.delete(Tags).where(Tags.c.event_id.in_(ids)))
                    connection.execute(sa.delete(Events).where(Events.c.id.in_(ids)))
        for path in event_files(instance, run_id)[:1] if ids else ():
            with closing(sqlite3.connect(path)) as file:
                file.execute("VACUUM")
