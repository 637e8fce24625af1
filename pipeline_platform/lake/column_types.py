"""What a model's columns and a table's do not agree about, in the words of fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline_platform.model.strict_options import PipelineError

if TYPE_CHECKING:
    from deltalake.schema import Field

_WORDS = {"long": "integer", "string": "text", "double": "number", "boolean": "yes or no", "binary": "bytes"}


class SchemaChangeError(PipelineError):
    """A column changed its type. Names table, column, both types and the way out."""


def refuse_changes(table: str, there: Sequence[Field], ours: Sequence[Field]) -> None:
    """Refuse a model whose fields have other types than the columns of its table.

    Raises:
        SchemaChangeError: Some have: `a: integer in the table, text in the model`.
    """
    kept = {field.name: field for field in there}
    if changes := [change for field in ours if field.name in kept for change in _changes(kept[field.name], field)]:
        raise SchemaChangeError(
            f"{table}: {'; '.join(changes)}. Give the field a new name, or write the batcher to a table of another name"
        )


def _changes(there: Field, ours: Field, inside: str = "") -> Iterator[str]:
    name = f"{inside}{ours.name}"
    old: Any = there.type
    new: Any = ours.type
    if old == new:
        return
    if _kind(old) == _kind(new) == "struct":
        kept = {field.name: field for field in old.fields}
        for field in new.fields:
            if field.name in kept:
                yield from _changes(kept.pop(field.name), field, f"{name}.")
            else:
                yield f"{name}.{field.name}: not in the table, {_in_words(field.type)} in the model"
        yield from (
            f"{name}.{gone}: {_in_words(field.type)} in the table, not in the model" for gone, field in kept.items()
        )
    else:
        yield f"{name}: {_in_words(old)} in the table, {_in_words(new)} in the model"


def _kind(type_: Any) -> str:
    return str(type_.type)


def _in_words(type_: Any) -> str:
    """A type as one says it: `list of text`."""
    match _kind(type_):
        case "array":
            return f"list of {_in_words(type_.element_type)}"
        case "map":
            return f"dict of {_in_words(type_.value_type)}"
        case "struct":
            return f"model of {', '.join(f'{field.name} ({_in_words(field.type)})' for field in type_.fields)}"
        case kind:
            return _WORDS.get(kind, kind.partition("(")[0])
