"""Maintenance of tables: retention, compaction and vacuum."""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import chain

from pipeline_platform.lake.decisions.ledger import Ledger
from pipeline_platform.lake.failures.failure_events import open_failures
from pipeline_platform.lake.log_length import limit_log
from pipeline_platform.lake.maintenance.compaction import compact, drop_bounds, mergeable
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.table_properties import KEEP_LOG
from pipeline_platform.lake.tables import CommitConflictError, Table, Tables
from pipeline_platform.model.bound_producer import BoundProducer
from pipeline_platform.model.options import Retention
from pipeline_platform.model.windows import window_key

_LOG = logging.getLogger(__name__)

SAFE_AGE = timedelta(days=7)
"""Least age of unreferenced files that are removed; more if a receive in progress is older.

A task may have written such a file for a future commit, or a run or query may still read it after compaction. Files of
a receive are never older than the receive, so the age of the oldest unfinished receive counts, even after a long pause.
For readers, a week is the default of Delta tables.
"""

CROWDED = 500
"""Number of files to compact from which readers slow down, so that compaction should not wait for the night."""


class MaintenanceError(Exception):
    """Some tables could not be maintained completely. The message contains each table and the reason."""


def maintain(
    tables: Tables,
    retention: Retention,
    now: datetime | None = None,
    log: Callable[[str], None] = _LOG.warning,
) -> dict[str, dict[str, int]]:
    """Drop old windows, compact and vacuum every table of a pipeline. Safe during runs, and safe to repeat.

    Tables of removed batchers are maintained, too.

    A window is old once the next window with data started before the time to keep. Three kinds of windows are kept:
    those with open failures in `failed`, those of receives in progress, and those of `outcomes` needed for
    `deduplicate_for` or for a replay of kept messages. An unreadable record of a receive may belong to any window:
    while there is one, nothing is dropped or vacuumed, and `log` is called with the reason.

    Returns:
        For each existing table: number of files `compacted` into larger ones, of `dropped` windows, and of `vacuumed`
        unreferenced files.

    Raises:
        MaintenanceError: Some tables or windows could not be maintained; all others were.
    """
    now = now or datetime.now(UTC)
    under_way, unreadable = Ledger(tables.lake, tables.pipeline.name).under_way()
    for error in unreadable:
        log(f"Skipped retention and vacuum: {error}")
    age = max([SAFE_AGE, *(now - receive.started_at for receive in under_way)])
    busy = {window for receive in under_way for window in receive.windows}
    needed = {"outcomes": min((receive.base for receive in under_way), default=None)}
    # Its decision, or a retry beside it, reads the commits since its base.
    is_late = any(now - receive.started_at > KEEP_LOG / 2 for receive in under_way)
    deduplicate_for = max(producer.options.deduplicate_for for producer in BoundProducer.all_of(tables.pipeline))
    # A replay reads decided messages from `outcomes`, for as long as messages are kept.
    outcomes = None if retention.messages is None else max(retention.messages, deduplicate_for)
    keep_for = {"messages": retention.messages, "failed": retention.failed, "outcomes": outcomes}
    report, errors = {}, list[Exception]()
    for name in (*tables.names, *removed_batchers(tables)):
        table = tables[name]
        try:
            if table.exists():
                time, dropped, vacuumed = keep_for.get(table.name, retention.batchers), 0, 0
                if time is not None and not unreadable:
                    # Duplicates are looked up by the time of the decision, which may be long after the window.
                    wanted_since = now - deduplicate_for if table.name == "outcomes" else None
                    dropped = _drop_windows(table, now - time, busy, wanted_since)
                compacted = compact(table, errors)
                drop_bounds(table)
                with table.look() as handle:
                    table.shorten_log(handle, keeps_commits=table.name in needed and is_late)
                    limit_log(table, needed.get(table.name))
                    if not unreadable:
                        hours = math.ceil(age / timedelta(hours=1))
                        # Full, because files of crashed tasks are not in any log.
                        vacuumed = len(handle.vacuum(retention_hours=hours, dry_run=False, full=True))
                report[table.name] = {"compacted": compacted, "dropped": dropped, "vacuumed": vacuumed}
        except Exception as error:  # an error of one table must not prevent maintenance of the others
            error.add_note(f"table: {table.pipeline}/{table.name}")
            errors.append(error)
    if errors:
        raise MaintenanceError("; ".join(_in_words(error) for error in errors)) from errors[0]
    return report


def _in_words(error: Exception) -> str:
    return ", ".join([str(error), *getattr(error, "__notes__", [])])


def _drop_windows(table: Table, before: datetime, busy: Collection[str], wanted_since: datetime | None) -> int:
    while True:
        # After a conflict, one of the windows may have a new failure.
        with table.look() as handle, suppress(CommitConflictError):
            files = table.files(handle)
            wanted = {file.window for file in files if wanted_since and file.committed_at >= wanted_since}
            old = set(over_before(before, (file.window for file in files))) - wanted - set(busy)
            if table.name == "failed":
                old = {window for window in old if not _has_open(table, files, window)}
            if removed := [file for file in files if file.window in old]:
                table.swap(handle, "retention", [], removed=removed)
            return len(old)


def over_before(time: datetime, windows: Iterable[str]) -> list[str]:
    """Return the windows that had ended at a time: those before the window that contains it."""
    key = window_key(time)
    return sorted({window for window in windows if window <= key})[:-1]


def _has_open(table: Table, files: Iterable[File], window: str) -> bool:
    paths = [table.path(file.path) for file in files if file.window == window]
    return len(open_failures(table.lake, paths)) > 0


def is_crowded(tables: Tables) -> bool:
    """Whether a table has at least `CROWDED` small files that compaction merges."""
    groups = (chain.from_iterable(mergeable(tables[name]).values()) for name in tables.names)
    return any(sum(map(len, of_table)) >= CROWDED for of_table in groups)
