"""Conformance suite for connectors."""

import difflib
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline_platform.source.contract import Source
from pipeline_platform.testing import acknowledging, answers, delivering, failing, ordering, returning
from pipeline_platform.testing.server_under_test import Server
from pipeline_platform.testing.trial import PROMISES, BrokenPromiseError, NotAskedError, Promise, Trial

ROOMS = (delivering, returning, acknowledging, ordering, failing, answers)
"""Modules of promises, which register them on import."""


@dataclass
class Report:
    """Result of a check without broken promises.

    Attributes:
        source: Class of the source.
        kept: Names of kept promises.
        not_asked: Reasons of skipped promises, by name.
        figures: Measured times in seconds; `backlog` should be below 0.05.
    """

    source: str = ""
    kept: list[str] = field(default_factory=list)
    not_asked: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


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
    if isinstance(only, str):
        report = Report()
        _ask(_named(only), source, server or Server(), report)
        return report
    names = list(PROMISES if only is None else only)
    return _ask_all([_named(name) for name in names], source, server or Server())


def _ask_all(promises: list[Promise], source: Callable[[], Source], server: Server) -> Report:
    __tracebackhide__ = True
    report, broken, waiting = Report(), dict[str, BrokenPromiseError](), {promise.name: promise for promise in promises}

    def ask(promise: Promise) -> None:
        for base in promise.builds_on:
            if base in waiting:
                ask(waiting.pop(base))
        if lacking := [base for base in promise.builds_on if base in broken or base in unasked]:
            unasked[promise.name] = lacking[0]
            return
        try:
            _ask(promise, source, server, report)
        except BrokenPromiseError as error:
            broken[promise.name] = error

    unasked: dict[str, str] = {}
    while waiting:
        ask(waiting.pop(next(iter(waiting))))
    if broken:
        rest = f"; skipped {len(unasked)} promises that depend on it" if unasked else ""
        raise ExceptionGroup(f"{report.source} breaks {', '.join(broken)}{rest}", list(broken.values()))
    return report


def _ask(promise: Promise, source: Callable[[], Source], server: Server, report: Report) -> None:
    with TemporaryDirectory(prefix="check-source-") as folder:
        trial = Trial(promise, source, server, Path(folder))
        report.source = type(trial.source).__name__
        try:
            with closing(trial):
                trial.need(isinstance(trial.source, promise.family), f"it applies to {promise.family.__name__} only")
                trial.need(trial.sent, "its server has no payloads for it (many)")
                promise.check(trial)
        except NotAskedError as why:
            report.not_asked[promise.name] = str(why)
        except BrokenPromiseError:
            raise
        except Exception as error:
            raise BrokenPromiseError(promise, "no error", f"{type(error).__name__}: {error}") from error
        else:
            report.kept.append(promise.name)
        report.figures |= trial.figures


def _named(name: str) -> Promise:
    if name not in PROMISES:
        near = difflib.get_close_matches(name, PROMISES, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Valid promises: {', '.join(PROMISES)}."
        raise ValueError(f"{name!r} is not a promise. {hint}")
    return PROMISES[name]
