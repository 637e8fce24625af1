"""Events: what a pipeline at work emits, and what each says."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Fields(NamedTuple):
    """The names of the fields that an event has from the start on, and of those that it has besides when it stops."""

    start: tuple[str, ...]
    stop: tuple[str, ...]


_PRODUCER = ("pipeline", "producer")
_RUN = (*_PRODUCER, "receive_id", "run_id", "origin")
_TASK = ("pipeline", "receive_id", "run_id", "task")
_OUTCOMES = ("handled", "failed", "returned")

EVENTS: Mapping[str, Fields] = {
    "ask": Fields((*_PRODUCER, "source"), ("backlog", "in_flight", "demand", "runs")),
    "begin": Fields((*_PRODUCER, "run_id", "origin"), ("receive_id", "demand")),
    "receive": Fields((*_RUN, "demand"), ("received", "redelivered", "tasks")),
    "handle": Fields(_RUN, (*_OUTCOMES, "duplicates", "staged", "rescued", "tasks")),
    "batcher": Fields((*_RUN, "batcher"), (*_OUTCOMES, "batches", "rescued", "tasks")),
    "parents": Fields(_RUN, (*_OUTCOMES, "rescued", "tasks")),
    "decide": Fields(_RUN, ("dropped", "tries")),
    "publish": Fields(_RUN, ("rows",)),
    "acknowledge": Fields(_RUN, ("acknowledged", "lost", "unacknowledged", "letters", "tasks")),
    "chunk": Fields((*_TASK, "messages"), (*_OUTCOMES, "staged")),
    "message": Fields((*_TASK, "message_id", "attempt"), ("failed",)),
    "batch": Fields((*_TASK, "batcher", "batch_id", "trigger", "messages"), ("ok", "failed")),
    "handle_failed": Fields((*_TASK, "messages"), ("rescuing",)),
}
"""What there is, in the order of a message's way."""

IN_TASKS = ("chunk", "message", "batch", "handle_failed")
"""Events of Spark's tasks: the class's own functions alone get them there."""


@dataclass(frozen=True)
class Event:
    """That something begins, stops or fails.

    Attributes:
        name: One of `EVENTS`.
        phase: `start`, then `stop` or `exception`.
        fields: What is known of it: see `EVENTS`. An exception has `kind`, the name of its class, besides. Never a
            payload, and never what an exception says: that may quote one.
        system_time: Seconds since 1970.
        monotonic_time: Seconds on a clock that is never set back.
        duration: Seconds since its start; None at the start.
        span: The same object for a start and its end, and for no other.
    """

    name: str
    phase: Literal["start", "stop", "exception"]
    fields: Mapping[str, Any]
    system_time: float
    monotonic_time: float
    duration: float | None
    span: object


Function = Callable[[Event], object]


def are_functions(value: object) -> bool:
    """Whether a value may be the option `telemetry` of a class."""
    return isinstance(value, Mapping) and all(
        name in EVENTS and callable(one) and not inspect.iscoroutinefunction(one) for name, one in value.items()
    )
