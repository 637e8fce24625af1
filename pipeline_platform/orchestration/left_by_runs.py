"""Uses of Dagster's private API to delete what its public API leaves of a deleted run, as of Dagster 1.13.27.

`DagsterInstance.delete_run` deletes a run and its events. In SQLite it leaves the run's file, without events; in every
database it leaves the run's evaluations of checks. If another version of Dagster lacks a name, they stay.
"""

from collections.abc import Sequence
from contextlib import suppress
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
