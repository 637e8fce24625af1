"""Checks of a deployment, each bounded in time: its result, and checks in parallel."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from enum import StrEnum
from functools import partial
from typing import NamedTuple, TypeAlias

from pydantic import Field

from pipeline_platform.background import in_background
from pipeline_platform.cli.errors import BROKEN, FAILED
from pipeline_platform.cli.output import Output
from pipeline_platform.model.failure import reason_of


class CheckState(StrEnum):
    """State of a check, from good to bad."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"

    @property
    def exit_code(self) -> int:
        """Exit code of `doctor`."""
        return {"ok": 0, "warning": FAILED, "error": BROKEN}[self.value]


class CheckResult(Output):
    """A check and its result."""

    name: str = Field(description="Name of the check.")
    state: CheckState = Field(description="Result of the check.")
    text: str = Field(description="Result in words, for people.")
    fix: str = Field(description="The fix; empty if the check is ok, or if `text` contains the fix.")
    seconds: float = Field(description="Duration of the check.")


class DoctorOutput(Output):
    """Output of `doctor`."""

    state: CheckState = Field(description="The worst result, which determines the exit code.")
    checks: list[CheckResult] = Field(description="All checks.")


class Finding(NamedTuple):
    """Result of a check: its state, its text, and the fix."""

    state: CheckState
    text: str
    fix: str = ""


def ok(text: str) -> Finding:
    """Return the result of a check that found nothing wrong."""
    return Finding(CheckState.OK, text)


def warning(text: str, fix: str) -> Finding:
    """Return the result of a check that found something that works, but not well."""
    return Finding(CheckState.WARNING, text, fix)


def error(text: str, fix: str = "") -> Finding:
    """Return the result of a check that found something broken."""
    return Finding(CheckState.ERROR, text, fix)


Look: TypeAlias = Callable[[], Finding]
"""A check. Any exception is an error of the checked service."""


def run_all(checks: Mapping[str, Look], within_s: float, looking_at: Callable[[str, str], object]) -> list[CheckResult]:
    """Run checks in parallel, and return their results in order. A check without an answer in time is an error.

    Its thread continues, and ends with the process.

    Args:
        checks: Checks by name.
        within_s: Longest time of a check.
        looking_at: Called with the name of a check and a text, when it starts and, with an empty text, when it ends.
    """
    started = time.monotonic()

    def run(name: str, look: Look) -> CheckResult:
        looking_at(name, "the check")
        try:
            finding = look()
        except BaseException as problem:  # of a client of any service; panics of Rust are BaseExceptions
            finding = error(f"{type(problem).__name__}: {reason_of(problem)}")
        looking_at(name, "")
        return _result(name, finding, started)

    answers = {name: in_background(partial(run, name, look), name) for name, look in checks.items()}
    done, _ = wait(answers.values(), within_s)
    late = error(
        f"no answer within {within_s:g} s", "Check that the service runs and is reachable. A longer time: --timeout"
    )
    for name, answer in answers.items():
        if answer not in done:
            looking_at(name, "")
    return [answer.result() if answer in done else _result(name, late, started) for name, answer in answers.items()]


def _result(name: str, finding: Finding, started: float) -> CheckResult:
    text = " ".join(finding.text.split())
    return CheckResult(
        name=name, state=finding.state, text=text, fix=finding.fix, seconds=round(time.monotonic() - started, 3)
    )
