"""Payloads of JSON, decoded strictly: what is not JSON, or would not come back as it was sent, is refused."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic_core import from_json

from pipeline_platform.model.fields import ModelClass

_QUOTED = re.compile(r"(Invalid (?:enum )?value|unknown field) .*?(?= - at |$)", re.DOTALL)
"""Where msgspec quotes a value, or a name, that a payload has."""

_decode = msgspec.json.Decoder().decode


class PayloadError(ValueError):
    """A payload is no JSON. Says what is wrong and where, and quotes nothing of it."""


def decoded(data: Any) -> Any:
    """Decode a payload of JSON. Whole numbers come back exactly. Of two members of one name the last one counts.

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


@lru_cache(maxsize=256)
def decoder(model: ModelClass) -> Callable[[Any], Any]:
    """What decodes JSON to an instance of a model, or raises a ValidationError, or a struct's PayloadError."""
    if issubclass(model, BaseModel):
        return model.model_validate_json
    decode = msgspec.json.Decoder(model).decode

    def decoded_to(data: Any) -> Any:
        try:
            return decode(data)
        except msgspec.DecodeError as error:
            if isinstance(error, msgspec.ValidationError):
                why = _QUOTED.sub(r"\1", str(error))
                raise PayloadError(f"{model.__name__}: {why}") from None
            raise PayloadError(f"the payload is no JSON: {_why(data, error)}") from None

    return decoded_to


def _why(data: bytes, error: Exception) -> str:
    """What is wrong and where, in the words of pydantic, whose models refuse payloads beside this."""
    try:
        from_json(data, allow_inf_nan=False)
    except ValueError as found:
        return str(found)
    return str(error)  # a number that no float holds: msgspec says how deep it lies, and names no key
