"""Columns of a model's table."""

import enum
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pyarrow as pa
from pydantic import (
    AwareDatetime,
    FutureDate,
    FutureDatetime,
    Json,
    JsonValue,
    NaiveDatetime,
    PastDate,
    PastDatetime,
)

from pipeline_platform.model.columns.casts import KINDS, Cast, ColumnError, JsonText, Members, Plain, Text, is_text
from pipeline_platform.model.columns.fields import MODELS, ModelClass, allows_none, fields
from pipeline_platform.model.columns.nested_casts import DictOf, ListOf, ModelOf

CONSTRAINED: dict[Any, type] = {
    **dict.fromkeys((AwareDatetime, NaiveDatetime, PastDatetime, FutureDatetime), datetime),
    **dict.fromkeys((PastDate, FutureDate), date),
}
"""Python types of the values of pydantic's own types."""
_FREE = (Any, Json, JsonValue, dict, list)
"""Types of any JSON."""
_LISTS = (list, set, frozenset, Sequence, tuple)
_DIGITS = 38
"""Most digits of a Decimal in a Delta table."""


@lru_cache(maxsize=256)
def row_type(model: ModelClass, kept: pa.Schema | None = None) -> ModelOf:
    """Return the casts from a model's fields to columns. All columns are nullable, so that fields can be added later.

    Args:
        model: A model of plain fields, models, lists and dicts.
        kept: Columns of the existing table: its Decimals keep their digits.

    Raises:
        ColumnError: No column can store a field, or the model has no fields.
    """
    return _model(model, (), pa.struct([]) if kept is None else pa.struct(list(kept)))


def arrow_schema(model: ModelClass) -> pa.Schema:
    """Return the columns of a model's table; see `row_type`."""
    return row_type(model).schema


def described(model: ModelClass) -> pa.Schema:
    """Return the columns of a model's table with the descriptions of its fields, which are comments in Delta."""
    texts = {name: {"comment": field.description} for name, field in fields(model).items() if field.description}
    return pa.schema([field.with_metadata(texts.get(field.name)) for field in arrow_schema(model)])


def _model(model: ModelClass, inside: tuple[ModelClass, ...], kept: pa.DataType | None) -> ModelOf:
    if model in inside:
        raise ColumnError(
            f"{model.__name__} contains itself, so its columns would have no end. Use Any for the inner models: "
            "they are stored as JSON text."
        )
    if not (known := fields(model)):
        raise ColumnError(f"{model.__name__} has no fields. Add one: each field is a column.")
    folded = [name.lower() for name in known]
    # Spark and Delta tables ignore the case of column names.
    if twice := sorted(name for name in set(folded) if folded.count(name) > 1):
        raise ColumnError(
            f"{model.__name__} has fields that differ only in case, which tables ignore: {twice}. Rename them."
        )
    inside = (*inside, model)
    types_ = {column.name: column.type for column in kept} if kept is not None and pa.types.is_struct(kept) else {}
    return ModelOf(
        model,
        {name: _cast(model, name, field.annotation, inside, types_.get(name)) for name, field in known.items()},
    )


def is_json(declared: Any) -> bool:
    """Whether a column stores a type as JSON text: any JSON, lists and dicts of it, and several types."""
    annotation = bare(declared)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if arguments and origin in (*_LISTS, dict, Mapping):
        return arguments[-1] is Any
    return annotation in _FREE or origin in (Union, types.UnionType, list, dict)  # List and Dict have an origin


def _cast(
    model: ModelClass, name: str, declared: Any, inside: tuple[ModelClass, ...], kept: pa.DataType | None
) -> Cast:
    annotation = bare(declared)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if is_json(annotation):
        return JsonText()
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        if len(kinds) == 1 and (kind := kinds.pop()) in KINDS:
            return Members(kind, arguments, None, str(annotation).removeprefix("typing."))
    elif origin in _LISTS and (len(arguments) == 1 or arguments[1:] == (Ellipsis,)):
        kept = kept.value_type if kept is not None and pa.types.is_list(kept) else None
        return ListOf(_cast(model, name, arguments[0], inside, kept), nullable=allows_none(arguments[0]))
    elif origin in (dict, Mapping) and arguments and bare(arguments[0]) is str:
        kept = kept.item_type if kept is not None and pa.types.is_map(kept) else None
        return DictOf(_cast(model, name, arguments[1], inside, kept), nullable=allows_none(arguments[1]))
    elif isinstance(annotation, type):
        if annotation is Decimal:
            is_kept = kept is not None and pa.types.is_decimal128(kept)
            return Plain(Decimal, kept if is_kept else _decimal(model, name, declared))
        if issubclass(annotation, MODELS):
            return _model(annotation, inside, kept)
        if issubclass(annotation, enum.Enum):
            values = [member.value for member in annotation]
            kinds = {*map(type, values)}
            if len(kinds) == 1 and (kind := kinds.pop()) in KINDS:
                return Members(kind, values, annotation, annotation.__name__)
        if is_text(annotation):
            return Text(annotation)
        for base in KINDS:
            if issubclass(annotation, base):
                return Plain(base)
    raise ColumnError(
        f"{model.__name__}.{name} has the type {annotation!r}, which no column can store. Use bool, int, float, str, "
        "bytes, datetime, date, time, timedelta, Decimal, UUID, Enum, Literal, a model, list[...], set[...], "
        "tuple[X, ...] or dict[str, ...]; or Any, for a column of JSON text."
    )


def _decimal(model: ModelClass, name: str, declared: Any) -> pa.DataType:
    """Return the column type of a Decimal, by the constraints `max_digits` and `decimal_places`."""
    limits = dict[str, int]()
    for constraint in _metadata(declared):
        for limit in ("max_digits", "decimal_places"):
            if (value := getattr(constraint, limit, None)) is not None:
                limits[limit] = value
    places = limits.get("decimal_places", 9)
    digits = max(limits.get("max_digits", _DIGITS), places) if "decimal_places" in limits else _DIGITS
    if digits > _DIGITS or limits.get("max_digits", 0) > _DIGITS:
        raise ColumnError(f"{model.__name__}.{name} has max_digits or decimal_places above {_DIGITS}. Lower it.")
    return pa.decimal128(digits, places)


def _metadata(annotation: Any) -> Iterator[Any]:
    """Yield the metadata of `Annotated`, also inside `X | None` and a pydantic `Field`."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        yield from _metadata(inner)
        for item in metadata:
            yield from (item, *getattr(item, "metadata", ()))
    elif get_origin(annotation) in (Union, types.UnionType):
        for alternative in get_args(annotation):
            yield from _metadata(alternative)


def bare(annotation: Any) -> Any:
    """Strip `Annotated`, the None of `X | None`, and the constraints of pydantic's own types."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        others = [alternative for alternative in get_args(annotation) if alternative is not type(None)]
        if len(others) == 1:
            return bare(others[0])
    return CONSTRAINED.get(annotation, annotation) if isinstance(annotation, type) else annotation
