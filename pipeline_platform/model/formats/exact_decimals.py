"""Exact Decimals from JSON: pydantic reads numbers as floats, so a number that a float would round becomes text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache, reduce
from itertools import chain
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Raw, defstruct
from pydantic import AliasChoices, BaseModel, RootModel

_EXACT = 15
"""Characters up to which a float represents every number without exponent exactly."""
_elements = msgspec.json.Decoder(list[Raw]).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode


_Types = frozenset[Any]
"""Alternative types of a value."""


class _Plan(NamedTuple):
    """Places of Decimals in a value: itself, its members by name in JSON or by index, and its other members."""

    is_decimal: bool = False
    members: Mapping[str | int, _Types] = {}
    others: _Types = frozenset()


def has_decimal(annotation: Any) -> bool:
    """Whether JSON of a type may contain a Decimal."""
    return any(plan.is_decimal for plan in _inside(annotation))


def _inside(annotation: Any) -> Iterator[_Plan]:
    """Yield the plan of each type in a type once."""
    seen, left = set[Any](), [*_types(annotation)]
    while left:
        if (kind := left.pop()) not in seen:
            seen.add(kind)
            yield (plan := _plan(frozenset([kind])))
            left += chain(plan.others, *plan.members.values())


def exact(data: bytes, annotation: Any) -> bytes | None:
    """Return JSON with text in place of numbers that belong to a Decimal and that a float would change.

    Returns:
        The changed JSON; None if nothing changed.

    Raises:
        msgspec.DecodeError: The JSON is not valid, or has NaN or an infinity.
        RecursionError: The JSON has too many nested brackets.
    """
    return _exact(data, _types(annotation))


def _exact(data: bytes, types: _Types) -> bytes | None:
    # Visits each value once for all alternatives: a visit per alternative would take exponential time in the depth.
    plan, data = _plan(types), data.strip()
    if plan.is_decimal and _is_changed(data):
        return b'"%b"' % data
    if not (plan.members or plan.others):
        return None
    if data[:1] == b"[":
        elements = [bytes(raw) for raw in _elements(data)]
        found = [_exact(item, plan.members.get(place, plan.others)) for place, item in enumerate(elements)]
        if any(found):
            return b"[%b]" % b",".join(new or old for new, old in zip(found, elements, strict=True))
    elif data[:1] == b"{":
        rewritten = [(key, _exact(bytes(value), of)) for key, value, of in _parts(data, types)]
        if changed := {key: Raw(value) for key, value in rewritten if value is not None}:
            return msgspec.json.encode(_members(data) | changed)
    return None


def _parts(data: bytes, types: _Types) -> list[tuple[str, Raw, _Types]]:
    """Return the members of an object that may have Decimals: name, value and types."""
    plan = _plan(types)
    if plan.others:
        return [(key, value, plan.members.get(key, plan.others)) for key, value in _members(data).items()]
    decode, wanted = _probe(types)
    probe = decode(data)
    return [(key, getattr(probe, attribute), of) for attribute, key, of in wanted]


def _is_changed(number: bytes) -> bool:
    has_exponent = b"e" in number or b"E" in number
    if len(number) <= _EXACT and not has_exponent:
        return False
    if number[:1] not in b"-0123456789" or not (has_exponent or b"." in number):  # whole numbers are exact
        return False
    return Decimal(number.decode()) != Decimal(repr(float(number)))


@lru_cache(maxsize=1_024)
def _probe(types: _Types) -> tuple[Callable[[bytes], Any], Sequence[tuple[str, str, _Types]]]:
    """Return a decoder of the members that may have Decimals, and their attribute, name in JSON and types."""
    known = {key: of for key, of in _plan(types).members.items() if isinstance(key, str)}
    wanted = {key: of for key, of in known.items() if any(map(has_decimal, of))}
    names = {f"field_{number}": key for number, key in enumerate(wanted)}
    probe = defstruct("Probe", [(name, Raw, Raw(b"")) for name in names], rename=names, gc=False)
    return msgspec.json.Decoder(probe).decode, [(name, key, wanted[key]) for name, key in names.items()]


@lru_cache(maxsize=1_024)
def _plan(types: _Types) -> _Plan:
    plans = [*map(_single, types)]
    return _Plan(
        any(plan.is_decimal for plan in plans),
        {
            key: _union(plan.members.get(key, plan.others) for plan in plans)
            for key in chain(*(plan.members for plan in plans))
        },
        _union(plan.others for plan in plans),
    )


def _union(types: Iterable[_Types]) -> _Types:
    return frozenset[Any]().union(*types)


def _types(*annotations: Any) -> _Types:
    return frozenset(map(_bare, annotations))


def _bare(annotation: Any) -> Any:
    """Return a type without metadata, which may have no hash."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bare(arguments[0])
    if not arguments or origin is Literal:
        return annotation
    if origin is Callable:  # its arguments include a list
        return origin
    inner = tuple(map(_bare, arguments))
    return reduce(or_, inner) if origin is UnionType else origin[inner]


def _filled(annotation: Any, generic: Any, arguments: Sequence[Any]) -> Any:
    """Return a type with the arguments of a generic type in place of type variables."""
    variables = dict(zip(getattr(generic, "__parameters__", ()), arguments, strict=False))
    if isinstance(annotation, TypeVar):
        return variables.get(annotation, annotation)
    free = getattr(annotation, "__parameters__", ())
    return annotation[tuple(variables.get(each, each) for each in free)] if free else annotation


def _single(annotation: Any) -> _Plan:
    origin, arguments = get_origin(annotation), get_args(annotation)
    generic = annotation if origin is None else origin
    if inner := getattr(generic, "__supertype__", getattr(generic, "__value__", None)):  # a NewType, a TypeAliasType
        return _single(_bare(_filled(inner, generic, arguments)))
    if origin in (Union, UnionType):
        others = {*arguments} - {type(None), bool, int}
        # With further alternatives, pydantic could read the text as another type.
        return _plan(frozenset(kind for kind in arguments if others == {kind} or not _single(kind).is_decimal))
    if annotation is Decimal:
        return _Plan(is_decimal=True)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        annotation.model_rebuild(raise_errors=False)  # resolves names of classes that were defined later
        if issubclass(annotation, RootModel):
            return _single(annotation.model_fields["root"].annotation)
        fields = dict[str | int, _Types]()
        for name, field in annotation.model_fields.items():
            alias = field.validation_alias
            names = alias.choices if isinstance(alias, AliasChoices) else [alias]
            fields |= dict.fromkeys([name, *(key for key in names if isinstance(key, str))], _types(field.annotation))
        return _Plan(members=fields)
    if origin is tuple and ... not in arguments:
        return _Plan(members={place: frozenset([kind]) for place, kind in enumerate(arguments)})
    if isinstance(generic, type) and "__annotations__" in vars(generic):  # a dataclass, or a TypedDict
        hints = get_type_hints(generic).items()
        return _Plan(members={name: _types(_filled(kind, generic, arguments)) for name, kind in hints})
    if origin is not None:
        is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
        return _Plan(others=frozenset(arguments[is_mapping:]) - {...})
    return _Plan()
