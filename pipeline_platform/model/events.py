"""Telemetry events and their fields."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pipeline_platform.model.strict_options import Requirement


class Fields(NamedTuple):
    """Names of the fields of an event: at its start, and additional fields when it stops."""

    start: tuple[str, ...]
    stop: tuple[str, ...]


_PRODUCER = ("pipeline", "producer")
_RUN = (*_PRODUCER, "receive_id", "run_id", "origin")
_TASK = ("pipeline", "receive_id", "run_id", "task")
_OUTCOMES = ("handled", "skipped", "failed", "returned")

EVENTS: Mapping[str, Fields] = {
    "ask": Fields((*_PRODUCER, "source"), ("backlog", "oldest", "in_flight", "demand", "runs")),
    "begin": Fields((*_PRODUCER, "run_id", "origin"), ("receive_id", "demand")),
    "receive": Fields((*_RUN, "demand"), ("received", "redelivered", "tasks")),
    "handle": Fields(_RUN, (*_OUTCOMES, "duplicates", "staged", "rescued", "tasks")),
    "batcher": Fields((*_RUN, "batcher"), (*_OUTCOMES, "batches", "rescued", "tasks")),
    "parents": Fields(_RUN, (*_OUTCOMES, "rescued", "tasks")),
    "decide": Fields(_RUN, ("dropped", "tries")),
    "publish": Fields(_RUN, ("rows",)),
    "acknowledge": Fields(_RUN, ("acknowledged", "lost", "unacknowledged", "letters", "latency", "tasks")),
    "count_failures": Fields(("pipeline",), ("open", "dead", "scheduled", "due")),
    "chunk": Fields((*_TASK, "messages"), (*_OUTCOMES, "staged")),
    "message": Fields((*_TASK, "message_id", "attempt"), ("failed",)),
    "batch": Fields((*_TASK, "batcher", "batch_id", "trigger", "messages"), ("ok", "failed")),
    "handle_failed": Fields((*_TASK, "messages"), ("rescuing",)),
}
"""All events, in the order in which a message passes them."""

IN_TASKS = ("chunk", "message", "batch", "handle_failed")
"""Events of Spark tasks, which only the functions of the class get."""


@dataclass(frozen=True)
class Event:
    """The start, stop or exception of an operation.

    Attributes:
        name: One of `EVENTS`.
        phase: `start`, then `stop` or `exception`.
        fields: Values by the names in `EVENTS`. An exception also has `kind`, the name of its class. Payloads are never
            included, nor texts of exceptions, which may quote them.
        system_time: Seconds since 1970.
        monotonic_time: Seconds on the monotonic clock.
        duration: Seconds since its start; None at the start.
        span: An object that identifies the operation: start and end have the same.
    """

    name: str
    phase: Literal["start", "stop", "exception"]
    fields: Mapping[str, Any]
    system_time: float
    monotonic_time: float
    duration: float | None
    span: object


Function = Callable[[Event], object]


def _are_functions(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        name in EVENTS and callable(function) and not inspect.iscoroutinefunction(function)
        for name, function in value.items()
    )


Functions = Annotated[
    Mapping[str, Function],
    Requirement(
        "a dict of functions by event, none of them async", f"Valid events: {', '.join(EVENTS)}.", _are_functions
    ),
]
"""Type of the option `telemetry`."""
