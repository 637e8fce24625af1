"""Exact Decimals from JSON: pydantic reads numbers as floats, so a number that a float would round becomes text."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw, defstruct
from pydantic import AliasChoices, BaseModel, RootModel

_EXACT = 15
"""Characters up to which a float represents every number without exponent exactly."""
_elements = msgspec.json.Decoder(list[Raw]).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode


class _Plan(NamedTuple):
    """Places of Decimals in a type: itself, its alternatives, its items, its fields by their names in JSON."""

    is_decimal: bool = False
    either: Sequence[Any] = ()
    items: Sequence[Any] = ()
    fields: Mapping[str, Any] = {}


def has_decimal(annotation: Any, inside: tuple[Any, ...] = ()) -> bool:
    """Whether JSON of a type may contain a Decimal."""
    if annotation in inside:
        return False
    plan = _plan(annotation)
    inner = (*plan.either, *plan.items, *plan.fields.values())
    return plan.is_decimal or any(has_decimal(part, (*inside, annotation)) for part in inner)


def exact(data: bytes, annotation: Any) -> bytes | None:
    """Return JSON with text in place of numbers that belong to a Decimal and that a float would change.

    Returns:
        The changed JSON; None if nothing changed.

    Raises:
        msgspec.DecodeError: The JSON is not valid, or has NaN or an infinity.
    """
    plan, data = _plan(annotation), data.strip()
    if plan.is_decimal:
        return b'"%b"' % data if _is_changed(data) else None
    made: bytes | None = None
    parts: list[tuple[str, Raw, Any]]
    for alternative in plan.either:
        made = exact(made or data, alternative) or made
    if plan.items and data[:1] == b"[":
        elements = [bytes(raw) for raw in _elements(data)]
        found = [exact(item, of) for item, of in zip(elements, _repeated(plan.items, len(elements)), strict=True)]
        if any(found):
            made = b"[%b]" % b",".join(new or old for new, old in zip(found, elements, strict=True))
    elif (plan.items or plan.fields) and data[:1] == b"{":
        if plan.fields:
            decode, wanted = _probe(annotation)
            probe = decode(data)
            parts = [(key, getattr(probe, attribute), of) for attribute, key, of in wanted]
        else:
            parts = [(key, value, plan.items[-1]) for key, value in _members(data).items()]
        rewritten = [(key, exact(bytes(value), of)) for key, value, of in parts]
        if changed := {key: Raw(value) for key, value in rewritten if value is not None}:
            made = msgspec.json.encode(_members(data) | changed)
    return made


def _is_changed(number: bytes) -> bool:
    has_exponent = b"e" in number or b"E" in number
    if len(number) <= _EXACT and not has_exponent:
        return False
    if number[:1] not in b"-0123456789" or not (has_exponent or b"." in number):  # whole numbers are exact
        return False
    return Decimal(number.decode()) != Decimal(repr(float(number)))


def _repeated(items: Sequence[Any], count: int) -> list[Any]:
    """Return the type of each element; the last type repeats."""
    return [items[min(place, len(items) - 1)] for place in range(count)]


@lru_cache(maxsize=1_024)
def _probe(annotation: Any) -> tuple[Callable[[bytes], Any], Sequence[tuple[str, str, Any]]]:
    """Return a decoder of the fields that may have Decimals, and their attribute, name in JSON and type."""
    wanted = {key: field for key, field in _plan(annotation).fields.items() if has_decimal(field)}
    names = {f"field_{number}": key for number, key in enumerate(wanted)}
    probe = defstruct("Probe", [(name, Raw, Raw(b"")) for name in names], rename=names, gc=False)
    return msgspec.json.Decoder(probe).decode, [(name, key, wanted[key]) for name, key in names.items()]


@lru_cache(maxsize=1_024)
def _plan(annotation: Any) -> _Plan:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plan(arguments[0])
    if origin in (Union, types.UnionType):
        others = {*arguments} - {type(None), bool, int}
        # With further alternatives, pydantic could read the text as another type.
        return _Plan(either=[kind for kind in arguments if others == {kind} or not _plan(kind).is_decimal])
    if annotation is Decimal:
        return _Plan(is_decimal=True)
    if isinstance(annotation, type) and issubclass(annotation, RootModel):
        return _Plan(either=[annotation.model_fields["root"].annotation])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = dict[str, Any]()
        for name, field in annotation.model_fields.items():
            alias = field.validation_alias
            names = alias.choices if isinstance(alias, AliasChoices) else [alias]
            fields |= dict.fromkeys([name, *(key for key in names if isinstance(key, str))], field.annotation)
        return _Plan(fields=fields)
    if origin is not None:
        is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
        return _Plan(items=[kind for kind in arguments[is_mapping:] if kind is not ...])
    if isinstance(annotation, type) and "__annotations__" in vars(annotation):  # a dataclass, or a TypedDict
        return _Plan(fields=get_type_hints(annotation))
    return _Plan()
