"""A promise of sources: its name, what it says, for whom, and how it is tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipeline_platform.source.contract import Source

Check = Callable[[Any], None]
"""Takes a `Trial`."""


class BrokenPromiseError(AssertionError):
    """A source does not keep a promise; its name is in `promise`."""

    def __init__(self, promise: Promise, expected: str, seen: str) -> None:
        self.promise = promise.name
        super().__init__(f"{promise.name}: {promise.says}\n  expected: {expected}\n  seen:     {seen}")


class NotAskedError(Exception):
    """A promise does not concern this source; the message says why."""


class Promise(NamedTuple):
    """What sources promise: what it says, in one sentence, of which family, and a check that raises where it is broken.

    Attributes:
        builds_on: Names of promises without which it cannot be kept; it is not asked where one of them is broken.
        messages: How many wait when it is tried; None for all payloads.
        many: Whether so many wait that they take several calls of the server: `Server.many` in place of `payloads`.
    """

    name: str
    says: str
    family: type[Any]
    builds_on: Sequence[str]
    messages: int | None
    many: bool
    check: Check


PROMISES: dict[str, Promise] = {}
"""All there are, by name."""

DELIVERS = (
    "nothing_is_lost", "payloads_are_untouched", "pickles_without_clients", "closing_unused_is_harmless",
)  # fmt: skip
"""What nearly all others build on."""


def promise(
    *,
    family: type[Any] = Source,
    builds_on: Sequence[str] = DELIVERS,
    messages: int | None = None,
    many: bool = False,
) -> Callable[[Check], Check]:
    """Make a promise of a function that tries it; the first line of its docstring is what it says."""

    def register(check: Check) -> Check:
        name, says = check.__name__, str(check.__doc__).partition("\n")[0]
        PROMISES[name] = Promise(name, says, family, builds_on, messages, many, check)
        return check

    return register
