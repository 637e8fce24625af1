"""Changes of windows and models once there is data: which are invalid, and how the others change columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pydantic import AwareDatetime, BaseModel, ValidationError

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.model.windows import WINDOW_FORMAT, canonical

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema
    from deltalake.schema import Field

_WORDS = {"long": "integer", "string": "text", "double": "number", "boolean": "yes or no", "binary": "bytes"}


class SchemaChangeError(PipelineError):
    """The type of a column changed. The message contains table, column, both types and a fix."""


def refuse_changes(table: str, there: Sequence[Field], ours: Sequence[Field]) -> None:
    """Check that the fields of a model have the types of the table's columns.

    Raises:
        SchemaChangeError: Types differ, for example `a: integer in the table, text in the model`.
    """
    if changes := [*_changes_of(there, ours)]:
        raise SchemaChangeError(
            f"{table}: {'; '.join(changes)}. Rename the field, or rename the batcher so that it gets a new table"
        )


def _changes_of(there: Sequence[Field], ours: Sequence[Field], inside: str = "") -> Iterator[str]:
    kept, spelled = ({name(field.name): field for field in there} for name in (str, str.lower))
    for field in ours:
        if field.name in kept:
            yield from _changes(kept[field.name], field, inside)
        elif (other := spelled.get(field.name.lower())) is not None:
            yield f"{inside}{field.name}: {inside}{other.name} in the table, which ignores case"


def _changes(there: Field, ours: Field, inside: str = "") -> Iterator[str]:
    name = f"{inside}{ours.name}"
    old: Any = there.type
    new: Any = ours.type
    if old == new:
        return
    if _kind(old) == _kind(new) == "struct":
        yield from _changes_of(old.fields, new.fields, f"{name}.")
    elif _kind(old) == _kind(new) == "array" and "struct" == _kind(old.element_type) == _kind(new.element_type):
        yield from _changes(_element(there), _element(ours), inside)
    else:
        yield f"{name}: {_in_words(old)} in the table, {_in_words(new)} in the model"


def _element(field: Any) -> Any:
    """Return a list's column as a column of its elements."""
    from deltalake.schema import Field

    return Field(f"{field.name}[]", field.type.element_type)


def _kind(type_: Any) -> str:
    return str(type_.type)


def _in_words(type_: Any) -> str:
    """Return a type in words, for example `list of text`."""
    match _kind(type_):
        case "array":
            return f"list of {_in_words(type_.element_type)}"
        case "map":
            return f"dict of {_in_words(type_.value_type)}"
        case "struct":
            return f"model of {', '.join(f'{field.name} ({_in_words(field.type)})' for field in type_.fields)}"
        case kind:
            return _WORDS.get(kind, kind.partition("(")[0])


class KeptWindows(BaseModel, frozen=True):
    """The options that define windows."""

    window_cron: str
    first_window: AwareDatetime | None


def check_windows(lake: Lake, pipeline: type[Pipeline], windows_with_data: Callable[[], Collection[str]]) -> None:
    """Check that existing data stays in its windows, and store changed options.

    Without data, every change is valid. With data, `window_cron` must not change, and `first_window` must not be after
    the oldest window. `windows_with_data` is called only if the options changed.

    Raises:
        PipelineError: One of these changes, or the stored options are invalid.
    """
    name, path = pipeline.__qualname__, f"{pipeline.name}/_windows.json"
    ours = KeptWindows(window_cron=canonical(pipeline.window_cron), first_window=pipeline.first_window)
    content = lake.read(path)
    try:
        kept = None if content is None else KeptWindows.model_validate_json(content)
    except ValidationError as error:
        raise PipelineError(
            f"{lake.uri(path)} is not a valid record of window options ({error.errors()[0]['type']}). Restore it, or "
            f"remove it if {name}.window_cron has not changed since the tables were created"
        ) from None
    if kept == ours:
        return
    if oldest := min(windows_with_data(), default=None):
        if kept and kept.window_cron != ours.window_cron:
            raise PipelineError(
                f"{name}.window_cron must stay {kept.window_cron!r}, because the tables of {pipeline.name} contain "
                f"data, got {pipeline.window_cron!r}. Restore it, or rename the pipeline"
            )
        begins = datetime.strptime(oldest, WINDOW_FORMAT).replace(tzinfo=UTC)
        if pipeline.first_window and begins < pipeline.first_window:
            raise PipelineError(
                f"{name}.first_window must not be after the oldest window with data, {oldest}, got "
                f"{pipeline.first_window.isoformat()}: failures of earlier windows could not be retried. Set it to "
                f"{begins.isoformat()} or earlier"
            )
    lake.write(path, ours.model_dump_json().encode())


def as_stored(columns: pa.Schema, handle: DeltaTable) -> Schema:
    """Return the columns of a model as a Delta schema; see `merged`."""
    from deltalake import Schema

    return Schema.from_arrow(merged(columns, handle))


def widen(handle: DeltaTable, ours: Schema, committing: Callable[[int], AbstractContextManager[None]]) -> None:
    """Add the columns and nested fields that a table lacks, and set changed comments. A commit runs in `committing`."""
    there = {field.name: field for field in handle.schema().fields}
    known = [field for field in ours.fields if field.name in there]
    added = [field for field in ours.fields if field not in known or there[field.name].type != field.type]
    if added:
        with committing(handle.version()):
            handle.alter.add_columns(added)
    for field in known:
        if not field.metadata.items() <= there[field.name].metadata.items():  # other tools may add keys
            with committing(handle.version()):
                handle.alter.set_column_metadata(field.name, field.metadata)


def merged(columns: pa.Schema, handle: DeltaTable) -> pa.Schema:
    """Return the columns of a model, with the Decimal digits and the nested fields of the stored table."""
    if not any(pa.types.is_nested(type_) or pa.types.is_decimal(type_) for type_ in columns.types):
        return columns
    there = {field.name: field.type for field in pa.schema(handle.schema().to_arrow())}
    return pa.schema([field.with_type(_merged(field.type, there.get(field.name, field.type))) for field in columns])


def _merged(ours: pa.DataType, there: pa.DataType, *, adds: bool = True) -> pa.DataType:
    """Return our type with the digits of the stored Decimals and, if `adds`, with the fields of both."""
    if pa.types.is_decimal(ours) and pa.types.is_decimal(there):
        return there
    if pa.types.is_struct(ours) and pa.types.is_struct(there):
        new = {field.name: field for field in ours}
        spelled = {*map(str.lower, new)}  # delta-rs ignores case: `refuse_changes` refuses another spelling
        known = {field.name: field for field in there if field.name in new or field.name.lower() not in spelled}
        names = [*known, *(name for name in new if name not in known)] if adds else [*new]
        return pa.struct(
            [
                new[name].with_type(_merged(new[name].type, known[name].type, adds=adds))
                if name in new and name in known
                else new.get(name, known.get(name))
                for name in names
            ]
        )
    if pa.types.is_list(ours) and pa.types.is_list(there):
        return pa.list_(_merged(ours.value_type, there.value_type, adds=adds))
    if pa.types.is_map(ours) and pa.types.is_map(there):
        # delta-rs cannot read a map whose files have different fields.
        return pa.map_(ours.key_type, _merged(ours.item_type, there.item_type, adds=False))
    return ours
