"""Dead letters: the original payloads of dead messages, sent to another source with labels about the failure."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pyarrow.compute as pc

from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import only, read_ranges, whole
from pipeline_platform.lake.tables import FAILED
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.message import MESSAGE_KEY
from pipeline_platform.run.flow import Flow
from pipeline_platform.source.patience import patiently

AT_ONCE = 100
"""Messages per call of the source. After a crash, that many may be sent twice."""

SENT = "letters"
"""Step of a receive whose manifest has the number of dead letters sent."""

_LABELS = (*MESSAGE_KEY, "stage", "kind", "reason")
_LABEL = 500
"""Maximum characters of a label: brokers limit the size of metadata."""


class Letters(NamedTuple):
    """Result of sending the dead letters of a receive.

    Attributes:
        sent: Letters sent by this call.
        unsent: Letters left to the next run.
        error: Reason for which letters are left.
    """

    sent: int = 0
    unsent: int = 0
    error: str | None = None


def send_dead_letters(flow: Flow, receive: Receive, manifest: Manifest) -> Letters:
    """Send the dead messages of a decided receive, each at least once. Continue where an earlier attempt stopped.

    Errors are returned, not raised: the messages are in `failed` in any case.
    """
    target, dead, before = flow.dead_letters, manifest.totals.dead, manifest.totals.letters
    if target is None or not dead:
        return Letters()
    sent = before
    try:
        for payloads, labels in _dead(flow, manifest, before):
            labelled = [target.labelled(label) for label in labels]
            metadata = labelled if any(labelled) else None
            patiently(partial(target.send, payloads, metadata), target.patience)
            sent += len(payloads)
            flow.ledger.write(receive, SENT, Manifest(reports=[TaskReport(letters=sent)]))
    except Exception as error:  # connectors may raise anything, and decided messages are acknowledged in any case
        reason = f"dead letters to {target.name}: {type(error).__name__}: {error}"
        return Letters(sent - before, max(1, dead - sent), reason)
    return Letters(sent - before)


def _dead(flow: Flow, manifest: Manifest, skip: int) -> Iterator[tuple[list[bytes], list[dict[str, str]]]]:
    """Yield payloads and labels of the dead messages of a receive, in portions, without the first `skip` messages."""
    columns = only(FAILED, "state", "data", "attempt", *_LABELS)
    for _, rows in read_ranges(flow.lake, whole(manifest.of_table("failed"), flow.pipeline.name), columns, AT_ONCE):
        dead = rows.filter(pc.equal(rows.column("state"), "dead"))
        left = dead.slice(skip)
        skip = max(0, skip - dead.num_rows)
        if left.num_rows:
            payloads = [data or b"" for data in left.column("data").to_pylist()]
            yield payloads, [_labels(flow.pipeline.name, row) for row in left.drop_columns("data").to_pylist()]


def _labels(pipeline: str, row: dict[str, Any]) -> dict[str, str]:
    """Return labels that every broker accepts as text: single lines that are not empty."""
    values = {"pipeline": pipeline, **{name: row[name] for name in _LABELS}, "attempts": str(row["attempt"])}
    plain = {name: "".join(c if c.isprintable() else " " for c in value or "") for name, value in values.items()}
    return {name: text[:_LABEL] for name, text in plain.items() if text.strip()}
