"""Failures of messages: kind, reason and traceback, without payloads; and causes, which many reasons have in common."""

import re
import traceback
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError
from pydantic_core import PydanticKnownError

_REFUSALS = 5
"""Most fields in the reason of a ValidationError."""

_SAID = 2_000
"""Most characters of an exception's text in a traceback."""

_PLATFORM = str(Path(__file__).parents[1])
"""Folder of the platform's files, also inside an archive."""

_FIELD = re.compile(r"[A-Za-z_][\w\[\]()-]{0,39}")
_MARGIN = re.compile(r"[ |]*")
"""Start of the lines of an exception in the traceback of an ExceptionGroup."""


class RunError(BaseException):
    """A callback cannot continue, and no message is at fault: the run fails, and its messages are handled again.

    It is not an `Exception`, because `except Exception` in a callback must not catch it.
    """


def words(value: object, limit: int | None = 8_000) -> str:
    """Return any value as text that a column can store, also if its `__str__` raises; lone surrogates are escaped."""
    try:
        text = str(value)
    except BaseException as error:
        text = f"<{type(value).__name__}, whose __str__ raised {type(error).__name__}>"
    return text[:limit].encode("utf-8", "backslashreplace").decode()


def declare(error: ValidationError, names: Container[str]) -> None:
    """Set the names of fields and types, which the reason of an error may show. It shows other names as `*`."""
    error.declared = names  # type: ignore[attr-defined]


def reason_of(error: BaseException) -> str:
    """Return the text of an exception, without payloads quoted by pydantic: reasons are logged and displayed."""
    return words(_without_input(words(error, None), _refusals(error)), 2_000) or type(error).__name__


def _refusals(error: BaseException) -> Mapping[str, str]:
    """Return the text of each ValidationError of an exception, which may quote a payload, with a text without it."""
    return {words(each, None): _refusal(each) for each in _chain(error) if isinstance(each, ValidationError)}


