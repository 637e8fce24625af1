"""A model's data as JSON and back, value for value: what `handle_batch` gets is what `handle_message` put."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin
from uuid import UUID

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import SchemaSerializer, SchemaValidator
from pydantic_core import core_schema as core

from pipeline_platform.model.schema import ColumnError, allows_none, bare, kind_of

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class Crossing:
    """Data on its way from one step to the next as JSON, and back into instances of one model.

    The types of the model's fields alone have a say, as they have in a table's columns. Its validators had their turn
    when the data was made, and would change twice what they change; its serializers may hide what is to arrive. So
    this is pydantic's own reading and writing of JSON, for schemas without them; strict, as columns are.
    """

    def __init__(self, model: type[BaseModel]) -> None:
        self._model = model
        self._forbids = model.model_config.get("extra") == "forbid"
        self._instance = _maker(model)
        fields = _fields_schema(model)
        self._to_json = SchemaSerializer(fields, _AS_JSON).to_json
        self._from_json = SchemaValidator(fields, _AS_JSON | core.CoreConfig(title=model.__name__)).validate_json

    def encode(self, data: Any) -> bytes:
        """Put the data of a message in JSON.

        Raises:
            ColumnError: It is no instance of the model and no dict of its fields.
            Exception: A value has no JSON.
        """
        if isinstance(data, self._model):
            data = _fields_of(data)
        elif not isinstance(data, dict):
            raise ColumnError(f"data is {kind_of(data)}, not {self._model.__name__} or a dict of its fields")
        elif self._forbids and (unknown := data.keys() - self._model.model_fields.keys()):
            raise ColumnError(f"data has {sorted(map(str, unknown))}, which {self._model.__name__} has no field for")
        encoded = self._to_json(data, warnings=False)
        if _REPLACEMENT in encoded:
            # Half of a surrogate pair in a value is refused, and in a key replaced: two keys could become one.
            for key in _keys(data):
                key.encode()
        return encoded

    def decode(self, value: bytes) -> BaseModel:
        """The instance of what `encode` wrote; what a dict lacked has its default.

        Raises:
            ValidationError: Something is not of its field's type.
        """
        return self._instance(self._from_json(value))


def _keys(data: Any) -> Iterator[str]:
    if isinstance(data, BaseModel):
        data = _fields_of(data)
    if isinstance(data, dict):
        yield from (key for key in data if isinstance(key, str))
        data = data.values()
    elif not isinstance(data, list | tuple | set | frozenset):
        return
    for one in data:
        yield from _keys(one)


@lru_cache(maxsize=256)
def crossing_of(model: type[BaseModel]) -> Crossing:
    """The one of a model, made once: that takes as long as hundreds of messages."""
    return Crossing(model)


_VALUES: dict[type, core.CoreSchema] = {
    bool: core.bool_schema(),
    int: core.int_schema(),
    float: core.float_schema(),
    str: core.str_schema(),
    bytes: core.bytes_schema(),
    datetime: core.datetime_schema(),
    date: core.date_schema(),
    Decimal: core.decimal_schema(allow_inf_nan=True),
    UUID: core.uuid_schema(),
    time: core.time_schema(),
    timedelta: core.timedelta_schema(),
}


# JSON has no bytes, and none of the numbers that are none.
_AS_JSON = core.CoreConfig(strict=True, ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")


def _fields_schema(model: type[BaseModel]) -> core.TypedDictSchema:
    """The fields of a model in a dict. As a model, pydantic would go by what the model itself has defined."""
    fields = {
        name: core.typed_dict_field(_field_schema(field), required=field.is_required())
        for name, field in model.model_fields.items()
    }
    keeps_extra = model.model_config.get("extra") == "allow"
    return core.typed_dict_schema(fields, extra_behavior="allow" if keeps_extra else "ignore", config=_AS_JSON)


def _model_schema(model: type[BaseModel]) -> core.CoreSchema:
    fields = _fields_schema(model)
    writes = core.plain_serializer_function_ser_schema(_fields_of, return_schema=fields)
    return core.no_info_after_validator_function(_maker(model), fields, serialization=writes)


def _fields_of(data: Any) -> Any:
    if isinstance(data, dict):
        return data
    if data.__pydantic_extra__ is None:
        return data.__dict__
    # What a cached_property left beside the fields is not one of the extra ones.
    own = {name: value for name, value in data.__dict__.items() if name in data.__pydantic_fields__}
    return {**own, **data.__pydantic_extra__}


def _maker(model: type[BaseModel]) -> Callable[[dict[str, Any]], BaseModel]:
    """How to make an instance of fields; as `model_construct` would, but nothing may change them."""
    names = set(model.model_fields)
    keeps_extra = model.model_config.get("extra") == "allow"
    has_private = model.__pydantic_post_init__ is not None  # private attributes are made there

    def make(fields: dict[str, Any]) -> BaseModel:
        extra = None
        if keeps_extra:
            extra = {name: fields.pop(name) for name in fields.keys() - names}
        instance = _new(model)
        _set(instance, "__dict__", fields)
        _set(instance, "__pydantic_fields_set__", names.copy())
        _set(instance, "__pydantic_extra__", extra)
        _set(instance, "__pydantic_private__", None)
        if has_private:
            kept = fields.copy()
            instance.model_post_init(None)
            fields.update(kept)
        return instance

    return make


_new = object.__new__
_set = object.__setattr__  # whatever a frozen model says


def _field_schema(field: FieldInfo) -> core.CoreSchema:
    schema = _value_schema(field.annotation)
    if field.is_required():
        return schema
    if field.default_factory is not None:
        takes_data = bool(field.default_factory_takes_validated_data)
        return core.with_default_schema(
            schema, default_factory=field.default_factory, default_factory_takes_data=takes_data
        )
    if field.default is None:
        schema = core.nullable_schema(schema)
    return core.with_default_schema(schema, default_factory=field.get_default)


def _value_schema(annotation: Any) -> core.CoreSchema:
    """What `_arrow_type` is for columns, for values."""
    if allows_none(annotation):
        return core.nullable_schema(_some_value_schema(bare(annotation)))
    return _some_value_schema(bare(annotation))


def _some_value_schema(annotation: Any) -> core.CoreSchema:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _VALUES[type(arguments[0])]
    if origin in (dict, Mapping):
        return core.dict_schema(core.str_schema(), _value_schema(arguments[1]))
    if origin is tuple:
        return core.tuple_schema([_value_schema(arguments[0])], variadic_item_index=0)
    if origin in (set, frozenset):
        of = core.set_schema if origin is set else core.frozenset_schema
        return of(_value_schema(arguments[0]))
    if origin is not None:
        return core.list_schema(_value_schema(arguments[0]))
    if annotation in _VALUES:
        return _VALUES[annotation]
    if issubclass(annotation, BaseModel):
        return _model_schema(annotation)
    if issubclass(annotation, enum.Enum):
        kind = type(next(iter(annotation)).value)
        if kind in (int, str):
            return core.enum_schema(annotation, list(annotation))
    else:
        kind = next(base for base in _VALUES if issubclass(annotation, base))
    return core.no_info_after_validator_function(annotation, _VALUES[kind])
