"""Keeping tables small and quick: few files instead of many, no more windows than are wanted, nothing left behind."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from deltalake import WriterProperties

from pipeline_platform.lake.failed import open_failures
from pipeline_platform.lake.ledger import Ledger, ReceiveError
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import CommitConflictError, Stored, Table, Tables
from pipeline_platform.lake.writer import ROW_GROUP_ROWS
from pipeline_platform.model.options import Retention
from pipeline_platform.model.windows import window_key

_LOG = logging.getLogger(__name__)

SAFE_AGE = timedelta(days=7)
"""Files that no commit names are left alone for so long, and longer while a receive is under way.

Such a file may be somebody's still: written by a task for a commit to come, or compacted away under a run or a query
that is reading it. A receive's own files are never older than the receive, and `maintain` goes back to the oldest
one that is not finished, however long a pipeline was paused. For readers, a week is what Delta tables promise by
default. Storage pays for caution; nothing pays for a file that is gone.
"""

_TRIES = 5


class Kept(NamedTuple):
    """What was done for a table.

    Attributes:
        compacted: Small files that became part of larger ones.
        dropped: Windows that were older than they are kept.
        vacuumed: Files removed that no commit names.
    """

    compacted: int
    dropped: int
    vacuumed: int


def maintain(
    tables: Tables,
    retention: Retention,
    now: datetime | None = None,
    tell: Callable[[str], None] = _LOG.warning,
) -> dict[str, dict[str, int]]:
    """Drop old windows, compact and vacuum every table of a pipeline; safe beside live runs, and to be repeated.

    A window counts as old once the next one that has data began before the time to keep. Never dropped are windows
    with open failures from `failed`, windows of receives under way from any table, and from `outcomes` what
    `deduplicate_for` or a replay of the messages still kept goes by. While the record of a receive cannot be read,
    nobody knows what is its, and nothing is dropped or removed.

    Args:
        tables: The pipeline's.
        retention: How long to keep what.
        now: The time it is.
        tell: Told in words what cannot be read.

    Returns:
        The fields of `Kept` by table; tables that no receive has made yet are left out.
    """
    now = now or datetime.now(UTC)
    ledger = Ledger(tables.lake, tables.pipeline.name)
    under_way = []
    retain_all = False
    for receive_id in ledger.unfinished():
        try:
            if receive := ledger.get(receive_id):
                under_way.append(receive)
        except ReceiveError as error:
            tell(f"nothing is dropped or removed: {error}")
            retain_all = True
    untouchable = min([now - SAFE_AGE, *(receive.started_at for receive in under_way)])
    busy = {window for receive in under_way for window in receive.windows}
    report = {}
    for name in tables.names:
        table = tables[name]
        if table.exists():
            keep_for = _keep_for(tables, retention, name)
            # A message is looked up by when it was decided, which may be long after its window.
            wanted_since = now - tables.pipeline.producer.deduplicate_for if name == "outcomes" else None
            dropped = 0 if keep_for is None or retain_all else _drop_windows(table, now - keep_for, busy, wanted_since)
            compacted = _compact(table)
            table.shorten_log(table.open())
            vacuumed = 0 if retain_all else _vacuum(table, now - untouchable)
            report[name] = Kept(compacted, dropped, vacuumed)._asdict()
    if not retain_all:
        _remove_leftovers(tables.lake, ledger, untouchable)
    return report


def _keep_for(tables: Tables, retention: Retention, name: str) -> timedelta | None:
    if name == "outcomes":
        # A replay gives out what `outcomes` says was decided, for as long as there are messages to give out.
        deduplicate_for = tables.pipeline.producer.deduplicate_for
        return None if retention.messages is None else max(retention.messages, deduplicate_for)
    return {"messages": retention.messages, "failed": retention.failed}.get(name, retention.batchers)


def _drop_windows(table: Table, before: datetime, busy: Collection[str], wanted_since: datetime | None) -> int:
    while True:
        handle = table.open()
        files = table.files(handle)
        if wanted_since is not None:
            busy = {*busy, *(file.window for file in files if file.committed_at >= wanted_since)}
        old = {window for window in over_before(before, (file.window for file in files)) if window not in busy}
        if table.name == "failed":
            old = {window for window in old if not _has_open(table, files, window)}
        removed = [file for file in files if file.window in old]
        if not removed:
            return 0
        try:
            table.remove(handle, removed)
        except CommitConflictError:
            continue  # a failure may have come to one of the windows
        return len(old)


def over_before(time: datetime, windows: Iterable[str]) -> list[str]:
    """Which of these windows were over at a time: those before the one that it lies in."""
    key = window_key(time)
    begun = sorted({window for window in windows if window <= key})
    return begun[:-1]


def _has_open(table: Table, files: Iterable[Stored], window: str) -> bool:
    paths = [f"{table.pipeline}/{table.name}/{file.path}" for file in files if file.window == window]
    return bool(open_failures(table.lake, paths).num_rows)


def _compact(table: Table) -> int:
    """Put the small files of each window together; give up, until next time, where live commits keep getting in."""
    properties = WriterProperties(compression="ZSTD", max_row_group_size=ROW_GROUP_ROWS)
    for _ in range(_TRIES):
        try:
            return table.compact(table.open(), properties)
        except CommitConflictError:
            continue  # a replay replaced what was being compacted
    return 0


def _vacuum(table: Table, older_than: timedelta) -> int:
    hours = math.ceil(older_than / timedelta(hours=1))
    # Full: files of tasks that died are in no log at all.
    return len(table.open().vacuum(retention_hours=hours, dry_run=False, full=True))


def _remove_leftovers(lake: Lake, ledger: Ledger, before: datetime) -> None:
    """Remove what tasks wrote for a receive after it was given up: a folder without a record."""
    for receive_id in ledger.unfinished():
        if ledger.get(receive_id) is None:
            written = lake.last_written(ledger.folder(receive_id))
            if written is not None and written < before:
                ledger.remove(receive_id)
