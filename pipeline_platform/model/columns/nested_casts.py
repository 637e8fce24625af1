"""Casts of lists, dicts and models to columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter, itemgetter
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from pydantic import BaseModel

from pipeline_platform.model.columns.casts import Cast, ColumnError, Plain, for_json
from pipeline_platform.model.columns.fields import ModelClass, fields, values_of

_LISTS = arrow.is_list, arrow.is_large_list, arrow.is_fixed_size_list


class ListOf(Cast):
    """A column of lists."""

    def __init__(self, item: Cast, *, nullable: bool) -> None:
        self._item, self._nullable, self.type = item, nullable, pa.list_(item.type)

    def of_values(self, values: Sequence[Any], path: str) -> pa.Array:
        """Build the column of Python's values."""
        lists = [None if value is None else _listed(value, path) for value in values]
        items = self._item.of_values(list(chain.from_iterable(filter(None, lists))), f"{path}[]")
        return self._made(items, [len(value or ()) for value in lists], [value is None for value in lists], path)

    def of_array(self, column: pa.Array, path: str) -> pa.Array:
        """Build the column of an Arrow array."""
        if not any(is_list(column.type) for is_list in _LISTS):
            return self.nulls(column, "a list", path)
        items = self._item.of_array(pc.list_flatten(column), f"{path}[]")
        return self._made(items, pc.fill_null(pc.list_value_length(column), 0), column.is_null(), path)

    def crossing(self, value: Any, path: str) -> Any:
        """Return a list."""
        if value is None:
            return None
        made = [self._item.crossing(item, f"{path}[]") for item in _listed(value, path)]
        return made if self._nullable or None not in made else _refuse_null(f"{path}[]")

    def read(self, value: Any) -> Any:
        """Return a list with JSON text decoded."""
        return None if value is None else list(map(self._item.read, value))

    def _made(self, items: pa.Array, lengths: Any, nulls: Any, path: str) -> pa.Array:
        if items.null_count and not self._nullable:
            _refuse_null(f"{path}[]")
        return pa.ListArray.from_arrays(_offsets(lengths), items, type=self.type, mask=_mask(nulls))


class DictOf(Cast):
    """A column of dicts with str keys."""

    def __init__(self, item: Cast, *, nullable: bool) -> None:
        self._key, self._item, self._nullable = Plain(str), item, nullable
        self.type = pa.map_(pa.string(), item.type)

    def of_values(self, values: Sequence[Any], path: str) -> pa.Array:
        """Build the column of Python's values."""
        given = [{} if value is None else _dict(value, path) for value in values]
        keys = self._key.of_values([*chain.from_iterable(given)], f"{path} (key)")
        items = self._item.of_values([*chain.from_iterable(mapping.values() for mapping in given)], f"{path}[]")
        return self._made(keys, items, list(map(len, given)), [value is None for value in values], path)

    def of_array(self, column: pa.Array, path: str) -> pa.Array:
        """Build the column of an Arrow array."""
        if not arrow.is_map(column.type):
            return self.nulls(column, "a dict", path)
        lists = column.cast(pa.list_(pa.struct([("key", column.type.key_type), ("value", column.type.item_type)])))
        keys, items = pc.list_flatten(lists).flatten()
        keys = self._key.of_array(keys, f"{path} (key)")
        lengths = pc.fill_null(pc.list_value_length(lists), 0)
        return self._made(keys, self._item.of_array(items, f"{path}[]"), lengths, column.is_null(), path)

    def crossing(self, value: Any, path: str) -> Any:
        """Return a dict."""
        if value is None:
            return None
        made = {
            self._key.crossing(key, f"{path} (key)"): self._item.crossing(item, f"{path}[]")
            for key, item in _dict(value, path).items()
        }
        return made if self._nullable or None not in made.values() else _refuse_null(f"{path}[]")

    def read(self, value: Any) -> Any:
        """Return a dict with JSON text decoded."""
        return None if value is None else {key: self._item.read(item) for key, item in value.items()}

    def _made(self, keys: pa.Array, items: pa.Array, lengths: Any, nulls: Any, path: str) -> pa.Array:
        if items.null_count and not self._nullable:
            _refuse_null(f"{path}[]")
        offsets = _offsets(lengths)
        parents = pc.list_parent_indices(pa.ListArray.from_arrays(offsets, keys))
        if pa.table([parents, keys], ["dict", "key"]).group_by(["dict", "key"]).aggregate([]).num_rows < len(keys):
            raise ColumnError(f"{path} has a key twice")  # readers could not build a dict
        return pa.MapArray.from_arrays(offsets, keys, items, type=self.type, mask=_mask(nulls))


_DICT = attrgetter("__dict__")
_Getter = Callable[[str], Callable[[Any], Any]]


