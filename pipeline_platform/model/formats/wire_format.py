"""Confluent's wire format: a zero byte, the id of the schema in four bytes, then the payload of the schema's format."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from struct import Struct
from typing import Any, Protocol

import msgspec
from pydantic import PydanticUserError, TypeAdapter, ValidationError

from pipeline_platform.model.failure import PayloadError, declare, reason_of, words
from pipeline_platform.model.formats.error_names import names_in
from pipeline_platform.model.formats.payload import QUOTED, decoder, has_struct

HEADER = 5
"""Bytes of the zero byte and the id."""
_LARGEST_ID = 2**31 - 1
"""Largest id of a schema. A registry answers to a larger id as to a wrong path."""
_unpacked = Struct(">BI").unpack_from


class Registry(Protocol):
    """A schema registry, which reads each schema once; `connectors.schema_registry` has the client."""

    def schema(self, schema_id: int, form: str | None = None) -> Any:
        """Return a schema of Confluent's client, in its text form or another, or raise a PayloadError."""

    def referenced(self, reference: Any) -> Any:
        """Return the schema to which a reference of a schema leads."""

    def __hash__(self) -> int:
        """Return a hash: decoders are cached by registry."""


def check_bytes(data: Any) -> None:
    """Raise a TypeError if data is not bytes: a callback has replaced it, or the message has no payload."""
    if not isinstance(data, bytes):
        raise TypeError(f"decoding requires data of type bytes, got {type(data).__name__}")


def schema_id_of(data: Any) -> int:
    """Return the id of a payload's schema.

    Raises:
        PayloadError: The payload has no header, or its id cannot be the id of a schema.
        TypeError: It is not bytes.
    """
    check_bytes(data)
    if len(data) < HEADER or data[0]:
        why = f"its first byte is {data[0]} instead of 0" if data and data[0] else f"it has {len(data)} bytes"
        raise PayloadError(f"the payload has no header of Confluent's wire format: {why}")
    if (schema_id := int(_unpacked(data)[1])) > _LARGEST_ID:
        raise PayloadError(f"the payload has no header of Confluent's wire format: {schema_id} is not a schema id")
    return schema_id


def checked(schema_id: int, schema: Any, kind: str) -> Any:
    """Return a schema of a registry if its payloads can be decoded without Confluent's rules.

    Raises:
        PayloadError: The schema is of another kind, or has rules to decrypt or change what it describes.
    """
    found, rules = schema.schema_type or "AVRO", schema.rule_set
    if found != kind:
        raise PayloadError(f"schema {schema_id} is of the type {found}, but {kind} is expected")
    if rules is not None:
        for rule in (*(rules.domain_rules or ()), *(getattr(rules, "encoding_rules", None) or ())):
            if not rule.disabled and rule.mode in ("READ", "WRITEREAD"):
                raise PayloadError(
                    f"schema {schema_id} has the rule {rule.name!r}, which applies to reading. Decode the payload with "
                    "Confluent's deserializer"
                )
    return schema


@lru_cache(maxsize=256)
def fitting(model: Any) -> Callable[[Any], Any]:
    """Return a function from plain Python values to a type, by the rules of pydantic or msgspec.

    Args:
        model: A pydantic model, a `msgspec.Struct`, or a type of them: `A | B`, `dict`.

    Raises:
        TypeError: Neither pydantic nor msgspec accepts the type.
    """
    if has_struct(model):
        return partial(msgspec.convert, type=model)
    try:
        return TypeAdapter(model).validate_python
    except PydanticUserError as error:
        raise TypeError(f"a payload cannot be decoded to {words(model, 200)}: {error.message}") from None


def misfit(error: Exception, model: Any, prefix: str) -> PayloadError:
    """Return the error for values that a model refuses. It names the schema, and quotes no payload."""
    if isinstance(error, msgspec.ValidationError):
        name = getattr(model, "__name__", str(model))
        why = QUOTED.sub(r"\1", str(error))
        return PayloadError(f"{prefix}{name}: {why}")
    if isinstance(error, ValidationError):
        declare(error, names_in(model))
    return PayloadError(f"{prefix}{reason_of(error)}")


MISFITS = (ValidationError, msgspec.ValidationError)
"""Errors of models."""


@lru_cache(maxsize=256)
def json_decoder(model: Any) -> Callable[[Any], Any]:
    """Return a function from JSON in the wire format to an instance of a model; it raises a PayloadError."""
    decode = decoder(model)

    def decoded(data: Any) -> Any:
        schema_id = schema_id_of(data)
        try:
            return decode(data[HEADER:])
        except (*MISFITS, PayloadError) as error:
            raise PayloadError(f"schema {schema_id}: {reason_of(error)}") from None

    return decoded
