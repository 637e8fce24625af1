"""Names that a pydantic type contributes to the paths of its errors, in contrast to keys of a payload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import SchemaError, SchemaValidator

_OPAQUE = {"metadata", "default", "expected", "serialization"}
"""Keys of a schema whose values are not schemas."""


@lru_cache(maxsize=256)
def names_in(annotation: Any) -> frozenset[str]:
    """Return the names of fields, aliases, alternatives and tags in a type. JSON may have further keys."""
    schema: Any = TypeAdapter(annotation).core_schema
    definitions = {node["ref"]: node for node in schema.get("definitions", ())}
    names, left = set[str](), [schema]
    while left:
        node = left.pop()
        if isinstance(node, list | tuple):
            left += node
        elif isinstance(node, Mapping):
            is_schema = isinstance(node.get("type"), str)  # not fields or tags by name, where `type` may be a field
            left += [value for key, value in node.items() if not (is_schema and key in _OPAQUE)]
            names.update(_names_of(node, definitions) if is_schema else ())
    return frozenset(names)


def _names_of(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterable[str]:
    match node:
        case {"type": "union", "choices": choices}:
            return [choice[1] if isinstance(choice, tuple) else _label(choice, definitions) for choice in choices]
        case {"type": "tagged-union", "choices": tags}:
            return _strings([tag.value if isinstance(tag, Enum) else tag for tag in tags])
        case {"fields": fields}:
            return _strings([*fields])
        case _:
            return _strings([node.get("name"), node.get("validation_alias")])


def _label(choice: Any, definitions: Mapping[str, Any]) -> str:
    """Return the name of an alternative in errors, such as `list[int]`."""
    named = definitions.get(choice.get("schema_ref"), choice)
    if named["type"] == "model":  # the validator of a large model takes milliseconds
        return str(named["cls"].__name__)
    try:
        return SchemaValidator(choice).title
    except SchemaError:  # it refers to a definition
        return SchemaValidator({"type": "definitions", "schema": choice, "definitions": [*definitions.values()]}).title


def _strings(nested: Any) -> Iterator[str]:
    if isinstance(nested, str):
        yield nested
    elif isinstance(nested, list):
        for each in nested:
            yield from _strings(each)
