"""Handling of received messages, by callbacks in Python or a query in Spark."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline_platform.control.pace import Pace
from pipeline_platform.lake.decisions.decision import state_of
from pipeline_platform.lake.decisions.ledger import Receive, ReceiveError
from pipeline_platform.lake.failures.failed import FailedMessages
from pipeline_platform.lake.manifest import File, Manifest
from pipeline_platform.lake.reader import RowRange, between, divide, spread, whole
from pipeline_platform.lake.tables import DECIDED
from pipeline_platform.lake.task_report import earliest
from pipeline_platform.run.flow import Flow
from pipeline_platform.run.intake import common, intake_of
from pipeline_platform.run.receive_state import ReceiveState
from pipeline_platform.run.work.spark_lane import SparkLane
from pipeline_platform.tasks.handle.handle_messages import Handle
from pipeline_platform.tasks.handle.in_order import FOUND_TABLE, DealPartitions, FindPartitions, HandleInOrder
from pipeline_platform.tasks.handle.repeats import FindRepeats

CLOCKS = timedelta(minutes=15)
"""Maximum lag of a run's clock behind the source's clock. AWS refuses requests with a larger difference."""

_FEW_FILES, _FEW_OUTCOMES = 100, 1_000_000
"""Most files and outcomes in which the run's process looks for redeliveries. More are read in Spark, in parallel."""
_WAITED = 0.1
"""Share of waiting time below which tasks, not permits, limit the speed."""


def handle(flow: Flow, receive: Receive, received: Manifest) -> Manifest:
    """Handle the received messages of a manifest, and return the manifest of the written files."""
    files = received.of_table("messages")
    repeats = _look_up(flow, receive, files, _oldest(received)) if received.totals.redelivered else []
    if flow.pipeline.uses_columns():
        return SparkLane(flow, receive, files, repeats).handle(max(report.largest for report in received.reports))
    pace = flow.pace(receive.receive_id if intake_of(flow, receive).gives_back else None)
    if flow.pipeline.partitioning() is not None:
        return _in_order(flow, receive, files, repeats, pace)
    received_rows = whole(files, flow.pipeline.name)
    work = flow.work(receive.receive_id, "handle")

    def step(first: int, end: int) -> Manifest:
        parts = spread(between(received_rows, first, end), flow.processors.concurrency)
        task = Handle(**common(flow, receive), parts=parts, pace=pace, repeats=repeats)
        return work.run(task, len(parts), end - first)

    messages = sum(file.rows for file in files)
    # Repeats need no permits: a receive of repeats only must not wait for permits.
    return step(0, messages) if repeats else in_portions(pace, messages, step)


def _in_order(flow: Flow, receive: Receive, files: Sequence[File], repeats: Sequence[RowRange], pace: Pace) -> Manifest:
    name, receive_id, concurrency = flow.pipeline.name, receive.receive_id, flow.processors.concurrency
    work, parts = flow.work(receive_id, "handle"), divide(files, name, concurrency)
    find = FindPartitions(**common(flow, receive), parts=parts, repeats=repeats)
    manifest = work.run(find, len(parts), sum(file.rows for file in files))
    found = manifest.staged(FOUND_TABLE)
    manifest = Manifest([file for file in manifest if file not in found], manifest.reports)
    if not found:
        return manifest
    messages = sum(file.rows for file in found)
    # No other run of the pipeline handles these partitions now, so the open failures are those of earlier messages.
    failures = _open_failures(flow, receive) if flow.pipeline.holds_partitions() else None
    deal = DealPartitions(flow.lake, name, receive_id, divide(found, name, 1)[0], concurrency, failures)
    (plan,) = divide(work.run(deal, 1, messages).files, name, 1)

    stopped = dict[str, str]()

    def step(first: int, end: int) -> Manifest:
        given: dict[str, Any] = {
            "parts": divide(files, name, 1),
            "plan": plan,
            "turns": (first, end),
            "stopped": dict(stopped),
        }
        task = HandleInOrder(**common(flow, receive), **given, pace=pace)
        manifest = work.run(task, min(concurrency, messages), end - first)
        for report in manifest.reports:
            stopped.update(report.stopped)
            report.stopped = {}
        return manifest

    return manifest + in_portions(pace, messages, step)


