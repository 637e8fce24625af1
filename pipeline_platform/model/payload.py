"""Payloads of JSON, decoded strictly: what is not JSON, or would not come back as it was sent, is refused."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic_core import from_json

_decode = msgspec.json.Decoder().decode


class PayloadError(ValueError):
    """A payload is no JSON. Says what is wrong and where, and quotes nothing of it."""


def decoded(data: Any) -> Any:
    """Decode a payload of JSON.

    Whole numbers come back exactly, whatever their length. Of two members of one name the last one counts.

    Raises:
        PayloadError: It is no JSON, or has NaN, an infinity, a number that no float holds, half a surrogate pair,
            a byte order mark or bytes that are no UTF-8.
        TypeError: It is no bytes: a callback has put something else in its place.
    """
    try:
        return _decode(data)
    except Exception as error:
        if not isinstance(data, bytes):
            raise TypeError(f"json() decodes bytes, and data is of type {type(data).__name__}") from None
        raise PayloadError(f"the payload is no JSON: {_why(data, error)}") from None


def _why(data: bytes, error: Exception) -> str:
    """What is wrong and where, in the words of pydantic, whose models refuse payloads beside this."""
    try:
        from_json(data, allow_inf_nan=False)
    except ValueError as found:
        return str(found)
    return str(error)  # a number that no float holds: msgspec says how deep it lies, and names no key