def _without_input(text: str, refusals: Mapping[str, str]) -> str:
    if margin := _MARGIN.match(text):
        for quoting, refusal in refusals.items():
            text = text.replace(quoting, refusal).replace(quoting.replace("\n", f"\n{margin[0]}"), refusal)
    return text


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes, and the exceptions of groups."""
    seen, left = set[int](), list[BaseException | None]([error])
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            left.append(each.__context__ if each.__cause__ is None else each.__cause__)
            left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def _refusal(error: ValidationError) -> str:
    """Return fields and reasons of a ValidationError; equal causes give equal text, so that they can be counted."""
    refused, names = error.errors(include_url=False, include_input=False), getattr(error, "declared", None)
    some = [": ".join(filter(None, (_place(details, names), _rule(details)))) for details in refused[:_REFUSALS]]
    more = [f"and {len(refused) - _REFUSALS} more"] if len(refused) > _REFUSALS else []
    return f"{error.title}: {'; '.join(some + more)}"


def _rule(refused: Any) -> str:
    """Return the message of an error, without the tag of a union, which comes from the payload."""
    if refused["type"] != "union_tag_invalid":
        return str(refused["msg"])
    return PydanticKnownError("union_tag_invalid", {**refused["ctx"], "tag": "*"}).message()


def _place(refused: Any, names: Container[str] | None) -> str:
    """Return the path to a field, without indices and keys, which come from the payload.

    If no names are declared, a key of a dict that looks like a name remains.
    """
    path = list(refused["loc"])
    if path and refused["type"] == "extra_forbidden":
        path[-1] = None
    for index, part in enumerate(path):
        if part == "[key]":
            path[index - 1] = None
        elif not isinstance(part, str) or not (_FIELD.fullmatch(part) if names is None else part in names):
            path[index] = None
    return ".".join(part or "*" for part in path)


def _traceback_of(error: BaseException) -> str:
    """Return the last 8,000 characters of a traceback from the callback on; texts of exceptions are cut first."""
    whole = traceback.TracebackException.from_exception(error, compact=True)
    while whole.stack and whole.stack[0].filename.startswith(_PLATFORM):
        del whole.stack[0]
    for frame in whole.stack:
        frame.filename = frame.filename.rpartition(".zip/")[2]
    refusals = _refusals(error)
    parts = [_without_input(words(part, None), refusals) for part in whole.format()]
    return words("".join(part if len(part) <= _SAID else f"{part[:_SAID]}...\n" for part in parts)[-8_000:])


HELD = "held"
"""Kind of a message that was not handled, because an earlier message of its partition has an open failure."""


class PayloadError(ValueError):
    """A payload cannot be decoded. The message contains reason and position, and does not quote the payload."""


class Failure(NamedTuple):
    """The failure of a message.

    Attributes:
        kind: `failed` if a callback called `Message.failed`; the class name of an exception; or, found by the
            platform, `worker killed`, `timeout`, `not returned`, `moved`, `unknown batcher`, `held`.
        reason: One line for people.
        traceback: Traceback of the exception, or empty.
        stage: The callback in which it failed, `batch_size` for a splitter, or `lake` if its data fits no column.
        retry: Whether a retry can help. If not, the message is dead at once.
        error: The exception, for the rules of `Retry`. None if there was no exception, and in later steps.
    """

    kind: str
    reason: str
    traceback: str = ""
    stage: str = ""
    retry: bool = True
    error: BaseException | None = None

    @classmethod
    def of(cls, error: BaseException, stage: str) -> Self:
        """Return the failure for an exception that a callback raised.

        Raises:
            RunError: The exception itself, if it is one.
        """
        if isinstance(error, RunError):
            raise error
        trace = _traceback_of(error)
        # A traceback refers to frames that refer to messages, and so to this failure.
        for each in _chain(error):
            each.__traceback__ = None
        return cls(type(error).__name__, reason_of(error), trace, stage, error=error)

    def at(self, stage: str) -> Self:
        """Return a copy with a stage, if it has none: `Message.failed` cannot set the stage."""
        return self if self.stage else self._replace(stage=stage)


FAILURE_COLUMNS = Failure._fields[: Failure._fields.index("retry")]
"""Texts of a `Failure`, which tables and files contain in columns of the same names."""

_VALUES = "|".join(
    (
        r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b",  # a UUID
        r"(?:\B[+-])?\b[0-9]\w*(?:[.,:+-][0-9]\w*)*",  # a number, time, address or version, with its unit
        r"\b[0-9A-Fa-f]{8,}\b",  # hexadecimal
        r"\b(?:[A-Za-z_]*[0-9]){3}\w*",  # a word with three digits, such as a key in base 32 or 64
    )
)
_QUOTED = r"""(?:\bb|\B)(?:'(?:[^']|'\b)*'|"(?:[^"]|"\b)*")\B"""
"""A quoted value. A quote after or before a letter is an apostrophe."""
_KEY = r"""^(?:\w*Error: )?(?:'[^']*'|"[^"]*")$"""
"""A reason that is only a quoted value, such as the missing key of a `KeyError`: without it, nothing would remain."""


def causes(reasons: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Return each reason with `*` for numbers, ids and quoted values, so that failures of one cause have equal texts.

    The cause of a cause is the cause itself. PyArrow does all of it, because there may be a million reasons.
    """
    unquoted = pc.replace_substring_regex(reasons, _QUOTED, "'*'")
    some = pc.if_else(pc.match_substring_regex(reasons, _KEY), reasons, unquoted)
    return pc.replace_substring_regex(some, _VALUES, "*")


def cause_of(reason: str) -> str:
    """Return the cause of a reason."""
    return str(causes(pa.array([reason]))[0].as_py())


def by_cause(counted: Mapping[str, int]) -> Counter[str]:
    """Return counts by cause of counts by reason. The only reason of a cause is kept as it is."""
    found: dict[str, tuple[str, int]] = {}
    for (reason, count), cause in zip(counted.items(), causes(pa.array(counted, pa.string())).to_pylist(), strict=True):
        before = found.get(cause)
        found[cause] = (reason, count) if before is None else (cause, before[1] + count)
    return Counter(dict(found.values()))
