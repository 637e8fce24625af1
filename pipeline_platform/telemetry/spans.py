"""Spans: each begins, and stops or fails. Functions get these events in the process where they happen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import Any, Literal

from pipeline_platform.model.events import EVENTS, IN_TASKS, Event, Function

_LOG = logging.getLogger(__name__)


_ATTACHED: dict[str, tuple[frozenset[str], Function]] = {}
_RAISED: dict[int, Function] = {}
"""Functions of classes that raised in this process, by their id."""
_ABOUT: ContextVar[Mapping[str, Any]] = ContextVar("about", default=MappingProxyType({}))


def attach(name: str, events: Iterable[str], function: Function) -> None:
    """Have a function get events in this process, until it raises or is detached.

    Args:
        name: To detach it by; it takes the place of another one of this name.
        events: Names, of `EVENTS`.
        function: Called where the event happens, which waits for it.

    Raises:
        ValueError: There is no such event.
    """
    wanted = frozenset(events)
    if unknown := sorted(wanted - EVENTS.keys()):
        raise ValueError(f"attach({name!r}): there is no event {unknown[0]!r}; there is {', '.join(EVENTS)}")
    _ATTACHED[name] = wanted, function


def detach(name: str) -> None:
    """Give the function of this name no more events; one that is not there is no error."""
    _ATTACHED.pop(name, None)


def is_attached(name: str) -> bool:
    """Whether a function of this name gets events."""
    return name in _ATTACHED


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Give all events meanwhile these fields."""
    token = _ABOUT.set({**_ABOUT.get(), **fields})
    try:
        yield
    finally:
        _ABOUT.reset(token)


class Span:
    """What begins when it is entered, and stops or fails. This one is emitted to nobody, and costs nothing."""

    def add(self, **fields: Any) -> None:
        """Give its end more fields."""

    def fail(self, error: BaseException) -> None:
        """Let it end as an exception although nothing is raised."""

    def __enter__(self) -> Span:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End."""


_SILENT = Span()


class _Emitted(Span):
    def __init__(self, name: str, pipeline: type[Any], fields: Mapping[str, Any]) -> None:
        self._name, self._pipeline = name, pipeline
        self._fields = {"pipeline": pipeline.name, **_of_event(name, _ABOUT.get()), **fields}
        self._error: BaseException | None = None

    def add(self, **fields: Any) -> None:
        self._fields.update(fields)

    def fail(self, error: BaseException) -> None:
        self._error = error

    def __enter__(self) -> Span:
        self._started = time.monotonic()
        self._emit("start", self._started)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        now = time.monotonic()
        if raised := error or self._error:
            self._fields["kind"] = type(raised).__name__
        self._emit("exception" if raised else "stop", now, now - self._started)

    def _emit(self, phase: Literal["start", "stop", "exception"], now: float, duration: float | None = None) -> None:
        event = Event(self._name, phase, dict(self._fields), time.time(), now, duration, self)
        # Of a Spark task nothing that is raised may reach a message; elsewhere a run may be asked to end meanwhile.
        caught = BaseException if self._name in IN_TASKS else Exception
        for known_as, function, detach_it in _listening(self._name, self._pipeline):
            try:
                function(event)
            except caught as error:
                detach_it()
                what = f"{type(error).__name__} at {self._name}.{phase}: it gets no more events in this process"
                _LOG.warning("telemetry: %s raised %s", known_as, what)


def _of_event(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {field: fields[field] for field in EVENTS[name].start if field in fields}


def _listening(name: str, pipeline: type[Any]) -> list[tuple[str, Function, Callable[[], None]]]:
    """The functions that get an event: what they are known as, and how each is detached."""
    found: list[tuple[str, Function, Callable[[], None]]] = [
        (key, function, lambda key=key: detach(key))  # type: ignore[misc]
        for key, (events, function) in list(_ATTACHED.items())
        if name in events
    ]
    own = pipeline.telemetry.get(name)
    if own is not None and id(own) not in _RAISED:
        key = f"{pipeline.name}: {getattr(own, '__qualname__', type(own).__qualname__)}"
        found.append((key, own, lambda: _RAISED.update({id(own): own})))
    return found


def has_listeners(name: str, pipeline: type[Any]) -> bool:
    """Whether any function gets an event of a pipeline."""
    return bool((_ATTACHED or pipeline.telemetry) and _listening(name, pipeline))


def span(name: str, pipeline: type[Any], **fields: Any) -> Span:
    """What is to begin, stop or fail as one of `EVENTS`; `fields` are known at the start, besides what `about` says."""
    return _Emitted(name, pipeline, fields) if has_listeners(name, pipeline) else _SILENT
