"""The decision of a receive: one compare-and-swap on `outcomes`, after which what it wrote is what there is.

A receive drops the messages that others decided since it looked from everything it wrote, in the few files that hold
them, and tries the swap again. So a message is decided once, however many runs hold it.

Who may decide is part of the same compare-and-swap. The version of the receive's transaction holds what became of it
and its owner: the run that began it, or the last run that took it over, which commits that before it does anything
else. A run that finds another owner there was fenced.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from deltalake import DeltaTable

from pipeline_platform.lake.ledger import Ledger, Receive
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import receive_ids
from pipeline_platform.lake.rewriting import OthersDecisions, Replacement, published
from pipeline_platform.lake.tables import (
    DECIDED,
    FENCED,
    KEEP_TRANSACTIONS,
    TAKEN,
    CommitConflictError,
    Table,
    Tables,
)

_RUN_BITS = 32
"""Of an owner, the lowest: its run. The others count who took the receive over before."""
_STATE_BITS = 2
"""Of a transaction's version, the lowest: DECIDED, FENCED or TAKEN. The others are the owner."""


class FencedError(Exception):
    """The receive was given up while its run stalled, or another run works on it: this run may not go on."""


class UnhandledError(Exception):
    """Not every message of a receive has an outcome: nothing of it may be decided."""


class Decision(NamedTuple):
    """What deciding came to: how many messages others had decided, and how many swaps it took."""

    dropped: int
    tries: int


class Standing(NamedTuple):
    """What the transaction of a receive says in `outcomes`: None and 0 where there is no transaction.

    The owner is the run that decided it or took it over; 0 for the run that began it.
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
        """Whether this run was the last to take it over."""
        return self.owner % 2**_RUN_BITS == zlib.crc32(run_id.encode()) and self.owner > 0

    def taken_by(self, run_id: str) -> Standing:
        """What it says once a run has taken it over."""
        times = (self.owner >> _RUN_BITS) + 1
        return Standing(TAKEN, times << _RUN_BITS | zlib.crc32(run_id.encode()))


def standing_of(outcomes: Table, receive_id: str) -> Standing:
    """What `outcomes` says of a receive now."""
    with outcomes.look() as handle:
        return Standing.of(handle, receive_id)


def decided(outcomes: Table, receive: Receive) -> Receive | None:
    """The receive as the run that decided it left it; None if it is not decided.

    Its transaction says so, or its rows where it is older than the transactions that the table keeps.
    """
    with outcomes.look() as handle:
        return _decided(outcomes, handle, receive)


def _decided(outcomes: Table, handle: DeltaTable, receive: Receive) -> Receive | None:
    state, owner = Standing.of(handle, receive.receive_id)
    if state is None and _holds(outcomes, handle, receive):
        state, owner = DECIDED, max(Ledger(outcomes.lake, outcomes.pipeline).owners(receive.receive_id), default=0)
    return receive.model_copy(update={"owner": owner}) if state == DECIDED else None


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

    Args:
        tables: The pipeline's.
        ledger: Holds its manifests.
        receive: Which.
        still_ours: Says before each swap whether the lease still holds.
        on_success: The action at the source for a message that another receive decided.

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
            standing = Standing.of(handle, receive_id)
            if done := _decided(outcomes, handle, receive):
                expect_owner(receive, done.owner)
                return Decision(dropped, tries)
            if standing.state == FENCED or ledger.get(receive_id) is None:
                raise FencedError(
                    f"receive {receive_id} was given up while its run stalled: its messages are another run's now"
                )
            expect_owner(receive, standing.owner)
            # From the look on, a commit that fences it or takes it over makes the swap fail.
            if not still_ours():
                raise FencedError(f"the lease of receive {receive_id} is over and could not be renewed")
            dropped += others.drop(outcomes.added_since(handle, looked))
            looked, tries = handle.version(), tries + 1
            files = _outcome_files(ledger.manifest(receive), receive)
            removed, left = replacement.at(handle)
            state = Standing(DECIDED, receive.owner).version
            outcomes.swap(handle, receive_id, [*files, *left], removed=removed, state=state)
            return Decision(dropped, tries)


def expect_owner(receive: Receive, owner: int) -> None:
    """Raise `FencedError` for a run whose receive another run took over."""
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
        The receive as this run's, and False; or as it was decided, and True.

    Raises:
        FencedError: It was given up, or another run took it over from this one.
    """
    outcomes, receive = tables["outcomes"], receive.model_copy(update={"run_id": run_id})
    while True:
        with outcomes.look() as handle, suppress(CommitConflictError):
            standing = Standing.of(handle, receive.receive_id)
            owners = ledger.owners(receive.receive_id)
            if not standing.is_of(run_id) and any(Standing(TAKEN, owner).is_of(run_id) for owner in owners):
                raise _taken(receive)
            if done := _decided(outcomes, handle, receive):
                return done, True
            if standing.state == FENCED:
                raise FencedError(
                    f"receive {receive.receive_id} was given up: its messages come back when their lease is over. "
                    "Nothing is left to re-execute"
                )
            receive = receive.model_copy(update={"owner": standing.owner})
            if standing.is_of(run_id):
                return receive, False
            taken = standing.taken_by(run_id)
            mine = ledger.hand_over(receive, taken.owner)
            try:
                outcomes.swap(handle, receive.receive_id, [], state=taken.version)
            except BaseException:
                ledger.disown(mine)
                raise
            return mine, False


def fence(tables: Tables, receive_id: str) -> bool:
    """Forbid a receive to decide; False where it has decided already."""
    outcomes = tables["outcomes"]
    while True:
        with outcomes.look() as handle, suppress(CommitConflictError):
            state = Standing.of(handle, receive_id).state
            if state not in (DECIDED, FENCED):
                outcomes.swap(handle, receive_id, [], state=FENCED)
            return state != DECIDED


def publish(tables: Tables, ledger: Ledger, receive: Receive) -> dict[str, int]:
    """Commit what a decided receive wrote to each table, once for each; return the rows by table.

    Several may call it at once, and again after any of them died half-way.
    """
    manifest = ledger.manifest(receive)
    # A batcher may have been renamed since: what is decided for it still has a table.
    names = dict.fromkeys([*tables.names, *sorted(published(manifest))])
    rows = {name: manifest.rows(name) for name in names if name != "outcomes"}
    for name in rows:
        files = manifest.of_table(name)
        if files or receive.replaces:
            _publish_once(tables[name], receive, files)
    return rows


def _publish_once(table: Table, receive: Receive, files: Sequence[File]) -> None:
    replacement = Replacement(table, receive)
    while True:
        with table.look() as handle, suppress(CommitConflictError):
            if handle.transaction_version(receive.receive_id) is None and not _holds(table, handle, receive):
                removed, left = replacement.at(handle)
                table.swap(handle, receive.receive_id, [*files, *left], removed=removed)
            return
