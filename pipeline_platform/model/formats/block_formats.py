"""Columns of blocks whose payloads are Avro, Protobuf, or JSON in Confluent's wire format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from msgspec import Struct

from pipeline_platform.model.blocks import decoded_columns, decoded_json
from pipeline_platform.model.columns.fields import ModelClass
from pipeline_platform.model.failure import Failure, PayloadError
from pipeline_platform.model.formats import avro, protobuf
from pipeline_platform.model.formats.payload import decoder_of
from pipeline_platform.model.formats.wire_format import HEADER, Registry, json_decoder, schema_id_of

if TYPE_CHECKING:
    from pipeline_platform.model.blocks import BlockOf

_AS_THEY_ARE = (bytes, bytearray, datetime, date)
"""Types for which msgspec must not parse text: pydantic has other rules for it."""


def avro_columns(messages: BlockOf, model: ModelClass, schema: str | Registry) -> BlockOf:
    """Decode the Avro payloads of a block as `columns` does, by the rules of `message.avro(model, schema)`.

    Args:
        messages: A block, or some of its rows.
        model: A pydantic model or a `msgspec.Struct`.
        schema: A `SchemaRegistry`, or a schema as JSON text for payloads without a header.

    Raises:
        ValueError: A field has the name of a column that routes rows, or the text is not a valid Avro schema.
    """
    block: BlockOf = decoded_columns(
        messages, model, partial(_decoded, avro.reader(schema), avro.decoder(model, schema))
    )
    return block


def protobuf_columns(messages: BlockOf, model: ModelClass, generated: Any, registry: Registry | None = None) -> BlockOf:
    """Decode the Protobuf payloads of a block as `columns` does, by the rules of `message.protobuf(model, generated)`.

    Args:
        messages: A block, or some of its rows.
        model: A pydantic model or a `msgspec.Struct`.
        generated: The class that protoc generated.
        registry: See `message.protobuf`.

    Raises:
        ValueError: A field has the name of a column that routes rows.
    """
    read = protobuf.reader(generated, registry)
    decode = protobuf.decoder(model, generated, registry)
    block: BlockOf = decoded_columns(
        messages, model, partial(_decoded, lambda data: protobuf.values(read(data)), decode)
    )
    return block


def json_schema_columns(messages: BlockOf, model: ModelClass) -> BlockOf:
    """Decode the payloads of a block as `columns` does, by the rules of `message.json_schema(model)`."""
    block: BlockOf = decoded_columns(messages, model, _decoded_json)
    return block


def _decoded(
    read: Callable[[Any], Any],
    decode: Callable[[Any], Any],
    data: pa.ChunkedArray,
    rows: Sequence[int],
    model: ModelClass,
    failures: dict[int, Failure],
) -> tuple[list[Any], Sequence[int]]:
    """Decode payloads together by `read` and the model's twin; if some do not fit, decode each row."""
    payloads, made = data.to_pylist(), decoder_of(model).made
    is_fast = issubclass(made, Struct)

    def one(payload: Any) -> Any:
        if is_fast:
            with suppress(Exception):
                return msgspec.convert(read(payload), made, builtin_types=_AS_THEY_ARE)
        value = decode(payload)
        return value if made is model else msgspec.convert(value, made, from_attributes=True)

    if is_fast:
        with suppress(Exception):
            plain = [read(payloads[row]) for row in rows]
            return msgspec.convert(plain, list[made], builtin_types=_AS_THEY_ARE), rows  # type: ignore[valid-type]
    values, fitting = list[Any](), list[int]()
    for row in rows:
        try:
            values.append(one(payloads[row]))
            fitting.append(row)
        except BaseException as error:
            failures[row] = Failure.of(error, "handle_messages")
    return values, fitting


def _decoded_json(
    data: pa.ChunkedArray, rows: Sequence[int], model: ModelClass, failures: dict[int, Failure]
) -> tuple[list[Any], Sequence[int]]:
    """Decode the payloads that have a header as JSON without it."""
    payloads, decode = data.to_pylist(), json_decoder(model)
    unframed = [row for row in rows if not _is_framed(payloads[row])]
    framed = sorted({*rows} - {*unframed}) if unframed else rows
    # Not `pc.binary_slice`: it fails with "Negative buffer resize" for blocks of thousands of rows (PyArrow 26.0.1).
    texts = pa.chunked_array([[payload and payload[HEADER:] for payload in payloads]], pa.binary())
    found = dict[int, Failure]()
    values, fitting = decoded_json(texts, framed, model, found)
    for row in (*unframed, *found):
        try:
            decode(payloads[row])
        except BaseException as error:  # with the id of the schema
            failures[row] = Failure.of(error, "handle_messages")
        else:  # the model accepts values that its columns refuse
            failures[row] = found[row]
    return values, fitting


def _is_framed(payload: Any) -> bool:
    try:
        schema_id_of(payload)
    except (PayloadError, TypeError):
        return False
    return True
