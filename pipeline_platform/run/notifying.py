"""Calls of the pipeline's own `acknowledge` for decided messages, before they are acknowledged."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.reader import RowRange, divide, whole
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.lake.writer import FILTERED_TABLE
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common, intake_of
from pipeline_platform.tasks.notify_author import NOT_TAKEN_TABLE, ROWS, NotifyAuthor, Stretch

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


def waits(flow: Flow, receive: Receive, manifest: Manifest) -> bool:
    """Whether a decided receive has messages that `acknowledge` was not notified of."""
    if flow.pipeline.acknowledge is Pipeline.acknowledge or not intake_of(flow, receive).is_outside:
        return False
    is_first = not any(report.step == NOTIFIED for report in manifest.reports)
    return bool(manifest.of_table("outcomes")) and (is_first or manifest.totals.not_taken > 0)


def notify(flow: Flow, receive: Receive, manifest: Manifest) -> NotTaken:
    """Notify `acknowledge` of the remaining messages of a decided receive, and store their positions.

    If the run crashes before they are stored, `acknowledge` is notified again.
    """
    if not waits(flow, receive, manifest):
        return NotTaken()
    name, totals = flow.pipeline.name, manifest.totals
    notified = _merged(totals.notified)
    all_decided = not (totals.returned.total() or totals.duplicates.total() or totals.dropped)
    outcomes = [] if all_decided else whole(manifest.of_table("outcomes"), name)
    failed, filtered = whole(manifest.of_table("failed"), name), whole(manifest.staged(FILTERED_TABLE), name)
    files = manifest.of_table("messages")
    messages = sum(file.rows for file in files)
    calls = -(-messages // ROWS)
    parts = divide(files, name, min(calls, flow.processors.concurrency))
    task = NotifyAuthor(
        **common(flow, receive), parts=parts, outcomes=outcomes, failed=failed, filtered=filtered, before=notified
    )
    written = flow.work(receive.receive_id, NOTIFIED).run(task, len(parts), messages)
    whole_step = TaskReport(step=NOTIFIED, notified=notified)
    flow.ledger.write(receive, NOTIFIED, Manifest(written.files, [whole_step, *written.reports]))
    not_taken = whole(written.staged(NOT_TAKEN_TABLE), name)
    return NotTaken(written.totals.not_taken, tuple(not_taken), tuple(written.totals.errors), written)


def _merged(notified: Mapping[str, Sequence[Stretch]]) -> dict[str, list[Stretch]]:
    """Return ranges of positions by `ack_ref`, with adjoining ranges merged."""
    merged: dict[str, list[Stretch]] = {}
    for ack_ref, ranges in notified.items():
        joined = merged[ack_ref] = list[Stretch]()
        for first, end in sorted(ranges):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((first, end))
    return merged
