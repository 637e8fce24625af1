"""From a pydantic model to the columns of a table, and from the data of messages to rows that fit them."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

import pyarrow as pa
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import SchemaSerializer, SchemaValidator
from pydantic_core import core_schema as core

_PLAIN: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    datetime: pa.timestamp("us", "UTC"),
    date: pa.date32(),
    Decimal: pa.decimal128(38, 9),
}
_CUT = (float, Decimal)
"""What Arrow would cut to an integer without a word."""
_WHOLE = {int, type(None)}
_AS_TEXT = (UUID, time, timedelta)


class ColumnError(TypeError):
    """A field of a model, or the data of a message, fits no column: names it."""


def arrow_schema(model: type[BaseModel]) -> pa.Schema:
    """The columns of a model's table, all nullable, so that a field can be added or dropped later.

    Raises:
        ColumnError: A field has a type that no column holds, or there is no field.
    """
    return _schema(model, ())


def _schema(model: type[BaseModel], inside: tuple[type[BaseModel], ...]) -> pa.Schema:
    if model in inside:
        raise ColumnError(
            f"{model.__name__} holds itself, and columns have no end then: keep the inner ones as JSON text"
        )
    if not model.model_fields:
        raise ColumnError(f"{model.__name__} has no fields: there would be no columns")
    inside = (*inside, model)
    return pa.schema(
        [
            pa.field(name, _arrow_type(model, name, field.annotation, inside))
            for name, field in model.model_fields.items()
        ]
    )


def _arrow_type(model: type[BaseModel], name: str, annotation: Any, inside: tuple[type[BaseModel], ...]) -> pa.DataType:
    annotation = _bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        if len(kinds) == 1 and (kind := kinds.pop()) in _PLAIN:
            return _PLAIN[kind]
    elif origin in (list, set, frozenset, Sequence, tuple) and (len(arguments) == 1 or arguments[1:] == (Ellipsis,)):
        return pa.list_(_arrow_type(model, name, arguments[0], inside))
    elif origin in (dict, Mapping) and arguments and _bare(arguments[0]) is str:
        return pa.map_(pa.string(), _arrow_type(model, name, arguments[1], inside))
    elif isinstance(annotation, type):
        if annotation in _PLAIN:
            return _PLAIN[annotation]
        if issubclass(annotation, BaseModel):
            return pa.struct(list(_schema(annotation, inside)))
        if issubclass(annotation, enum.Enum):
            kinds = {type(member.value) for member in annotation}
            if len(kinds) == 1 and (kind := kinds.pop()) in _PLAIN:
                return _PLAIN[kind]
        if annotation in _AS_TEXT:
            return pa.string()
        for base, type_ in _PLAIN.items():
            if issubclass(annotation, base):
                return type_
    raise ColumnError(
        f"{model.__name__}.{name} is {annotation!r}, which is no column's type; use bool, int, float, str, bytes, "
        "datetime, date, Decimal, UUID, Enum, Literal, a model, list[...] or dict[str, ...]"
    )


def _bare(annotation: Any) -> Any:
    """Strip `Annotated` and the None of `X | None`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        others = [one for one in get_args(annotation) if one is not type(None)]
        if len(others) == 1:
            return _bare(others[0])
    return annotation


@lru_cache(maxsize=256)
def row_of(model: type[BaseModel]) -> Callable[[BaseModel], dict[str, Any]]:
    """How to turn an instance of the model into a row: its own `__dict__` where every field is plain already."""
    if all(_is_plain(field.annotation) for field in model.model_fields.values()):
        return _own_dict

    def convert(instance: BaseModel) -> dict[str, Any]:
        return {name: _plain(value) for name, value in instance.__dict__.items()}

    return convert


def _own_dict(instance: BaseModel) -> dict[str, Any]:
    return instance.__dict__


def _is_plain(annotation: Any) -> bool:
    annotation = _bare(annotation)
    return annotation in _PLAIN or get_origin(annotation) is Literal


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return row_of(type(value))(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, _AS_TEXT):
        return value.isoformat() if isinstance(value, time) else str(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    return value


def required(model: type[BaseModel]) -> frozenset[str]:
    """The fields that are never None: in their columns a null is an error."""
    return frozenset(
        name
        for name, field in model.model_fields.items()
        if not _allows_none(field.annotation) and (field.is_required() or field.default is not None)
    )


def _allows_none(annotation: Any) -> bool:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_allows_none(one) for one in get_args(annotation))
    return annotation in (None, type(None), Any)


