"""Data on its way from handling to batching, as JSON and back, value for value."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import lru_cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, with_config
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict

from pipeline_platform.model.schema import AS_TEXT, PLAIN, fields_of


def encode(data: Any, model: type[BaseModel] | None = None) -> tuple[bytes, str]:
    """Write the data of a message, and say how: `bytes` as they are, all else as `json`.

    With a model the values of its fields cross: validators and serializers have no say. Without one data crosses as
    its own JSON.

    Args:
        data: What handling made of a message: bytes, an instance of the model, a dict of its fields, or plain JSON.
        model: The batcher's, or None.

    Raises:
        Exception: It has no JSON, or the model does not take it (a ColumnError).
    """
    if isinstance(data, bytes):
        return data, "bytes"
    if model is not None:
        given = fields_of(data, model)
        extra = getattr(data, "model_extra", None) or {}
        fields = {name: _without_models(given[name]) for name in model.model_fields}
        return to_json(fields | _without_models(extra), bytes_mode="base64", inf_nan_mode="constants"), "json"
    if isinstance(data, BaseModel):
        return data.model_dump_json(by_alias=False, round_trip=True).encode(), "json"
    return to_json(data), "json"


def decode(value: bytes, encoding: str, model: type[BaseModel] | None = None) -> Any:
    """The inverse of `encode`; with a model an instance of it, with the very values that were put.

    Raises:
        ValidationError: A value is not of its field's type.
    """
    if encoding == "bytes":
        return value
    return from_json(value) if model is None else _reader(model)(value)


def _without_models(value: Any) -> Any:
    if isinstance(value, BaseModel):
        value = {name: value.__dict__[name] for name in type(value).model_fields} | (value.model_extra or {})
    if isinstance(value, dict):
        return {key: _without_models(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_without_models(one) for one in value]
    return value


@lru_cache(maxsize=256)
def _reader(model: type[BaseModel]) -> Callable[[bytes], Any]:
    """How to read a model, found once: that takes as long as hundreds of messages."""
    return TypeAdapter(_shape(model)).validate_json


def _shape(model: type[BaseModel]) -> Any:
    """A model's fields without its validators, which had their turn when the data was made."""
    fields = {
        name: _stripped(field.annotation) | None if field.default is None else _stripped(field.annotation)
        for name, field in model.model_fields.items()
    }
    config = ConfigDict(strict=True, val_json_bytes="base64", extra=model.model_config.get("extra"))

    def make(values: dict[str, Any]) -> BaseModel:
        instance = model.model_construct(**values)
        # A model_post_init changed the fields when the data was made: it must not change them twice.
        instance.__dict__.update((name, values[name]) for name in fields)
        return instance

    typed_dict: Any = TypedDict  # of fields that only the model knows
    shape = with_config(config)(typed_dict(model.__name__, fields))
    return Annotated[shape, AfterValidator(make)]


def _stripped(annotation: Any) -> Any:
    """The type of a field whose model `arrow_schema` takes, without validators of its own."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _stripped(arguments[0])
    if origin in (Union, UnionType):
        return reduce(or_, map(_stripped, arguments))
    if origin is Literal or annotation in (*PLAIN, *AS_TEXT, type(None), ...):
        return annotation
    if origin is not None:
        return origin[tuple(map(_stripped, arguments))]
    if issubclass(annotation, BaseModel):
        return _shape(annotation)
    if issubclass(annotation, enum.Enum):
        kind = type(next(iter(annotation)).value)
    else:
        kind = next(base for base in PLAIN if issubclass(annotation, base))
    return Annotated[kind, AfterValidator(annotation)]
