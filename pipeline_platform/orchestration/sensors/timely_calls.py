"""Calls of sources with a time limit: a source that hangs must not occupy the daemon's threads for other sensors."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from pipeline_platform.background import in_background
from pipeline_platform.source.contract import Source, SourceAwayError

T = TypeVar("T")

WITHIN_S = 5.0
"""Seconds for which a tick waits for a source."""
GIVE_UP_S = 60.0
"""Seconds after which a call that has not returned is ignored, and the source is asked again."""
OLD_S = 300.0
"""Seconds after the start of a call from which its result is not used: some sensors look every few hours."""


class _Call(NamedTuple):
    """A call of a source. It keeps its source, so that the id stays unique."""

    source: Source
    name: str
    answer: Future[Any]
    started: float

    @property
    def is_running(self) -> bool:
        return not self.answer.done() and time.monotonic() < self.started + GIVE_UP_S

    @property
    def is_usable(self) -> bool:
        return self.answer.done() and time.monotonic() < self.started + OLD_S


_LATE: dict[tuple[int, str], _Call] = {}
"""Calls that did not return in time, by id of the source and name, until their result is read."""


def is_late(source: Source, *names: str) -> bool:
    """Whether a call of one of these names runs, or its result was not read."""
    return any((id(source), name) in _LATE for name in names)


def timely(source: Source, name: str, call: Callable[[], T], within_s: float | None = None) -> T:
    """Return the result of a call of a source, or of an earlier late call with the same name.

    A source that is always slow is therefore called once in two ticks.

    Args:
        source: The source.
        name: Name of the call.
        call: Function that calls the source.
        within_s: Longest wait in seconds; `WITHIN_S` by default.

    Raises:
        SourceAwayError: Neither this call nor an earlier one returned in time. It continues in a separate thread.
    """
    # A source need not be safe for threads: no call starts while another one runs.
    if running := next((late for late in _LATE.values() if late.source is source and late.is_running), None):
        raise _has_not_returned(running)
    made = _LATE.pop((id(source), name), None)
    if made is None or not made.is_usable:
        made = _Call(source, name, in_background(call, "call-of-source"), time.monotonic())
    try:
        error = made.answer.exception(WITHIN_S if within_s is None else within_s)
    except TimeoutError:
        _LATE[id(source), name] = made
        raise _has_not_returned(made) from None
    if error is not None:
        raise error
    answer: T = made.answer.result()
    return answer


def _has_not_returned(call: _Call) -> SourceAwayError:
    return SourceAwayError(f"{call.name} has not returned yet. A later tick reads its result")
