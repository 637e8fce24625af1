"""History of a message: its deliveries with their results, and its current lease."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pydantic import Field

from pipeline_platform.cli.output import Output, Time
from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.failures.failure_events import rank
from pipeline_platform.lake.reader import rows_with, scan
from pipeline_platform.lake.tables import FAILED, Table
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import ReceiveState

_Row = dict[str, Any]


class Unfinished(Output):
    """An unfinished receive."""

    phase: str = Field(description="Phase: `begun`, `leased`, `handled`, `batched`, `decided` or `published`.")
    started_at: Time = Field(description="Start of the receive.")
    lease_until: Time | None = Field(description="End of its claim unless it is renewed. Null without an active run.")


class Delivery(Output, frozen=False):
    """A delivery of a message in a receive."""

    receive_id: str = Field(description="Id of the receive.")
    source: str = Field(description="Name of the source.")
    window: str = Field(description="Window of the message.")
    attempt: int = Field(description="1 for the first delivery, and one more for each retry.")
    received: _Row | None = Field(
        None, description="Its row in the table `messages`, without the payload. Null for a replay, or after retention."
    )
    redelivered: bool = Field(False, description="Whether the source marked it as redelivered after a known delivery.")
    replayed_by: str | None = Field(
        None, description="Receive of the replay that replaced its outcome, failures and rows."
    )
    outcome: str | None = Field(
        None, description="`handled`, `skipped`, `failed`, `returned`, `duplicate` or `erased`. Null if undecided."
    )
    action: str | None = Field(None, description="Ack action of the message.")
    failures: list[_Row] = Field([], description="Its events in the table `failed`, in order.")
    rows: list[_Row] = Field([], description="Its rows in the tables of batchers, each with its `table`.")
    run_id: str | None = Field(None, description="Run that finished the receive or works on it. Null if not recorded.")
    acknowledged_at: Time | None = Field(
        None, description="End of the receive. Null before its end, or if it is not recorded."
    )
    unfinished: Unfinished | None = Field(None, description="The receive. Null if it is finished.")


def deliveries_of(flow: Flow, message_id: str, source: str | None = None) -> list[Delivery]:
    """Return the recorded deliveries of a message, in order.

    Returns:
        The deliveries; empty if the message was not received yet, or is older than the retention.

    Raises:
        ReceiveError: The record or a manifest of an active receive is unreadable.
    """
    outcomes = _rows(flow.tables["outcomes"], message_id)
    # Published rows have an outcome in their window, as long as retention keeps that.
    windows = {row["window"] for row in outcomes} or None
    deliveries: dict[tuple[str, str], Delivery] = {}

    def delivery(row: _Row) -> Delivery:
        known = Delivery(**{name: row[name] for name in ("receive_id", "source", "window", "attempt")})
        return deliveries.setdefault((known.receive_id, known.source), known)

    def arrived(row: _Row) -> None:
        first, mine = row.pop("first_receive_id", None), delivery(row)
        if first is not None:
            is_decided, mine = mine.outcome is not None, delivery({**row, "receive_id": first})
            mine.replayed_by = row["receive_id"] if is_decided else mine.replayed_by
        mine.received = row

    for row in outcomes:
        decided = delivery(row)
        decided.outcome, decided.action = row["outcome"], row["action"]
    for row in _rows(flow.tables["messages"], message_id, windows):
        arrived(row)
    for row in _in_order(_rows(flow.tables["failed"], message_id, windows)):
        delivery(row).failures.append(row)
    for name in flow.pipeline.batchers_with_tables():
        for row in _rows(flow.tables[name], message_id, windows):
            delivery(row).rows.append({"table": name, **row})
    unfinished = {receive_id: ReceiveState(flow, receive_id) for receive_id in flow.ledger.unfinished()}
    for state in unfinished.values():
        for row in _received(flow, state.receive, message_id):
            arrived(row)
    claims = flow.control.in_flight(flow.pipeline.name, of_all=True)
    leases = {claim.receive_id: claim.expires_at for claim in claims}
    ended = flow.control.ended(flow.pipeline.name, receive_ids=[receive_id for receive_id, _ in deliveries])
    ends = {end.receive_id: end for end in ended}
    for known in deliveries.values():
        end, holder = ends.get(known.receive_id), unfinished.get(known.receive_id)
        if holder and (receive := holder.receive):
            known.run_id = receive.run_id
            phase, until = holder.phase.name.lower(), leases.get(known.receive_id)
            known.unfinished = Unfinished(phase=phase, started_at=receive.started_at, lease_until=until)
        elif end:
            known.run_id, known.acknowledged_at = end.run_id, end.ended_at
    return _sorted(known for known in deliveries.values() if source in (None, known.source))


def _sorted(deliveries: Iterable[Delivery]) -> list[Delivery]:
    """Sort deliveries of a message, and mark redeliveries."""
    mine = list(deliveries)
    mine.sort(key=lambda each: (each.source, each.attempt, str(each.received and each.received["received_at"])))
    for earlier, later in pairwise(mine):
        is_same = (earlier.source, earlier.attempt) == (later.source, later.attempt)
        later.redelivered = is_same and later.received is not None and later.received["redelivered"]
    return mine


def _rows(table: Table, message_id: str, windows: Iterable[str] | None = None) -> list[_Row]:
    """Return the rows of a message without its payload, in some windows or in all."""
    if not table.exists():
        return []
    import polars as pl

    with table.look() as handle:
        rows = scan(table.lake, handle)
        if windows is not None:
            rows = rows.filter(pl.col("window").is_in(list(windows)))
        if table.name in ("messages", "failed"):  # the `data` of a batcher is a result, not the payload
            rows = rows.drop("data")
        return rows.filter(pl.col("message_id") == message_id).collect().to_dicts()


def _received(flow: Flow, receive: Receive | None, message_id: str) -> Iterator[_Row]:
    """Yield the rows of a message in an unfinished receive, which may not be published yet."""
    if receive is None:  # finished meanwhile
        return
    columns = pa.schema([column for column in MESSAGES if column.name not in ("data", "window")])
    for file in flow.ledger.manifest(receive, "receive").of_table("messages"):
        for rows in rows_with(flow.lake, flow.tables["messages"].path(file.path), "message_id", message_id, columns):
            yield from ({**row, "window": file.window} for row in rows.to_pylist())


def _in_order(events: list[_Row]) -> list[_Row]:
    ranks = rank(pa.Table.from_pylist(events, schema=FAILED)).to_pylist()
    return [event for _, event in sorted(zip(ranks, events, strict=True), key=lambda each: each[0])]
