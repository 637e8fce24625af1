"""The decision of a receive: one compare-and-swap on `outcomes`, after which what it wrote is what there is.

A receive drops the messages that others decided since it looked from everything it wrote, in the few files that hold
them, and tries the swap again. So a message is decided once, however many runs hold it.

Who may decide is part of the same compare-and-swap. The version of the receive's transaction holds what became of it
and its owner: the run that began it, or the last run that took it over, which commits that before it does anything
else. A run that finds another owner there was fenced.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Self

from deltalake import DeltaTable

from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import receive_ids
from pipeline_platform.lake.removed_batchers import removed_batchers
from pipeline_platform.lake.rewriting import OthersDecisions, Reopened, Replacement, published
from pipeline_platform.lake.tables import (
    DECIDED,
    FENCED,
    KEEP_TRANSACTIONS,
    TAKEN,
    CommitConflictError,
    Table,
    Tables,
    side_by_side,
)

_RUN_BITS = 32
"""Of an owner, the lowest: its run. The others count who took the receive over before."""
_MARK_BITS = 2
"""Of a transaction's version, the lowest: DECIDED, FENCED or TAKEN. The others are the owner."""


class FencedError(Exception):
    """The receive was given up while its run stalled, or another run works on it: this run may not go on."""

    @classmethod
    def given_up(cls, receive_id: str) -> Self:
        """Nobody decided it, and nobody will."""
        return cls(
            f"receive {receive_id} was given up while its run stalled or had failed: its messages come back when their "
            "lease is over, and nothing is left to do here"
        )

    @classmethod
    def taken(cls, receive_id: str, run_id: str) -> Self:
        """A re-execution works on it, or finished it."""
        why = "it was given up while the run stalled, or a re-execution took it over"
        return cls(f"receive {receive_id} is not run {run_id}'s any more: {why}")


class UnhandledError(Exception):
    """Not every message of a receive has an outcome: nothing of it may be decided."""


class Decision(NamedTuple):
    """What deciding came to: how many messages others had decided, and how many swaps it took."""

    dropped: int
    tries: int


class Transaction(NamedTuple):
    """What `outcomes` says of a receive, or another table once it shows it: None and 0 where it says nothing.

    The owner is the run that decided it or took it over; 0 for the run that began it.
    """

    mark: int | None
    owner: int

    @classmethod
    def of(cls, table: Table, handle: DeltaTable, receive_id: str, record: Receive | None) -> Self:
        """Look it up: by its rows where the receive is older than the transactions that the table keeps."""
        version = table.transaction_version(handle, receive_id)
        if version is not None:
            return cls(version % 2**_MARK_BITS, version >> _MARK_BITS)
        if record is None or not _holds(table, handle, record):
            return cls(None, 0)
        return cls(DECIDED, max(Ledger(table.lake, table.pipeline).owners(receive_id), default=0))

    @property
    def is_decided(self) -> bool:
        """Whether a run decided the receive."""
        return self.mark == DECIDED

    @property
    def version(self) -> int:
        """As Delta keeps it."""
        return self.owner << _MARK_BITS | (self.mark or 0)

    def is_of(self, run_id: str) -> bool:
        """Whether this run was the last to take the receive over."""
        return self.owner % 2**_RUN_BITS == zlib.crc32(run_id.encode()) and self.owner > 0

    def taken_by(self, run_id: str) -> Self:
        """What it says once a run has taken the receive over."""
        times = (self.owner >> _RUN_BITS) + 1
        return self._replace(mark=TAKEN, owner=times << _RUN_BITS | zlib.crc32(run_id.encode()))


def transaction_of(table: Table, receive_id: str, record: Receive | None) -> Transaction:
    """What a table says of a receive now. Once it is decided, it stays so."""
    if (known := table.known(receive_id)) is not None and known % 2**_MARK_BITS == DECIDED:
        return Transaction(DECIDED, known >> _MARK_BITS)
    with table.look() as handle:
        return Transaction.of(table, handle, receive_id, record)


def _holds(table: Table, handle: DeltaTable, receive: Receive) -> bool:
    """Whether the table has rows of a receive that is older than the transactions that it keeps."""
    if datetime.now(UTC) - receive.started_at <= KEEP_TRANSACTIONS - timedelta(days=1):
        return False
    stored = table.files(handle, receive.windows)
    return any(receive.receive_id in receive_ids(table.lake, table.path(file.path)) for file in stored)


