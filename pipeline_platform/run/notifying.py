"""Calls of the pipeline's own `acknowledge` for decided messages, before they are acknowledged."""

from typing import NamedTuple

from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange, divide, whole
from pipeline_platform.lake.rewriting import DROPPED
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common, intake_of
from pipeline_platform.tasks.notify_author import ROWS, NotifyAuthor, Stretch, not_taken_table

NOTIFIED = "heard"
"""Step of a receive whose manifest has the positions that `acknowledge` was notified of."""


class NotTaken(NamedTuple):
    """Messages that `acknowledge` could not be notified of.

    Attributes:
        messages: Number of messages.
        rows: Files with their ids; see `tasks.notify_author.NOT_TAKEN`.
        errors: Sample of the errors that it raised.
        written: Manifest of the tasks; empty if there were no messages to notify of.
    """

    messages: int = 0
    rows: tuple[RowRange, ...] = ()
    errors: tuple[str, ...] = ()
    written: Manifest = Manifest()


def waits(flow: Flow, receive: Receive) -> bool:
    """Whether a decided receive has messages that `acknowledge` was not notified of."""
    if flow.pipeline.acknowledge is Pipeline.acknowledge or not intake_of(flow, receive).is_outside:
        return False
    if not flow.ledger.manifest(receive).of_table("outcomes"):
        return False
    before = flow.ledger.manifest(receive, NOTIFIED)
    return not before.notes or before.total("unheard") > 0


def notify(flow: Flow, receive: Receive) -> NotTaken:
    """Notify `acknowledge` of the remaining messages of a decided receive, and store their positions.

    If the run crashes before they are stored, `acknowledge` is notified again.
    """
    if not waits(flow, receive):
        return NotTaken()
    manifest, before = flow.ledger.manifest(receive), flow.ledger.manifest(receive, NOTIFIED)
    name, spans = flow.pipeline.name, _spans(before)
    all_decided = not any(manifest.total(others) for others in ("returned", "duplicates", DROPPED))
    outcomes = [] if all_decided else whole(manifest.of_table("outcomes"), name)
    failed = whole(manifest.of_table("failed"), name)
    files = manifest.of_table("messages")
    calls = -(-sum(file.rows for file in files) // ROWS)
    parts = divide(files, name, min(calls, flow.processors.concurrency))
    task = NotifyAuthor(**common(flow, receive), parts=parts, outcomes=outcomes, failed=failed, before=spans)
    written = flow.work(receive.receive_id, NOTIFIED).run(task, len(parts))
    flow.ledger.write(receive, NOTIFIED, Manifest(written.files, [{"heard": spans}, *written.notes]))
    rows = whole(written.of_table(not_taken_table(receive.receive_id)), name)
    errors = tuple(why for notes in written.notes for why in notes.get("unheard_why", []))
    return NotTaken(written.total("unheard"), tuple(rows), errors, written)


def _spans(manifest: Manifest) -> dict[str, list[Stretch]]:
    """Return the positions that `acknowledge` was notified of by `ack_ref`, as merged ranges."""
    found: dict[str, list[Stretch]] = {}
    for notes in manifest.notes:
        for ack_ref, spans in notes.get("heard", {}).items():
            found.setdefault(ack_ref, []).extend((first, end) for first, end in spans)
    merged: dict[str, list[Stretch]] = {}
    for ack_ref, spans in found.items():
        joined = merged[ack_ref] = list[Stretch]()
        for first, end in sorted(spans):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((first, end))
    return merged
