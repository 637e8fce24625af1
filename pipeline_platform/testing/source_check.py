"""The suite that every connector passes."""

import difflib
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline_platform.source.contract import Source
from pipeline_platform.testing import acknowledging, answers, delivering, failing, returning
from pipeline_platform.testing.server_under_test import Server
from pipeline_platform.testing.trial import PROMISES, BrokenPromiseError, NotAskedError, Promise, Trial

ROOMS = (delivering, returning, acknowledging, failing, answers)
"""Modules of promises: to import one makes them."""


@dataclass
class Report:
    """What came of a check that found nothing broken: names of promises, kept or not asked, and why.

    `figures` are in seconds; a look at the backlog is best below 0.05.
    """

    source: str = ""
    kept: list[str] = field(default_factory=list)
    not_asked: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


def promises_of(source: type[Source]) -> list[str]:
    """Names of the promises that a class of sources makes, to ask for each in a test of its own."""
    return [one.name for one in PROMISES.values() if issubclass(source, one.family)]


def check_source(
    source: Callable[[], Source], server: Server | None = None, *, only: str | Iterable[str] | None = None
) -> Report:
    """Ask a source for all that it promises.

    Each promise is tried on a queue of its own. The lease of the sources should be short, as some are waited for, but
    longer than it takes to receive and acknowledge a few messages: two seconds do for a server on the same machine.

    Args:
        source: Makes a source of a new, empty queue, each time it is called.
        server: What only the author of the connector knows; nothing by default.
        only: Name or names of the promises to try; all that concern the source by default.

    Returns:
        What was kept and what was not asked.

    Raises:
        BrokenPromiseError: The one promise that `only` names is broken.
        ExceptionGroup: Of a `BrokenPromiseError` for each promise that is broken. Those that build on it are not
            asked.
        ValueError: There is no promise of a name in `only`.
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
    report, broken, waiting = Report(), dict[str, BrokenPromiseError](), {one.name: one for one in promises}

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
        rest = f"; {len(unasked)} promises that build on it were not asked" if unasked else ""
        raise ExceptionGroup(f"{report.source} breaks {', '.join(broken)}{rest}", list(broken.values()))
    return report


def _ask(promise: Promise, source: Callable[[], Source], server: Server, report: Report) -> None:
    with TemporaryDirectory(prefix="check-source-") as folder:
        trial = Trial(promise, source, server, Path(folder))
        report.source = type(trial.source).__name__
        try:
            with closing(trial):
                trial.need(isinstance(trial.source, promise.family), f"{promise.family.__name__} alone promises it")
                trial.need(trial.sent, "its server is not given many messages (many)")
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
        hint = f"; did you mean {near[0]!r}?" if near else f". There are {', '.join(PROMISES)}"
        raise ValueError(f"there is no promise {name!r}{hint}")
    return PROMISES[name]
