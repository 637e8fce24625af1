"""Why a message failed, in words that a table holds and people may see, without payloads."""

import re
import traceback
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

_REFUSALS = 5
"""Fields that are shown of a model that refuses its input."""

_SAID = 2_000
"""Characters of an exception's text in a traceback."""

_PLATFORM = str(Path(__file__).parents[1])
"""Where the platform's own files are, also in an archive."""

_FIELD = re.compile(r"\[key\]|[A-Za-z_][\w\[\]()-]{0,39}")


def words(value: object, limit: int | None = 8_000) -> str:
    """Turn anything into text that a column holds, also if its `__str__` raises; half surrogates are escaped."""
    try:
        text = str(value)
    except BaseException as error:
        text = f"<{type(value).__name__}, whose __str__ raised {type(error).__name__}>"
    return text[:limit].encode("utf-8", "backslashreplace").decode()


def reason_of(error: BaseException) -> str:
    """What an exception says, without the payload that pydantic quotes: reasons are logged and shown to many."""
    return words(_without_input(words(error, None), error), 2_000) or type(error).__name__


def _without_input(text: str, error: BaseException | None) -> str:
    """Replace in a text the words of each ValidationError that an exception is or arose from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ValidationError):
            text = text.replace(words(error, None), _refusal(error))
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return text


def _refusal(error: ValidationError) -> str:
    """Where a model refuses its input and why; equal for equal causes, so that they can be counted."""
    refused = error.errors(include_url=False, include_context=False, include_input=False)
    some = [": ".join(filter(None, (_place(one), one["msg"]))) for one in refused[:_REFUSALS]]
    more = [f"and {len(refused) - _REFUSALS} more"] if len(refused) > _REFUSALS else []
    return f"{error.title}: {'; '.join(some + more)}"


def _place(refused: Any) -> str:
    """The path to a field. An index is left out, and so is a key, which the payload chose."""
    path = list(refused["loc"])
    if path and refused["type"] == "extra_forbidden":
        path[-1] = None
    for index, part in enumerate(path):
        if part == "[key]":
            path[index - 1] = None
    return ".".join(part if isinstance(part, str) and _FIELD.fullmatch(part) else "*" for part in path)


def _traceback_of(error: BaseException) -> str:
    """The last 8,000 characters of a traceback, from the callback on; long texts of exceptions are cut first."""
    whole = traceback.TracebackException.from_exception(error, compact=True)
    while whole.stack and whole.stack[0].filename.startswith(_PLATFORM):
        del whole.stack[0]
    for frame in whole.stack:
        frame.filename = frame.filename.rpartition(".zip/")[2]
    parts = [_without_input(part, error) for part in whole.format()]
    return words("".join(part if len(part) <= _SAID else f"{part[:_SAID]}...\n" for part in parts)[-8_000:])


class Failure(NamedTuple):
    """Why a message failed.

    Attributes:
        kind: `failed` if a callback called `Message.failed`; the exception's class name if it raised; else what the
            platform found: `worker killed`, `timeout`, `not returned`, `moved`, `unknown batcher`.
        reason: One line for people.
        traceback: Of the exception, or empty.
        stage: The callback it failed in, `batch_size` for a splitter, or `lake` if its data fits no column.
        retry: False where another attempt would fail as well: the message is dead at once.
    """

    kind: str
    reason: str
    traceback: str = ""
    stage: str = ""
    retry: bool = True

    @classmethod
    def of(cls, error: BaseException, stage: str) -> Self:
        """Describe an exception that a callback raised."""
        return cls(type(error).__name__, reason_of(error), _traceback_of(error), stage)

    def at(self, stage: str) -> Self:
        """The same, with a stage: `Message.failed` does not know which callback calls it."""
        return self if self.stage else self._replace(stage=stage)