def refuse_nulls(columns: Sequence[pa.Array], schema: pa.Schema, required: frozenset[str]) -> None:
    """Check that columns hold a value wherever their field has to have one.

    Raises:
        ColumnError: One does not.
    """
    for field, column in zip(schema, columns, strict=True):
        if column.null_count and field.name in required:
            raise ColumnError(f"{field.name} is None, which its model does not allow")


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
            raise ColumnError(f"data is {_kind(data)}, not {self._model.__name__} or a dict of its fields")
        elif self._forbids and (unknown := data.keys() - self._model.model_fields.keys()):
            raise ColumnError(f"data has {sorted(map(str, unknown))}, which {self._model.__name__} has no field for")
        return self._to_json(data, warnings=False)

    def decode(self, value: bytes) -> BaseModel:
        """The instance of what `encode` wrote; what a dict lacked has its default.

        Raises:
            ValidationError: Something is not of its field's type.
        """
        return self._instance(self._from_json(value))


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
    if _allows_none(annotation):
        return core.nullable_schema(_some_value_schema(_bare(annotation)))
    return _some_value_schema(_bare(annotation))


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


class RowType:
    """The rows of one model: checks data against its columns, and builds them a column at a time."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model
        self.schema = arrow_schema(model)
        self._struct = pa.struct(list(self.schema))
        self._fields = frozenset(model.model_fields)
        self._in_order = tuple(model.model_fields)
        self._never_none = required(model)
        self._row = row_of(model)
        self._integers = [field.name for field in self.schema if pa.types.is_integer(field.type)]

    def rows(self, data: list[Any]) -> list[dict[str, Any]]:
        """Turn the data of many messages into rows.

        Raises:
            Exception: One of them is none, or something of the model's own raised; `row` tells whose.
        """
        if self._row is _own_dict:
            kinds = set(map(type, data))
            if kinds == {self.model}:
                return [one.__dict__ for one in data]
            if kinds == {dict} and self._are_rows(data):
                return data
        return [self.row(one) for one in data]

    def _are_rows(self, data: list[dict[str, Any]]) -> bool:
        """Whether dicts are rows as they stand, their fields in order: found out for all at once, by loops in C."""
        return set(map(tuple, data)) == {self._in_order} and all(
            set(map(type, map(itemgetter(name), data))) <= _WHOLE for name in self._integers
        )

    def row(self, data: Any) -> dict[str, Any]:
        """Turn the data of one message into a row.

        Args:
            data: An instance of the model, or a dict by the names of its fields; what a dict lacks is filled in
                with the field's default.

        Raises:
            ColumnError: It is neither.
        """
        if isinstance(data, self.model):
            return self._row(data)
        if not isinstance(data, dict):
            raise ColumnError(f"data is {_kind(data)}, not {self.model.__name__} or a dict of its fields")
        if data.keys() != self._fields:
            data = {**data, **self._defaults(data)}
        for name in self._integers:
            if isinstance(data[name], _CUT):
                raise ColumnError(f"{name} is {data[name]!r}, which is no int")
        return data if self._row is _own_dict else _plain_dict(data)

    def _defaults(self, data: dict[str, Any]) -> dict[str, Any]:
        if unknown := data.keys() - self._fields:
            raise ColumnError(f"data has {sorted(map(str, unknown))}, which {self.model.__name__} has no field for")
        fields = self.model.model_fields
        absent = self._fields - data.keys()
        if missing := sorted(name for name in absent if fields[name].is_required()):
            raise ColumnError(f"data lacks {missing}, which {self.model.__name__} requires")
        return {name: fields[name].get_default(call_default_factory=True, validated_data=data) for name in absent}

    def columns(self, rows: list[dict[str, Any]]) -> list[pa.Array]:
        """Build the columns of rows.

        Raises:
            pa.ArrowException, TypeError, ValueError, OverflowError: Some value does not fit its column.
        """
        flat: list[pa.Array] = pa.array(rows, self._struct).flatten()
        refuse_nulls(flat, self.schema, self._never_none)
        return flat


def _plain_dict(data: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in data.items()}


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
