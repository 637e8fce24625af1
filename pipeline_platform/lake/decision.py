"""The decision of a receive: one compare-and-swap on `outcomes`, after which what it wrote is what there is.

What others decided since this receive looked is theirs: those messages are dropped from everything it wrote, in the
few files that hold them, and the swap is tried again. So a message is decided once, however many runs hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import receive_ids
from pipeline_platform.lake.receives import Receive, Receives
from pipeline_platform.lake.storage import Lake
from pipeline_platform.lake.tables import DECIDED, FENCED, CommitConflictError, LogExpiredError, Stored, Table, Tables
from pipeline_platform.lake.writer import Writer

KEY = ("source", "message_id")
DROPPED = "dropped"
"""A step of a receive that found messages decided by others: how many."""


class FencedError(Exception):
    """The receive was given up for dead while its run stalled: it may not decide any more."""


class UnhandledError(Exception):
    """What is known of a receive is not what became of every message of it: nothing of it may be decided."""


class Decision(NamedTuple):
    """What deciding came to.

    Attributes:
        dropped: Messages that others had decided.
        tries: Swaps it took.
    """

    dropped: int
    tries: int


def decided(table: Table, handle: DeltaTable, receive: Receive) -> bool:
    """Whether a receive has decided, by its transaction, or by its rows where that is too old to be kept."""
    state = handle.transaction_version(receive.receive_id)
    if state is not None:
        return bool(state == DECIDED)
    return _holds(table, handle, receive)


def _holds(table: Table, handle: DeltaTable, receive: Receive) -> bool:
    """Whether the table has rows of a receive that is older than the transactions that the table keeps."""
    if not _older_than_transactions(handle, receive):
        return False
    return any(
        receive.receive_id in ids
        for _, ids in _receive_ids(table, [f.path for f in table.files(handle, receive.windows)])
    )


def _older_than_transactions(handle: DeltaTable, receive: Receive) -> bool:
    kept = handle.metadata().configuration.get("delta.setTransactionRetentionDuration", "interval 30 days")
    return datetime.now(UTC) - receive.started_at > timedelta(days=int(kept.split()[1]) - 1)


def decide(
    tables: Tables,
    receives: Receives,
    receive: Receive,
    still_ours: Callable[[], bool] = lambda: True,
    on_success: str = "ack",
) -> Decision:
    """Commit the outcomes of a receive, once; deciding again what is decided does nothing.

    Args:
        tables: The pipeline's.
        receives: Where its manifests are.
        receive: Which.
        still_ours: Asked right before each swap: whether the lease still holds.
        on_success: What the source is told of a message that another receive decided.

    Raises:
        FencedError: It was given up, or its lease is somebody else's.
        UnhandledError: Some message of it has no outcome, or more than one: a step was left out.
    """
    outcomes = tables["outcomes"]
    looked, dropped, tries = receive.base, 0, 0
    while True:
        handle = outcomes.open()
        state = handle.transaction_version(receive.receive_id)
        if state == DECIDED or (state is None and _holds(outcomes, handle, receive)):
            return Decision(dropped, tries)
        if state == FENCED or receives.get(receive.receive_id) is None:
            raise FencedError(
                f"receive {receive.receive_id} was given up while its run stalled: its messages are another run's now"
            )
        try:
            added = outcomes.added_since(handle, looked)
        except LogExpiredError as error:
            raise FencedError(f"receive {receive.receive_id} is too old to be decided: {error}") from error
        dropped += _drop_decided(tables, receives, receive, added, on_success)
        looked = handle.version()
        files = _outcome_files(receives.manifest(receive.receive_id), receive)
        removed, kept = replacement(outcomes, handle, receive)
        if not still_ours():
            raise FencedError(f"the lease of receive {receive.receive_id} is over and could not be renewed")
        tries += 1
        try:
            outcomes.swap(handle, receive.receive_id, [*files, *kept], removed=removed)
        except CommitConflictError:
            continue
        return Decision(dropped, tries)


def _outcome_files(manifest: Manifest, receive: Receive) -> list[File]:
    """The outcomes that a receive is about to decide: one for each message."""
    received, known = manifest.rows("messages"), manifest.rows("outcomes")
    if received != known:
        raise UnhandledError(
            f"receive {receive.receive_id} has {received} messages and the outcomes of {known}: some of its steps did "
            "not come to their end. Re-execute from `handle_messages` on, all steps after it included"
        )
    return manifest.of_table("outcomes")


def fence(tables: Tables, receive_id: str) -> bool:
    """Forbid a receive to decide; False where it has decided already."""
    outcomes = tables["outcomes"]
    while True:
        handle = outcomes.open()
        state = handle.transaction_version(receive_id)
        if state is not None:
            return bool(state == FENCED)
        try:
            outcomes.swap(handle, receive_id, [], state=FENCED)
        except CommitConflictError:
            continue
        return True


def publish(tables: Tables, receives: Receives, receive: Receive) -> dict[str, int]:
    """Commit what a decided receive wrote to each table, once for each; return the rows by table.

    May be called by several at once, and again after any of them died half-way.
    """
    manifest = receives.manifest(receive.receive_id)
    published = {}
    # Those it wrote to as well: a batcher may have been renamed since, and what is decided has a table still.
    for name in dict.fromkeys([*tables.names, *_published(manifest)]):
        if name != "outcomes":
            files = manifest.of_table(name)
            published[name] = sum(file.rows for file in files)
            if files or receive.replaces:
                _publish_once(tables.get(name), receive, files)
    return published


def _published(manifest: Manifest) -> list[str]:
    """The tables that files are meant for; what is only staged lies in a folder of the receive."""
    return [name for name in dict.fromkeys(file.table for file in manifest) if "/" not in name]


def _publish_once(table: Table, receive: Receive, files: Sequence[File]) -> None:
    while True:
        handle = table.open()
        if handle.transaction_version(receive.receive_id) is not None or _holds(table, handle, receive):
            return
        removed, kept = replacement(table, handle, receive)
        try:
            table.swap(handle, receive.receive_id, [*files, *kept], removed=removed)
        except CommitConflictError:
            continue
        return


def replacement(table: Table, handle: DeltaTable, receive: Receive) -> tuple[list[Stored], list[File]]:
    """For a replay: the files that hold rows of the receives it replaces, and new files with their other rows."""
    if not receive.replaces:
        return [], []
    stored = {file.path: file for file in table.files(handle, receive.windows)}
    replaced = pa.array(receive.replaces, pa.string())

    def stays(rows: pa.Table) -> pa.Array:
        return pc.invert(pc.is_in(rows["receive_id"], replaced))

    removed: list[Stored] = []
    kept: list[File] = []
    for path, ids in _receive_ids(table, stored):
        if ids & set(receive.replaces):
            removed.append(stored[path])
            if not ids <= set(receive.replaces):
                kept += _rewrite(table, receive, path, stored[path].window, stays)
    return removed, kept


def _receive_ids(table: Table, paths: Iterable[str]) -> Iterator[tuple[str, set[str]]]:
    for path in paths:
        yield path, receive_ids(table.lake, f"{table.pipeline}/{table.name}/{path}")


def _drop_decided(tables: Tables, receives: Receives, receive: Receive, added: Sequence[str], on_success: str) -> int:
    """Drop from all that the receive wrote the messages which the added outcomes decide; return how many."""
    if not added:
        return 0
    manifest = receives.manifest(receive.receive_id)
    lake, folder = tables.lake, receive.pipeline
    ours = {file: _outcomes(lake, f"{folder}/outcomes/{file.path}") for file in manifest.of_table("outcomes")}
    lost: list[pa.Array] = []
    for path in added:
        theirs = _outcomes(lake, f"{folder}/outcomes/{path}")
        lost += [_key(mine).filter(_decided_by(theirs, mine)) for mine in ours.values()]
    keys = pc.unique(pa.chunked_array(lost or [pa.array([], pa.string())], pa.string()).combine_chunks())
    if not len(keys):
        return 0
    # First, for it is by this that the acknowledgement knows: see `Flow.acknowledge`.
    receives.keep(receive.receive_id, DROPPED, Manifest(notes=[{DROPPED: len(keys)}]))

    def stays(rows: pa.Table) -> pa.Array:
        return pc.invert(pc.is_in(_key(rows), keys))

    replaced: dict[File, File | None] = {}
    for file in manifest:
        # The raw log may hold a message twice; what is only staged is not published.
        if file.table == "messages" or file.table not in _published(manifest):
            continue
        held = _key(ours[file]) if file in ours else _keys(lake, f"{folder}/{file.table}/{file.path}")
        if not pc.any(pc.is_in(held, keys)).as_py():
            continue
        if file.table == "outcomes":
            replaced[file] = _as_duplicates(tables["outcomes"], receive, file, keys, on_success)
        else:
            left = _rewrite(tables.get(file.table), receive, file.path, file.window, stays)
            replaced[file] = left[0] if left else None
    receives.replace_files(receive.receive_id, replaced)
    return len(keys)


def _outcomes(lake: Lake, path: str) -> pa.Table:
    with lake.open_input(path) as file:
        return pq.read_table(file, columns=[*KEY, "attempt", "outcome"])


def _decided_by(theirs: pa.Table, ours: pa.Table) -> pa.Array:
    """Which of our messages theirs decide: what they handled, and what they failed at our attempt or a later one.

    A failure at an earlier attempt is the very one that a backfill drives once more.
    """
    keys = _key(ours)
    handled = _key(theirs.filter(pc.equal(theirs["outcome"], "handled")))
    failures = theirs.filter(pc.equal(theirs["outcome"], "failed"))
    failed = (
        pa.table({"key": _key(failures), "attempt": failures["attempt"]})
        .group_by("key")
        .aggregate([("attempt", "max")])
    )
    at = failed["attempt_max"].combine_chunks().take(pc.index_in(keys, failed["key"].combine_chunks()))
    not_before = pc.fill_null(pc.greater_equal(at, ours["attempt"].combine_chunks()), False)
    return pc.or_(pc.is_in(keys, handled), not_before)


def _keys(lake: Lake, path: str) -> pa.Array:
    with lake.open_input(path) as file:
        return _key(pq.read_table(file, columns=[*KEY]))


def _key(rows: pa.Table) -> pa.Array:
    return pc.binary_join_element_wise(rows["source"], rows["message_id"], "\0").combine_chunks()


def _as_duplicates(table: Table, receive: Receive, file: File, keys: pa.Array, on_success: str) -> File:
    """The same outcomes, with those of `keys` marked as another's: the source is told of them all the same."""
    with _source_file(table, file.path) as stored:
        rows = pq.read_table(stored)
    theirs = pc.is_in(_key(rows), keys)
    for column, value in (("outcome", "duplicate"), ("action", on_success)):
        index = rows.schema.get_field_index(column)
        rows = rows.set_column(index, column, pc.if_else(theirs, value, rows[column]))
    return _write(table, receive, file.window, rows.to_batches())[0]


def _rewrite(
    table: Table, receive: Receive, path: str, window: str, keep: Callable[[pa.Table], pa.Array]
) -> list[File]:
    """Write the rows of a file that are to be kept to a new one, a row group at a time."""

    def kept() -> Iterator[pa.RecordBatch]:
        with _source_file(table, path) as stored:
            parquet = pq.ParquetFile(stored)
            for group in range(parquet.metadata.num_row_groups):
                rows = parquet.read_row_group(group)
                yield from rows.filter(keep(rows)).to_batches()

    return _write(table, receive, window, kept())


def _source_file(table: Table, path: str) -> pa.NativeFile:
    return table.lake.open_input(f"{table.pipeline}/{table.name}/{path}")


def _write(table: Table, receive: Receive, window: str, batches: Iterable[pa.RecordBatch]) -> list[File]:
    with Writer(table.lake, table.pipeline, f"{receive.receive_id}-rewritten") as writer:
        for batch in batches:
            writer.write(table.name, window, batch)
        return writer.close().files
