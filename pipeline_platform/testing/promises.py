"""Promises of sources and sinks, and the order in which a suite checks them."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

Check = Callable[[Any], None]
"""Function of a trial."""


class BrokenPromiseError(AssertionError):
    """A source or sink breaks the promise whose name is in `promise`."""

    def __init__(self, promise: Promise, expected: str, seen: str) -> None:
        self.promise = promise.name
        super().__init__(f"{promise.name}: {promise.says}\n  expected: {expected}\n  seen:     {seen}")


class NotAskedError(Exception):
    """A promise does not apply to this source or sink, for the reason in the message."""


class Promise(NamedTuple):
    """A promise of sources or sinks.

    Attributes:
        name: Its name.
        says: Its sentence.
        family: Class of the sources or sinks that it applies to.
        builds_on: Names of promises that it depends on; it is skipped if one of them is broken.
        check: Function that raises if it is broken.
        messages: Number of waiting messages at the start of its check; None for all payloads.
        many: Whether the check needs several calls of the server: it uses `Server.many` instead of `payloads`.
    """

    name: str
    says: str
    family: type[Any]
    builds_on: Sequence[str]
    check: Check
    messages: int | None = None
    many: bool = False

    @classmethod
    def of(cls, check: Check, family: type[Any], builds_on: Sequence[str], *more: Any) -> Promise:
        """Return the promise of a check; the first line of its docstring is the promise's sentence."""
        return cls(check.__name__, str(check.__doc__).partition("\n")[0], family, builds_on, check, *more)


@dataclass
class Report:
    """Result of a check without broken promises.

    Attributes:
        source: Class of the source or sink.
        kept: Names of kept promises.
        not_asked: Reasons of skipped promises, by name.
        figures: Measured times in seconds; `backlog` of a source should be below 0.05.
    """

    source: str = ""
    kept: list[str] = field(default_factory=list)
    not_asked: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


class Trial:
    """Trial of one promise of a subject, a source or a sink."""

    def __init__(self, promise: Promise, subject: Any) -> None:
        self.promise, self.subject = promise, subject
        self.figures: dict[str, float] = {}

    def need(self, condition: object, reason: str) -> None:
        """Raise `NotAskedError` with the reason, unless a condition holds."""
        if not condition:
            raise NotAskedError(reason)

    def expect(self, condition: object, expected: str, seen: object) -> None:
        """Raise `BrokenPromiseError`, unless a condition holds."""
        if not condition:
            raise BrokenPromiseError(self.promise, expected, str(seen))

    def check(self) -> None:
        """Check the promise."""
        self.need(isinstance(self.subject, self.promise.family), f"it applies to {self.promise.family.__name__} only")
        self.promise.check(self)

    def close(self) -> None:
        """Close what the trial opened."""


TrialOf = Callable[[Promise, Path], Trial]
"""Function that returns the trial of a promise, which may write to a folder."""


def check_promises(promises: Mapping[str, Promise], only: str | Iterable[str] | None, trial_of: TrialOf) -> Report:
    """Check promises: all, some, or one by its name.

    Raises:
        BrokenPromiseError: The promise named by `only`, a str, is broken.
        ExceptionGroup: Contains a `BrokenPromiseError` for each broken promise.
        ValueError: A name in `only` is not a promise.
    """
    __tracebackhide__ = True
    if isinstance(only, str):
        report = Report()
        _check(_named(only, promises), trial_of, report)
        return report
    return _check_all([_named(name, promises) for name in (promises if only is None else only)], trial_of)


def _check_all(promises: list[Promise], trial_of: TrialOf) -> Report:
    __tracebackhide__ = True
    report, broken, waiting = Report(), dict[str, BrokenPromiseError](), {promise.name: promise for promise in promises}

    def check(promise: Promise) -> None:
        for base in promise.builds_on:
            if base in waiting:
                check(waiting.pop(base))
        if lacking := [base for base in promise.builds_on if base in broken or base in unasked]:
            unasked[promise.name] = lacking[0]
            return
        try:
            _check(promise, trial_of, report)
        except BrokenPromiseError as error:
            broken[promise.name] = error

    unasked: dict[str, str] = {}
    while waiting:
        check(waiting.pop(next(iter(waiting))))
    if broken:
        rest = f"; skipped {len(unasked)} promises that depend on it" if unasked else ""
        raise ExceptionGroup(f"{report.source} breaks {', '.join(broken)}{rest}", list(broken.values()))
    return report


def _check(promise: Promise, trial_of: TrialOf, report: Report) -> None:
    with TemporaryDirectory(prefix="check-") as folder:
        trial = trial_of(promise, Path(folder))
        report.source = type(trial.subject).__name__
        try:
            with closing(trial):
                trial.check()
        except NotAskedError as why:
            report.not_asked[promise.name] = str(why)
        except BrokenPromiseError:
            raise
        except Exception as error:
            raise BrokenPromiseError(promise, "no error", f"{type(error).__name__}: {error}") from error
        else:
            report.kept.append(promise.name)
        report.figures |= trial.figures


def error_of(call: Callable[[], object]) -> Exception | None:
    """Return the exception of a call; None if it raises none."""
    try:
        call()
    except Exception as error:
        return error
    return None


def text_of(error: Exception | None) -> str:
    """Return an error with its traceback and causes, as in a log."""
    return "" if error is None else "".join(traceback.format_exception(error))


def _named(name: str, promises: Mapping[str, Promise]) -> Promise:
    if name not in promises:
        near = difflib.get_close_matches(name, promises, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Valid promises: {', '.join(promises)}."
        raise ValueError(f"{name!r} is not a promise. {hint}")
    return promises[name]
