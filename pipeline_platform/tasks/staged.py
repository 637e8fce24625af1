"""Handled messages on their way to a batcher with a callback: what is written of them between the two steps."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from pipeline_platform.model.crossing import crossing_of

STAGED = pa.schema(
    [
        ("source", pa.string()),
        ("message_id", pa.string()),
        ("data", pa.binary()),
        ("metadata", pa.string()),
        ("ack_ref", pa.string()),
        ("ack_id", pa.string()),
        ("attempt", pa.int32()),
        ("received_at", pa.timestamp("us", "UTC")),
        ("position", pa.int64()),
        ("value", pa.binary()),
        ("encoding", pa.string()),
        ("batch_key", pa.string()),
        ("batch_mode", pa.string()),
        ("on_success", pa.string()),
        ("on_failure", pa.string()),
        ("size", pa.int64()),
    ]
)
"""The delivery, and what handling made of its data. `size` is the bytes of both payloads: batches are cut by it."""

DELIVERY = STAGED.names[: STAGED.names.index("position") + 1]


def staged_table(receive_id: str, batcher: str) -> str:
    """Where a receive keeps the messages of a batcher with a callback until their batches are handled."""
    return f"_receives/{receive_id}/{batcher}"


def encode(data: Any, model: type[BaseModel] | None = None) -> tuple[bytes, str]:
    """Data as it crosses from handling to batching: bytes as they are, all else as JSON; never pickled.

    Args:
        data: What handling made of a message.
        model: The batcher's; without one data crosses as its JSON says it, a model's own serializers included.

    Raises:
        Exception: It has no JSON, or the batcher's model does not take it.
    """
    if isinstance(data, bytes):
        return data, "bytes"
    if model is not None:
        return crossing_of(model).encode(data), "json"
    if isinstance(data, BaseModel):
        return data.model_dump_json(by_alias=False, round_trip=True).encode(), "json"
    return to_json(data), "json"


def decode(value: bytes, encoding: str, model: type[BaseModel] | None = None) -> Any:
    """The inverse of `encode`; JSON becomes the batcher's model where it has one, with the very values put.

    Raises:
        Exception: It does not fit the types of the model's fields.
    """
    if encoding == "bytes":
        return value
    return from_json(value) if model is None else crossing_of(model).decode(value)
