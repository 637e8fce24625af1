"""Keeping tables small and quick: few files instead of many, no more windows than are wanted, nothing left behind."""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from pipeline_platform.lake.compaction import compact, drop_bounds, several
from pipeline_platform.lake.failure_events import open_failures
from pipeline_platform.lake.ledger import Ledger
from pipeline_platform.lake.manifest import File
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.tables import CommitConflictError, Table, Tables
from pipeline_platform.model.options import Retention
from pipeline_platform.model.windows import window_key

_LOG = logging.getLogger(__name__)

SAFE_AGE = timedelta(days=7)
"""Files that no commit names stay for so long, and longer while a receive is under way.

A task may have written such a file for a commit to come, or compaction may have taken it from a run or a query that is
reading it. A receive's own files are never older than the receive, and `maintain` goes back to the oldest one that is
not finished, however long a pipeline was paused. For readers, a week is what Delta tables promise by default.
"""

CROWDED = 500
"""So many files that could be fewer slow down all who open a table: it is not left like this until the night."""


class MaintenanceError(Exception):
    """Some tables could not be maintained in full. Names each, and why; the others were."""


def maintain(
    tables: Tables,
    retention: Retention,
    now: datetime | None = None,
    log: Callable[[str], None] = _LOG.warning,
) -> dict[str, dict[str, int]]:
    """Drop old windows, compact and vacuum every table of a pipeline; safe beside live runs, and to be repeated.

    The tables of batchers that the pipeline has no more are maintained like those of its batchers.

    A window counts as old once the next one that has data began before the time to keep. Never dropped are windows
    with open failures from `failed`, windows of receives under way from any table, and from `outcomes` what
    `deduplicate_for` or a replay of the messages still kept goes by. A record that cannot be read may be of any
    window: nothing is dropped or removed while there is one, and `log` gets in words why.

    Returns:
        By table that a receive has made: `compacted` files that became part of larger ones, `dropped` windows, and
        `vacuumed` files that no commit names.

    Raises:
        MaintenanceError: Some tables, or some windows of them, could not be maintained; all others were.
    """
    now = now or datetime.now(UTC)
    under_way, unreadable = Ledger(tables.lake, tables.pipeline.name).under_way()
    for error in unreadable:
        log(f"nothing is dropped or removed: {error}")
    age = max([SAFE_AGE, *(now - receive.started_at for receive in under_way)])
    busy = {window for receive in under_way for window in receive.windows}
    deduplicate_for = max(producer.deduplicate_for for producer in tables.pipeline.producers_of().values())
    # A replay gives out what `outcomes` says was decided, for as long as there are messages to give out.
    outcomes = None if retention.messages is None else max(retention.messages, deduplicate_for)
    keep_for = {"messages": retention.messages, "failed": retention.failed, "outcomes": outcomes}
    report, errors = {}, list[Exception]()
    for name in (*tables.names, *removed_batchers(tables)):
        table = tables[name]
        try:
            if table.exists():
                time, dropped, vacuumed = keep_for.get(table.name, retention.batchers), 0, 0
                if time is not None and not unreadable:
                    # A message is looked up by when it was decided, which may be long after its window.
                    wanted_since = now - deduplicate_for if table.name == "outcomes" else None
                    dropped = _drop_windows(table, now - time, busy, wanted_since)
                compacted = compact(table, errors)
                drop_bounds(table)
                with table.look() as handle:
                    table.shorten_log(handle)
                    if not unreadable:
                        hours = math.ceil(age / timedelta(hours=1))
                        # Full: files of tasks that died are in no log at all.
                        vacuumed = len(handle.vacuum(retention_hours=hours, dry_run=False, full=True))
                report[table.name] = {"compacted": compacted, "dropped": dropped, "vacuumed": vacuumed}
        except Exception as error:  # whatever is wrong with one table, the others are maintained
            error.add_note(f"while {table.pipeline}/{table.name} was maintained")
            errors.append(error)
    if errors:
        raise MaintenanceError("; ".join(_in_words(error) for error in errors)) from errors[0]
    return report


def _in_words(error: Exception) -> str:
    return ", ".join([str(error), *getattr(error, "__notes__", [])])


def _drop_windows(table: Table, before: datetime, busy: Collection[str], wanted_since: datetime | None) -> int:
    while True:
        # A conflict: a failure may have come to one of the windows.
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
    """Which of these windows were over at a time: those before the one that it lies in."""
    key = window_key(time)
    return sorted({window for window in windows if window <= key})[:-1]


def _has_open(table: Table, files: Iterable[File], window: str) -> bool:
    paths = [table.path(file.path) for file in files if file.window == window]
    return bool(open_failures(table.lake, paths).num_rows)


def is_crowded(tables: Tables) -> bool:
    """Whether a table has as many files as `CROWDED` beside others of their window."""
    return any(sum(several(table).values()) >= CROWDED for table in map(tables.__getitem__, tables.names))
