"""Trace context as text: with it the steps of a run, in whatever process, belong to one trace."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def traceparent() -> str:
    """The W3C `traceparent` of what is under way here; empty where nobody traces."""
    if "opentelemetry.trace" not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


@contextmanager
def within(parent: str) -> Iterator[None]:
    """Have spans that begin meanwhile be children of a `traceparent`; an empty one changes nothing."""
    if not parent:
        yield
        return
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:  # workers may do without it
        yield
        return
    token = context.attach(TraceContextTextMapPropagator().extract({"traceparent": parent}))
    try:
        yield
    finally:
        context.detach(token)
