"""The columns of a model's table, and the data of messages as rows of it."""

import enum
import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pyarrow as pa
from pydantic import AwareDatetime, FutureDate, FutureDatetime, NaiveDatetime, PastDate, PastDatetime

from pipeline_platform.model.casts import AS_TEXT, KINDS, Cast, ColumnError, Members, Plain, Text
from pipeline_platform.model.fields import MODELS, ModelClass, allows_none, fields
from pipeline_platform.model.nested_casts import DictOf, ListOf, ModelOf

CONSTRAINED: dict[Any, type] = {
    **dict.fromkeys((AwareDatetime, NaiveDatetime, PastDatetime, FutureDatetime), datetime),
    **dict.fromkeys((PastDate, FutureDate), date),
}
"""What values pydantic's own types have."""
_DIGITS = 38
"""The most digits of a Decimal in a Delta table."""


@lru_cache(maxsize=256)
def row_type(model: ModelClass, kept: pa.Schema | None = None) -> ModelOf:
    """The casts of a model's fields to the columns of its table. All are nullable, so that fields may come and go.

    Args:
        model: A model of plain fields, models, lists and dicts.
        kept: The columns of a table that was made before: its Decimals keep their digits.

    Raises:
        ColumnError: A field has a type that no column holds, or there is no field.
    """
    return _model(model, (), pa.struct([]) if kept is None else pa.struct(list(kept)))


def arrow_schema(model: ModelClass) -> pa.Schema:
    """The columns of a model's table; see `row_type`."""
    return row_type(model).schema


def _model(model: ModelClass, inside: tuple[ModelClass, ...], kept: pa.DataType | None) -> ModelOf:
    if model in inside:
        raise ColumnError(
            f"{model.__name__} holds itself, so its columns would have no end: keep the inner ones as JSON text"
        )
    if not (known := fields(model)):
        raise ColumnError(f"{model.__name__} has no fields: there would be no columns")
    folded = [name.lower() for name in known]
    # Spark, and Delta tables with it, ignores the case of a column's name.
    if twice := sorted(name for name in set(folded) if folded.count(name) > 1):
        raise ColumnError(
            f"{model.__name__} has fields that differ only in case, which tables ignore: {twice}. Rename them"
        )
    inside = (*inside, model)
    there = {one.name: one.type for one in kept} if kept is not None and pa.types.is_struct(kept) else {}
    return ModelOf(
        model,
        {name: _cast(model, name, field.annotation, inside, there.get(name)) for name, field in known.items()},
    )


def _cast(
    model: ModelClass, name: str, declared: Any, inside: tuple[ModelClass, ...], kept: pa.DataType | None
) -> Cast:
    annotation = bare(declared)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        if len(kinds) == 1 and (kind := kinds.pop()) in KINDS:
            return Members(kind, arguments, None, str(annotation).removeprefix("typing."))
    elif origin in (list, set, frozenset, Sequence, tuple) and (len(arguments) == 1 or arguments[1:] == (Ellipsis,)):
        kept = kept.value_type if kept is not None and pa.types.is_list(kept) else None
        return ListOf(_cast(model, name, arguments[0], inside, kept), nullable=allows_none(arguments[0]))
    elif origin in (dict, Mapping) and arguments and bare(arguments[0]) is str:
        kept = kept.item_type if kept is not None and pa.types.is_map(kept) else None
        return DictOf(_cast(model, name, arguments[1], inside, kept), nullable=allows_none(arguments[1]))
    elif isinstance(annotation, type):
        if annotation is Decimal:
            is_kept = kept is not None and pa.types.is_decimal128(kept)
            return Plain(Decimal, kept if is_kept else _decimal(model, name, declared))
        if annotation in KINDS:
            return Plain(annotation)
        if issubclass(annotation, MODELS):
            return _model(annotation, inside, kept)
        if issubclass(annotation, enum.Enum):
            values = [member.value for member in annotation]
            kinds = {*map(type, values)}
            if len(kinds) == 1 and (kind := kinds.pop()) in KINDS:
                return Members(kind, values, annotation, annotation.__name__)
        if annotation in AS_TEXT:
            return Text(annotation)
        for base in KINDS:
            if issubclass(annotation, base):
                return Plain(base)
    raise ColumnError(
        f"{model.__name__}.{name} is {annotation!r}, which is no column's type; use bool, int, float, str, bytes, "
        "datetime, date, time, timedelta, Decimal, UUID, Enum, Literal, a model, list[...], set[...], tuple[X, ...] or "
        "dict[str, ...]"
    )


def _decimal(model: ModelClass, name: str, declared: Any) -> pa.DataType:
    """The column of a Decimal: of `max_digits` and `decimal_places`, where both are said."""
    limits = dict[str, int]()
    for one in _metadata(declared):
        for limit in ("max_digits", "decimal_places"):
            if (value := getattr(one, limit, None)) is not None:
                limits[limit] = value
    places = limits.get("decimal_places", 9)
    digits = max(limits.get("max_digits", _DIGITS), places) if "decimal_places" in limits else _DIGITS
    if digits > _DIGITS or limits.get("max_digits", 0) > _DIGITS:
        raise ColumnError(f"{model.__name__}.{name} has max_digits or decimal_places above {_DIGITS}: lower it")
    return pa.decimal128(digits, places)


def _metadata(annotation: Any) -> Iterator[Any]:
    """What `Annotated` says of a type, also of one that may be None; a pydantic `Field` has it inside."""
    if get_origin(annotation) is Annotated:
        inner, *said = get_args(annotation)
        yield from _metadata(inner)
        for one in said:
            yield from (one, *getattr(one, "metadata", ()))
    elif get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from _metadata(one)


def bare(annotation: Any) -> Any:
    """Strip `Annotated`, the None of `X | None`, and what pydantic's own types demand of a value."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        others = [one for one in get_args(annotation) if one is not type(None)]
        if len(others) == 1:
            return bare(others[0])
    return CONSTRAINED.get(annotation, annotation) if isinstance(annotation, type) else annotation
