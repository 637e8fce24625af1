"""The decision of a receive: one compare-and-swap on `outcomes` makes the outcomes of its messages final.

Before each try, a receive looks which of its messages other receives decided since its last look, and drops these from
the few files that contain them. So a message is decided once, however many runs received it.

A fence is a commit to the same table: a receive that is fenced can never decide.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple, Self

import pyarrow as pa
from deltalake import DeltaTable

from pipeline_platform.lake.decisions.ledger import Ledger, Receive
from pipeline_platform.lake.decisions.rewriting import OthersDecisions, Reopened, Replacement, published
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import receive_ids, row_groups
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.schema_changes import merged
from pipeline_platform.lake.table_properties import SURELY_KEPT
from pipeline_platform.lake.tables import DECIDED, FENCED, CommitConflictError, Table, Tables, side_by_side
from pipeline_platform.sinks.contract import Publication, SinkAwayError
from pipeline_platform.source.patience import patiently

_SINK_ROWS = 65_536
"""Maximum number of rows in a batch of a sink."""


class FencedError(Exception):
    """The receive was fenced: its run stalled, failed or was re-executed, and must not continue it."""

    @classmethod
    def of(cls, receive_id: str) -> Self:
        """Return the error for a receive."""
        return cls(
            f"receive {receive_id}: fenced, because its run stalled, failed or was re-executed. Its messages were "
            "released to the source, and a later run handles them. Nothing is left to do in this run"
        )


class UnhandledError(Exception):
    """Some messages of a receive have no outcome, or the receive is not published yet."""


class Decision(NamedTuple):
    """Result of a decision: messages that other receives had decided, and the number of tries."""

    dropped: int
    tries: int


def state_at(handle: DeltaTable, table: Table, receive_id: str, record: Receive | None) -> int | None:
    """Return the state of a receive as of a handle: DECIDED, FENCED, or None. In other tables, DECIDED means published.

    The rows of a receive show it if the receive is older than the transactions that the table keeps.
    """
    state = table.transaction_version(handle, receive_id)
    if state is not None or record is None or table.has_seen_all_of(receive_id):
        return state
    return DECIDED if _holds(table, handle, record) else None


def state_of(table: Table, receive_id: str, record: Receive | None) -> int | None:
    """Return the state of a receive in a table now. A decided receive stays decided."""
    if table.known(receive_id) == DECIDED:
        return DECIDED
    with table.look() as handle:
        return state_at(handle, table, receive_id, record)


def _holds(table: Table, handle: DeltaTable, receive: Receive) -> bool:
    """Whether the table has, or had, rows of a receive that is older than the transactions that the table keeps."""
    if datetime.now(UTC) - receive.started_at <= SURELY_KEPT:
        return False
    if Ledger(table.lake, table.pipeline).was_published(receive):
        return True
    stored = table.files(handle, receive.windows)
    return any(receive.receive_id in receive_ids(table.lake, table.path(file.path)) for file in stored)


def decide(
    tables: Tables,
    ledger: Ledger,
    receive: Receive,
    still_ours: Callable[[], bool] = lambda: True,
    on_success: str = "ack",
) -> Decision:
    """Commit the outcomes of a receive, once. Does nothing if it is decided already.

    Args:
        tables: Tables of the pipeline.
        ledger: Manifests of the receive.
        receive: The receive; all its messages have outcomes.
        still_ours: Returns whether the leases are still valid; called before each try.
        on_success: Ack action for messages that another receive decided.

    Raises:
        FencedError: The receive was fenced, or its lease expired and could not be renewed.
        UnhandledError: A message has no outcome, or several outcomes: a step was left out.
        LogExpiredError: It is older than the log of `outcomes`.
    """
    outcomes, receive_id = tables["outcomes"], receive.receive_id
    others, replacement = OthersDecisions(tables, ledger, receive, on_success), Replacement(outcomes, receive)
    looked, dropped, tries = receive.base, 0, 0
    while True:
        with outcomes.look() as handle, suppress(CommitConflictError):
            state = state_at(handle, outcomes, receive_id, receive)
            if state == DECIDED:
                return Decision(dropped, tries)
            if state == FENCED or ledger.get(receive_id) is None:
                raise FencedError.of(receive_id)
            # A fence that is committed after the look makes the swap fail.
            if not still_ours():
                raise FencedError(f"receive {receive_id}: its lease expired and could not be renewed")
            try:
                dropped += others.drop(outcomes.added_since(handle, looked))
                manifest = ledger.manifest(receive)
                files = _outcome_files(manifest, receive)
            except Exception:
                if ledger.get(receive_id) is None:
                    continue  # another run removed its manifests after the look; the next look finds out why
                raise
            looked, tries = handle.version(), tries + 1
            removed, left = replacement.at(handle)
            outcomes.swap(handle, receive_id, [*files, *left], removed=removed, not_before=_newest(manifest))
            return Decision(dropped, tries)


def _outcome_files(manifest: Manifest, receive: Receive) -> list[File]:
    """Return the files of outcomes, which must have one for each message."""
    received, known = manifest.rows("messages"), manifest.rows("outcomes")
    if received != known:
        raise UnhandledError(
            f"receive {receive.receive_id}: has {received} messages, but outcomes of {known}, because a step did not "
            "complete. Re-execute the run"
        )
    return manifest.of_table("outcomes")


def _newest(manifest: Manifest) -> datetime | None:
    """Return the time at which the newest message was published; None if the source does not report it.

    Look-ups rely on decisions being later than the publication of their messages, even if the clock of a host is wrong.
    """
    return max((report.published_until for report in manifest.reports if report.published_until), default=None)


def fence(tables: Tables, receive: Receive) -> Receive | None:
    """Forbid an undecided receive to decide. Return the receive if it is decided already, else None."""
    outcomes, receive_id = tables["outcomes"], receive.receive_id
    while True:
        with outcomes.look() as handle, suppress(CommitConflictError):
            state = state_at(handle, outcomes, receive_id, receive)
            if state == DECIDED:
                return receive
            if state != FENCED:
                outcomes.swap(handle, receive_id, [], state=FENCED)
            return None


def publish(tables: Tables, receive: Receive, manifest: Manifest) -> dict[str, int]:
    """Commit the rows of a decided receive to each table and sink, once each. Return the number of rows by table.

    Several processes may do this at once, and again after a crash.
    """
    side_by_side(
        lambda table: _publish_once(table, receive, manifest.of_table(table.name)), _changed(tables, receive, manifest)
    )
    for name, sink in tables.sinks.items():
        if (receive.replaces and manifest.rows("outcomes")) or manifest.rows(name):
            columns = sink_columns(tables[name])
            rows = partial(_rows_of, tables[name], manifest.of_table(name), columns)
            of = (receive.started_at, receive.windows, receive.replaces, rows)
            publication = Publication(receive.receive_id, receive.pipeline, name, columns, *of)
            patiently(partial(sink.publish, publication), sink.patience, SinkAwayError)
    return {name: manifest.rows(name) for name in (*tables.names, *published(manifest)) if name != "outcomes"}


def sink_columns(table: Table) -> pa.Schema:
    """Return the columns of a batcher's rows in its sink: with the Decimal digits and nested fields of its table."""
    with table.look() as handle:
        return merged(table.schema, handle)


