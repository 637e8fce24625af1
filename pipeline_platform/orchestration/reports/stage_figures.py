"""Figures of the stages of a pipeline, and the latency of its messages, as metadata of the asset `messages`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, NamedTuple

import dagster as dg

from pipeline_platform.lake.decisions.ledger import Receive
from pipeline_platform.run.flow import Flow

STAGES = "stages"
"""Name of the metadata with the figures of stages."""
SHARES = (0.5, 0.95, 0.99)
"""Percentiles of the latency that are shown."""


@dataclass
class StageFigures:
    """Figures of a stage (`receive`, `handle` or `batch-<batcher>`) or of a sample (`type-<type>`) over some receives.

    Attributes:
        receives: Receives in which the stage had messages.
        messages: Messages that it received, handled or batched.
        batches: Batches that it handled.
        seconds: Duration of the stage, summed over receives.
        task_seconds: Duration of its tasks.
    """

    receives: int = 0
    messages: int = 0
    batches: int = 0
    seconds: float = 0.0
    task_seconds: float = 0.0

    def add(self, other: StageFigures) -> None:
        """Add the figures of further receives."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


def stages_of(flow: Flow, receive: Receive) -> dict[str, StageFigures]:
    """Return the figures of each stage that a receive has passed."""
    found = {}
    for stage in ("receive", "handle", *(f"batch-{name}" for name in flow.pipeline.batchers)):
        manifest = flow.ledger.manifest(receive, stage)
        if not manifest.reports:
            continue
        counts, is_batcher = manifest.totals.counts(), stage.startswith("batch-")
        outcomes = sum(counts[name] for name in ("handled", "skipped", "failed", "returned"))
        messages = counts["received"] or outcomes + counts["staged"] + counts["duplicates"]
        seconds = sum(report.seconds for report in manifest.reports if report.step)
        tasks = sum(report.seconds for report in manifest.reports if not report.step)
        found[stage] = StageFigures(1, messages, counts["batches"] if is_batcher else 0, seconds, tasks)
    handled = flow.ledger.manifest(receive, "handle")  # a batcher without a callback has no step
    for kind, messages in handled.totals.timed.items():
        found[f"type-{kind}"] = StageFigures(1, messages, task_seconds=handled.totals.timed_s[kind])
    tables = {f"batch-{name}": handled.rows(name) for name in flow.pipeline.batchers}
    return {stage: StageFigures(1, rows) for stage, rows in tables.items() if rows} | found


def percentile(latency: Mapping[float, int], share: float) -> float | None:
    """Return the latency that a share of the messages does not exceed; None without messages."""
    seconds, wanted = sorted(latency), share * sum(latency.values())
    sums = accumulate(latency[second] for second in seconds)
    return next((second for second, messages in zip(seconds, sums, strict=True) if messages >= wanted), None)


def latency_name(share: float) -> str:
    """Return the name of the metadata with a percentile of the latency."""
    return f"latency p{share * 100:g}, seconds"


def metadata_of_stages(stages: Mapping[str, StageFigures], latency: Mapping[float, int]) -> dict[str, Any]:
    """Return mean seconds of each stage per receive and latency percentiles, which Dagster plots, and all figures."""
    timed = {stage: each for stage, each in stages.items() if each.seconds}
    seconds = {f"seconds: {stage}": round(each.seconds / each.receives, 3) for stage, each in timed.items()}
    shown = {latency_name(share): percentile(latency, share) for share in SHARES}
    rounded = {stage: {name: round(value, 3) for name, value in asdict(each).items()} for stage, each in stages.items()}
    return {
        **seconds,
        **slowest(stages),
        **(shown if latency else {}),
        **({STAGES: dg.MetadataValue.json(rounded)} if rounded else {}),
    }


def slowest(stages: Mapping[str, StageFigures]) -> dict[str, str]:
    """Return the batcher with the highest mean time of a batch, and the type of messages with that of a message.

    Without batches or with a single type, it is left out.
    """
    of_batch = {name: each.task_seconds / each.batches for name, each in stages.items() if each.batches}
    of_type = {name: each.task_seconds / each.messages for name, each in stages.items() if name.startswith("type-")}
    shown = {}
    for what, prefix, unit, means in (
        ("slowest batcher", "batch-", "batch", of_batch),
        ("slowest message type", "type-", "message", of_type if len(of_type) > 1 else {}),
    ):
        if means:
            name = max(means, key=means.__getitem__)
            shown[what] = f"{name.removeprefix(prefix)}: {means[name]:.3g} s a {unit}"
    return shown


class Report(NamedTuple):
    """A report of one receive, or of the rounds since the last report, for one window.

    Attributes:
        at: Its time.
        receive_id: Its last receive; reports of several windows of a run have the same.
        received: Messages that were received in the window.
        failed: Messages that failed in the window.
        stages: Figures by stage.
        latency: Percentiles; empty if unknown, for example of a retry.
    """

    at: datetime
    receive_id: str
    received: int
    failed: int
    stages: Mapping[str, StageFigures]
    latency: tuple[float, ...]


def report_of(timestamp: float, metadata: Mapping[str, Any]) -> Report:
    """Return the report in the metadata of a materialisation of `messages`."""
    values = {name: value.value for name, value in metadata.items()}
    stages = {name: StageFigures(**figures) for name, figures in values.get(STAGES, {}).items()}
    latency = tuple(values[name] for share in SHARES if (name := latency_name(share)) in values)
    at = datetime.fromtimestamp(timestamp, UTC)
    return Report(at, values.get("receive_id", ""), values.get("received", 0), values.get("failed", 0), stages, latency)


def sum_of_stages(reports: Iterable[Report]) -> dict[str, StageFigures]:
    """Return the sums of the figures of reports by stage."""
    sums: dict[str, StageFigures] = defaultdict(StageFigures)
    for report in reports:
        for name, figures in report.stages.items():
            sums[name].add(figures)
    return sums
