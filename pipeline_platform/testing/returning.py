"""Promises about redelivery: messages that were read and not acknowledged are not lost."""

from contextlib import suppress
from typing import Any

from pipeline_platform.source.connection import ConnectedSource
from pipeline_platform.source.contract import SourceError
from pipeline_platform.testing.trial import DELIVERS, MANY, Received, Row, Trial, promise, some

RETURNS = (*DELIVERS, "nothing_is_acknowledged_early")
"""Prerequisites of promises about redelivered messages."""


@promise()
def nothing_is_acknowledged_early(trial: Trial) -> None:
    """Messages of a crashed run are redelivered."""
    received = trial.first()
    trial.lose(received)
    trial.expect_back(received.data, trial.patience_s, "again")


@promise(builds_on=RETURNS)
def ids_are_stable(trial: Trial) -> None:
    """A message has the same `message_id` at every delivery."""
    trial.need(trial.source.has_identity, "its messages have no ids")
    _expect_same(trial, "message_id")


@promise(builds_on=RETURNS)
def places_and_times_are_stable(trial: Trial) -> None:
    """`partition`, `sequence` and `published_at` are the same at every delivery, or null."""
    _expect_same(trial, "partition", "sequence", "published_at")


@promise(builds_on=RETURNS)
def what_comes_again_is_marked(trial: Trial) -> None:
    """`redelivered` is true for messages that may have been delivered before."""
    for _, again in _twice(trial):
        trial.expect(again["redelivered"] is True, f"true for {again['data'][:40]!r}", again["redelivered"])


@promise(builds_on=RETURNS)
def leases_end(trial: Trial) -> None:
    """Messages are redelivered when their lease expires."""
    trial.need(trial.lease_s, "its leases do not expire")
    received = trial.first()
    trial.lapse(received)
    trial.expect_back(received.data, trial.patience_s, f"after a lease of {trial.lease_s:g} s")


@promise(builds_on=RETURNS, many=True)
def extending_keeps(trial: Trial) -> None:
    """A lease does not expire while `extend` is called every `extend_every_s` seconds."""
    every_s = trial.source.extend_every_s
    trial.need(every_s, "its leases are not renewed")
    received = trial.first()
    for _ in range(4):
        trial.server.sleep(every_s or 0)
        kept = trial.source.extend(received.receive_id, received.held)
        trial.expect(kept is True, "True from extend() while no other receive has a message", kept)
    trial.expect_none_of(received.data, "whose leases are renewed")


@promise(builds_on=RETURNS, messages=5)
def extending_what_is_lost_says_so(trial: Trial) -> None:
    """`extend` returns False if another receive has leased the messages."""
    trial.need(trial.source.extend_every_s, "its leases are not renewed")
    late = trial.first()
    trial.lose(late)
    trial.expect_back(late.data, trial.patience_s, "again")
    kept = late.source.extend(late.receive_id, late.held)
    trial.expect(kept is False, "False from extend()", kept)


@promise(builds_on=RETURNS, many=True)
def abandoning_gives_back_at_once(trial: Trial) -> None:
    """Messages of a crashed run are redelivered as soon as `abandon` is called."""
    trial.need(trial.has_abandon, "it has no abandon()")
    received = trial.first()
    trial.abandon(received)
    trial.expect_back(received.data, trial.soon_s, "at once")


@promise(builds_on=RETURNS, messages=5)
def abandoning_touches_nothing_else(trial: Trial) -> None:
    """`abandon` may be called twice, also for an unknown receive, and does not affect messages of other receives."""
    dead = trial.first()
    trial.abandon(Received(dead.source, "an-unknown-receive", []))
    trial.lose(dead)
    trial.abandon(dead)
    held = trial.expect_back(dead.data, trial.patience_s, "again")
    trial.abandon(dead)
    trial.expect_none_of(dead.data, f"that {len(held)} later receives have leased")


@promise(family=ConnectedSource, builds_on=RETURNS, messages=5)
def a_cut_connection_gives_back(trial: Trial) -> None:
    """After a lost connection the source reconnects, and its messages are redelivered, unless acknowledged in time."""
    cut = trial.server.cut
    trial.need(cut, "its server has no way to cut a connection")
    late = trial.first()
    if cut is not None:
        cut(trial.source)
    came = {data for again in trial.come(late.data, trial.patience_s, by=trial.source) for data in again.data}
    lacking = set(late.data) - came
    trial.expect(not lacking, f"all {len(late.rows)} messages again", f"{len(came)}, without {some(lacking)}")
    with suppress(SourceError):  # the source may report the lost connection
        trial.acknowledge(late, trial.source.on_success)
    trial.source.close()
    trial.expect_back(late.data, trial.patience_s, "once more")


def _twice(trial: Trial) -> list[tuple[Row, Row]]:
    received = trial.first(demand=MANY)
    trial.lose(received)
    again = {row["data"]: row for later in trial.come(received.data, trial.patience_s) for row in later.rows}
    return [(row, again[row["data"]]) for row in received.rows if row["data"] in again]


def _expect_same(trial: Trial, *columns: str) -> None:
    def of(row: Row) -> dict[str, Any]:
        return {column: row[column] for column in columns}

    for first, again in _twice(trial):
        trial.expect(of(first) == of(again), f"{of(first)} again, for {first['data'][:40]!r}", of(again))
