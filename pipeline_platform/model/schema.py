"""From a pydantic model to the columns of a table, and from the data of messages to rows that fit them."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
_WHOLE = {int, type(None)}
_MISFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
_NOT_CONVERTED = re.compile("Could not convert .* with type", re.DOTALL)
"""How Arrow tells a value, which is payload."""
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
    """The rows of one model: builds their columns from the data of many messages, and refuses what fits none."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model
        self.schema = arrow_schema(model)
        self._fields = frozenset(model.model_fields)
        self._struct = pa.struct(list(self.schema))
        self._never_none = required(model)
        self._integers = [field for field in self.schema if _holds_integers(field.type)]
        self._is_plain = row_of(model) is _own_dict

    def columns(self, data: list[Any]) -> list[pa.Array]:
        """Build the columns of `schema`.

        Args:
            data: An instance of the model each, or a dict by the names of its fields; what a dict lacks is filled in
                with the field's default.

        Raises:
            Exception: Some is neither, or holds what its column does not (a ColumnError, which names the field); or
                something of the model's own raised.
        """
        try:
            columns = self._columns(self._as_they_stand(data))
        except KeyError:
            columns = self._columns([self._row(one) for one in data])
        refuse_nulls(columns, self.schema, self._never_none)
        return columns

    def _as_they_stand(self, data: list[Any]) -> list[dict[str, Any]]:
        """Rows without a copy, where what they hold is plain: as many fields as there are, and maybe of other names."""
        if self._is_plain:
            kinds = set(map(type, data))
            if kinds == {self.model}:
                return [one.__dict__ for one in data]
            if kinds == {dict} and set(map(len, data)) == {len(self._fields)}:
                return data
        return [self._row(one) for one in data]

    def _row(self, data: Any) -> dict[str, Any]:
        if isinstance(data, self.model):
            row = data.__dict__
        elif isinstance(data, dict):
            row = data
            if unknown := row.keys() - self._fields:
                raise ColumnError(f"data has {sorted(map(str, unknown))}, which {self.model.__name__} has no field for")
        else:
            raise ColumnError(f"data is {kind_of(data)}, not {self.model.__name__} or a dict of its fields")
        if absent := self._fields - row.keys():
            row = {**row, **self._defaults(absent, row)}
        return row if self._is_plain else {name: _plain(value) for name, value in row.items()}

    def _defaults(self, absent: frozenset[str], data: dict[str, Any]) -> dict[str, Any]:
        fields = self.model.model_fields
        if missing := sorted(name for name in absent if fields[name].is_required()):
            raise ColumnError(f"data lacks {missing}, which {self.model.__name__} requires")
        return {name: fields[name].get_default(call_default_factory=True, validated_data=data) for name in absent}

    def _columns(self, rows: list[dict[str, Any]]) -> list[pa.Array]:
        """Build the columns of rows; a KeyError says that some row lacks a field."""
        for field in self._integers:
            _refuse_cut(field, list(map(itemgetter(field.name), rows)))
        try:
            # All at once: going through the rows a second time costs as much as building a column.
            columns: list[pa.Array] = pa.array(rows, self._struct).flatten()
        except _MISFIT:
            for field in self.schema:
                _refuse_misfit(field, [row[field.name] for row in rows])
            raise
        for field, column in zip(self.schema, columns, strict=True):
            if column.null_count:  # Arrow takes what is not there for None
                _ = [row[field.name] for row in rows]
        return columns


def _refuse_cut(field: pa.Field, values: list[Any]) -> None:
    for number in _cut(field.type, values):
        raise ColumnError(f"{field.name} is {number!r}, which is no int")


def _refuse_misfit(field: pa.Field, values: list[Any]) -> None:
    try:
        pa.array(values, field.type)
    except _MISFIT as error:
        said = _NOT_CONVERTED.sub("Could not convert a value with type", str(error))
        raise ColumnError(f"{field.name} does not fit its column: {said}") from None


def _cut(type_: pa.DataType, values: Collection[Any]) -> Iterator[float | Decimal]:
    """The values that Arrow would cut to an integer without a word."""
    if pa.types.is_integer(type_):
        if not set(map(type, values)) <= _WHOLE:
            yield from (value for value in values if isinstance(value, float | Decimal))
    elif pa.types.is_list(type_):
        for value in values:
            if isinstance(value, list):
                yield from _cut(type_.value_type, value)
    else:
        for value in values:
            if isinstance(value, dict):
                yield from _cut_inside(type_, value)


def _cut_inside(type_: pa.DataType, value: dict[Any, Any]) -> Iterator[float | Decimal]:
    if pa.types.is_map(type_):
        yield from _cut(type_.item_type, value.values())
    else:
        for field in type_:
            yield from _cut(field.type, [value.get(field.name)])


@lru_cache(maxsize=1_024)
def _holds_integers(type_: pa.DataType) -> bool:
    if pa.types.is_map(type_):
        return _holds_integers(type_.item_type)
    if pa.types.is_list(type_):
        return _holds_integers(type_.value_type)
    if pa.types.is_struct(type_):
        return any(_holds_integers(field.type) for field in type_)
    return bool(pa.types.is_integer(type_))


def kind_of(value: Any) -> str:
    """The name of a value's type, as an error tells it."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
