"""Dead messages, sent to another source: the original payload, labelled with where it failed and why."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pyarrow.compute as pc

from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import only, read_ranges, whole
from pipeline_platform.lake.tables import FAILED
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.patience import patiently

AT_ONCE = 100
"""Messages that are sent before it is written down that they were: that many may be sent twice."""

SENT = "letters"
"""A step of a receive that has sent dead letters: how many."""

_LABELS = ("source", "message_id", "stage", "kind", "reason")
_LABEL = 500
"""Characters of a label: a broker takes few bytes beside a payload."""


class Letters(NamedTuple):
    """What became of the dead messages of a receive.

    Attributes:
        sent: Those that were sent now.
        unsent: Those that are left for the next run.
        error: Why, in words.
    """

    sent: int = 0
    unsent: int = 0
    error: str | None = None


def send(flow: Flow, receive: Receive, manifest: Manifest) -> Letters:
    """Send what a decided receive recorded as dead, each at least once, and go on where an earlier try stopped.

    An error is returned, never raised: the messages are in `failed` in any case.
    """
    target, dead, before = flow.dead_letters, manifest.total("dead"), manifest.total(SENT)
    if target is None or not dead:
        return Letters()
    sent = before
    try:
        for payloads, labels in _dead(flow, manifest, before):
            said = [target.labelled(one) for one in labels]
            metadata = said if any(said) else None
            patiently(partial(target.send, payloads, metadata), target.patience)
            sent += len(payloads)
            flow.ledger.write(receive, SENT, Manifest(notes=[{SENT: sent}]))
    except Exception as error:  # whatever a connector raises, what was decided is acknowledged
        said_so = f"dead letters to {target.name}: {type(error).__name__}: {error}"
        return Letters(sent - before, max(1, dead - sent), said_so)
    return Letters(sent - before)


def _dead(flow: Flow, manifest: Manifest, skip: int) -> Iterator[tuple[list[bytes], list[dict[str, str]]]]:
    """The dead messages of a receive, some at a time, but for the first ones: payloads and labels."""
    columns = only(FAILED, "state", "data", "attempt", *_LABELS)
    for _, rows in read_ranges(flow.lake, whole(manifest.of_table("failed"), flow.pipeline.name), columns, AT_ONCE):
        dead = rows.filter(pc.equal(rows.column("state"), "dead"))
        left = dead.slice(skip)
        skip = max(0, skip - dead.num_rows)
        if left.num_rows:
            payloads = [data or b"" for data in left.column("data").to_pylist()]
            yield payloads, [_labels(flow.pipeline.name, row) for row in left.drop_columns("data").to_pylist()]


def _labels(pipeline: str, row: dict[str, Any]) -> dict[str, str]:
    """What every broker takes as text: of one line, and not empty."""
    values = {"pipeline": pipeline, **{name: row[name] for name in _LABELS}, "attempts": str(row["attempt"])}
    plain = {name: "".join(c if c.isprintable() else " " for c in value or "") for name, value in values.items()}
    return {name: text[:_LABEL] for name, text in plain.items() if text.strip()}
