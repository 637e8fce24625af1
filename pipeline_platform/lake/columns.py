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
    annotation = bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        if len(kinds) == 1 and (kind := kinds.pop()) in _PLAIN:
            return _PLAIN[kind]
    elif origin in (list, set, frozenset, Sequence, tuple) and (len(arguments) == 1 or arguments[1:] == (Ellipsis,)):
        return pa.list_(_arrow_type(model, name, arguments[0], inside))
    elif origin in (dict, Mapping) and arguments and bare(arguments[0]) is str:
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


def bare(annotation: Any) -> Any:
    """Strip `Annotated` and the None of `X | None`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        others = [one for one in get_args(annotation) if one is not type(None)]
        if len(others) == 1:
            return bare(others[0])
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
    annotation = bare(annotation)
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
        if not allows_none(field.annotation) and (field.is_required() or field.default is not None)
    )


def allows_none(annotation: Any) -> bool:
    """Whether a field so annotated may be None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return any(allows_none(one) for one in get_args(annotation))
    return annotation in (None, type(None), Any)


def refuse_nulls(columns: Sequence[pa.Array], schema: pa.Schema, required: frozenset[str]) -> None:
    """Check that columns hold a value wherever their field has to have one.

    Raises:
        ColumnError: One does not.
    """
    for field, column in zip(schema, columns, strict=True):
        if column.null_count and field.name in required:
            raise ColumnError(f"{field.name} is None, which its model does not allow")


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
            raise ColumnError(f"data is {kind_of(data)}, not {self.model.__name__} or a dict of its fields")
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


def kind_of(value: Any) -> str:
    """The name of a value's type, as an error tells it."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