def _rows_of(table: Table, files: Sequence[File], columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    stored = pa.schema([column for column in columns if column.name != "window"])
    for file in files:
        for rows in row_groups(table.lake, table.path(file.path), stored):
            yield from rows.append_column("window", pa.repeat(file.window, rows.num_rows)).to_batches(_SINK_ROWS)


def is_published(tables: Tables, receive: Receive, manifest: Manifest) -> bool:
    """Whether every table, in the lake and in sinks, contains the rows of a decided receive."""
    changed = [*_changed(tables, receive, manifest)]
    if any(state_of(table, receive.receive_id, receive) != DECIDED for table in changed):
        return False
    sinks = [(table.name, tables.sinks[table.name]) for table in changed if table.name in tables.sinks]
    return all(sink.is_published(receive.pipeline, name, receive.receive_id) for name, sink in sinks)


def _changed(tables: Tables, receive: Receive, manifest: Manifest) -> Iterator[Table]:
    """Yield the tables, other than `outcomes`, in which a receive adds or replaces rows."""
    replaces = receive.replaces and manifest.rows("outcomes")
    # A batcher that was renamed since still has a table for decided rows.
    removed = removed_batchers(tables) if replaces else []
    names = dict.fromkeys([*tables.names, *sorted(published(manifest)), *removed])
    return (tables[name] for name in names if name != "outcomes" and (replaces or manifest.rows(name)))


def _publish_once(table: Table, receive: Receive, files: Sequence[File]) -> None:
    replacement, reopened = Replacement(table, receive), Reopened(table, receive, files)
    while True:
        with table.look() as handle, suppress(CommitConflictError):
            if state_at(handle, table, receive.receive_id, receive) != DECIDED:
                removed, left = replacement.at(handle)
                table.swap(handle, receive.receive_id, [*reopened.at(handle), *left], removed=removed)
            return
