"""Conformance suite for sinks."""

from collections.abc import Callable, Iterable

from pipeline_platform.sinks.contract import Sink
from pipeline_platform.testing.promises import Report, check_promises
from pipeline_platform.testing.sinks import sink_failing, sink_storing
from pipeline_platform.testing.sinks.sink_trial import SINK_PROMISES, SinkTrial, Store

ROOMS = (sink_storing, sink_failing)
"""Modules of promises, which register them on import."""


def sink_promises() -> list[str]:
    """Return the names of the promises of sinks, for a parametrised test."""
    return [*SINK_PROMISES]


def check_sink(sink: Callable[[], Sink], store: Store, *, only: str | Iterable[str] | None = None) -> Report:
    """Check that a sink keeps its promises. Each promise is checked with a new store.

    Some checks publish in another process and kill it, so the class of the sink must be importable there.

    Args:
        sink: Function that returns a sink of a new, empty store at each call. `close` is called at the end.
        store: Function that reads the rows, and properties of the store that the suite cannot detect.
        only: Name or names of the promises to check; all by default.

    The result and the errors are those of `check_source`.
    """
    __tracebackhide__ = True
    return check_promises(SINK_PROMISES, only, lambda promise, _: SinkTrial(promise, sink, store))
