"""Trace context as text, so that the steps of a run belong to one trace across processes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def traceparent() -> str:
    """Return the W3C `traceparent` of the current span; empty without tracing."""
    if "opentelemetry.trace" not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


@contextmanager
def within(parent: str) -> Iterator[None]:
    """Make spans that start inside the context children of a `traceparent`; an empty one has no effect."""
    if not parent:
        yield
        return
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:  # workers may lack it
        yield
        return
    token = context.attach(TraceContextTextMapPropagator().extract({"traceparent": parent}))
    try:
        yield
    finally:
        context.detach(token)
