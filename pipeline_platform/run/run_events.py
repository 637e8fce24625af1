"""Telemetry of a run: its start and its steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from pipeline_platform.lake.ledger import Origin, Receive
from pipeline_platform.lake.manifest import Manifest
from pipeline_platform.model.events import EVENTS
from pipeline_platform.run.flow import Flow
from pipeline_platform.telemetry.configuration import export
from pipeline_platform.telemetry.spans import Span, about, span
from pipeline_platform.telemetry.tracing import within

P = ParamSpec("P")

_COUNTED = ("began", "seconds", "task", "received", "batches", "handled", "failed", "returned", "acknowledged")
"""Fields to emit about a task, if they are known."""


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
    counts = {key: manifest.total(key) for key in EVENTS[name].stop if key not in ("tasks", "staged")}
    if "staged" in EVENTS[name].stop:
        noted = (item for notes in manifest.notes for item in notes.items())
        counts["staged"] = sum(count for key, count in noted if key.startswith("staged:"))
    event.add(**counts, tasks=tasks_of(manifest))


def tasks_of(manifest: Manifest) -> Sequence[dict[str, Any]]:
    """Return the start, duration and counts of each task of a step."""
    return [{name: notes[name] for name in _COUNTED if name in notes} for notes in manifest.notes if "began" in notes]
