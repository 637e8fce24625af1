"""Telemetry of a run: its start and its steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from pipeline_platform.lake.decisions.ledger import Origin, Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.lake.task_report import TaskReport
from pipeline_platform.model.events import EVENTS
from pipeline_platform.run.flow import Flow
from pipeline_platform.telemetry.configuration import export
from pipeline_platform.telemetry.spans import Span, about, span
from pipeline_platform.telemetry.tracing import within

P = ParamSpec("P")

_COUNTED = ("received", "batches", "handled", "skipped", "failed", "returned", "acknowledged")
"""Counts to emit about a task that are not zero."""


def emitting_begin(begin: Callable[Concatenate[Flow, P], Receive]) -> Callable[Concatenate[Flow, P], Receive]:
    """Wrap `begin` to emit the start of a run: the root span of the run's trace."""

    @wraps(begin)
    def emitted(flow: Flow, /, *args: P.args, **kwargs: P.kwargs) -> Receive:
        export()
        known = {name: kwargs[name] for name in ("run_id", "origin")}
        with span("begin", flow.pipeline, producer=flow.producer.name, **known) as event:
            receive = begin(flow, *args, **kwargs)
            event.add(receive_id=receive.receive_id, demand=receive.demand)
            return receive

    return emitted


@contextmanager
def emitting(name: str, flow: Flow, receive: Receive, **fields: Any) -> Iterator[Span]:
    """Emit a step of a receive, as a span that is current in the block."""
    export()
    known: dict[str, str | Origin] = {key: getattr(receive, key) for key in ("receive_id", "run_id", "origin")}
    known["producer"] = receive.producer
    with within(receive.traceparent), about(**known), span(name, flow.pipeline, **fields) as event:
        yield event


def add_counts(event: Span, name: str, manifest: Manifest) -> None:
    """Add the counts of a step's manifest and of each of its tasks."""
    counts = manifest.totals.counts()
    event.add(**{key: counts[key] for key in EVENTS[name].stop if key != "tasks"}, tasks=tasks_of(manifest))


def tasks_of(manifest: Manifest) -> Sequence[dict[str, Any]]:
    """Return the start, duration and counts of each task of a step."""
    return [_counts_of(report) for report in manifest.reports if report.began is not None]


def _counts_of(task: TaskReport) -> dict[str, Any]:
    counts = {name: count for name, count in task.counts().items() if count and name in _COUNTED}
    return {"task": task.task, "began": task.began, "seconds": task.seconds, **counts}
