"""The decision of a receive: one compare-and-swap on `outcomes`, after which what it wrote is what there is.

What others decided since this receive looked is theirs: those messages are dropped from everything it wrote, in the
few files that hold them, and the swap is tried again. So a message is decided once, however many runs hold it.

Who may decide is part of the same compare-and-swap. The version of the receive's transaction holds what became of it
and its owner: the run that began it, or the last one that took it over, which commits that before it does anything
else. A run that finds another owner there was fenced.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from deltalake import DeltaTable

from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.rewriting import OthersDecisions, Replacement, published, receive_ids
from pipeline_platform.lake.tables import (
    DECIDED,
    FENCED,
    TAKEN,
    CommitConflictError,
    LogExpiredError,
    Table,
    Tables,
)

_RUN_BITS = 32
"""Of an owner, the lowest: its run. The others count who took the receive over before."""
_STATE_BITS = 2
"""Of a transaction's version, the lowest: DECIDED, FENCED or TAKEN. The others are the owner."""


class FencedError(Exception):
    """The receive was given up for dead while its run stalled, or another run works on it: this one may not go on."""


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


class Standing(NamedTuple):
    """What the transaction of a receive says in `outcomes`.

    Attributes:
        state: DECIDED, FENCED or TAKEN; None where there is no transaction.
        owner: Who decided it or took it over; 0 for the run that began it.
    """

    state: int | None
    owner: int

    @classmethod
    def of(cls, handle: DeltaTable, receive_id: str) -> Standing:
        """Look it up."""
        version = handle.transaction_version(receive_id)
        return cls(None, 0) if version is None else cls(version % 2**_STATE_BITS, version >> _STATE_BITS)

    @property
    def version(self) -> int:
        """As a transaction's version."""
        return self.owner << _STATE_BITS | (self.state or 0)

    def is_of(self, run_id: str) -> bool:
        """Whether a run took it over, last."""
        return self.owner % 2**_RUN_BITS == zlib.crc32(run_id.encode()) and self.owner > 0

    def taken_by(self, run_id: str) -> Standing:
        """What it says once a run has taken it over."""
        times = (self.owner >> _RUN_BITS) + 1
        return Standing(TAKEN, times << _RUN_BITS | zlib.crc32(run_id.encode()))


def decided(table: Table, handle: DeltaTable, receive: Receive) -> Receive | None:
    """The receive as the run that decided it left it; None if it is not decided.

    By its transaction, or by its rows where that is too old to be kept.
    """
    standing = Standing.of(handle, receive.receive_id)
    if standing.state == DECIDED:
        return receive.model_copy(update={"owner": standing.owner})
    if standing.state is None and _holds(table, handle, receive):
        owners = Ledger(table.lake, table.pipeline).owners(receive.receive_id)
        return receive.model_copy(update={"owner": owners[-1] if owners else 0})
    return None


def _holds(table: Table, handle: DeltaTable, receive: Receive) -> bool:
    """Whether the table has rows of a receive that is older than the transactions that the table keeps."""
    if not _older_than_transactions(handle, receive):
        return False
    return any(
        receive.receive_id in ids
        for _, ids in receive_ids(table, [f.path for f in table.files(handle, receive.windows)])
    )


def _older_than_transactions(handle: DeltaTable, receive: Receive) -> bool:
    kept = handle.metadata().configuration.get("delta.setTransactionRetentionDuration", "interval 30 days")
    return datetime.now(UTC) - receive.started_at > timedelta(days=int(kept.split()[1]) - 1)


def decide(
    tables: Tables,
    ledger: Ledger,
    receive: Receive,
    still_ours: Callable[[], bool] = lambda: True,
    on_success: str = "ack",
) -> Decision:
    """Commit the outcomes of a receive, once; deciding again what is decided does nothing.

    Args:
        tables: The pipeline's.
        ledger: Where its manifests are.
        receive: Which.
        still_ours: Asked before each swap: whether the lease still holds.
        on_success: What the source is told of a message that another receive decided.

    Raises:
        FencedError: It was given up, or its lease or the receive itself is another run's.
        UnhandledError: Some message of it has no outcome, or more than one: a step was left out.
    """
    outcomes = tables["outcomes"]
    others, replacement = OthersDecisions(tables, ledger, receive, on_success), Replacement(outcomes, receive)
    handle, looked = outcomes.open(), receive.base
    files: list[File] = []
    dropped = tries = 0
    while True:
        # Asked before the look: the swap fails if anything is committed between the two.
        ours = still_ours()
        handle.update_incremental()
        if done := decided(outcomes, handle, receive):
            expect_owner(receive, done.owner)
            return Decision(dropped, tries)
        standing = Standing.of(handle, receive.receive_id)
        if standing.state == FENCED or ledger.get(receive.receive_id) is None:
            raise FencedError(
                f"receive {receive.receive_id} was given up while its run stalled: its messages are another run's now"
            )
        expect_owner(receive, standing.owner)
        if not ours:
            raise FencedError(f"the lease of receive {receive.receive_id} is over and could not be renewed")
        try:
            added = outcomes.added_since(handle, looked)
        except LogExpiredError as error:
            raise FencedError(f"receive {receive.receive_id} is too old to be decided: {error}") from error
        lost = others.drop(added)
        dropped, looked = dropped + lost, handle.version()
        if lost or not tries:
            files = _outcome_files(ledger.manifest(receive), receive)
        removed, kept = replacement.at(handle)
        tries += 1
        try:
            state = Standing(DECIDED, receive.owner).version
            outcomes.swap(handle, receive.receive_id, [*files, *kept], removed=removed, state=state)
        except CommitConflictError:
            continue
        return Decision(dropped, tries)


