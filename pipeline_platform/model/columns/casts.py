"""Casts of plain fields to columns: the values that each type of field accepts, from Python and from Arrow.

A column accepts the values that it can store exactly, at every depth: in a field, a model, a list and a dict. Any other
value is a `ColumnError`, which names the field and quotes no value. `docs/reference/tables.md` lists the types.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from numbers import Integral, Real
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from pydantic import AnyUrl, IPvAnyAddress, TypeAdapter
from pydantic_core import from_json, to_json

MISFIT = (pa.ArrowException, TypeError, ValueError, ArithmeticError)
_EPOCH, _DAY = date(1970, 1, 1), 86_400
_FIRST_DAY, _LAST_DAY = ((day - _EPOCH).days for day in (date.min, date.max))
_INEXACT = [Inexact, InvalidOperation]
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


class ColumnError(TypeError):
    """A field of a model, or the data of a message, does not fit its column. The message names the field."""


def is_time(type_: pa.DataType) -> bool:
    """Whether a type is one of dates or of times with a date."""
    return bool(arrow.is_date(type_) or arrow.is_timestamp(type_))


def beyond_calendar(times: pa.Array) -> bool:
    """Whether a column for which `is_time` is true has a time outside the years 1 to 9999, Python's range."""
    per_day = 1 if arrow.is_date32(times.type) else _DAY * _PER_SECOND[getattr(times.type, "unit", "ms")]
    first, end = _FIRST_DAY * per_day, (_LAST_DAY + 1) * per_day
    return any(bound.is_valid and not first <= bound.value < end for bound in pc.min_max(times).values())


def has_seconds(value: datetime | time | None) -> bool:
    """Whether the offset of a time to UTC has seconds, as in times before 1900. JSON would lose them."""
    if value is None or value.tzinfo is None or value.tzinfo is UTC:  # without a call: it checks each message
        return False
    offset = value.utcoffset()
    return offset is not None and (offset.seconds % 60 > 0 or offset.microseconds > 0)


def for_json(value: Any) -> Any:
    """Return a value, or the datetime in UTC if JSON would lose the seconds of its offset."""
    return value.astimezone(UTC) if isinstance(value, datetime) and has_seconds(value) else value


class Kind(NamedTuple):
    """A type of field, and the values that it accepts.

    Attributes:
        column: Type of its column.
        python: Types whose instances it accepts.
        arrow: Function that returns whether it accepts an Arrow type.
        takes: The accepted types as text, for errors.
        limits: The values that its column can store, as text, for errors.
        refused: Subclasses of `python` that it does not accept.
        exact: Types that need no check, because Arrow accepts only `python` for them; None if Arrow always does.
    """

    column: pa.DataType
    python: tuple[type, ...]
    arrow: Callable[[pa.DataType], bool]
    takes: str
    limits: str
    refused: tuple[type, ...] = ()
    exact: tuple[type, ...] | None = None


