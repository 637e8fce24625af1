"""Spans: operations that emit an event when they start, and when they stop or fail."""

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
"""Attached functions by name. `attach` applies to the whole process, as in Broadway's telemetry."""
_RAISED: dict[int, Function] = {}
"""Functions of the option `telemetry` that raised in this process, by their id. They get no more events."""
_ABOUT: ContextVar[Mapping[str, Any]] = ContextVar("about", default=MappingProxyType({}))


def attach(name: str, events: Iterable[str], function: Function) -> None:
    """Call a function for events in this process, until it raises or is detached.

    Args:
        name: Name for `detach`. Replaces a function of the same name.
        events: Names of events, keys of `EVENTS`.
        function: The function. It is called synchronously where the event happens.

    Raises:
        ValueError: A name is not an event.
    """
    wanted = frozenset(events)
    if unknown := sorted(wanted - EVENTS.keys()):
        raise ValueError(f"attach({name!r}): {unknown[0]!r} is not an event. Valid events: {', '.join(EVENTS)}.")
    _ATTACHED[name] = wanted, function


def detach(name: str) -> None:
    """Detach the function of this name, if it is attached."""
    _ATTACHED.pop(name, None)


def is_attached(name: str) -> bool:
    """Whether a function of this name is attached."""
    return name in _ATTACHED


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Add fields to all events inside the context."""
    token = _ABOUT.set({**_ABOUT.get(), **fields})
    try:
        yield
    finally:
        _ABOUT.reset(token)


class Span:
    """An operation that starts when it is entered, and stops or fails. This base class emits no events."""

    def add(self, **fields: Any) -> None:
        """Add fields to its end."""

    def fail(self, error: BaseException) -> None:
        """End it as an exception although the block does not raise."""

    def __enter__(self) -> Span:
        """Start."""
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
        # In a Spark task no exception may reach a message; elsewhere a request to end the run must pass.
        caught = BaseException if self._name in IN_TASKS else Exception
        for known_as, function, detach_it in _listening(self._name, self._pipeline):
            try:
                function(event)
            except caught as error:
                detach_it()
                place = f"{self._name}.{phase}"
                _LOG.warning("Detached %s from telemetry: raised %s at %s", known_as, type(error).__name__, place)


def _of_event(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {field: fields[field] for field in EVENTS[name].start if field in fields}


def _listening(name: str, pipeline: type[Any]) -> list[tuple[str, Function, Callable[[], None]]]:
    """Return the functions that get an event: name, function, and a function that detaches it."""
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
    """Whether a function gets an event of a pipeline."""
    return bool((_ATTACHED or pipeline.telemetry) and _listening(name, pipeline))


def span(name: str, pipeline: type[Any], **fields: Any) -> Span:
    """Return a span for one of `EVENTS`; its start has `fields` and the fields of `about`."""
    return _Emitted(name, pipeline, fields) if has_listeners(name, pipeline) else _SILENT
