"""The columns of a model's table, and the data of messages as rows of it."""

import enum
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from numbers import Integral, Number
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

import pyarrow as pa
from pydantic import AwareDatetime, BaseModel, FutureDate, FutureDatetime, NaiveDatetime, PastDate, PastDatetime

from pipeline_platform.model.fields import MODELS, ModelClass, fields, values_of

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
CONSTRAINED: dict[Any, type] = {
    **dict.fromkeys((AwareDatetime, NaiveDatetime, PastDatetime, FutureDatetime), datetime),
    **dict.fromkeys((PastDate, FutureDate), date),
}
"""What values pydantic's own types have."""
_WHOLE, _TIMES = {int, type(None)}, {datetime, date, type(None)}
_CUT = re.compile("int64|timestamp|date32")
"""Types for which Arrow takes numbers that are something else."""
_DICT = attrgetter("__dict__")
_Getter = Callable[[str], Callable[[Any], Any]]
_MISFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
_NOT_CONVERTED = re.compile("Could not convert .* with type", re.DOTALL)
"""Arrow quotes the value, which is payload."""


class ColumnError(TypeError):
    """A field of a model, or the data of a message, fits no column: names it."""


@lru_cache(maxsize=256)
def arrow_schema(model: ModelClass, inside: tuple[ModelClass, ...] = ()) -> pa.Schema:
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
    if not (known := fields(model)):
        raise ColumnError(f"{model.__name__} has no fields: there would be no columns")
    inside = (*inside, model)
    return pa.schema(
        [pa.field(name, _arrow_type(model, name, field.annotation, inside)) for name, field in known.items()]
    )


def _arrow_type(model: ModelClass, name: str, annotation: Any, inside: tuple[ModelClass, ...]) -> pa.DataType:
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
        if issubclass(annotation, MODELS):
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
        "datetime, date, time, timedelta, Decimal, UUID, Enum, Literal, a model, list[...], set[...], tuple[X, ...] or "
        "dict[str, ...]"
    )


def bare(annotation: Any) -> Any:
    """Strip `Annotated`, the None of `X | None`, and what pydantic's own types demand of a value."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        others = [one for one in get_args(annotation) if one is not type(None)]
        if len(others) == 1:
            return bare(others[0])
    return CONSTRAINED.get(annotation, annotation) if isinstance(annotation, type) else annotation


def refuse_nulls(columns: Sequence[pa.Array], model: ModelClass) -> None:
    """Check that the columns of a model hold a value wherever a field has to have one.

    Raises:
        ColumnError: A column does not.
    """
    for (name, field), column in zip(fields(model).items(), columns, strict=True):
        if column.null_count and not field.has_none:
            raise ColumnError(f"{name} is None, which its model does not allow")


def fields_of(data: Any, model: ModelClass) -> Mapping[str, Any]:
    """The fields of a message's data by name, with the field's default for what a dict lacks.

    Args:
        data: An instance of the model or a dict by the names of its fields. An instance may hold more than fields.
        model: The batcher's.

    Raises:
        ColumnError: It is neither, or a dict has an unknown name or lacks a required field.
    """
    known = fields(model)
    if isinstance(data, model):
        given = values_of(data)
    elif isinstance(data, dict):
        given = data
        if unknown := given.keys() - known.keys():
            raise ColumnError(f"data has {sorted(map(str, unknown))}, which {model.__name__} has no field for")
    else:
        kind = f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")
        raise ColumnError(f"data is {kind}, not {model.__name__} or a dict of its fields")
    if given.keys() >= known.keys():
        return given
    absent = known.keys() - given.keys()
    if missing := sorted(name for name in absent if known[name].is_required):
        raise ColumnError(f"data lacks {missing}, which {model.__name__} requires")
    return {**given, **{name: known[name].default(given) for name in absent}}


class RowType:
    """Builds the columns of one model from the data of many messages, and refuses data that fits no column."""

    def __init__(self, model: ModelClass) -> None:
        self.model = model
        self.schema = arrow_schema(model)
        annotations = [bare(field.annotation) for field in fields(model).values()]
        self._is_plain = all(one in PLAIN or get_origin(one) is Literal for one in annotations)

    def columns(self, data: Sequence[Any]) -> list[pa.Array]:
        """Build the columns of `schema`.

        Args:
            data: What `fields_of` takes, for each row.

        Raises:
            Exception: Data is something else, or holds what its column does not (a ColumnError, which names the
                field); or code of the model's own raised.
        """
        if self._is_plain:
            with suppress(KeyError):  # a dict has other fields, or an instance was made without some
                return self._columns(*self._as_they_are(data))
        rows = [fields_of(one, self.model) for one in data]
        return self._columns(itemgetter, rows if self._is_plain else list(map(plain, rows)))

    def _as_they_are(self, data: Sequence[Any]) -> tuple[_Getter, Sequence[Any]]:
        """What gets a field out of a row, and the rows; they are copied only where they are not alike."""
        kinds = set(map(type, data))
        if kinds == {dict} and set(map(len, data)) == {len(self.schema)}:
            return itemgetter, data
        if kinds == {self.model}:
            return (itemgetter, list(map(_DICT, data))) if issubclass(self.model, BaseModel) else (attrgetter, data)
        return itemgetter, [fields_of(one, self.model) for one in data]

    def _columns(self, getter: _Getter, rows: Sequence[Any]) -> list[pa.Array]:
        columns = list[pa.Array]()
        for field in self.schema:
            values = list(map(getter(field.name), rows))
            if _CUT.search(str(field.type)):
                for number, wanted in _cut(field.type, values):
                    raise ColumnError(f"{field.name} is {number!r}, which is no {wanted}")
            try:
                columns.append(pa.array(values, field.type))
            except _MISFIT as error:
                said = _NOT_CONVERTED.sub("Could not convert a value with type", str(error))
                raise ColumnError(f"{field.name} does not fit its column: {said}") from None
        refuse_nulls(columns, self.model)
        return columns


def plain(value: Any) -> Any:
    """A value as Arrow takes it: models as dicts, enums by their value, collections as lists."""
    if isinstance(value, MODELS):
        value = values_of(value)
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, AS_TEXT):
        return value.isoformat() if isinstance(value, time) else str(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    return value


def _cut(type_: pa.DataType, values: list[Any]) -> Iterator[tuple[Number, str]]:
    """The numbers that Arrow would cut to an integer or take for a time, however deep; and what they are not."""
    if pa.types.is_integer(type_):
        if not set(map(type, values)) <= _WHOLE:
            yield from ((one, "int") for one in values if isinstance(one, Number) and not isinstance(one, Integral))
    elif pa.types.is_temporal(type_):
        if not set(map(type, values)) <= _TIMES:
            yield from ((one, "time") for one in values if isinstance(one, Number))
    elif pa.types.is_list(type_):
        yield from _cut(type_.value_type, [one for value in values if isinstance(value, list) for one in value])
    elif pa.types.is_map(type_):
        yield from _cut(type_.item_type, [one for value in values if isinstance(value, dict) for one in value.values()])
    elif pa.types.is_struct(type_):
        for field in type_:
            yield from _cut(field.type, [value.get(field.name) for value in values if isinstance(value, dict)])
