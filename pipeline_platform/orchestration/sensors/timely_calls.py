"""Calls of sources with a time limit: a source that hangs must not occupy the daemon's threads for other sensors."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from pipeline_platform.source.contract import Source, SourceAwayError

T = TypeVar("T")

WITHIN_S = 5.0
"""Seconds for which a tick waits for a source."""


class _Call(NamedTuple):
    """A call of a source. It keeps its source, so that the id stays unique."""

    source: Source
    name: str
    answer: Future[Any]


_LATE: dict[int, _Call] = {}
"""Calls that did not return in time, by id of the source, until their result is read."""


def timely(source: Source, name: str, call: Callable[[], T], within_s: float | None = None) -> T:
    """Return the result of a call of a source, or of an earlier late call with the same name.

    So a source that is always slow is asked once in two ticks.

    Args:
        source: The source.
        name: Name of the call.
        call: Function that calls the source.
        within_s: Longest wait in seconds; `WITHIN_S` by default.

    Raises:
        SourceAwayError: Neither this call nor an earlier one returned in time. It continues in a thread of its own.
    """
    late = _LATE.get(id(source))
    if late is not None and not late.answer.done():
        raise _has_not_returned(late)
    _LATE.pop(id(source), None)
    made = late if late is not None and late.name == name else _Call(source, name, _started(call))
    try:
        error = made.answer.exception(WITHIN_S if within_s is None else within_s)
    except TimeoutError:
        _LATE[id(source)] = made
        raise _has_not_returned(made) from None
    if error is not None:
        raise error
    answer: T = made.answer.result()
    return answer


def _has_not_returned(call: _Call) -> SourceAwayError:
    return SourceAwayError(f"{call.name} has not returned yet. A later tick reads its result")


def _started(call: Callable[[], Any]) -> Future[Any]:
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    # Not a thread of an executor: the code server would wait for it when it ends.
    threading.Thread(target=run, name="call-of-source", daemon=True).start()
    return answer
