"""Uses of Dagster's private API to delete what its public API leaves, as of Dagster 1.13.27.

`DagsterInstance.delete_run` deletes a run and its events. In SQLite it leaves the run's file, without events; in every
database it leaves the run's evaluations of checks. It cannot delete some of a run's events. If a version of Dagster
lacks one of the names, nothing is deleted here.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import dagster as dg
import sqlalchemy as sa


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