def _is_any(*tests: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda type_: any(test(type_) for test in tests)


_is_text = _is_any(arrow.is_string, arrow.is_large_string, arrow.is_string_view)
_is_bytes = _is_any(arrow.is_binary, arrow.is_large_binary, arrow.is_fixed_size_binary, arrow.is_binary_view)
_TEXTS = (str, bytes, bytearray, memoryview)
_YEARS = "the years 1 to 9999 in UTC, in microseconds"

KINDS: Mapping[type, Kind] = {
    bool: Kind(pa.bool_(), (bool,), arrow.is_boolean, "bool", "True and False"),
    int: Kind(pa.int64(), (Integral,), arrow.is_integer, "int", "64 bits", (bool,), (int,)),
    float: Kind(
        pa.float64(),
        (Real,),
        _is_any(arrow.is_floating, arrow.is_integer),
        "float or int",
        "an int of at most 2**53",
        (bool,),
        (float, int),
    ),
    str: Kind(pa.string(), _TEXTS, _is_any(_is_text, _is_bytes), "str", "valid UTF-8"),
    bytes: Kind(pa.binary(), _TEXTS, _is_any(_is_text, _is_bytes), "bytes or str", "a str of valid UTF-8"),
    datetime: Kind(pa.timestamp("us", "UTC"), (datetime,), arrow.is_timestamp, "datetime", _YEARS, exact=(datetime,)),
    date: Kind(pa.date32(), (date,), arrow.is_date, "date", "the years 1 to 9999", (datetime,), (date,)),
    Decimal: Kind(
        pa.decimal128(38, 9),
        (Decimal, int),
        _is_any(arrow.is_decimal, arrow.is_integer),
        "Decimal or int",
        "",
        (bool,),
        (Decimal, int),
    ),
}
"""Types that a column stores unchanged. A subclass has the same column."""


class Cast(ABC):
    """A cast from the values of a field to its column.

    Attributes:
        type: Type of the column.
        own: Types whose values need no cast between handling and batching; empty if each value needs a check.
    """

    type: pa.DataType
    own: tuple[type, ...] = ()

    @abstractmethod
    def of_values(self, values: Sequence[Any], path: str) -> pa.Array:
        """Build the column of Python's values.

        Raises:
            ColumnError: A value does not fit; `path` names the field.
        """

    @abstractmethod
    def of_array(self, column: pa.Array, path: str) -> pa.Array:
        """Build the column of an Arrow array.

        Raises:
            ColumnError: A value does not fit; `path` names the field.
        """

    @abstractmethod
    def crossing(self, value: Any, path: str) -> Any:
        """Return a value without its models, as `encode` writes it, cast to the field's type.

        Raises:
            ColumnError: The value does not fit; `path` names the field.
        """

    def read(self, value: Any) -> Any:
        """Return a value of the column, with JSON text decoded."""
        return value

    def nulls(self, column: pa.Array, takes: str, path: str) -> pa.Array:
        """Return a column of nulls for an array of another type, which may contain only nulls."""
        if column.null_count < len(column):
            raise ColumnError(f"{path} must be {takes}, got {column.type}")
        return pa.nulls(len(column), self.type)


class Plain(Cast):
    """A column of unchanged values, by one of `KINDS`."""

    def __init__(self, base: type, type_: pa.DataType | None = None) -> None:
        """Cast to the column of a kind; `type_` is the type of a Decimal with other digits."""
        self.base, self.kind = base, KINDS[base]
        self.type, self.own = type_ or self.kind.column, (base, type(None))
        self._is_time = is_time(self.type)
        self._exact = self.kind.exact and {*self.kind.exact, type(None)}
        self._limits, self._quantize = self.kind.limits, None
        if base is Decimal:
            digits, places = self.type.precision, self.type.scale
            self._limits = f"{digits - places} digits before the decimal point and {places} after it"
            self._unit, self._quantize = Decimal((0, (1,), -places)), Context(digits, traps=_INEXACT).quantize

    def of_values(self, values: Sequence[Any], path: str) -> pa.Array:
        """Build the column of Python's values."""
        if self._exact and not set(map(type, values)) <= self._exact:
            values = self._as_exact(values, path)
        try:
            if (quantize := self._quantize) is not None:  # Arrow stores wrong values for more digits, or crashes
                unit = self._unit
                values = [None if value is None else quantize(value, unit) for value in values]
            column = pa.array(values, self.type)
        except MISFIT:
            self._refuse_others(values, path)
            raise self._beyond(path) from None
        return self._within(column, path)

    def of_array(self, column: pa.Array, path: str) -> pa.Array:
        """Build the column of an Arrow array."""
        column = _decoded(column)
        if not self.kind.arrow(column.type):
            return self.nulls(column, self.kind.takes, path)
        if self.type == column.type and self.base is not str:
            return self._within(column, path)
        try:
            if self.base is str:  # via bytes, because Arrow does not check the UTF-8 of text
                column = column.cast(pa.binary())
            elif self.base is Decimal:  # via 256 bits, because Arrow stores wrong values of decimals that overflow 128
                column = column.cast(pa.decimal256(76, self.type.scale))
            return self._within(column.cast(self.type), path)
        except pa.ArrowException:
            raise self._beyond(path) from None

    def crossing(self, value: Any, path: str) -> Any:
        """Return a value of the field's own type, which JSON can contain."""
        if type(value) not in self.own or (self.base is datetime and has_seconds(value)):
            return self.of_values([value], path)[0].as_py()
        return value

    def _refuse_others(self, values: Iterable[Any], path: str) -> None:
        python, refused = self.kind.python, self.kind.refused
        for value in values:
            if value is not None and (not isinstance(value, python) or isinstance(value, refused)):
                raise ColumnError(f"{path} must be {self.kind.takes}, got {type(value).__qualname__}")

    def _as_exact(self, values: Sequence[Any], path: str) -> Sequence[Any]:
        """Return values of other types, such as those of NumPy and pandas, as values that Arrow stores exactly."""
        self._refuse_others(values, path)
        if any(getattr(value, "nanosecond", 0) for value in values):
            raise self._beyond(path)
        return [int(value) if isinstance(value, Integral) else value for value in values]

    def _within(self, column: pa.Array, path: str) -> pa.Array:
        if self._is_time and beyond_calendar(column):
            raise self._beyond(path)
        return column

    def _beyond(self, path: str) -> ColumnError:
        return ColumnError(f"{path} does not fit its column, which stores {self._limits}")


class Text(Cast):
    """A column that stores values as text, in a normal form."""

    def __init__(self, base: type) -> None:
        self.type, self.base, self.own = pa.string(), base, (base, type(None))
        self._python = (IPv4Address, IPv6Address) if base is _ANY_ADDRESS else base
        of_url: _AsText = str, TypeAdapter(base).validate_python, None
        self._text, self._parsed, self._arrow = AS_TEXT.get(base, of_url)
        self._takes = f"{base.__name__} or its text"

    def of_values(self, values: Sequence[Any], path: str) -> pa.Array:
        """Build the column of Python's values."""
        return pa.array([self.crossing(value, path) for value in values], self.type)

    def of_array(self, column: pa.Array, path: str) -> pa.Array:
        """Build the column of an Arrow array."""
        column = _decoded(column)
        if self._arrow is not None and self._arrow(column.type):
            unit = pa.duration("us") if self.base is timedelta else pa.time64("us")
            with suppress(pa.ArrowInvalid):
                return self.of_values(column.cast(unit).to_pylist(), path)
            raise ColumnError(f"{path} does not fit its column, which stores microseconds")
        if not _is_text(column.type) and getattr(column.type, "extension_name", "") != "arrow.uuid":
            return self.nulls(column, self._takes, path)
        return self.of_values(column.to_pylist(), path)

    def crossing(self, value: Any, path: str) -> Any:
        """Return the text of a value."""
        if value is None:
            return None
        with suppress(*MISFIT):
            if isinstance(value, str):
                return self._text(self._parsed(value))
            if isinstance(value, self._python):
                return self._text(value)
        if isinstance(value, str):
            raise ColumnError(f"{path} is not the text of a {self.base.__name__}")
        raise ColumnError(f"{path} must be {self._takes}, got {type(value).__qualname__}")


_to_timedelta = TypeAdapter(timedelta).validate_python
_FINER = re.compile(r"[.,]\d{7}")


def parsed_span(text: str) -> timedelta:
    """Parse a timedelta: ISO 8601, or the text of a column, where `-1 day, 23:00:00` is minus one hour."""
    days, _, rest = text.rpartition(", ")
    return _to_timedelta(rest) + timedelta(int(days.partition(" day")[0] or 0))


def _span_text(span: timedelta) -> str:
    if getattr(span, "nanoseconds", 0):  # of pandas
        raise ValueError("finer than a microsecond")
    return timedelta.__str__(span)


def _in_microseconds(parsed: Callable[[str], Any], text: str) -> Any:
    if _FINER.search(text):
        raise ValueError("finer than a microsecond")
    return parsed(text)


_ANY_ADDRESS: Any = IPvAnyAddress
_AsText = tuple[Callable[[Any], str], Callable[[str], Any], Callable[[pa.DataType], bool] | None]
AS_TEXT: Mapping[type, _AsText] = {
    UUID: (str, UUID, None),
    _ANY_ADDRESS: (str, ip_address, None),
    **{address: (str, address, None) for address in (IPv4Address, IPv6Address, IPv4Network, IPv6Network)},
    time: (time.isoformat, partial(_in_microseconds, time.fromisoformat), arrow.is_time),
    timedelta: (_span_text, partial(_in_microseconds, parsed_span), arrow.is_duration),
}
"""Types that a column stores as text: the functions that write and parse it, and the accepted Arrow type."""


def is_text(annotation: Any) -> bool:
    """Whether a column stores a type as text, in a normal form."""
    return annotation in AS_TEXT or (isinstance(annotation, type) and issubclass(annotation, AnyUrl))


class JsonText(Cast):
    """A column of JSON text, for fields with values of several types."""

    type = pa.string()

    def of_values(self, values: Sequence[Any], path: str) -> pa.Array:
        """Build the column of Python's values."""
        return pa.array([None if value is None else self._written(value, path) for value in values], self.type)

    def of_array(self, column: pa.Array, path: str) -> pa.Array:
        """Build the column of an Arrow array. Text must be JSON, and is not changed."""
        column = _decoded(column)
        if not _is_text(column.type):
            return self.of_values(column.to_pylist(maps_as_pydicts="strict"), path)
        texts = column.to_pylist()
        try:
            for text in texts:
                from_json("null" if text is None else text, allow_inf_nan=False)
        except ValueError:
            raise ColumnError(f"{path} is not JSON text") from None
        return pa.array(texts, self.type)

    def crossing(self, value: Any, path: str) -> Any:
        """Return the value as plain JSON."""
        return None if value is None else from_json(self._written(value, path))

    def read(self, value: Any) -> Any:
        """Return the decoded JSON."""
        return None if value is None else from_json(value)

    def _written(self, value: Any, path: str) -> bytes:
        try:
            return to_json(for_json(value), by_alias=False, inf_nan_mode="null", fallback=msgspec.to_builtins)
        except MISFIT as error:
            raise ColumnError(f"{path} cannot be written as JSON: {type(error).__name__}") from None


class Members(Cast):
    """A column of the values of an enum or a Literal."""

    def __init__(self, base: type, values: Sequence[Any], of: type[enum.Enum] | None, name: str) -> None:
        self._plain, self._of, self._name = Plain(base), of, name
        self.type, self.own = self._plain.type, () if of is None else (of, type(None))
        self._known = self._plain.of_values([*values, None], name)

    def of_values(self, values: Sequence[Any], path: str) -> pa.Array:
        """Build the column of Python's values."""
        if self._of is not None:
            values = [value._value_ if isinstance(value, self._of) else value for value in values]
        return self._members(self._plain.of_values(values, path), path)

    def of_array(self, column: pa.Array, path: str) -> pa.Array:
        """Build the column of an Arrow array."""
        return self._members(self._plain.of_array(column, path), path)

    def crossing(self, value: Any, path: str) -> Any:
        """Return the value of a member."""
        return value._value_ if type(value) is self._of else self.of_values([value], path)[0].as_py()

    def _members(self, column: pa.Array, path: str) -> pa.Array:
        if pc.all(pc.is_in(column, self._known)).as_py() is not False:
            return column
        try:  # an enum may accept more values than its members have: combined flags, or by `_missing_`
            if self._of is not None:
                known = {value: self._of(value)._value_ for value in column.drop_null().unique().to_pylist()}
                return self._plain.of_values(list(map(known.get, column.to_pylist())), path)
        except MISFIT:
            pass
        raise ColumnError(f"{path} is not a value of {self._name}")


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if arrow.is_dictionary(column.type) else column
