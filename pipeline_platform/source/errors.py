"""Errors of a source."""

from typing import ClassVar

Errors = tuple[type[Exception], ...]
"""Classes of errors, as after `except`."""


class SourceError(Exception):
    """A source cannot perform an operation. The message contains the option, the value and the fix.

    Attributes:
        summary: The problem in two or three words, which follow the source's name.
    """

    summary: ClassVar[str] = "cannot be used"


class SourceAwayError(SourceError):
    """The server is unavailable. The operation may be retried."""

    summary = "does not answer"