class ModelOf(Cast):
    """A column of models; for the outermost model, the columns of a table."""

    def __init__(self, model: ModelClass, casts: Mapping[str, Cast]) -> None:
        self.model, self.casts = model, casts
        self.schema = pa.schema([pa.field(name, cast.type) for name, cast in casts.items()])
        self.type = pa.struct(list(self.schema))
        self._filled = [name for name, field in fields(model).items() if not field.has_none]

    def of_values(self, values: Sequence[Any], path: str) -> pa.Array:
        """Build the column of Python's values."""
        there = [value for value in values if value is not None]
        return self._made(self.columns(there, path), [value is None for value in values])

    def of_array(self, column: pa.Array, path: str) -> pa.Array:
        """Build the column of an Arrow array."""
        if not arrow.is_struct(column.type):
            return self.nulls(column, self.model.__name__, path)
        given, there = [field.name for field in column.type], column.drop_null()
        if len(set(given)) < len(given):
            raise ColumnError(f"{path} has a field twice")
        if set(given) != self.casts.keys():  # as for a dict, a missing field may have a default
            return self.of_values(column.to_pylist(maps_as_pydicts="strict"), path)
        columns = dict(zip(given, there.flatten(), strict=True))
        return self._made(self.cast([columns[name] for name in self.casts], path), column.is_null())

    def crossing(self, value: Any, path: str = "") -> Any:
        """Return a dict of the fields of a model, with its extra fields."""
        if value is None and path:
            return None
        given, within = fields_of(value, self.model, path or "data"), f"{path}." if path else ""
        made = {name: cast.crossing(given[name], within + name) for name, cast in self.casts.items()}
        if nulls := [name for name in self._filled if made[name] is None]:
            _refuse_null(within + nulls[0])
        extra = getattr(value, "model_extra", None) or {}
        return made | {name: for_json(item) for name, item in extra.items()}

    def read(self, value: Any) -> Any:
        """Return a dict of fields with JSON text decoded."""
        return None if value is None else {name: cast.read(value[name]) for name, cast in self.casts.items()}

    def columns(self, data: Sequence[Any], path: str = "") -> list[pa.Array]:
        """Build the column of each field from data that `fields_of` accepts. Code of the model may raise anything."""
        try:
            getter, rows = self._as_they_are(data)
            values = [list(map(getter(name), rows)) for name in self.casts]
        except (KeyError, AttributeError):  # a dict has other fields, or an instance lacks some
            given = [fields_of(row, self.model, path or "data") for row in data]
            values = [[row[name] for row in given] for name in self.casts]
        return self._each("of_values", values, path)

    def cast(self, columns: Sequence[pa.Array], path: str = "") -> list[pa.Array]:
        """Build the column of each field from Arrow arrays, in the order of the fields."""
        return self._each("of_array", columns, path)

    def _each(self, build: str, given: Sequence[Any], path: str) -> list[pa.Array]:
        within, made = f"{path}." if path else "", list[pa.Array]()
        for (name, cast), values in zip(self.casts.items(), given, strict=True):
            made.append(getattr(cast, build)(values, within + name))
            if made[-1].null_count and name in self._filled:
                _refuse_null(within + name)
        return made

    def _as_they_are(self, data: Sequence[Any]) -> tuple[_Getter, Sequence[Any]]:
        """Return a getter of fields, and the rows that it works on; raise a KeyError if rows are of several types."""
        kinds = set(map(type, data))
        if kinds == {dict} and set(map(len, data)) == {len(self.casts)}:
            return itemgetter, data
        if kinds == {self.model}:
            return (itemgetter, list(map(_DICT, data))) if issubclass(self.model, BaseModel) else (attrgetter, data)
        raise KeyError

    def _made(self, columns: Sequence[pa.Array], nulls: Any) -> pa.Array:
        """Build the column of models from the columns of the models that are not null."""
        mask = _mask(nulls)
        if mask is not None:
            places = pc.subtract(pc.cumulative_sum(pc.invert(mask).cast(pa.int64())), 1)
            places = pc.if_else(mask, pa.scalar(None, pa.int64()), places)
            columns = [column.take(places) for column in columns]
        return pa.StructArray.from_arrays(columns, fields=list(self.type), mask=mask)


def fields_of(data: Any, model: ModelClass, path: str = "data") -> Mapping[str, Any]:
    """Return the values of a model's fields by name; a field that a dict lacks gets its default.

    Args:
        data: An instance of the model, which may have extra fields, or a dict by the names of its fields.
        model: The model.
        path: Name of the data in errors.

    Raises:
        ColumnError: It is neither, or a dict has an unknown name or lacks a required field.
    """
    known = fields(model)
    if isinstance(data, model):
        given = values_of(data)
    elif isinstance(data, dict):
        given = data
        if unknown := given.keys() - known.keys():
            raise ColumnError(f"{path} has {sorted(map(str, unknown))}, which are not fields of {model.__name__}")
    else:
        kind = f"{type(data).__module__}.{type(data).__qualname__}".removeprefix("builtins.")
        raise ColumnError(f"{path} must be {model.__name__} or a dict of its fields, got {kind}")
    if given.keys() >= known.keys():
        return given
    absent = known.keys() - given.keys()
    if missing := sorted(name for name in absent if known[name].is_required):
        raise ColumnError(f"{path} lacks {missing}, which {model.__name__} requires")
    return {**given, **{name: known[name].default(given) for name in absent}}


def _refuse_null(path: str) -> NoReturn:
    raise ColumnError(f"{path} must not be None")


def _dict(value: Any, path: str) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    raise ColumnError(f"{path} must be a dict, got {type(value).__qualname__}")


def _listed(value: Any, path: str) -> Sequence[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if getattr(value, "ndim", None) == 1:  # an array of NumPy
        return list(value.tolist())
    raise ColumnError(f"{path} must be a list, got {type(value).__qualname__}")


def _offsets(lengths: Any) -> pa.Array:
    if isinstance(lengths, pa.Array):
        lengths = lengths.to_pylist()
    return pa.array(accumulate(lengths, initial=0), pa.int32())


def _mask(nulls: Any) -> pa.Array | None:
    mask = nulls if isinstance(nulls, pa.Array) else pa.array(nulls, pa.bool_())
    return mask if mask.true_count else None
