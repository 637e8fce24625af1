"""Decoding of Avro payloads: in Confluent's wire format with a registry, or without a header with a given schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from io import BytesIO
from typing import Any

from pipeline_platform.model.failure import PayloadError
from pipeline_platform.model.formats.wire_format import (
    HEADER,
    MISFITS,
    Registry,
    check_bytes,
    checked,
    fitting,
    misfit,
    schema_id_of,
)


@lru_cache(maxsize=256)
def decoder(model: Any, schema: str | Registry) -> Callable[[Any], Any]:
    """Return a function from a payload to an instance of a model; it raises a PayloadError. See `Message.avro`."""
    read, fit = reader(schema), fitting(model)

    def decoded(data: Any) -> Any:
        value = read(data)
        try:
            return fit(value)
        except MISFITS as error:
            raise misfit(error, model, "" if isinstance(schema, str) else f"schema {schema_id_of(data)}: ") from None

    return decoded


@lru_cache(maxsize=256)
def reader(schema: str | Registry) -> Callable[[Any], Any]:
    """Return a function from a payload to plain Python values; it raises a PayloadError.

    Raises:
        ValueError: The text is not a valid Avro schema.
        TypeError: The schema is neither text nor a registry.
    """
    from fastavro import schemaless_reader  # late: an optional dependency

    if isinstance(schema, str):
        return partial(_record, schemaless_reader, _parsed_text(schema), 0, "")
    if not hasattr(schema, "referenced"):
        raise TypeError(f"the schema must be JSON text or a SchemaRegistry, got {type(schema).__name__}")
    known = dict[int, Callable[[bytes], Any]]()

    def read(data: Any) -> Any:
        schema_id = schema_id_of(data)
        if (record := known.get(schema_id)) is None:
            found = checked(schema_id, schema.schema(schema_id), "AVRO")
            try:
                parsed = _parsed(schema, found, {})
            except Exception as error:
                raise PayloadError(f"schema {schema_id} cannot be parsed: {type(error).__name__}: {error}") from None
            record = known[schema_id] = partial(_record, schemaless_reader, parsed, HEADER, f"schema {schema_id}: ")
        return record(data)

    return read


def _parsed_text(text: str) -> Any:
    from fastavro import parse_schema
    from fastavro.schema import SchemaParseException, UnknownType

    try:
        return parse_schema(json.loads(text), expand=True)
    except (ValueError, SchemaParseException, UnknownType) as error:
        raise ValueError(f"the text is not a valid Avro schema: {type(error).__name__}: {error}") from None


def _parsed(registry: Registry, schema: Any, named: dict[str, Any]) -> Any:
    """Parse a schema after the schemas that it refers to."""
    from fastavro import parse_schema

    for reference in schema.references or ():
        _parsed(registry, registry.referenced(reference), named)
    return parse_schema(json.loads(schema.schema_str), named_schemas=named, expand=True)


def _record(decode: Callable[..., Any], parsed: Any, start: int, prefix: str, data: Any) -> Any:
    check_bytes(data)
    stream = BytesIO(data)
    stream.seek(start)
    try:
        value = decode(stream, parsed, None)
    except Exception as error:  # its text may quote the payload
        raise PayloadError(f"{prefix}the payload is not Avro of this schema: {type(error).__name__}") from None
    if (left := len(data) - stream.tell()) > 0:
        raise PayloadError(f"{prefix}the payload is not Avro of this schema: {left} bytes follow its value")
    return value
