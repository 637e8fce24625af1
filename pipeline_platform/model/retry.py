"""Retries of failed messages: which, when and how often."""

import random
import zlib
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from pipeline_platform.model.failure import HELD, Failure, PayloadError, RunError, reason_of, words
from pipeline_platform.model.strict_options import Duration, Options, Requirement

JITTER = 0.25
"""Usual random part of a pause: calls and messages that failed together are not retried together."""


class Backoff(Options):
    """Growing pauses: `first`, then `factor` times the previous pause, up to `most`."""

    first: Duration = Field(description="Pause before the second attempt.")
    factor: float = Field(2.0, ge=1, le=100, description="Growth: each pause is the previous one times this number.")
    most: Duration = Field(timedelta(hours=1), description="Longest pause.")

    @model_validator(mode="after")
    def _grows(self) -> Self:
        if self.most < self.first:
            raise ValueError(
                f"most: must be at least first ({self.first}), got {self.most}. "
                "Raise it, or use Retry(backoff=timedelta(...)) for a constant pause."
            )
        return self

    def before(self, attempt: int, jitter: float = 0.0, chance: float | None = None) -> timedelta:
        """Return the pause before an attempt: `first` before attempt 2.

        Args:
            attempt: Number of the attempt, from 2.
            jitter: Random part: 0.25 adds up to a quarter of the pause, -0.5 removes up to half of it.
            chance: Share of `jitter` to use, from 0 to 1. None: a random share.
        """
        try:
            pause = min(self.most, self.first * self.factor ** (attempt - 2))
        except OverflowError:
            pause = self.most
        return pause * (1 + jitter * (random.random() if chance is None else chance))  # noqa: S311 - no secret


def _are_kinds(value: object) -> bool:
    return isinstance(value, tuple) and all(
        issubclass(kind, BaseException)
        if isinstance(kind, type)
        else kind != "" and (isinstance(kind, str) or callable(kind))
        for kind in value
    )


_KINDS = Requirement(
    "a tuple of exception classes, kinds of failures and functions of an exception",
    "Use, for example, (ConnectionError, 'timeout').",
    _are_kinds,
)
_Kinds = tuple[type[BaseException] | str | Callable[[BaseException], object], ...]


class Retry(Options):
    """Retries of failed messages. A message that fails at its last attempt is dead.

    A failure that `on` or `never` excludes is dead at once. A class includes its subclasses. A text is a kind as in
    the table `failed`, such as `timeout`, or `failed` for `message.failed(...)`. A function gets the exception of a
    failure, and returns whether the option applies to it. It runs in the process of the callbacks, and does not apply
    to failures without an exception.
    """

    max_attempts: int = Field(
        ge=1, le=1_000, description="Attempts per message, the first included. 1 disables retries."
    )
    backoff: Duration | Backoff = Field(
        Backoff(first=timedelta(minutes=1)),
        description="Pause before a retry: constant, or a Backoff. Up to a quarter of it is added at random.",
    )
    on: Annotated[_Kinds, _KINDS._replace(is_valid=lambda value: value and _are_kinds(value))] | None = Field(
        None,
        description="Exception classes, kinds and functions of an exception: only these failures are retried. None: "
        "all failures.",
    )
    never: Annotated[_Kinds, _KINDS] = Field(
        (PayloadError, ValidationError),
        description="Exception classes, kinds and functions of an exception: failures that are never retried. By "
        "default payloads that cannot be decoded; () if `on` is set.",
    )

    @model_validator(mode="before")
    @classmethod
    def _retries_what_on_lists(cls, given: dict[str, Any]) -> dict[str, Any]:
        return given if given.get("on") is None else {"never": (), **given}

    def judged(self, failure: Failure) -> Failure:
        """Return a failure with `retry=False` if `on` or `never` excludes it.

        If a function of `on` or `never` raises, its exception is added to the reason, and the failure may be retried.
        """
        if not failure.retry or failure.kind == HELD:
            return failure
        try:
            allows = (self.on is None or _is_one_of(failure, self.on)) and not _is_one_of(failure, self.never)
        except RunError:
            raise
        except BaseException as error:
            note = f". A function of Retry raised {type(error).__name__}: {reason_of(error)}"
            return failure if note in failure.reason else failure._replace(reason=words(failure.reason + note))
        return failure if allows else failure._replace(retry=False)

    @property
    def functions(self) -> list[Callable[[BaseException], object]]:
        """The functions of an exception in `on` and `never`."""
        return [kind for kind in (*(self.on or ()), *self.never) if not isinstance(kind, str | type)]

    def is_last(self, attempt: int) -> bool:
        """Whether a message that fails at this attempt is dead."""
        return attempt >= self.max_attempts

    def due_at(self, source: str, message_id: str, attempt: int, failed_at: datetime) -> datetime:
        """Return the time of the retry after a failure at this attempt; equal arguments give the same time."""
        chance = zlib.crc32("\0".join((source, message_id, str(attempt))).encode()) / 2**32
        given = self.backoff
        backoff = given if isinstance(given, Backoff) else Backoff(first=given, factor=1, most=given)
        return failed_at + backoff.before(attempt + 1, JITTER, chance)


def _is_one_of(failure: Failure, kinds: _Kinds) -> bool:
    """Whether any of `kinds` applies to a failure. Without an exception, a class applies if its name is the kind."""
    error = failure.error
    for kind in kinds:
        if isinstance(kind, str):
            found = failure.kind == kind
        elif error is None:
            found = isinstance(kind, type) and failure.kind == kind.__name__
        else:
            found = isinstance(error, kind) if isinstance(kind, type) else bool(kind(error))
        if found:
            return True
    return False