def expect_owner(receive: Receive, owner: int) -> None:
    """Refuse to go on with a receive that another run took over."""
    if owner != receive.owner:
        raise _taken(receive)


def _taken(receive: Receive) -> FencedError:
    return FencedError(
        f"receive {receive.receive_id} is not run {receive.run_id}'s any more: a re-execution took it over"
    )


def _outcome_files(manifest: Manifest, receive: Receive) -> list[File]:
    """The outcomes that a receive is about to decide: one for each message."""
    received, known = manifest.rows("messages"), manifest.rows("outcomes")
    if received != known:
        raise UnhandledError(
            f"receive {receive.receive_id} has {received} messages and the outcomes of {known}: some of its steps did "
            "not come to their end. Re-execute from `handle_messages` on, all steps after it included"
        )
    return manifest.of_table("outcomes")


def take_over(tables: Tables, ledger: Ledger, receive: Receive, run_id: str) -> tuple[Receive, bool]:
    """Make a run the owner of a receive that another began: nothing that others still do to it counts from here on.

    Returns:
        The receive as this run's, and False; or as it was decided, and True: then that is what there is.

    Raises:
        FencedError: It was given up, or this run had taken it over and another one did so since.
    """
    outcomes, receive = tables["outcomes"], receive.model_copy(update={"run_id": run_id})
    handle = outcomes.open()
    while True:
        handle.update_incremental()
        standing = Standing.of(handle, receive.receive_id)
        had = any(Standing(TAKEN, owner).is_of(run_id) for owner in ledger.owners(receive.receive_id))
        if had and not standing.is_of(run_id):
            raise _taken(receive)
        if done := decided(outcomes, handle, receive):
            return done, True
        if standing.state == FENCED:
            raise FencedError(
                f"receive {receive.receive_id} was given up: its messages come back when their lease is over. Nothing "
                "is left to re-execute"
            )
        receive = receive.model_copy(update={"owner": standing.owner})
        if standing.is_of(run_id):
            return receive, False
        taken = standing.taken_by(run_id)
        mine = ledger.hand_over(receive, taken.owner)
        try:
            outcomes.swap(handle, receive.receive_id, [], state=taken.version)
        except BaseException as error:
            ledger.disown(mine)
            if isinstance(error, CommitConflictError):
                continue
            raise
        return mine, False


def fence(tables: Tables, receive_id: str) -> bool:
    """Forbid a receive to decide; False where it has decided already."""
    outcomes = tables["outcomes"]
    handle = outcomes.open()
    while True:
        handle.update_incremental()
        state = Standing.of(handle, receive_id).state
        if state in (DECIDED, FENCED):
            return state == FENCED
        try:
            outcomes.swap(handle, receive_id, [], state=FENCED)
        except CommitConflictError:
            continue
        return True


def publish(tables: Tables, ledger: Ledger, receive: Receive) -> dict[str, int]:
    """Commit what a decided receive wrote to each table, once for each; return the rows by table.

    May be called by several at once, and again after any of them died half-way.
    """
    manifest = ledger.manifest(receive)
    rows = {}
    # Those it wrote to as well: a batcher may have been renamed since, and what is decided has a table still.
    for name in dict.fromkeys([*tables.names, *published(manifest)]):
        if name != "outcomes":
            files = manifest.of_table(name)
            rows[name] = sum(file.rows for file in files)
            if files or receive.replaces:
                _publish_once(tables.get(name), receive, files)
    return rows


def _publish_once(table: Table, receive: Receive, files: Sequence[File]) -> None:
    replacement, handle = Replacement(table, receive), table.open()
    while True:
        handle.update_incremental()
        if handle.transaction_version(receive.receive_id) is not None or _holds(table, handle, receive):
            return
        removed, kept = replacement.at(handle)
        try:
            table.swap(handle, receive.receive_id, [*files, *kept], removed=removed)
        except CommitConflictError:
            continue
        return
