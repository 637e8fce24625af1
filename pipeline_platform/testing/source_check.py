"""Conformance suite for connectors."""

from collections.abc import Callable, Iterable

from pipeline_platform.source.contract import Source
from pipeline_platform.testing import acknowledging, answers, delivering, failing, ordering, returning
from pipeline_platform.testing.promises import Report, check_promises
from pipeline_platform.testing.server_under_test import Server
from pipeline_platform.testing.trial import PROMISES, Trial

ROOMS = (delivering, returning, acknowledging, ordering, failing, answers)
"""Modules of promises, which register them on import."""


def promises_of(source: type[Source]) -> list[str]:
    """Return the names of the promises that apply to a class of sources, for a parametrised test."""
    return [promise.name for promise in PROMISES.values() if issubclass(source, promise.family)]


def check_source(
    source: Callable[[], Source], server: Server | None = None, *, only: str | Iterable[str] | None = None
) -> Report:
    """Check that a source keeps its promises.

    Each promise is checked with a new queue. Choose a short lease, because some checks wait until it expires, but a
    longer one than a receive and its acknowledgement take: two seconds for a server on the same machine.

    Args:
        source: Function that returns a source of a new, empty queue at each call.
        server: Properties of the server that cannot be found out.
        only: Name or names of the promises to check; all that apply to the source by default.

    Returns:
        The kept and the skipped promises.

    Raises:
        BrokenPromiseError: The promise named by `only`, a str, is broken.
        ExceptionGroup: Contains a `BrokenPromiseError` for each broken promise. Promises that depend on it are
            skipped.
        ValueError: A name in `only` is not a promise.
    """
    __tracebackhide__ = True
    given = server or Server()
    return check_promises(PROMISES, only, lambda promise, folder: Trial(promise, source, given, folder))
