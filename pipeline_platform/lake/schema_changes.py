"""Changes of windows and column types that are invalid once there is data, and the digits of stored Decimals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pydantic import AwareDatetime, BaseModel, ValidationError

from pipeline_platform.lake.storage import Lake
from pipeline_platform.model.pipeline import Pipeline
from pipeline_platform.model.strict_options import PipelineError
from pipeline_platform.model.windows import WINDOW_FORMAT, canonical

if TYPE_CHECKING:
    from deltalake.schema import Field
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema


_WORDS = {"long": "integer", "string": "text", "double": "number", "boolean": "yes or no", "binary": "bytes"}


class SchemaChangeError(PipelineError):
    """The type of a column changed. The message contains table, column, both types and a fix."""


def refuse_changes(table: str, there: Sequence[Field], ours: Sequence[Field]) -> None:
    """Check that the fields of a model have the types of the table's columns.

    Raises:
        SchemaChangeError: Types differ, for example `a: integer in the table, text in the model`.
    """
    kept = {field.name: field for field in there}
    if changes := [change for field in ours if field.name in kept for change in _changes(kept[field.name], field)]:
        raise SchemaChangeError(
            f"{table}: {'; '.join(changes)}. Rename the field, or rename the batcher so that it gets a new table"
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
    """Return the columns of a model as a Delta schema, with the Decimal digits of the stored table."""
    from deltalake import Schema

    return Schema.from_arrow(keep_decimals(columns, handle))


def keep_decimals(columns: pa.Schema, handle: DeltaTable) -> pa.Schema:
    """Return the columns of a model, with the Decimal digits of the stored table."""
    if "decimal" not in str(columns):
        return columns
    there = pa.struct(list(pa.schema(handle.schema().to_arrow())))
    return pa.schema(list(_kept(pa.struct(list(columns)), there)))


def _kept(ours: pa.DataType, there: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal(ours) and pa.types.is_decimal(there):
        return there
    if pa.types.is_struct(ours) and pa.types.is_struct(there):
        known = {field.name: field.type for field in there}
        return pa.struct([field.with_type(_kept(field.type, known.get(field.name, field.type))) for field in ours])
    if pa.types.is_list(ours) and pa.types.is_list(there):
        return pa.list_(_kept(ours.value_type, there.value_type))
    if pa.types.is_map(ours) and pa.types.is_map(there):
        return pa.map_(ours.key_type, _kept(ours.item_type, there.item_type))
    return ours
