"""Partitions: messages of one partition are handled in their order, one after the other."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

SOURCE: Literal["source"] = "source"
"""The partition is the one that the source names."""

ALLOWED = (
    f"it must be {SOURCE!r}, or a function that takes the message alone and returns its partition, an int of 0 or more"
)


def is_partitioning(value: object) -> bool:
    """Whether something says by which partition messages keep their order; None says that they keep none."""
    if value is None or (isinstance(value, str) and value == SOURCE):
        return True
    if not callable(value) or inspect.iscoroutinefunction(value) or inspect.isgeneratorfunction(value):
        return False
    try:
        inspect.signature(value).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not say what it takes
        return True
    return True


def _checked(value: object) -> object:
    if not is_partitioning(value):
        raise ValueError(ALLOWED)
    return value


PartitionBy = Annotated[Any, AfterValidator(_checked)]
"""`None`, `"source"`, or a function of a message. A function is called where the message is, in a task."""


def partition_of(function: Callable[[Any], object], message: object) -> str:
    """Ask a function for the partition of a message, as text; raise where it is no int of 0 or more."""
    value = function(message)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"partition_by must return an int of 0 or more, got {type(value).__name__}: convert it")
    text = int.__repr__(value)
    if text.startswith("-"):
        raise ValueError(f"partition_by must return an int of 0 or more, got {text[:40]}")
    return text


def as_given(partition_by: object, partition: str | None) -> int | str | None:
    """Return a partition as the function, or the source, gave it."""
    return partition if partition is None or partition_by == SOURCE else int(partition)