def decide(
    tables: Tables,
    ledger: Ledger,
    receive: Receive,
    still_ours: Callable[[], bool] = lambda: True,
    on_success: str = "ack",
) -> Decision:
    """Commit the outcomes of a receive, once; to decide again what is decided does nothing.

    `still_ours` says before each swap whether the lease still holds. By the action `on_success` the source learns of a
    message that another receive decided.

    Raises:
        FencedError: It was given up, or its lease or the receive itself is another run's.
        UnhandledError: Some message of it has no outcome, or more than one: a step was left out.
        LogExpiredError: It is older than the log of `outcomes`.
    """
    outcomes, receive_id = tables["outcomes"], receive.receive_id
    others, replacement = OthersDecisions(tables, ledger, receive, on_success), Replacement(outcomes, receive)
    looked, dropped, tries = receive.base, 0, 0
    while True:
        with outcomes.look() as handle, suppress(CommitConflictError):
            found = Transaction.of(outcomes, handle, receive_id, receive)
            if found.mark == FENCED or (not found.is_decided and ledger.get(receive_id) is None):
                raise FencedError.given_up(receive_id)
            if found.owner != receive.owner:
                raise FencedError.taken(receive_id, receive.run_id)
            if found.is_decided:
                return Decision(dropped, tries)
            # From the look on, a commit that fences it or takes it over makes the swap fail.
            if not still_ours():
                raise FencedError(f"the lease of receive {receive_id} is over and could not be renewed")
            try:
                dropped += others.drop(outcomes.added_since(handle, looked))
                manifest = ledger.manifest(receive)
                files = _outcome_files(manifest, receive)
            except Exception:
                if ledger.get(receive_id) is None:
                    continue  # Another run removed its manifests after the look. The next look finds why.
                raise
            looked, tries = handle.version(), tries + 1
            removed, left = replacement.at(handle)
            state, published = Transaction(DECIDED, receive.owner).version, _newest(manifest)
            outcomes.swap(handle, receive_id, [*files, *left], removed=removed, state=state, not_before=published)
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


def _newest(manifest: Manifest) -> datetime | None:
    """When the newest message was published; None if the source does not say.

    A message is decided after it is published, whatever the clock of this host says. A look-up relies on it.
    """
    times = [notes["published_until"] for notes in manifest.notes if notes.get("published_until")]
    return max(map(datetime.fromisoformat, times), default=None)


def take_over(tables: Tables, ledger: Ledger, receive: Receive, run_id: str) -> tuple[Receive, bool]:
    """Make a run the owner of a receive that another began: nothing that others still do to it counts from here on.

    Returns:
        The receive as this run's, and False; or as it was decided, and True.

    Raises:
        FencedError: It was given up, or another run took it over from this one.
    """
    outcomes, receive_id = tables["outcomes"], receive.receive_id
    while True:
        with outcomes.look() as handle, suppress(CommitConflictError):
            found = Transaction.of(outcomes, handle, receive_id, receive)
            # A later one is of a take-over that was not committed.
            before = [owner for owner in ledger.owners(receive_id) if owner >> _RUN_BITS < found.owner >> _RUN_BITS]
            if not found.is_of(run_id) and any(Transaction(TAKEN, owner).is_of(run_id) for owner in before):
                raise FencedError.taken(receive_id, run_id)
            if found.mark == FENCED:
                raise FencedError.given_up(receive_id)
            receive = receive.model_copy(update={"run_id": run_id, "owner": found.owner})
            if found.is_decided or found.is_of(run_id):
                return receive, found.is_decided
            taken = found.taken_by(run_id)
            # They stay there if this fails: the commit may have come through all the same.
            mine = ledger.hand_over(receive, taken.owner)
            outcomes.swap(handle, receive_id, [], state=taken.version)
            return mine, False


def fence(tables: Tables, receive: Receive) -> Receive | None:
    """Forbid a receive to decide; return it as the run that decided it left it, or None if none has."""
    outcomes, receive_id = tables["outcomes"], receive.receive_id
    while True:
        with outcomes.look() as handle, suppress(CommitConflictError):
            found = Transaction.of(outcomes, handle, receive_id, receive)
            if found.is_decided:
                return receive.model_copy(update={"owner": found.owner})
            if found.mark != FENCED:
                outcomes.swap(handle, receive_id, [], state=FENCED)
            return None


def publish(tables: Tables, receive: Receive, manifest: Manifest) -> dict[str, int]:
    """Commit what a decided receive wrote to each table, once for each; return the rows by table.

    Several may call it at once, and again after any of them died half-way.
    """
    side_by_side(
        lambda table: _publish_once(table, receive, manifest.of_table(table.name)), _changed(tables, receive, manifest)
    )
    return {name: manifest.rows(name) for name in (*tables.names, *published(manifest)) if name != "outcomes"}


def is_published(tables: Tables, receive: Receive, manifest: Manifest) -> bool:
    """Whether every table shows what a decided receive wrote."""
    changed = _changed(tables, receive, manifest)
    return all(transaction_of(table, receive.receive_id, receive).is_decided for table in changed)


def _changed(tables: Tables, receive: Receive, manifest: Manifest) -> Iterator[Table]:
    """The tables that a receive adds rows to, or replaces rows of, beside its outcomes."""
    replaces = receive.replaces and manifest.rows("outcomes")
    # A batcher may have been renamed since: what is decided for it still has a table.
    removed = removed_batchers(tables) if replaces else []
    names = dict.fromkeys([*tables.names, *sorted(published(manifest)), *removed])
    return (tables[name] for name in names if name != "outcomes" and (replaces or manifest.rows(name)))


def _publish_once(table: Table, receive: Receive, files: Sequence[File]) -> None:
    replacement, reopened = Replacement(table, receive), Reopened(table, receive, files)
    while True:
        with table.look() as handle, suppress(CommitConflictError):
            if not Transaction.of(table, handle, receive.receive_id, receive).is_decided:
                removed, left = replacement.at(handle)
                table.swap(handle, receive.receive_id, [*reopened.at(handle), *left], removed=removed)
            return
