"""Messages that are redelivered again and again, because each run returns them to the source."""

from collections import Counter
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline_platform.lake.reader import only, row_groups, rows_with
from pipeline_platform.lake.tables import OUTCOMES, Table

WINDOWS = 48
"""Number of newest windows with outcomes to search: a message that is always returned appears in them."""


class ComingBack(NamedTuple):
    """Messages returned at least twice, the greatest number of returns of a message, and the oldest window."""

    messages: int
    deliveries: int
    oldest: str


def coming_back(outcomes: Table) -> ComingBack | None:
    """Return undecided messages that were returned at least twice in the newest windows, or None."""
    if not outcomes.exists():
        return None
    with outcomes.look() as handle:
        files = outcomes.files(handle)
    newest = set(sorted({file.window for file in files})[-WINDOWS:])
    files = sorted((file for file in files if file.window in newest), key=lambda file: file.window)
    columns, times, first = only(OUTCOMES, "message_id", "outcome"), Counter[str](), dict[str, str]()
    for file in files:
        for rows in rows_with(outcomes.lake, outcomes.path(file.path), "outcome", "returned", columns):
            for message_id in rows["message_id"].to_pylist():
                times[message_id] += 1
                first.setdefault(message_id, file.window)
    again = {message_id for message_id, count in times.items() if count > 1}
    for file in files if again else ():
        for rows in row_groups(outcomes.lake, outcomes.path(file.path), columns):
            is_returned = pc.is_in(rows["message_id"], pa.array(list(again), pa.string()))
            is_decided = pc.is_in(rows["outcome"], pa.array(["handled", "failed"]))
            again -= set(rows.filter(pc.and_(is_returned, is_decided))["message_id"].to_pylist())
    if not again:
        return None
    return ComingBack(len(again), max(times[id_] for id_ in again), min(first[id_] for id_ in again))
