"""What a run emits: that it begins, and each of its steps."""

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
"""What is emitted of a task, where it is known."""


def emitting_begin(begin: Callable[Concatenate[Flow, P], Receive]) -> Callable[Concatenate[Flow, P], Receive]:
    """Have `begin` emit that a run begins. In a trace this is the root of all that the run does."""

    @wraps(begin)
    def emitted(flow: Flow, /, *args: P.args, **kwargs: P.kwargs) -> Receive:
        export()
        known = {name: kwargs[name] for name in ("run_id", "origin")}
        with span("begin", flow.pipeline, producer=flow.producer, **known) as event:
            receive = begin(flow, *args, **kwargs)
            event.add(receive_id=receive.receive_id, demand=receive.demand)
            return receive

    return emitted


@contextmanager
def emitting(name: str, flow: Flow, receive: Receive, **fields: Any) -> Iterator[Span]:
    """Emit a step of a receive, which is entered."""
    export()
    known: dict[str, str | Origin] = {one: getattr(receive, one) for one in ("receive_id", "run_id", "origin")}
    known["producer"] = receive.producer
    with within(receive.traceparent), about(**known), span(name, flow.pipeline, **fields) as event:
        yield event


def add_counts(event: Span, name: str, manifest: Manifest) -> None:
    """Add what a step's manifest counts, and each of its tasks."""
    counts = {one: manifest.total(one) for one in EVENTS[name].stop if one not in ("tasks", "staged")}
    if "staged" in EVENTS[name].stop:
        noted = (item for notes in manifest.notes for item in notes.items())
        counts["staged"] = sum(count for one, count in noted if one.startswith("staged:"))
    event.add(**counts, tasks=tasks_of(manifest))


def tasks_of(manifest: Manifest) -> Sequence[dict[str, Any]]:
    """What the tasks of a step say of themselves: when each began, how long it took, what it counted."""
    return [{name: notes[name] for name in _COUNTED if name in notes} for notes in manifest.notes if "began" in notes]
