"""Strict decoding of JSON payloads by a model, or by its twin: an equivalent `msgspec.Struct`, four times faster."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct, defstruct
from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import from_json

from pipeline_platform.model.columns.fields import ModelClass, fields
from pipeline_platform.model.failure import PayloadError, declare, words
from pipeline_platform.model.formats.compression import format_of
from pipeline_platform.model.formats.error_names import names_in
from pipeline_platform.model.formats.exact_decimals import exact, has_decimal

QUOTED = re.compile(r"(Invalid (?:enum )?value|unknown field) .*?(?= - at |$)", re.DOTALL)
"""Pattern of the values and names of a payload that msgspec quotes in errors."""

_decode = msgspec.json.Decoder().decode


def decoded(data: Any) -> Any:
    """Decode a JSON payload. Integers are exact, and the last of two members with the same name is used.

    Raises:
        PayloadError: It is not valid JSON, or contains NaN, an infinity, a number outside the range of a float, a lone
            surrogate, a byte order mark or invalid UTF-8.
        TypeError: It is not bytes: a callback has replaced it.
    """
    try:
        return _decode(data)
    except Exception as error:
        if not isinstance(data, bytes):
            raise TypeError(f"json() requires data of type bytes, got {type(data).__name__}") from None
        raise PayloadError(f"the payload is not valid JSON: {_why(data, error)}") from None


@lru_cache(maxsize=256)
def decoder(model: Any) -> Callable[[Any], Any]:
    """Return a function that decodes JSON to a type, or raises a ValidationError (pydantic) or PayloadError (msgspec).

    Args:
        model: A pydantic model, a `msgspec.Struct`, or a type of them: `A | B`, `list[A]`.

    Raises:
        TypeError: Neither pydantic nor msgspec accepts the type.
    """
    if has_struct(model):
        return _by_msgspec(model)
    if isinstance(model, type) and issubclass(model, BaseModel):
        own: Callable[[Any], Any] = model.model_validate_json
    else:
        try:
            own = TypeAdapter(model).validate_json
        except PydanticUserError as error:
            raise TypeError(f"json() cannot decode to {words(model, 200)}: {error.message}") from None
    return partial(_named, partial(_exactly, own, model) if has_decimal(model) else own, model)


def has_struct(model: Any) -> bool:
    """Whether a type is a `msgspec.Struct`, or a union, list or dict of them."""
    return (isinstance(model, type) and issubclass(model, Struct)) or any(map(has_struct, get_args(model)))


def _by_msgspec(model: Any) -> Callable[[Any], Any]:
    decode, name = msgspec.json.Decoder(model).decode, getattr(model, "__name__", str(model))

    def decoded_to(data: Any) -> Any:
        try:
            return decode(data)
        except msgspec.DecodeError as error:
            if isinstance(error, msgspec.ValidationError):
                why = QUOTED.sub(r"\1", str(error))
                raise PayloadError(f"{name}: {why}") from None
            raise PayloadError(f"the payload is not valid JSON: {_why(data, error)}") from None

    return decoded_to


def _named(own: Callable[[Any], Any], model: Any, data: Any) -> Any:
    """Decode by pydantic. The error of a payload that is not JSON names its format, if that is known."""
    try:
        return own(data)
    except ValidationError as error:
        declare(error, names_in(model))
        if (why := format_of(data)) is None or error.errors(include_input=False)[0]["type"] != "json_invalid":
            raise
        refused: Any = {"type": "json_invalid", "ctx": {"error": why}, "input": data}
        raise ValidationError.from_exception_data(error.title, [refused], "json") from None


def _exactly(own: Callable[[Any], Any], model: Any, data: Any) -> Any:
    try:
        return own(exact(data, model) or data) if isinstance(data, bytes) else own(data)
    except (msgspec.DecodeError, RecursionError):
        own(data)  # raises pydantic's error, unless only msgspec refuses the payload
        why = "it contains NaN or an infinity together with a Decimal, whose digits cannot be exact then"
        raise PayloadError(f"the payload is not valid JSON: {why}") from None


def _why(data: bytes, error: Exception) -> str:
    """Return reason and position of an error in pydantic's wording, so that both decoders report the same."""
    if why := format_of(data):
        return why
    try:
        from_json(data, allow_inf_nan=False)
    except ValueError as found:
        return str(found)
    return str(error)  # a number outside the range of a float: msgspec reports its depth, and quotes no key


_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "date": date}
_NEUTRAL = {"type", "metadata", "ref"}
"""Keys of a schema's node that do not affect decoding."""
_HARMLESS = {"title", "frozen", "extra_fields_behavior"}
"""Settings of a model that a twin follows, or that do not affect decoding."""
_DEEP, _LONG = 200, 4_300
"""Pydantic's limits of nested brackets and digits; msgspec does not check them in fields that the model lacks."""
SHORT = 2 * _DEEP
"""Bytes below which a payload is always within these limits."""
_DIGITS = re.compile(rb"(?<!\d)\d{%d}" % _LONG)  # from the start of a number: from each digit, it would be slow
_NANOSECONDS = re.compile(rb":\d\d\.\d{7}|\\u00(?:2[eE]|3[\daA])")
"""Pattern of times finer than a microsecond, also escaped: pydantic cuts them, msgspec rounds them."""


class _NoTwinError(Exception):
    """A model has rules that no struct can express."""


class Decoder(NamedTuple):
    """Decoders of payloads by a model's rules.

    Attributes:
        made: The class of the results: the model or its twin.
        short: Decodes valid UTF-8 of fewer than `SHORT` bytes, or raises.
        fast: Decodes valid UTF-8.
        exact: Decodes any payload.
    """

    made: ModelClass
    short: Callable[[bytes], Any]
    fast: Callable[[bytes], Any]
    exact: Callable[[Any], Any]


@lru_cache(maxsize=256)
def decoder_of(model: ModelClass) -> Decoder:
    """Return the decoders of a model. Payloads that its twin refuses or may misread are decoded by the model itself."""
    own = decoder(model)
    try:
        twin = _twin(model)
    except _NoTwinError:
        return Decoder(model, own, own, own)
    decode = msgspec.json.Decoder(twin).decode
    has_times = "datetime" in repr([field.annotation for field in fields(twin).values()])

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
        known = {node["ref"]: node for node in schema["definitions"]}
        schema = schema["schema"]
    made: type[Struct] = _type(schema, known)
    return made


def _type(node: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """Return the type that decodes like a schema's node; raise a `_NoTwinError` if the node has an unknown rule."""
    kind, more = node["type"], node.keys() - _NEUTRAL
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
        return _type(known[node["schema_ref"]], {})  # without references: a model that contains itself has no columns
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
        if schema["type"] == "default" and schema.keys() - _NEUTRAL <= {"schema", "default", "default_factory"} | {
            "default_factory_takes_data"
        }:
            # Payloads without a field that has another default are decoded by the model.
            if type(schema.get("default", ...)) in (type(None), bool, int, float, str):
                default = [schema["default"]]
            schema = schema["schema"]
        declared.append((name, _type(schema, known), *default))
    forbids = config.get("extra_fields_behavior") == "forbid"
    return defstruct(
        node["cls"].__name__, declared, kw_only=True, rename=names, forbid_unknown_fields=forbids, gc=False
    )
