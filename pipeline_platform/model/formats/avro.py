"""Decoding of Avro payloads: in Confluent's wire format with a registry, or without a header with a given schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import MAX_PREC
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


def decoder(model: Any, schema: str | Registry) -> Callable[[Any], Any]:
    """Return a function from a payload to an instance of a model; it raises a PayloadError. See `Message.avro`."""
    return _decoder(model, _expected(schema))


@lru_cache(maxsize=256)
def _decoder(model: Any, schema: str | Registry) -> Callable[[Any], Any]:
    read, fit = _reader(schema), fitting(model)

    def decoded(data: Any) -> Any:
        value = read(data)
        try:
            return fit(value)
        except MISFITS as error:
            raise misfit(error, model, "" if isinstance(schema, str) else f"schema {schema_id_of(data)}: ") from None

    return decoded


def reader(schema: str | Registry) -> Callable[[Any], Any]:
    """Return a function from a payload to plain Python values; it raises a PayloadError.

    Raises:
        ValueError: The text is not a valid Avro schema.
        TypeError: The schema is neither text nor a registry.
    """
    return _reader(_expected(schema))


def _expected(schema: str | Registry) -> str | Registry:
    if not isinstance(schema, str) and not hasattr(schema, "referenced"):
        raise TypeError(f"the schema must be JSON text or a SchemaRegistry, got {type(schema).__name__}")
    return schema


@lru_cache(maxsize=256)
def _reader(schema: str | Registry) -> Callable[[Any], Any]:
    from fastavro import schemaless_reader  # late: an optional dependency

    if isinstance(schema, str):
        return partial(_record, schemaless_reader, _parsed_text(schema), 0, "")
    known = dict[int, Callable[[bytes], Any]]()

    def read(data: Any) -> Any:
        schema_id = schema_id_of(data)
        if (record := known.get(schema_id)) is None:
            found = checked(schema_id, schema.schema(schema_id), "AVRO")
            try:
                parsed = _parsed(found.schema_str, _references(schema, found))
            except Exception as error:
                raise PayloadError(f"schema {schema_id} cannot be parsed: {type(error).__name__}: {error}") from None
            record = known[schema_id] = partial(_record, schemaless_reader, parsed, HEADER, f"schema {schema_id}: ")
        return record(data)

    return read


def _parsed_text(text: str) -> Any:
    try:
        return _parsed(text, {})
    except Exception as error:
        raise ValueError(f"the text is not a valid Avro schema: {type(error).__name__}: {error}") from None


def _references(registry: Registry, schema: Any) -> dict[str, Any]:
    """Return the named types of the schemas to which a schema refers."""
    from fastavro import parse_schema

    named = dict[str, Any]()
    for reference in schema.references or ():
        found = registry.referenced(reference)
        named |= _references(registry, found)
        parse_schema(json.loads(found.schema_str), named_schemas=named, expand=True)
    return named


def _parsed(text: str, named: dict[str, Any]) -> Any:
    """Return a record with the schema as its only field: fastavro parses a union again for each payload."""
    from fastavro import parse_schema

    record = {"type": "record", "name": "__payload__", "fields": [{"name": "value", "type": json.loads(text)}]}
    return _strict(parse_schema(record, named_schemas=named, expand=True), set())


def _strict(schema: Any, seen: set[int]) -> Any:
    """Change a parsed schema, so that fastavro rounds no decimal and refuses negative indices.

    In the list of a union or an enum, it would count from the end.
    """
    if isinstance(schema, list):
        return {"type": "union", **dict(enumerate([_strict(of, seen) for of in schema]))}
    if isinstance(schema, dict) and id(schema) not in seen:
        seen.add(id(schema))
        match schema["type"]:
            case "record" | "error":
                for field in schema["fields"]:
                    field["type"] = _strict(field["type"], seen)
            case "array":
                schema["items"] = _strict(schema["items"], seen)
            case "map":
                schema["values"] = _strict(schema["values"], seen)
            case "enum":
                schema["symbols"] = dict(enumerate(schema["symbols"]))
        if schema.get("logicalType") == "decimal":
            schema["precision"] = MAX_PREC
    return schema


def _record(decode: Callable[..., Any], parsed: Any, start: int, prefix: str, data: Any) -> Any:
    check_bytes(data)
    stream = BytesIO(data)
    stream.seek(start)
    try:
        value = decode(stream, parsed, None)["value"]
    except Exception as error:  # its text may quote the payload
        raise PayloadError(f"{prefix}the payload is not Avro of this schema: {type(error).__name__}") from None
    if (left := len(data) - stream.tell()) > 0:
        raise PayloadError(f"{prefix}the payload is not Avro of this schema: {left} bytes follow its value")
    return value
