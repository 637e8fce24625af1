"""Payloads of JSON, decoded strictly, by a model or by its twin: a struct that does so in a quarter of the time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct, defstruct
from pydantic import BaseModel, PydanticUserError, TypeAdapter
from pydantic_core import from_json

from pipeline_platform.model.exact_decimals import exact, has_decimal
from pipeline_platform.model.failure import words
from pipeline_platform.model.fields import ModelClass, fields

_QUOTED = re.compile(r"(Invalid (?:enum )?value|unknown field) .*?(?= - at |$)", re.DOTALL)
"""Where msgspec quotes a value, or a name, that a payload has."""

_decode = msgspec.json.Decoder().decode


class PayloadError(ValueError):
    """A payload is no JSON. Says what is wrong and where, and quotes nothing of it."""


def decoded(data: Any) -> Any:
    """Decode a payload of JSON. Whole numbers come back exactly. Of two members of one name the last one counts.

    Raises:
        PayloadError: It is no JSON, or has NaN, an infinity, a number that no float holds, half a surrogate pair,
            a byte order mark or bytes that are no UTF-8.
        TypeError: It is no bytes: a callback has put something else in its place.
    """
    try:
        return _decode(data)
    except Exception as error:
        if not isinstance(data, bytes):
            raise TypeError(f"json() decodes bytes, and data is of type {type(data).__name__}") from None
        raise PayloadError(f"the payload is no JSON: {_why(data, error)}") from None


@lru_cache(maxsize=256)
def decoder(model: Any) -> Callable[[Any], Any]:
    """What decodes JSON to a type, or raises a ValidationError, or a PayloadError of msgspec's.

    Args:
        model: A pydantic model, a `msgspec.Struct`, or a type of them: `A | B`, `list[A]`.

    Raises:
        TypeError: Neither pydantic nor msgspec takes the type.
    """
    if _has_struct(model):
        return _by_msgspec(model)
    if isinstance(model, type) and issubclass(model, BaseModel):
        own: Callable[[Any], Any] = model.model_validate_json
    else:
        try:
            own = TypeAdapter(model).validate_json
        except PydanticUserError as error:
            raise TypeError(f"json() cannot decode to {words(model, 200)}: {error.message}") from None
    return partial(_exactly, own, model) if has_decimal(model) else own


def _has_struct(model: Any) -> bool:
    return (isinstance(model, type) and issubclass(model, Struct)) or any(map(_has_struct, get_args(model)))


def _by_msgspec(model: Any) -> Callable[[Any], Any]:
    decode, name = msgspec.json.Decoder(model).decode, getattr(model, "__name__", str(model))

    def decoded_to(data: Any) -> Any:
        try:
            return decode(data)
        except msgspec.DecodeError as error:
            if isinstance(error, msgspec.ValidationError):
                why = _QUOTED.sub(r"\1", str(error))
                raise PayloadError(f"{name}: {why}") from None
            raise PayloadError(f"the payload is no JSON: {_why(data, error)}") from None

    return decoded_to


def _exactly(own: Callable[[Any], Any], model: Any, data: Any) -> Any:
    """Decode by pydantic; Decimals keep all their digits."""
    try:
        return own(exact(data, model) or data) if isinstance(data, bytes) else own(data)
    except msgspec.DecodeError:
        own(data)  # refuses in its own words what it does not take, either
        why = "it has NaN or an infinity beside a Decimal, whose digits are not read exactly then"
        raise PayloadError(f"the payload is no JSON: {why}") from None


def _why(data: bytes, error: Exception) -> str:
    """What is wrong and where, in the words of pydantic, whose models refuse payloads beside this."""
    try:
        from_json(data, allow_inf_nan=False)
    except ValueError as found:
        return str(found)
    return str(error)  # a number that no float holds: msgspec says how deep it lies, and names no key


_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "date": date}
_SAID = {"type", "metadata", "ref"}
"""What a node of a schema may say besides; it changes nothing."""
_HARMLESS = {"title", "frozen", "extra_fields_behavior"}
"""Settings of a model that a twin follows, or that change nothing of what is decoded."""
_DEEP, _LONG = 200, 4_300
"""Brackets, and digits of a number, that msgspec passes over in a field that no model has, and pydantic does not."""
SHORT = 2 * _DEEP
"""Bytes that have fewer of either."""
_DIGITS = re.compile(rb"\d{%d}" % _LONG)
_NANOSECONDS = re.compile(rb":\d\d\.\d{7}|\\u00(?:2[eE]|3[\daA])")
"""What pydantic cuts to microseconds, and msgspec rounds; some of it may be escaped."""


class _NoTwinError(Exception):
    """A model does more than decode."""


class Decoder(NamedTuple):
    """How payloads are decoded by a model's rules: to what is `made`, the model or its twin.

    `short` takes what is UTF-8 and has fewer bytes than `SHORT`, or raises; `fast` what is UTF-8; `exact` anything.
    """

    made: ModelClass
    short: Callable[[bytes], Any]
    fast: Callable[[bytes], Any]
    exact: Callable[[Any], Any]


@lru_cache(maxsize=256)
def decoder_of(model: ModelClass) -> Decoder:
    """The decoder of a model. What its twin refuses, or may take for something else, is left to the model itself."""
    own = decoder(model)
    try:
        twin = _twin(model)
    except _NoTwinError:
        return Decoder(model, own, own, own)
    decode = msgspec.json.Decoder(twin).decode
    has_times = "datetime" in repr([one.annotation for one in fields(twin).values()])

    def exact(data: Any) -> Any:
        return msgspec.convert(own(data), twin, from_attributes=True)

    def fast(data: bytes) -> Any:
        is_flat = len(data) < SHORT or data.count(b"[") + data.count(b"{") < _DEEP
        if is_flat and (len(data) < _LONG or not _DIGITS.search(data)):
            try:
                if not has_times or not _NANOSECONDS.search(data):
                    return decode(data)
            except msgspec.DecodeError:
                pass
        return exact(data)

    return Decoder(twin, fast if has_times else decode, fast, exact)


def _twin(model: ModelClass) -> type[Struct]:
    schema = getattr(model, "__pydantic_core_schema__", None)
    if not issubclass(model, BaseModel) or not isinstance(schema, Mapping):
        raise _NoTwinError
    known = {}
    if schema["type"] == "definitions":
        known = {one["ref"]: one for one in schema["definitions"]}
        schema = schema["schema"]
    made: type[Struct] = _type(schema, known)
    return made


def _type(node: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """The type that decodes what a node of a schema does; a `_NoTwinError` where the node has an unknown rule."""
    kind, more = node["type"], node.keys() - _SAID
    if kind in _PLAIN and not more:
        return _PLAIN[kind]
    if kind == "datetime" and more == {"microseconds_precision"}:
        return datetime
    if kind == "nullable" and more == {"schema"}:
        return _type(node["schema"], known) | None
    if kind == "list" and more == {"items_schema"}:
        return list[_type(node["items_schema"], known)]  # type: ignore[misc]
    if kind == "dict" and more == {"keys_schema", "values_schema"} and node["keys_schema"] == {"type": "str"}:
        return dict[str, _type(node["values_schema"], known)]  # type: ignore[misc]
    if kind == "literal" and more == {"expected"} and {*map(type, node["expected"])} == {str}:
        return Literal[tuple(node["expected"])]
    if kind == "definition-ref" and more == {"schema_ref"} and node["schema_ref"] in known:
        return _type(known[node["schema_ref"]], {})  # one that holds itself has no columns
    if kind == "model" and more == {"cls", "config", "custom_init", "root_model", "schema"}:
        return _struct(node, known)
    raise _NoTwinError


def _struct(node: Mapping[str, Any], known: Mapping[str, Any]) -> type[Struct]:
    config, inner = node["config"], node["schema"]
    if config.keys() - _HARMLESS or config.get("extra_fields_behavior") == "allow" or node["custom_init"]:
        raise _NoTwinError
    if node["root_model"] or inner["type"] != "model-fields" or "extras_schema" in inner:
        raise _NoTwinError
    declared, names = list[Any](), dict[str, str]()
    for name, field in inner["fields"].items():
        schema, default = field["schema"], list[Any]()
        if not isinstance(names.setdefault(name, field.get("validation_alias", name)), str):
            raise _NoTwinError
        if schema["type"] == "default" and schema.keys() - _SAID <= {"schema", "default", "default_factory"} | {
            "default_factory_takes_data"
        }:
            # What lacks a field with another default is left to the model.
            if type(schema.get("default", ...)) in (type(None), bool, int, float, str):
                default = [schema["default"]]
            schema = schema["schema"]
        declared.append((name, _type(schema, known), *default))
    forbids = config.get("extra_fields_behavior") == "forbid"
    return defstruct(
        node["cls"].__name__, declared, kw_only=True, rename=names, forbid_unknown_fields=forbids, gc=False
    )
