"""The columns of a pydantic model's table, and the data of messages as rows of it."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

import pyarrow as pa
from pydantic import BaseModel

PLAIN: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    datetime: pa.timestamp("us", "UTC"),
    date: pa.date32(),
    Decimal: pa.decimal128(38, 9),
}
"""Types that a column holds as they are. A subclass of one is held by the same column."""
AS_TEXT = (UUID, time, timedelta)
"""Types that a column holds as text."""
_WHOLE = {int, type(None)}
_MISFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
_NOT_CONVERTED = re.compile("Could not convert .* with type", re.DOTALL)
"""Arrow quotes the value, which is payload."""


class ColumnError(TypeError):
    """A field of a model, or the data of a message, fits no column: names it."""


@lru_cache(maxsize=256)
def arrow_schema(model: type[BaseModel], inside: tuple[type[BaseModel], ...] = ()) -> pa.Schema:
    """The columns of a model's table. All are nullable, so that a field can be added or dropped later.

    Args:
        model: A model of plain fields, models, lists and dicts.
        inside: The models that hold this one.

    Raises:
        ColumnError: A field has a type that no column holds, or there is no field.
    """
    if model in inside:
        raise ColumnError(
            f"{model.__name__} holds itself, so its columns would have no end: keep the inner ones as JSON text"
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
        if len(kinds) == 1 and (kind := kinds.pop()) in PLAIN:
            return PLAIN[kind]
    elif origin in (list, set, frozenset, Sequence, tuple) and (len(arguments) == 1 or arguments[1:] == (Ellipsis,)):
        return pa.list_(_arrow_type(model, name, arguments[0], inside))
    elif origin in (dict, Mapping) and arguments and bare(arguments[0]) is str:
        return pa.map_(pa.string(), _arrow_type(model, name, arguments[1], inside))
    elif isinstance(annotation, type):
        if annotation in PLAIN:
            return PLAIN[annotation]
        if issubclass(annotation, BaseModel):
            return pa.struct(list(arrow_schema(annotation, inside)))
        if issubclass(annotation, enum.Enum):
            kinds = {type(member.value) for member in annotation}
            if len(kinds) == 1 and (kind := kinds.pop()) in PLAIN:
                return PLAIN[kind]
        if annotation in AS_TEXT:
            return pa.string()
        for base, type_ in PLAIN.items():
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
def _never_none(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(
        name
        for name, field in model.model_fields.items()
        if not _allows_none(field.annotation) and (field.is_required() or field.default is not None)
    )


def _allows_none(annotation: Any) -> bool:
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return any(map(_allows_none, get_args(annotation)))
    return annotation in (None, type(None), Any)


def refuse_nulls(columns: Sequence[pa.Array], model: type[BaseModel]) -> None:
    """Check that the columns of a model hold a value wherever a field has to have one.

    Raises:
        ColumnError: A column does not.
    """
    for name, column in zip(model.model_fields, columns, strict=True):
        if column.null_count and name in _never_none(model):
            raise ColumnError(f"{name} is None, which its model does not allow")


def fields_of(data: Any, model: type[BaseModel]) -> dict[str, Any]:
    """The fields of a message's data by name, with the field's default for what a dict lacks.

    Args:
        data: An instance of the model or a dict by the names of its fields. An instance may hold more than fields.
        model: The batcher's.

    Raises:
        ColumnError: It is neither, or a dict has an unknown name or lacks a required field.
    """
    fields = model.model_fields
    if isinstance(data, model):
        given = data.__dict__
    elif isinstance(data, dict):
        given = data
        if unknown := given.keys() - fields.keys():
            raise ColumnError(f"data has {sorted(map(str, unknown))}, which {model.__name__} has no field for")
    else:
        kind = f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")
        raise ColumnError(f"data is {kind}, not {model.__name__} or a dict of its fields")
    if given.keys() >= fields.keys():
        return given
    absent = fields.keys() - given.keys()
    if missing := sorted(name for name in absent if fields[name].is_required()):
        raise ColumnError(f"data lacks {missing}, which {model.__name__} requires")
    return {
        **given,
        **{name: fields[name].get_default(call_default_factory=True, validated_data=given) for name in absent},
    }


class RowType:
    """Builds the columns of one model from the data of many messages, and refuses data that fits no column."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model
        self.schema = arrow_schema(model)
        self._struct = pa.struct(list(self.schema))
        self._integers = [field for field in self.schema if "int64" in str(field.type)]
        annotations = [bare(field.annotation) for field in model.model_fields.values()]
        self._is_plain = all(one in PLAIN or get_origin(one) is Literal for one in annotations)

    def columns(self, data: list[Any]) -> list[pa.Array]:
        """Build the columns of `schema`.

        Args:
            data: What `fields_of` takes, for each row.

        Raises:
            Exception: Data is something else, or holds what its column does not (a ColumnError, which names the
                field); or code of the model's own raised.
        """
        rows = self._rows(data)
        for field in self._integers:
            for number in _cut(field.type, list(map(itemgetter(field.name), rows))):
                raise ColumnError(f"{field.name} is {number!r}, which is no int")
        try:
            # All at once: another pass over the rows costs as much as building a column.
            columns: list[pa.Array] = pa.array(rows, self._struct).flatten()
        except _MISFIT:
            for field in self.schema:
                _refuse_misfit(field, [row[field.name] for row in rows])
            raise
        refuse_nulls(columns, self.model)
        return columns

    def _rows(self, data: list[Any]) -> list[dict[str, Any]]:
        if self._is_plain and (kinds := set(map(type, data))) <= {self.model, dict} and len(kinds) == 1:
            rows = data if kinds == {dict} else [one.__dict__ for one in data]
            names = self.model.model_fields.keys()
            if all(map(names.__eq__, map(dict.keys, rows))):
                return rows  # without a copy
        rows = [fields_of(one, self.model) for one in data]
        return rows if self._is_plain else [_plain(row) for row in rows]


def _plain(value: Any) -> Any:
    """A value as Arrow takes it: models as dicts, enums by their value, collections as lists."""
    if isinstance(value, BaseModel):
        value = value.__dict__
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, AS_TEXT):
        return value.isoformat() if isinstance(value, time) else str(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    return value


def _refuse_misfit(field: pa.Field, values: list[Any]) -> None:
    try:
        pa.array(values, field.type)
    except _MISFIT as error:
        said = _NOT_CONVERTED.sub("Could not convert a value with type", str(error))
        raise ColumnError(f"{field.name} does not fit its column: {said}") from None


def _cut(type_: pa.DataType, values: list[Any]) -> Iterator[float | Decimal]:
    """The numbers that Arrow would cut to an integer without an error, however deep they lie."""
    if pa.types.is_integer(type_):
        if not set(map(type, values)) <= _WHOLE:
            yield from (value for value in values if isinstance(value, float | Decimal))
    elif pa.types.is_list(type_):
        yield from _cut(type_.value_type, [one for value in values if isinstance(value, list) for one in value])
    elif pa.types.is_map(type_):
        yield from _cut(type_.item_type, [one for value in values if isinstance(value, dict) for one in value.values()])
    elif pa.types.is_struct(type_):
        for field in type_:
            yield from _cut(field.type, [value.get(field.name) for value in values if isinstance(value, dict)])
