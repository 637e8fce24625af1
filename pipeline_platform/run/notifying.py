"""The pipeline's own `acknowledge`: notified of what is decided before that is acknowledged, and of nothing twice."""

from typing import NamedTuple

from pipeline_platform.lake.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange, divide, whole
from pipeline_platform.lake.rewriting import DROPPED
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common, intake_of
from pipeline_platform.tasks.acknowledge.notify_author import ROWS, NotifyAuthor, Stretch, not_taken_table

NOTIFIED = "heard"
"""A step of a receive: of which positions `acknowledge` was notified."""


class NotTaken(NamedTuple):
    """The messages of which `acknowledge` could not be notified.

    Attributes:
        messages: How many.
        rows: Where their ids lie; see `tasks.acknowledge.notify_author.NOT_TAKEN`.
        errors: A sample of what it raised, in words.
        written: What the tasks wrote; empty if there was nothing to notify of.
    """

    messages: int = 0
    rows: tuple[RowRange, ...] = ()
    errors: tuple[str, ...] = ()
    written: Manifest = Manifest()


def waits(flow: Flow, receive: Receive) -> bool:
    """Whether a decided receive has messages of which `acknowledge` was not notified."""
    if flow.pipeline.acknowledge is Pipeline.acknowledge or not intake_of(flow, receive).is_outside:
        return False
    if not flow.ledger.manifest(receive).of_table("outcomes"):
        return False
    before = flow.ledger.manifest(receive, NOTIFIED)
    return not before.notes or before.total("unheard") > 0


def notify(flow: Flow, receive: Receive) -> NotTaken:
    """Notify `acknowledge` of the messages that a decided receive has left, and write down which they were.

    A run that dies before that is written notifies of them again.
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
    """The positions of which it was notified, by `ack_ref`, neighbours put together."""
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
