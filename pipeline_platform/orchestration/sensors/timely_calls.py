"""Calls of sources with a time limit: a source that hangs must not occupy the daemon's threads for other sensors."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
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


_CALLS: dict[tuple[int, str], _Call] = {}
"""Calls that run, or whose result was not read, by id of the source and name."""
_LOCK = threading.Lock()


def is_late(source: Source, *names: str) -> bool:
    """Whether a call of one of these names runs, or its result was not read."""
    return any((id(source), name) in _CALLS for name in names)


def timely(source: Source, name: str, call: Callable[[], T], within_s: float | None = None) -> T:
    """Return the result of a call of a source, or of an earlier late call with the same name.

    A source that is always slow is therefore called once in two ticks. A source need not be safe for threads: a call
    waits for a call that another sensor has just made.

    Args:
        source: The source.
        name: Name of the call.
        call: Function that calls the source.
        within_s: Longest wait in seconds; `WITHIN_S` by default.

    Raises:
        SourceAwayError: Neither this call nor an earlier one returned in time. It continues in a separate thread.
    """
    within_s = WITHIN_S if within_s is None else within_s
    deadline = time.monotonic() + within_s
    made = _call_of(source, name, call)
    while made.name != name or not made.is_usable:
        late_at = min(deadline, made.started + within_s)
        if not wait([made.answer], max(0.0, late_at - time.monotonic())).done:
            raise SourceAwayError(f"{made.name} has not returned yet. A later tick reads its result")
        if made.name == name:
            break
        made = _call_of(source, name, call)
    with _LOCK:
        if _CALLS.get((id(source), name)) is made:
            del _CALLS[id(source), name]
    error = made.answer.exception()
    if error is not None:
        raise error
    answer: T = made.answer.result()
    return answer


def _call_of(source: Source, name: str, call: Callable[[], T]) -> _Call:
    """Return the running call of a source, an unread result of the same name, or a new call."""
    with _LOCK:
        if running := next((each for each in _CALLS.values() if each.source is source and each.is_running), None):
            return running
        made = _CALLS.get((id(source), name))
        if made is None or not made.is_usable:
            answer = in_background(call, "call-of-source")
            made = _CALLS[id(source), name] = _Call(source, name, answer, time.monotonic())
        return made
