"""Partitions: messages of the same partition are handled in their order."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pipeline_platform.model.message import Message
from pipeline_platform.model.strict_options import Requirement

SOURCE: Literal["source"] = "source"
"""The value of `partition_by` that keeps the partitions of the source."""
PARTITION_BY = "partition_by"
"""Stage of messages that fail before they are handled: they have no partition, or an earlier failure holds them."""


def _takes_a_message(value: object) -> bool:
    if not callable(value) or inspect.iscoroutinefunction(value) or inspect.isgeneratorfunction(value):
        return False
    try:
        inspect.signature(value).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


PartitionBy = Annotated[
    Callable[[Message], int] | Literal["source"] | None,
    Requirement(
        f"{SOURCE!r} or a function of one message that returns its partition, an int of 0 or more",
        is_valid=lambda value: value in (None, SOURCE) if isinstance(value, str | None) else _takes_a_message(value),
    ),
]
"""`None`, `"source"`, or a function of a message, which Spark tasks call."""

Only = Annotated[
    Callable[[Message], bool] | None,
    Requirement(
        "a function of one message that returns True or False",
        is_valid=lambda value: value is None or _takes_a_message(value),
    ),
]
"""`None`, or a predicate over messages, which Spark tasks call."""


def partition_of(function: Callable[[Any], object], message: object) -> str:
    """Return the partition that a function gives to a message, as text.

    Raises:
        TypeError: The function returned something else than an int.
        ValueError: The function returned a negative int.
    """
    value = function(message)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"partition_by: must return an int of 0 or more, got {type(value).__name__}. Use int(...).")
    text = int.__repr__(value)
    if text.startswith("-"):
        raise ValueError(f"partition_by: must return an int of 0 or more, got {text[:40]}.")
    return text


def as_given(partition_by: object, partition: str | None) -> int | str | None:
    """Return a partition with its original type: int from a function, str from the source."""
    return partition if partition is None or partition_by == SOURCE else int(partition)