def _open_failures(flow: Flow, receive: Receive) -> dict[str, list[str]]:
    """Return the files of `failed` in windows with open failures, also of decided receives that are not published."""
    failed = FailedMessages(name=flow.pipeline.name, lake=flow.lake, pipeline=flow.pipeline.name)
    unpublished = list[File]()
    for receive_id in {*flow.ledger.unfinished()} - {receive.receive_id}:
        with suppress(ReceiveError):  # a damaged receive must not keep runs from starting
            decided = ReceiveState(flow, receive_id).unfinished
            if decided and state_of(flow.tables["failed"], receive_id, decided) != DECIDED:
                unpublished += flow.ledger.manifest(decided).of_table("failed")
    everywhere = failed.paths() if unpublished else {}
    files = failed.open_files()  # after the paths: a file that is published in between is then added twice, not lost
    for file in unpublished:
        path = flow.tables["failed"].path(file.path)
        if path not in everywhere.get(file.window, []):  # another process may have published it meanwhile
            files.setdefault(file.window, everywhere.get(file.window, [])).append(path)
    return files


def in_portions(pace: Pace, messages: int, step: Callable[[int, int], Manifest]) -> Manifest:
    """Handle all messages in portions for which there are permits.

    A task that waits for a permit occupies a core of Spark; this process does not.
    """
    done, first, more = Manifest(), 0, 0
    while first < messages:
        before = pace.waited
        portion = pace.portion(messages - first)
        if pace.waited == before:
            portion = max(portion, more)
        end = min(first + portion, messages)
        manifest = step(first, end)
        took = sum(report.seconds for report in manifest.reports)
        # If tasks do not wait for permits, portions are unnecessary: make them larger.
        more = 2 * portion if manifest.totals.waited < _WAITED * took else 0
        if manifest.totals.released:  # later messages of a partition must not overtake released messages
            pace.end()
        first, done = end, done + manifest
    return done


def _look_up(flow: Flow, receive: Receive, files: Sequence[File], published: datetime | None) -> list[RowRange]:
    """Look up deliveries that were decided before, published at a time or later; return the files with the result."""
    pipeline, concurrency = flow.pipeline, flow.processors.concurrency
    # By the time of decision, not by window: a manual run may pull into an old window.
    now = datetime.now(UTC)
    oldest = now - max(producer.options.deduplicate_for for producer in flow.producer.each)
    if published is not None:  # no message is decided before it is published
        oldest = max(oldest, min(published, now) - CLOCKS)
    outcomes = flow.tables["outcomes"]
    with outcomes.look() as handle:
        stored = [file for file in outcomes.files(handle) if file.committed_at >= oldest]
    known = [RowRange(outcomes.path(file.path), file.window, 0, file.rows, 0) for file in stored]
    is_quick = len(known) <= _FEW_FILES and sum(file.rows for file in stored) <= _FEW_OUTCOMES
    parts = [known] if is_quick else spread(known, concurrency)
    messages, received = sum(file.rows for file in files), whole(files, pipeline.name)
    receive_id = receive.receive_id
    find = FindRepeats(flow.lake, pipeline.name, receive_id, receive.window, received, parts)
    found = flow.work(receive_id, "handle").run(find, len(find.known), messages if is_quick else None)
    return whole(found.files, pipeline.name)


def _oldest(received: Manifest) -> datetime | None:
    """Return the publication time of the oldest redelivered message; None if the source does not report it."""
    return earliest([report.redelivered_since for report in received.reports if report.redelivered])
