"""Encoding of data between handling and batching: JSON that preserves every value."""

import enum
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from datetime import datetime, time, timedelta
from functools import lru_cache, partial, reduce
from operator import contains, or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Json, TypeAdapter, with_config
from pydantic_core import from_json, to_json
from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12 on

from pipeline_platform.model.columns.casts import KINDS, Plain, Text, has_seconds, is_text, parsed_span
from pipeline_platform.model.columns.fields import MODELS, ModelClass, fields, values_of
from pipeline_platform.model.columns.schema import CONSTRAINED, bare, is_json, row_type
from pipeline_platform.model.formats.payload import has_struct


def encode(data: Any, model: ModelClass | None = None) -> tuple[bytes, str]:
    """Return the encoded data of a message, and its encoding: `bytes` or `json`.

    With a model, the values of its fields are encoded, without validators and serializers. Without a model, data is
    encoded by its own JSON serializer.

    Raises:
        ColumnError: The data does not fit the model.
        Exception: The data has no JSON.
    """
    if isinstance(data, bytes):
        return data, "bytes"
    if model is not None:
        return _crossing(model).encode(data), "json"
    if isinstance(data, BaseModel):
        return data.model_dump_json(by_alias=False, round_trip=True).encode(), "json"
    if isinstance(data, Struct):
        return msgspec.json.encode(data), "json"
    return to_json(data), "json"


def decode(value: bytes, encoding: str, model: ModelClass | None = None) -> Any:
    """Return the data that was encoded; with a model, an instance of it.

    Raises:
        ValidationError: The values do not fit the model.
    """
    if encoding == "bytes":
        return value
    return from_json(value) if model is None else _crossing(model).decode(value)


_COMBINATIONS = 1_000
"""Most remembered combinations of types that need no cast: a check of each value costs a tenth of a step."""


class _Crossing:
    """Encoder and decoder for the data of one model."""

    def __init__(self, model: ModelClass) -> None:
        self._model, self._row_type = model, row_type(model)
        is_open = _extra(model) == "allow"
        self._names, self._own = [*self._row_type.casts], [cast.own for cast in self._row_type.casts.values()]
        self._is_flat = all(self._own) and not is_open
        self._exact = set[tuple[type, ...]]()
        casts = self._row_type.casts.items()
        self._times = [name for name, cast in casts if isinstance(cast, Plain | Text) and cast.base in (datetime, time)]
        # JSON has no bytes: they are written as text.
        has_bytes = "binary" in str(self._row_type.schema.types) or is_open
        self._bytes_mode: Literal["base64", "utf8"] = "base64" if has_bytes else "utf8"
        # JSON text has the names of fields, not their aliases.
        self.decode = partial(TypeAdapter(_shape(model)).validate_json, by_alias=True, by_name=True)

    def encode(self, data: Any) -> bytes:
        values = values_of(data) if type(data) is self._model else {}
        if not self._is_flat or [*values] != self._names:
            values = self._row_type.crossing(data)
        elif (kinds := tuple(map(type, values.values()))) not in self._exact:
            values = self._row_type.crossing(data)
            if len(self._exact) < _COMBINATIONS and all(map(contains, self._own, kinds)):
                self._exact.add(kinds)
        elif any(map(has_seconds, map(values.get, self._times))):
            values = self._row_type.crossing(data)
        return to_json(values, bytes_mode=self._bytes_mode, inf_nan_mode="constants")


_crossing = lru_cache(maxsize=256)(_Crossing)  # building it takes as long as hundreds of messages


def _extra(model: ModelClass) -> Any:
    return model.model_config.get("extra") if issubclass(model, BaseModel) else None


def _shape(model: ModelClass) -> Any:
    """Return the type of a model's fields without its validators, which ran when the data was created."""
    known, extra = fields(model), _extra(model)
    names = set(known)
    stripped = {
        name: _stripped(field.annotation) | None if field.has_none else _stripped(field.annotation)
        for name, field in known.items()
    }
    is_plain = extra != "allow" and getattr(model, "__pydantic_post_init__", None) is None

    def make(values: dict[str, Any]) -> BaseModel | Struct:
        if not issubclass(model, BaseModel):
            made = model(**values)
            if hasattr(model, "__post_init__"):  # it already changed the fields when the data was created
                for name, value in values.items():
                    force_setattr(made, name, value)
            return made
        if is_plain:  # like model_construct, in a third of its time
            instance = model.__new__(model)
            _set(instance, "__dict__", values)
            _set(instance, "__pydantic_fields_set__", names.copy())
            _set(instance, "__pydantic_extra__", None)
            _set(instance, "__pydantic_private__", None)
            return instance
        instance = model.model_construct(**values)
        # model_post_init already changed the fields when the data was created: undo the second change.
        instance.__dict__.update((name, values[name]) for name in names)
        return instance

    typed_dict: Any = TypedDict  # its fields are known at run time only
    config = ConfigDict(strict=True, extra=extra)
    return Annotated[with_config(config)(typed_dict(model.__name__, stripped)), AfterValidator(make)]


def _from_base64(text: str) -> bytes:
    return a2b_base64(text.replace("-", "+").replace("_", "/"))  # in half the time of urlsafe_b64decode


_PARSED: Mapping[Any, Callable[[str], Any]] = {
    timedelta: parsed_span,
    time: time.fromisoformat,
    bytes: _from_base64,
}
"""Types that are parsed from another text than pydantic's. Bytes in a column of JSON text are pydantic's."""


def _parsed(parse: Callable[[str], Any], value: Any) -> Any:
    return parse(value) if isinstance(value, str) else value


_set = object.__setattr__  # also works for a frozen model


def _free(annotation: Any) -> Any:
    """Return the type of a field that is stored as JSON text. Its validators decide between several types."""
    if has_struct(bare(annotation)):
        return Annotated[Any, AfterValidator(lambda value: msgspec.convert(value, annotation))]
    return Any if bare(annotation) is Json else annotation


def _stripped(annotation: Any) -> Any:
    """Return the type of a field of a model that `arrow_schema` accepts, without the type's validators."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if is_json(annotation):
        return _free(annotation)
    if origin is Annotated:
        return _stripped(arguments[0])
    if origin in (Union, UnionType):
        return reduce(or_, map(_stripped, arguments))
    if origin is Literal:  # its column has one type
        return _stripped(type(arguments[0]))
    if is_text(annotation) or annotation in (*KINDS, type(None), ...):
        parse = _PARSED.get(annotation)
        return annotation if parse is None else Annotated[annotation, BeforeValidator(partial(_parsed, parse))]
    if origin is not None:
        return origin[tuple(map(_stripped, arguments))]
    if annotation in CONSTRAINED:
        return CONSTRAINED[annotation]
    if issubclass(annotation, MODELS):
        return _shape(annotation)
    if issubclass(annotation, enum.Enum):
        kind = type(next(iter(annotation)).value)
    else:
        kind = next(base for base in KINDS if issubclass(annotation, base))
    # A lambda, because pydantic refuses the signature of an enum since Python 3.12.
    return Annotated[_stripped(kind), AfterValidator(lambda value: annotation(value))]  # noqa: PLW0108
