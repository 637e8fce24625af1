"""The life of one message: each delivery, what came of it, and what holds it now."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

import polars as pl
import pyarrow as pa

from pipeline_platform.lake.failure_events import rank
from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.reader import rows_with, scan
from pipeline_platform.lake.tables import FAILED, Table
from pipeline_platform.model.message import MESSAGES
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.receive_state import ReceiveState

Row = dict[str, Any]


@dataclass
class Held:
    """The receive of a delivery that is not finished.

    Attributes:
        phase: How far it is, as `Phase` has it, in small letters.
        started_at: When it began.
        lease_until: Until when its run's claim counts; None where no run renews it: the next run finishes it, or gives
            it up.
    """

    phase: str
    started_at: datetime
    lease_until: datetime | None


@dataclass
class Delivery:
    """One receive of a message.

    Attributes:
        receive_id: Which.
        source: Its source; ids are unique per source.
        window: Where it belongs.
        attempt: 1, and one more for each retry.
        received: Of the table `messages`: when it was published and received, partition, sequence, metadata; None for
            a replay, and once retention took that.
        redelivered: Whether the source marked it, and an earlier delivery is known. Some sources mark every delivery.
        replayed_by: The receive of the latest replay, whose outcome, failures and rows replaced those of this one.
        outcome: `handled`, `failed`, `returned` or `duplicate`; None while it has none.
        action: What its source was answered for it.
        failures: Its events in `failed`, in order.
        rows: Its rows in the tables of batchers, each with the name of its `table`.
        run_id: Of the run that ended the receive or holds it; None where that is no longer remembered.
        acknowledged_at: When the receive ended; None before that, and where it is no longer remembered.
        held: The receive, as long as it is not finished.
    """

    receive_id: str
    source: str
    window: str
    attempt: int
    received: Row | None = None
    redelivered: bool = False
    replayed_by: str | None = None
    outcome: str | None = None
    action: str | None = None
    failures: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    run_id: str | None = None
    acknowledged_at: datetime | None = None
    held: Held | None = None


def trace(flow: Flow, message_id: str, source: str | None = None) -> list[Delivery]:
    """Tell the life of a message, from its first delivery that the lake remembers to what holds it now.

    Args:
        flow: The pipeline and its resources; no Spark is needed.
        message_id: As the source names it.
        source: Of a pipeline with several sources, the message's; None for any.

    Returns:
        Its deliveries, in order; none where it never came, waits at its source still, or is older than retention.

    Raises:
        ReceiveError: The record or a manifest of a receive that is under way cannot be read.
    """
    outcomes = _rows(flow.tables["outcomes"], message_id)
    # Published rows have an outcome in their window, as long as retention keeps that.
    windows = {row["window"] for row in outcomes} or None
    deliveries: dict[tuple[str, str], Delivery] = {}

    def delivery(row: Row) -> Delivery:
        known = Delivery(*(row[name] for name in ("receive_id", "source", "window", "attempt")))
        return deliveries.setdefault((known.receive_id, known.source), known)

    def arrived(row: Row) -> None:
        first, mine = row.pop("first_receive_id", None), delivery(row)
        if first is not None:
            is_decided, mine = mine.outcome is not None, delivery({**row, "receive_id": first})
            mine.replayed_by = row["receive_id"] if is_decided else mine.replayed_by
        mine.received = row

    for row in outcomes:
        one = delivery(row)
        one.outcome, one.action = row["outcome"], row["action"]
    for row in _rows(flow.tables["messages"], message_id, windows):
        arrived(row)
    for row in _in_order(_rows(flow.tables["failed"], message_id, windows)):
        delivery(row).failures.append(row)
    for name in flow.pipeline.batchers:
        for row in _rows(flow.tables[name], message_id, windows):
            delivery(row).rows.append({"table": name, **row})
    unfinished = {receive_id: ReceiveState(flow, receive_id) for receive_id in flow.ledger.unfinished()}
    for state in unfinished.values():
        for row in _received(flow, state.receive, message_id):
            arrived(row)
    leases = {one.receive_id: one.expires_at for one in flow.control.in_flight(flow.pipeline.name, of_all=True)}
    ended = flow.control.ended(flow.pipeline.name, receive_ids=[receive_id for receive_id, _ in deliveries])
    ends = {end.receive_id: end for end in ended}
    for one in deliveries.values():
        end, holder = ends.get(one.receive_id), unfinished.get(one.receive_id)
        if holder and (receive := holder.receive):
            one.run_id = receive.run_id
            one.held = Held(holder.phase.name.lower(), receive.started_at, leases.get(one.receive_id))
        elif end:
            one.run_id, one.acknowledged_at = end.run_id, end.ended_at
    return _sorted(one for one in deliveries.values() if source in (None, one.source))


def _sorted(deliveries: Iterable[Delivery]) -> list[Delivery]:
    """Sort deliveries of a message, and mark those that were redelivered."""
    mine = list(deliveries)
    mine.sort(key=lambda one: (one.source, one.attempt, str(one.received and one.received["received_at"])))
    for earlier, one in pairwise(mine):
        is_same = (earlier.source, earlier.attempt) == (one.source, one.attempt)
        one.redelivered = is_same and one.received is not None and one.received["redelivered"]
    return mine


def _rows(table: Table, message_id: str, windows: Iterable[str] | None = None) -> list[Row]:
    """The rows of a message, in some windows or in all, without its payload."""
    if not table.exists():
        return []
    with table.look() as handle:
        rows = scan(table.lake, handle)
        if windows is not None:
            rows = rows.filter(pl.col("window").is_in(list(windows)))
        if table.name in ("messages", "failed"):  # a batcher's own `data` is what came of it
            rows = rows.drop("data")
        return rows.filter(pl.col("message_id") == message_id).collect().to_dicts()


def _received(flow: Flow, receive: Receive | None, message_id: str) -> Iterator[Row]:
    """The rows of a message that a receive wrote down, and that no table may show yet."""
    if receive is None:  # finished since
        return
    columns = pa.schema([one for one in MESSAGES if one.name not in ("data", "window")])
    for file in flow.ledger.manifest(receive, "receive").of_table("messages"):
        for rows in rows_with(flow.lake, flow.tables["messages"].path(file.path), "message_id", message_id, columns):
            yield from ({**row, "window": file.window} for row in rows.to_pylist())


def _in_order(events: list[Row]) -> list[Row]:
    """Events of a message in the order in which they count."""
    ranks = rank(pa.Table.from_pylist(events, schema=FAILED)).to_pylist()
    return [event for _, event in sorted(zip(ranks, events, strict=True), key=lambda each: each[0])]
